"""A device without free memory: the error says what to change."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from spark_dl.training.checks import out_of_memory_explained
from spark_dl.world import World
from tests.builders.models import small_config

CPU = World(1, 2, 1, 2, "worker-7", torch.device("cpu"), dist.HashStore())
GPU = dataclasses.replace(CPU, device=torch.device("cuda", 3), backend="nccl")
SHARED = dataclasses.replace(GPU, backend="gloo")
CONFIG = small_config(2, train={"accumulation_steps": 3, "global_batch_size": 96})


def ask_for_too_much():
    torch.empty(1 << 58)


def ask_a_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")


@pytest.mark.parametrize(("world", "ask", "where"), [
    (CPU, ask_for_too_much, "cpu has no memory left, with about 16 rows in a micro-batch; raise"),
    (GPU, ask_a_gpu, "cuda:3 has no memory left, with about 16 rows in a micro-batch; raise"),
    (SHARED, ask_a_gpu, r"in a micro-batch, and other ranks use the same GPU \(launch.gpus_per_rank\); raise"),
])  # fmt: skip
def test_the_error_names_the_rank_the_rows_and_the_settings(world, ask, where):
    change = r"train.accumulation_steps \(now 3\), lower train.global_batch_size \(now 96\)"
    with (
        pytest.raises(RuntimeError, match=rf"rank 1 on worker-7: .*{where} {change}") as error,
        out_of_memory_explained(CONFIG, world),
    ):
        ask()
    assert "allocate" in str(error.value.__cause__)


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2"), out_of_memory_explained(CONFIG, CPU):
        torch.ones(2, 3) @ torch.ones(2, 3)
