"""What a rank says before it trains."""

import logging

import pytest
import torch
import torch.distributed as dist

from spark_dl import DDP, DPSingleProcess, worker
from spark_dl.world import World
from tests.builders.models import small_config


@pytest.mark.parametrize(("rank", "gpus", "parallel", "said"), [
    (0, 2, DDP(), True), (1, 2, DDP(), False), (0, 1, DDP(), False), (0, 0, DDP(), False),
    (0, 2, DPSingleProcess(), False),
], ids=str)  # fmt: skip
def test_gpus_that_a_rank_does_not_use_are_named_once(caplog, rank, gpus, parallel, said):
    own = tuple(torch.device("cuda", index) for index in range(gpus))
    device = own[0] if own else torch.device("cpu")
    world = World(rank, 2, rank, 2, "host", device, dist.HashStore(), gpus=own)
    with caplog.at_level(logging.WARNING, "spark_dl"):
        worker._say_unused_gpus(small_config(1, parallel=parallel), world)
    assert ("each rank has 2 GPUs and trains on one of them; set launch.gpus_per_rank to 1" in caplog.text) == said
