"""Ranks that compare their first collective operations leave torch as they found it."""

import subprocess
import sys
import types

import torch
import torch.distributed as dist

from spark_dl.launch.rank.desync import first_compared


def test_torch_is_as_before_for_the_next_task_of_the_process():
    before = dict(vars(dist.ProcessGroup))
    with first_compared(types.SimpleNamespace(world_size=2, rank=0)):
        assert vars(dist.ProcessGroup)["barrier"] is not before["barrier"]
    assert dict(vars(dist.ProcessGroup)) == before
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.barrier()
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


RANK = """
import datetime, os, sys, types
import torch
import torch.distributed as dist
from spark_dl.launch.rank.desync import COMPARED, DesyncError, first_compared

folder, rank = sys.argv[1], int(sys.argv[2])

def init(name, **place):
    place = {"rank": rank, "world_size": 3, **place}
    limit = datetime.timedelta(seconds=40)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", timeout=limit, **place)

def numbers_of_the_same_size():
    tensor = torch.tensor(3.0) if rank == 0 else torch.zeros(1)
    dist.broadcast(tensor, 0)
    assert float(tensor) == 3.0

def groups_of_the_same_name_in_two_worlds():
    for number, members in enumerate([[0, 1], [0, 2]]):
        init(f"world{number}")
        group = dist.new_group(members)
        if rank in members:
            dist.broadcast(torch.ones(3), 0, group=group) if number else dist.all_reduce(torch.ones(2), group=group)
        numbers_of_the_same_size()
        dist.destroy_process_group()

def groups_of_the_same_name_side_by_side():
    if rank:
        init("pair", rank=rank - 1, world_size=2)
        dist.all_reduce(torch.ones(5))
    else:
        init("alone", rank=0, world_size=1)
        dist.barrier()
    dist.destroy_process_group()

def uneven_rows():
    init("uneven")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), find_unused_parameters=True)
    with model.join():
        for _ in range(1 + rank):
            model(torch.ones(1, 2)).sum().backward()
    kept.append(model)  # the end of a DDP model can wait for a thread that waits for Python's lock
    dist.destroy_process_group()

kept = []

def a_fork():
    if not (child := os.fork()):
        init(f"fork{rank}", rank=0, world_size=1)
        dist.all_reduce(torch.ones(rank + 1))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    init("forked")
    dist.barrier()
    dist.destroy_process_group()

def mismatch():
    init("mismatch")
    dist.all_gather_object([None] * 3, "x" * rank)
    dist.barrier()
    try:
        dist.all_reduce(torch.ones(3 if rank == 2 else 2))
    except DesyncError as error:
        print(error, flush=True)
    except RuntimeError:
        pass
    os._exit(0)

with first_compared(types.SimpleNamespace(world_size=3, rank=rank)):
    groups_of_the_same_name_in_two_worlds()
    groups_of_the_same_name_side_by_side()
    uneven_rows()
    a_fork()
    mismatch()
"""


def test_F19_programs_that_are_right_go_on_and_one_that_is_wrong_is_named(tmp_path):
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    ends = [(*rank.communicate(timeout=60), rank.returncode) for rank in ranks]
    assert [code for *_, code in ends] == [0] * 3, ends
    told = "".join(out for out, *_ in ends)
    assert "the ranks called different collective operations as number" in told, ends
    assert "rank 2 all_reduce [[3] float32] at <string>:" in told
    assert " all_reduce [[2] float32] at <string>:" in told
