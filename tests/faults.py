"""Faults in a model: NaN and Inf that begin on one rank, in one step."""

import dataclasses
import io
import math

import numpy as np
import torch
from torch import nn

from spark_dl import ModelSpec
from spark_dl.data.load.build import build_train_loader
from spark_dl.rundir import checkpoint
from tests.builders.models import build_mlp
from tests.builders.row_places import places_of
from tests.ranks.runs import flat_tensors, rank_states


class BadRow(nn.Module):
    """Multiplies the gradient by a factor in the batch that has a row: on one rank, in one step of an epoch."""

    def __init__(self, row, factor):
        super().__init__()
        self.net, self.row, self.factor = build_mlp(), torch.tensor(row), factor

    def forward(self, features):
        out = self.net(features)
        if out.requires_grad and bool((features == self.row).all(1).any()):
            out.register_hook(lambda gradient: gradient * self.factor)
        return out


@dataclasses.dataclass(frozen=True)
class Build:
    """Builds a model with a bad row; a class, so that ranks of any start method can unpickle it."""

    row: tuple
    factor: float = math.nan

    def __call__(self):
        return BadRow(self.row, self.factor)


class Gate(nn.Module):
    """Multiplies a batch by a weight, and in one that has a bad row its output or its gradient by a factor, too."""

    def __init__(self, rows, factor, where):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.rows, self.factor, self.where = torch.tensor(rows).reshape(-1, 1, 4), factor, where

    def forward(self, features):
        out = features * self.scale
        if out.requires_grad and bool((features == self.rows.to(features.device)).all(2).any()):
            if self.where == "output":
                return out * self.factor
            out.register_hook(lambda gradient: gradient * self.factor)
        return out


@dataclasses.dataclass(frozen=True)
class BuildGated:
    """Builds a chain of layers, which any strategy can train, with bad rows. norm: whether it has a BatchNorm."""

    rows: tuple = ()
    factor: float = math.nan
    where: str = "gradient"
    norm: bool = False

    def __call__(self):
        norm = [nn.BatchNorm1d(16)] if self.norm else []
        layers = [nn.Linear(4, 16), *norm, nn.Tanh(), nn.Linear(16, 3)]
        return nn.Sequential(Gate(self.rows, self.factor, self.where), *layers)


def row_of(run, rank, step, num_ranks):
    """A row that a rank has in a step, as (features ...)."""
    loader = build_train_loader(run.train, run.spec, run.config, rank=rank, world_size=num_ranks)
    steps = loader.epoch(0)
    batch = next(batches for batches in steps if batches.step == step).micro_batches[-1]
    steps.close()
    assert batch["weight"][0] == 1
    return tuple(batch["features"][0].tolist())


def place_of_row(run, row):
    """(file, row group, row) of a row, given its features."""
    places = places_of(run.train, "features").items()
    return next(place for cell, place in places if tuple(np.load(io.BytesIO(cell)).tolist()) == row)


def with_bad_row(run, *, rank, step, num_trainers, factor=math.nan):
    """A run whose gradient is multiplied by a factor on one rank, in one step of each epoch, counted from 1."""
    row = row_of(run, rank, step - 1, num_trainers)
    return dataclasses.replace(run, spec=ModelSpec(build=Build(row, factor)))


def assert_last_good(run, step):
    """The newest checkpoint is that of a step, can be loaded, and is finite."""
    saved = checkpoint.latest(run.run_dir)
    assert (saved.step if saved else 0) == step
    if saved is None:
        return ""
    state = {"model": checkpoint.load(saved, "model.pt"), "training": checkpoint.load(saved, "training.pt"),
             "ranks": dict(enumerate(rank_states(saved)))}  # fmt: skip
    tensors = [t for t in flat_tensors(state).values() if isinstance(t, torch.Tensor)]
    assert tensors
    assert all(bool(torch.isfinite(t).all()) for t in tensors)
    return saved.url
