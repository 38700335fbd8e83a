"""A model whose weights count how often each row was used, so that a lost or repeated row shows in a checkpoint.

Each row has a weight whose gradient is -1 / B in a step that uses the row, where B is the number of rows of a step, and
0 in all others. With SGD and a momentum m, a use adds from u to u / (1 - m) to it, where u = lr / B, however many steps
follow. So n uses add from n u to n u / (1 - m), which is less than (n + 1) u as long as n < (1 - m) / m.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from spark_dl.config import Data, Loader, Shards, Train
from spark_dl.data.write.arrays import write_arrays
from spark_dl.spec import ModelSpec

MOMENTUM = 0.125
MOST_USES = 6
"""Up to so many uses of a row are told apart with this momentum."""
DATA = Data(features=("features", "row"), label="label")
_LR, _BATCH, _WIDTH, _CLASSES = 0.1, 48, 8, 4
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Ledger:
    """How often each row was used."""

    lost: int
    """Number of uses that rows have too few."""
    repeated: int
    """Number of uses that rows have too many."""


class CountingNetwork(nn.Module):
    """A network with dropout, and a weight for each row. # features: [rows, 8], row: [rows], its number

    sleep_s: seconds that a training step takes at least, so that faults hit it.
    """

    def __init__(self, rows: int, sleep_s: float = 0.0):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(_WIDTH, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, _CLASSES))
        self.uses = nn.Parameter(torch.zeros(rows))
        self._sleep_s = sleep_s

    def forward(self, features: Tensor, row: Tensor) -> dict[str, Tensor]:
        if self.training:
            time.sleep(self._sleep_s)
        return {"scores": self.net(features), "uses": self.uses[row]}


def loss(output: Mapping[str, Tensor], label: Tensor) -> Tensor:
    """Returns a loss for each row. # label: [rows]"""
    return nn.functional.cross_entropy(output["scores"], label, reduction="none") - output["uses"]


def build_spec(rows: int, sleep_s: float = 0.0) -> ModelSpec:
    """Returns the model for a dataset of so many rows."""
    return ModelSpec(build=functools.partial(CountingNetwork, rows, sleep_s), loss=loss)


def settings(epochs: int) -> tuple[Train, Loader]:
    """Returns settings that the counts are right with, for 1, 2, 3, 4 and 6 ranks."""
    if not 1 <= epochs < MOST_USES:
        raise ValueError(f"epochs: expected 1 to {MOST_USES - 1}, so that uses can be counted, found {epochs}")
    train = Train(
        global_batch_size=_BATCH, epochs=epochs, lr=_LR, optimizer_args={"momentum": MOMENTUM}, log_every=1, seed=3
    )
    return train, Loader(num_streams=12, shuffle_window_rows=2 * _BATCH)


def write_rows(url: str | os.PathLike[str], steps: int) -> int:
    """Writes rows for so many steps of an epoch. Returns their number."""
    rows = steps * _BATCH
    rng = np.random.default_rng(0)
    write_arrays({
        "features": rng.standard_normal((rows, _WIDTH), np.float32), "row": np.arange(rows),
        "label": rng.integers(0, _CLASSES, rows),
    }, url, DATA, shards=Shards(rows_per_row_group=40, rows_per_shard=120))  # fmt: skip
    return rows


def read_ledger(weights: Mapping[str, Tensor], epochs: int) -> Ledger:
    """Compares how often each row was used with once in each epoch. weights: those of a checkpoint, by name."""
    uses = count_uses(weights["uses"])
    return Ledger(int((epochs - uses).clamp(min=0).sum()), int((uses - epochs).clamp(min=0).sum()))


def count_uses(weight: Tensor) -> Tensor:
    """Returns how often each row was used. # weight: [rows] -> [rows] int64"""
    return torch.floor(weight.double() * _BATCH / _LR + _ROUNDING).long()
