"""How far a rank has come in its collective operations: the number in each heartbeat, and the operation with stacks."""

import subprocess
import sys

RANK = """
import sys, threading, time
import torch
import torch.distributed as dist
from spark_dl.launch.failures import rank_state
from spark_dl.launch.failures.rank_state import last_collective, progress

def wait_for(number, is_open):
    # The recorder learns of the end of an operation a little later than its caller.
    end = time.monotonic() + 20
    while (found := last_collective()) is None or (found["number"], found["is_open"]) != (number, is_open):
        assert time.monotonic() < end, (found, number, is_open)
        time.sleep(0.01)
    assert progress() == {"number": number}

assert progress() is None
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
assert progress() == {"number": 0}
assert last_collective() is None
for number in range(1, 1001):
    dist.all_reduce(torch.ones(2))
    if number % 5 == 0:  # where threads of Gloo overtake each other, one that has ended must not look open
        wait_for(number, False)
store = dist.distributed_c10d._get_default_store()
if dist.get_rank() == 1:
    store.wait(["seen"])
    wait_for(1000, False)
waiting = threading.Thread(target=dist.all_reduce, args=(torch.ones(2),))
waiting.start()
if dist.get_rank() == 0:
    wait_for(1001, True)
    rank_state.reset()  # as of an earlier task, whose operation never ended
    assert progress() == {"number": 1001}
    assert last_collective() is None
    store.set("seen", "1")
waiting.join()
dist.all_reduce(torch.ones(2))
wait_for(1002, False)
dist.destroy_process_group()
assert progress() is None
"""


def test_F04_the_progress_of_a_rank_has_its_last_operation_and_whether_it_waits(tmp_path):
    command = [sys.executable, "-c", RANK, str(tmp_path / "file")]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    ends = [(rank.communicate(timeout=60)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ends] == [0, 0], ends
