"""How far a rank has come in its collective operations, which each heartbeat says."""

import subprocess
import sys

RANK = """
import sys, threading, time
import torch
import torch.distributed as dist
from spark_dl.launch.rank import collectives
from spark_dl.launch.rank.collectives import progress

def wait_for(expected):
    # The recorder learns of the end of an operation a little later than its caller.
    end = time.monotonic() + 20
    while progress() != expected:
        assert time.monotonic() < end, (progress(), expected)
        time.sleep(0.01)

assert progress() is None
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
assert progress() == {"number": 0, "is_open": False}
for _ in range(3):
    dist.all_reduce(torch.ones(2))
wait_for({"number": 3, "is_open": False})
store = dist.distributed_c10d._get_default_store()
if dist.get_rank() == 1:
    store.wait(["seen"])
    assert progress() == {"number": 3, "is_open": False}
waiting = threading.Thread(target=dist.all_reduce, args=(torch.ones(2),))
waiting.start()
if dist.get_rank() == 0:
    wait_for({"number": 4, "is_open": True})
    collectives.reset()  # as of an earlier task, whose operation never ended
    assert progress() == {"number": 4, "is_open": None}
    store.set("seen", "1")
waiting.join()
wait_for({"number": 4, "is_open": False})
dist.destroy_process_group()
assert progress() is None
"""


def test_F04_the_progress_of_a_rank_has_its_last_operation_and_whether_it_waits(tmp_path):
    command = [sys.executable, "-c", RANK, str(tmp_path / "file")]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    ends = [(rank.communicate(timeout=60)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ends] == [0, 0], ends
