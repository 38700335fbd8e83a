"""Errors and memory: what to do about a device without free memory, and what an error must not keep alive."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

import torch

from spark_dl.config import Config
from spark_dl.world import World


@contextlib.contextmanager
def out_of_memory_explained(config: Config, world: World) -> Iterator[None]:
    """Makes an error of torch that a device, or the host, has no memory left one that says what to change."""
    try:
        yield
    except RuntimeError as error:
        # On CPUs torch has no class for it.
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        train = config.train
        rows = -(-train.global_batch_size // (config.data_size * train.accumulation_steps))
        shared = ", and other ranks use the same GPU (launch.gpus_per_rank)" if _is_shared(world) else ""
        smaller = "" if config.parallel.cuts_model else (
            ". For a model that is itself too large, set parallel.strategy to mesh, with zero_stage, tensor or pipeline"
        )  # fmt: skip
        raise RuntimeError(
            f"rank {world.rank} on {world.host}: {world.device} has no memory left, with about {rows} rows in a "
            f"micro-batch{shared}; raise train.accumulation_steps (now {train.accumulation_steps}), lower "
            f"train.global_batch_size (now {train.global_batch_size}), use more ranks, or set train.precision to bf16"
            f"{smaller}"
        ) from error


def _is_shared(world: World) -> bool:
    return world.device.type == "cuda" and world.world_size > 1 and world.backend == "gloo"


def clear_frames(error: BaseException) -> None:
    """Clears the local variables of the frames of an error and of its causes."""
    cause: BaseException | None = error
    cleared: set[int] = set()
    while cause is not None and id(cause) not in cleared:
        traceback.clear_frames(cause.__traceback__)
        cleared.add(id(cause))
        cause = cause.__cause__ or cause.__context__
