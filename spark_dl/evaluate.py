"""Exact distributed evaluation: sums and counts are reduced over the ranks, never means of means."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spark_dl.config import Config
from spark_dl.config.checks import suggestion
from spark_dl.data.load.build import BatchLoader, build_loader
from spark_dl.gather import gather_tensors, sum_over_ranks
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint_files import MODEL
from spark_dl.spec import ModelSpec, Run, weighted_loss_sum
from spark_dl.world import World

if TYPE_CHECKING:
    from torchmetrics import Metric

_METRIC_MODULES = ("torchmetrics", "torchmetrics.classification", "torchmetrics.regression")


def evaluate(run: Run, world: World) -> dict[str, Any]:
    """Evaluates the weights of `run.checkpoint` on the rows of `run.train`. Collective; the same on all ranks."""
    assert run.checkpoint is not None
    model = load_model(run.spec, run.checkpoint, sha256=run.checkpoint_sha256).to(world.device)
    loader = build_loader(
        run.train, run.config, rank=world.rank, world_size=world.world_size, shuffle=False,
        prepare=run.spec.prepare, pin=world.device.type == "cuda",
    )  # fmt: skip
    return {"rows": loader.plan.rows, **evaluate_model(run.spec, model, loader, run.config, world)}


def load_model(spec: ModelSpec, checkpoint_url: str, *, sha256: str | None = None) -> nn.Module:
    """Builds the model with the weights of a checkpoint, on the CPU, in evaluation mode. Called on any side.

    sha256: checksum of the checkpoint's manifest, if it was checked before.
    Raises ValueError for weights of another model, and for a damaged checkpoint, with the file and the cause.
    """
    model = spec.build()
    weights = checkpoint.load(checkpoint.open_checkpoint(checkpoint_url, sha256=sha256), MODEL)["0"]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"the weights of {checkpoint_url} do not fit the model of spec.build: {error}") from error
    return model.eval()


def evaluate_model(
    spec: ModelSpec, model: nn.Module, loader: BatchLoader, config: Config, world: World
) -> dict[str, Any]:
    """Computes the mean loss and the metrics over the true rows of a loader. Collective; the same on all ranks."""
    metrics = {name: build_metric(name, args).to(world.device) for name, args in config.train.metrics.items()}
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    with _in_evaluation_mode(model), torch.inference_mode():
        for step in loader.epoch(0):
            for cpu_batch in step.micro_batches:
                batch = {name: tensor.to(world.device, non_blocking=True) for name, tensor in cpu_batch.items()}
                output, losses = weighted_loss_sum(spec, model, batch, config)
                total += losses
                true_rows = batch["weight"] > 0
                if metrics and bool(true_rows.any()):
                    label = batch[config.data.label or ""]
                    for metric in metrics.values():
                        metric.update(output[true_rows].float(), label[true_rows])
    sum_over_ranks(total)
    with warnings.catch_warnings():
        # torchmetrics warns on a rank without true rows.
        warnings.filterwarnings("ignore", message=".*was called before the ``update``.*")
        values = {name: _plain(metric.compute()) for name, metric in metrics.items()}
    return {"loss": float(total) / loader.plan.rows, **values}


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


def build_metric(name: str, args: Mapping[str, Any]) -> Metric:
    """Builds a metric of torchmetrics. Raises ValueError for an unknown class or wrong arguments."""
    arguments = {key: value for key, value in args.items() if key != "class"}
    for module in _METRIC_MODULES:
        cls = getattr(importlib.import_module(module), args["class"], None)
        if isinstance(cls, type):
            try:
                metric: Metric = cls(**arguments, dist_sync_fn=gather_tensors)
            except (TypeError, ValueError) as error:
                raise ValueError(f"train.metrics.{name}: {args['class']} does not take {arguments}: {error}") from error
            return metric
    known = sorted({n for m in _METRIC_MODULES for n in importlib.import_module(m).__all__})
    raise ValueError(
        f"train.metrics.{name}: no class {args['class']!r} in torchmetrics{suggestion(args['class'], known)}"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.ndim == 0 else value.tolist()
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
