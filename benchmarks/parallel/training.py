"""What the measurements on ranks train: meshes, with batches of random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from spark_dl.config import Config, Data, Launch, Loader, Train
from spark_dl.parallel.mesh import mesh
from spark_dl.parallel.mesh.settings import Mesh
from spark_dl.parallel.trainable import Trainable
from spark_dl.spec import Batch, ModelSpec, Output
from spark_dl.world import World

TIMEOUT_S = 120.0


def build_config(parallel: Mesh, num_ranks: int, *, micro_batches: int = 1, rows: int = 1, **train: Any) -> Config:
    """Returns the settings of a run with these rows of a micro-batch."""
    data = parallel.dims(num_ranks).data
    return Config(
        data=Data(features=("x",), label=None),
        loader=Loader(num_streams=data, shuffle=False),
        train=Train(
            global_batch_size=data * micro_batches * rows, accumulation_steps=micro_batches, **{"lr": 1e-6, **train}
        ),
        parallel=parallel,
        launch=Launch(num_ranks=num_ranks, device="cpu", collective_timeout_s=TIMEOUT_S),
    )


def build_spec(build: Callable[[], nn.Module]) -> ModelSpec:
    """Returns a model whose loss of a row is the mean of its output."""
    return ModelSpec(build=build, loss=_losses)


def _losses(output: Output, batch: Any) -> Tensor:
    assert isinstance(output, Tensor)
    return output.flatten(1).mean(1)


def build_batches(shape: tuple[int, ...], config: Config) -> list[Batch]:
    """Returns the micro-batches of a step, the same on all ranks. # shape: of a row"""
    generator = torch.Generator().manual_seed(0)
    train, data = config.train, config.data_size
    rows = train.global_batch_size // data // train.accumulation_steps
    return [
        {"x": torch.randn(rows, *shape, generator=generator), "weight": torch.ones(rows)}
        for _ in range(train.accumulation_steps)
    ]


@contextlib.contextmanager
def training(spec: ModelSpec, world: World, config: Config) -> Iterator[Trainable]:
    """Builds this rank's part of a model for the block. Collective."""
    trainable = mesh.parallelize(spec, world, config)
    try:
        yield trainable
    finally:
        trainable.close()


def take_step(trainable: Trainable, batches: list[Batch], config: Config) -> None:
    """Takes one step as the training loop does. Collective."""
    trainable.forward_backward(batches, config.train.global_batch_size)
    trainable.step()
    trainable.optimizer.zero_grad(set_to_none=True)
