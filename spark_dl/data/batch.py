"""What the model is called with: the rows of a step as dicts of tensors, one for each micro-batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spark_dl.data.ragged import Array, Ragged, concatenate, pad
from spark_dl.data.schema import Column

Batch = dict[str, Tensor]
Prepare = Callable[[Batch, Sequence[int]], Mapping[str, Tensor]]
"""(batch, numbers that tell it from all others) -> the batch that the model sees."""


@dataclass(frozen=True)
class StepRows:
    """The rows that one rank has of a dataset in one step, before they are tensors."""

    cells: Sequence[Array | Ragged]
    """By column. # each (rows, *cell)"""
    weight: Array
    """# (rows,)"""


@dataclass(frozen=True)
class StepBatches:
    """What one rank works on in one step."""

    step: int
    """Number of the step in its epoch."""
    micro_batches: list[Batch]
    """Columns by name, [rows, *cell], and `weight`, [rows] float32; on the CPU. Ragged ones as `build_batch` says."""
    rows: int
    """True rows of the global batch, over all ranks."""


def build_batch(columns: Sequence[Column], cells: Sequence[Array | Ragged], ragged: str) -> Batch:
    """The tensors of some rows, which share the memory of the arrays.

    A ragged column becomes, with `ragged` "pad", `name`, [rows, longest, *inner], filled with zeros, and `name_mask`,
    [rows, longest] bool; with "offsets" `name`, [values, *inner], end to end, and `name_offsets`, [rows + 1] int64.
    """
    batch: Batch = {}
    for column, values in zip(columns, cells, strict=True):
        if not isinstance(values, Ragged):
            batch[column.name] = torch.from_numpy(values)
        elif ragged == "pad":
            padded, mask = pad(values)
            batch[column.name], batch[f"{column.name}_mask"] = torch.from_numpy(padded), torch.from_numpy(mask)
        else:
            offsets = values.offsets - values.offsets[0]
            batch[column.name] = torch.from_numpy(np.array(values.own_values))
            batch[f"{column.name}_offsets"] = torch.from_numpy(offsets)
    return batch


@dataclass(frozen=True)
class BatchBuilder:
    """Makes the micro-batches of a rank's step."""

    columns: Sequence[Column]
    micro_batches: int = 1
    ragged: str = "pad"
    prepare: Prepare | None = None
    pin: bool = False
    """Whether they are copied to page-locked memory, from which copies to a GPU need not be waited for."""

    def build(self, parts: Sequence[StepRows], key: Sequence[int]) -> list[Batch]:
        """The rows of a step in near-equal pieces, the larger ones first; of several datasets each has a piece.

        `key` tells the step from all others; `prepare` gets it with the number of the micro-batch.
        """
        batches = []
        for i, pieces in enumerate(zip(*(self._pieces(part) for part in parts), strict=True)):
            # The cells are joined before they are tensors: datasets have other longest rows, and other offsets.
            cells = [concatenate(c) for c in zip(*(piece.cells for piece in pieces), strict=True)]
            batch = build_batch(self.columns, cells, self.ragged)
            batch["weight"] = torch.from_numpy(np.concatenate([piece.weight for piece in pieces]))
            if self.prepare is not None:
                batch = dict(self.prepare(batch, (*key, i)))
            batches.append({name: t.pin_memory() for name, t in batch.items()} if self.pin else batch)
        return batches

    def _pieces(self, rows: StepRows) -> list[StepRows]:
        size, more = divmod(len(rows.weight), self.micro_batches)
        bounds = [i * size + min(i, more) for i in range(self.micro_batches + 1)]
        return [StepRows([c[a:b] for c in rows.cells], rows.weight[a:b]) for a, b in itertools.pairwise(bounds)]
