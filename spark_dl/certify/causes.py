"""Why a training differs: what a model and its loss do with the rows beside a row, or keep outside of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from spark_dl.config import Config
from spark_dl.generators import generator_states, generators_kept
from spark_dl.parallel.loss import loss_and_count, select_rows, weighted_loss_sum
from spark_dl.parallel.modules import ModuleState
from spark_dl.spec import Batch, ModelSpec

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Cause:
    """A property of a model or of its loss."""

    key: str
    """A word by which it is accepted."""
    text: str
    change: str
    explains: tuple[str, ...]
    """Kinds of checks in which weights can differ because of it."""
    remedy: tuple[tuple[str, str, Any], ...] = ()
    """Section, name and value of settings with which it should be gone."""


def find_causes(spec: ModelSpec, config: Config, batch: Batch) -> list[Cause]:
    """Returns what can make trained weights differ, found with one batch on the CPU. Called on the driver.

    Args:
        batch: a global batch of true rows.
    """
    with generators_kept(()):
        torch.manual_seed(config.train.seed)
        return list(_causes(spec, config, batch))


def _causes(spec: ModelSpec, config: Config, batch: Batch) -> Iterator[Cause]:
    if (difference := _of_halves(spec, config, batch)) is not None and difference > _TOLERANCE:
        ragged = [name for name in config.data.features if f"{name}_mask" in batch]
        padding = f", or the model reads the padding of {', '.join(map(repr, ragged))}" if ragged else ""
        mask = f", or use '{ragged[0]}_mask' wherever several positions are read" if ragged else ""
        yield Cause(
            "loss",
            f"the loss of {len(batch['weight'])} rows differs from the mean of its halves by {difference:.1g}: it is "
            f"over something else than rows, such as tokens, or compares the rows of a batch{padding}",
            "return one value per row, or (losses, weights), or (sum, count); give ModelSpec(count=...); gather the "
            f"rows that are compared, spark_dl.gather_rows or ModelSpec(embed=, global_loss=){mask}",
            ("ranks", "micro-batches", "padding"),
        )
    model = spec.build_to_train()
    norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
    if norms:
        yield Cause(
            "batchnorm",
            f"BatchNorm ({_listed(norms)}) uses the mean and the variance of the rows of a rank's micro-batch, and the "
            "rows that fill the last batch count, too",
            "parallel.sync_batchnorm: true, without accumulation; or a norm of single rows, such as GroupNorm",
            ("ranks", "micro-batches", "padding"), (("parallel", "sync_batchnorm", True),),
        )  # fmt: skip
    state, generators = ModuleState(model), generator_states()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _, total = weighted_loss_sum(spec, model, batch, config)
    if generator_states() != generators:
        dropouts = [n for n, m in model.named_modules() if isinstance(m, _DROPOUTS) and m.p > 0]
        what = f"dropout ({_listed(dropouts)})" if dropouts else "the forward pass"
        yield Cause(
            "random", f"{what} draws random numbers, and each rank draws others",
            "train.random_by: row", ("ranks",), (("train", "random_by", "row"),),
        )  # fmt: skip
    generators = generator_states()
    total.backward()
    if generator_states() != generators:
        yield Cause(
            "gradients",
            "the backward pass draws random numbers, as in hooks of gradients, on each rank and micro-batch",
            "add the noise in spec.set_position, or to the gradients of the whole step in an optimizer of your own",
            ("ranks", "micro-batches"),
        )  # fmt: skip
    if any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse for module in model.modules()):
        yield Cause(
            "sparse",
            "rows of weight 0 have sparse gradients of 0, by which an optimizer such as SparseAdam moves their entries",
            "an optimizer without a state for such entries, such as SGD, or sparse=False", ("padding",),
        )  # fmt: skip
    if unsaved := state.changed_unsaved():
        yield Cause(
            "state", f"a step changes {_listed(unsaved)}, which no checkpoint has, and each rank counts by itself",
            "make it a buffer (register_buffer), or save it with get_extra_state",
            ("ranks", "micro-batches", "resumed", "padding"),
        )  # fmt: skip
    of_norms = tuple(f"{name}." for name in norms)
    changed = [
        name for name, buffer in model.named_buffers()
        if name in before and not torch.equal(buffer, before[name]) and not (of_norms and name.startswith(of_norms))
    ]  # fmt: skip
    if changed:
        yield Cause(
            "buffers",
            f"the forward pass changes the buffer {_listed(changed)}, from the rows of a rank's micro-batch, and from "
            "rows of weight 0",
            "compute it from rows whose weight is above 0, and from those of all ranks, or in spec.set_position",
            ("ranks", "micro-batches", "padding"),
        )


def _of_halves(spec: ModelSpec, config: Config, batch: Batch) -> float | None:
    """Returns by how much the mean loss differs from that of the halves, in evaluation mode.

    None if the batch cannot be halved, as with `loader.ragged: offsets`, or if nothing of it counts.
    """
    model, rows = spec.build_to_train().eval(), len(batch["weight"])
    if not all(tensor.ndim and len(tensor) == rows for tensor in batch.values()):
        return None
    sums = []
    for part in (torch.arange(rows), torch.arange(rows // 2), torch.arange(rows // 2, rows)):
        torch.manual_seed(0)
        sums.append(loss_and_count(spec, model, _cut_padding(select_rows(batch, part)), config))
    (whole, count), (first, first_count), (second, second_count) = sums
    if not count or not first_count + second_count:
        return None
    halves = (first + second) / (first_count + second_count)
    return abs(whole / count - halves) / max(abs(whole / count), 1e-6)


def _cut_padding(batch: Batch) -> Batch:
    """Returns ragged columns as long as the longest of these rows, as the loader makes them."""
    cut = dict(batch)
    for name, mask in batch.items():
        column = name.removesuffix("_mask")
        if name != column and column in batch:
            longest = max(1, int(mask.sum(1).max()))
            cut[name], cut[column] = mask[:, :longest], batch[column][:, :longest]
    return cut


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(name if " " in name else repr(name) for name in names[:3]) + more
