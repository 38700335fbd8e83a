"""The ports of Gloo: open while the ranks connect, and to nobody afterwards."""

import datetime
import multiprocessing
import os
import socket

import pytest
import torch
import torch.distributed as dist

from spark_dl import Launch
from spark_dl.launch.rank.ports import closed_when_connected
from spark_dl.launch.rank.rendezvous import join
from spark_dl.launch.rank.script import read_script, run_script
from tests.builders import sockets

LIMIT = datetime.timedelta(seconds=20)


def tried(port):
    with socket.socket() as client:
        client.settimeout(0.5)
        try:
            client.connect(("127.0.0.1", port))
        except OSError:
            return False
    return True


def own_ports():
    return {port for _, _, port in sockets.listening([os.getpid()])}


def work(rank, folder, is_closed, results):
    """Two groups of two ranks, which then send; and whether others get in."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    before = own_ports()
    with closed_when_connected() if is_closed else open(os.devnull):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=LIMIT)
        second = dist.new_group([0, 1], timeout=LIMIT)
        found = torch.ones(1)
        dist.all_reduce(found)
        dist.all_reduce(found, group=second)
        ports = own_ports() - before
        dist.barrier()
        got_in = [tried(port) for port in sorted(ports)]
        dist.barrier()
        for _ in range(3):
            dist.all_reduce(found)
        server = socket.create_server(("127.0.0.1", 0))  # of the user's own, as ever
        is_open = tried(server.getsockname()[1])
    dist.destroy_process_group()
    results.put((rank, found.item(), got_in, is_open))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("is_closed", [True, False])
def test_S07_nobody_gets_in_at_the_ports_of_gloo_when_the_ranks_have_connected(tmp_path, is_closed):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=work, args=(rank, str(tmp_path), is_closed, results), daemon=True)
             for rank in range(2)]  # fmt: skip
    for each in ranks:
        each.start()
    found = [results.get(timeout=90) for _ in ranks]
    for each in ranks:
        each.join(20)
    for _, total, got_in, is_open in found:
        assert total == 32.0
        assert is_open
        assert len(got_in) >= 2
        assert got_in == [not is_closed] * len(got_in)


def test_S07_joining_closes_them(no_launcher):
    before, make = own_ports(), dist.distributed_c10d._new_process_group_helper
    with join(Launch(device="cpu")):
        ports = own_ports() - before
        assert not any(map(tried, ports))
        assert dist.distributed_c10d._new_process_group_helper is not make
    assert dist.distributed_c10d._new_process_group_helper is make


PROGRAM = """
import sys, torch
sys.path.append({root!r})
from tests.unit.launch.rank.test_ports import own_ports, tried
torch.distributed.init_process_group("gloo", init_method="file://{folder}/store", rank=int(sys.argv[1]), world_size=2)
assert (ports := own_ports())
torch.distributed.barrier()
assert not any(map(tried, ports)), ports
torch.distributed.barrier()
open("{folder}/done-" + sys.argv[1], "w").close()
"""


@pytest.mark.slow
def test_S07_the_ports_of_a_program_close_as_those_of_a_function(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (tmp_path / "train.py").write_text(PROGRAM.format(folder=tmp_path, root=os.getcwd()))
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=run_script, args=(read_script(str(tmp_path / "train.py"), [rank], {}),))
        for rank in range(2)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0", "done-1"}
