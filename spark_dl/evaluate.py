"""Exact distributed evaluation: sums and counts are reduced over the ranks, never means of means."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from spark_dl.config import Config
from spark_dl.data.load.build import BatchLoader, build_loader
from spark_dl.gather import RowRanks, gathering, sum_over_ranks
from spark_dl.parallel.loss import (
    Call,
    EvaluationMode,
    autocast,
    check_ignored,
    count_of,
    counts_elements,
    loss_sum,
    noting_counts,
    true_rows,
    weighted_loss_sum,
    without_gradient,
)
from spark_dl.parallel.modules import to_device
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_into, load_weights
from spark_dl.spec import Batch, ModelSpec, Output, Run
from spark_dl.training.row_metrics import build_metrics
from spark_dl.world import World

_SKIPS = (
    "a rank without rows in a batch leaves out spec.evaluation (a LightningModule: validation_step), so rows cannot be "
    "gathered there; compute the loss of the rows of the rank"
)
_REPORT_S = 1.0
"""Seconds between two reports of the progress of an evaluation."""


def evaluate(run: Run, world: World) -> dict[str, Any]:
    """Evaluates the weights of `run.checkpoint` on the rows of `run.train`. Collective; the same on all ranks."""
    assert run.checkpoint is not None
    model = load_model(run.spec, run.checkpoint, sha256=run.checkpoint_sha256).to(world.device)
    loader = build_loader(
        run.train, run.config, rank=world.rank, world_size=world.world_size, shuffle=False,
        prepare=run.spec.prepare_in_loader(), pin=world.device.type == "cuda",
    )  # fmt: skip
    with gathering(RowRanks(world.world_size), several=run.config.several_micro_batches(evaluates=True)):
        return {"rows": loader.plan.rows, **evaluate_model(run.spec, model, loader, run.config, world)}


def load_model(spec: ModelSpec, checkpoint_url: str, *, sha256: str | None = None) -> nn.Module:
    """Builds the model with the weights of a checkpoint, on the CPU, in evaluation mode. Called on any side.

    Args:
        sha256: checksum of the checkpoint's manifest, if it was checked before.

    Raises:
        ValueError: For weights of another model, and for a damaged checkpoint, with the file and the cause.
    """
    model = spec.build()
    saved = checkpoint.open_checkpoint(checkpoint_url, sha256=sha256)
    load_into(model, load_weights(saved), f"the weights of {checkpoint_url}", frozen=saved.frozen)
    return model.eval()


def evaluate_model(
    spec: ModelSpec,
    model: nn.Module,
    loader: BatchLoader,
    config: Config,
    world: World,
    *,
    call: Call | None = None,
    forward: Callable[[Batch], Output | None] | None = None,
    counts: bool = True,
) -> dict[str, Any]:
    """Computes the mean loss and the metrics over the true rows of a loader. Collective; the same on all ranks.

    With `data.weight`, the loss and functions of `spec.metrics` are means with the weights of the rows, whatever
    `data.weight_mean` says of training. Where the loss has weights of its own, or `spec.count`, the mean is over these.

    With `spec.evaluation`, its values replace the loss. Raises ValueError if one of them has the name of a metric.

    Args:
        call, forward, counts: see `Trainable`.
    """
    call = call or (lambda function, batch: function(model, batch))
    metrics = build_metrics(spec, config)
    evaluation = None if spec.evaluation is None else spec.evaluation(model)
    for row_metric in metrics:
        row_metric.metric.to(world.device)
    of_evaluation = RowRanks(1) if world.world_size == 1 else _SKIPS
    has_weights = config.data.weight is not None
    is_counted = has_weights or counts_elements(spec, config, loader.columns)
    # Of losses, and what their mean is over: by the batches, by the losses, and the ranks whose losses say it.
    total = torch.zeros(4, dtype=torch.float64, device=world.device)
    report_at = time.monotonic() + _REPORT_S
    compute = EvaluationMode()
    with noting_counts(by_weight=has_weights) as noted, _in_evaluation_mode(model), torch.no_grad():
        for step in loader.epoch(0):
            if world.rank == 0 and time.monotonic() >= report_at:
                world.report({"kind": "evaluation", "step": step.step, "steps": loader.plan.steps})
                report_at = time.monotonic() + _REPORT_S
            for cpu_batch in step.micro_batches:
                check_ignored(spec, cpu_batch, config.data.label)
                batch = to_device(cpu_batch, world.device, config)
                output = None
                if is_counted and counts:
                    total[1] += count_of(spec, batch, config, by_weight=has_weights)
                if forward is not None:
                    with torch.inference_mode(), autocast(batch, config):
                        output = forward(batch)
                        if output is None or not counts:
                            continue
                        total[0] += loss_sum(spec, output, batch, config)
                elif evaluation is None:
                    output, losses = compute(
                        functools.partial(weighted_loss_sum, spec, model, batch, config, call=call)
                    )
                    if not counts:
                        continue
                    total[0] += losses.detach()
                elif bool((batch["weight"] > 0).any()):
                    with gathering(of_evaluation), torch.inference_mode(), autocast(batch, config):
                        evaluation.update(true_rows(batch, model))
                if metrics and output is None:  # these functions return none
                    output = compute(functools.partial(_output, spec, batch, config, call))
                for row_metric in metrics:
                    assert output is not None
                    row_metric.update(without_gradient(output), batch)
    own_count = noted.total()
    if own_count is not None and counts:
        total[2], total[3] = own_count, 1
    sum_over_ranks(total)
    values = {row_metric.name: row_metric.compute() for row_metric in metrics}
    count = float(total[2]) if total[3] else float(total[1]) if is_counted else loader.plan.rows
    result = {"loss": float(total[0]) / count if count else math.nan} if evaluation is None else evaluation.compute()
    if taken := sorted(result.keys() & values.keys()):
        raise ValueError(
            f"train.metrics, spec.metrics: spec.evaluation has a value {taken[0]!r}, too; rename one of them"
        )
    return {**result, **values}


def _output(spec: ModelSpec, batch: Batch, config: Config, call: Call) -> Output:
    with autocast(batch, config):
        output: Output = call(lambda model, batch: spec.output(model, batch, config.inputs), batch)
        return output


@contextlib.contextmanager
def _in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode for the block, and then restores the mode of each module, as some may be frozen."""
    before = {module: module.training for module in model.modules()}
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)  # some modules override this
        for module, mode in before.items():
            module.training = mode
