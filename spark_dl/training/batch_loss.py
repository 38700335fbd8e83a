"""The check that the loss of a batch is a mean over its rows, so that weights do not depend on the number of ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from spark_dl.generators import generators_kept
from spark_dl.parallel.loss import Call, count_of, select_rows, weighted_loss_sum
from spark_dl.parallel.module_state import module_state_kept
from spark_dl.spec import Batch, ModelSpec

if TYPE_CHECKING:
    from spark_dl.config import Config

_TOLERANCE, _TOLERANCE_ON_GPU = 1e-5, 1e-3
"""Relative differences that are rounding. On a GPU, batches of other sizes have other kernels, in TF32 as well."""


def check_batch_loss(
    spec: ModelSpec, model: nn.Module, batch: Batch, config: Config, *, call: Call | None = None
) -> None:
    """Raises ValueError if `spec.batch_loss` of a batch is not the mean of those of its halves. Collective.

    Called before the first step, on a rank, in evaluation mode, without dropout. The means of the halves are weighted
    by their rows, or by `spec.count`. A loss that draws random numbers is not checked, nor one that fails: the step
    then shows its error. The model is left as it was. batch: on the device of the model.
    """
    rows = torch.nonzero(batch["weight"] > 0)[:, 0]
    half = (len(rows) + 1) // 2
    # In float32, as rounding in 16 bits would hide a difference.
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, precision="float32"))
    # All ranks call it as often, as the forward pass can be collective.
    parts = [rows, rows, rows[:half], rows[half:]] if len(rows) > 1 else [torch.arange(len(batch["weight"]))] * 4
    with module_state_kept(model), generators_kept(_gpus(model)), torch.no_grad():
        model.eval()
        found = []
        for i, part in enumerate(parts):
            torch.manual_seed(i)
            found.append(_loss_and_count(spec, model, select_rows(batch, part.to(rows.device)), config, call))
    if len(rows) < 2 or not all(found):
        return
    (whole, count), (again, _), (first, first_count), (second, second_count) = (each for each in found if each)
    tolerance = _TOLERANCE_ON_GPU if batch["weight"].is_cuda else _TOLERANCE
    if not math.isclose(whole, again, rel_tol=tolerance, abs_tol=tolerance):
        return  # it draws random numbers
    halves = (first + second) / (first_count + second_count) if first_count + second_count else 0.0
    whole = whole / count if count else 0.0
    if math.isclose(whole, halves, rel_tol=tolerance, abs_tol=tolerance) or not math.isfinite(whole):
        return
    of = "rows" if spec.count is None else "count"
    raise ValueError(
        f"spec.batch_loss (a LightningModule: training_step): the loss of {len(rows)} rows is {whole:.6g}, and the "
        f"mean of its halves {halves:.6g}, so it is not a mean over the {of}, and the weights would depend on the "
        "number of ranks and micro-batches; say what it is a mean over, such as ModelSpec(count=lambda batch: "
        "(batch['labels'] != -100).sum()), or accept it with train.check_batch_loss: false"
    )


def _loss_and_count(
    spec: ModelSpec, model: nn.Module, rows: Batch, config: Config, call: Call | None
) -> tuple[float, float] | None:
    try:
        _, total = weighted_loss_sum(spec, model, rows, config, call=call)
        return float(total), float(count_of(spec, rows, config))
    except Exception:
        return None


def _gpus(model: nn.Module) -> list[int]:
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
