"""Ranks that compare their first collective operations leave torch as they found it."""

import types

import torch
import torch.distributed as dist

from spark_dl.launch.rank.desync import first_compared


def test_torch_is_as_before_for_the_next_task_of_the_process():
    before = dict(vars(dist.ProcessGroup))
    with first_compared(types.SimpleNamespace(world_size=2)):
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
