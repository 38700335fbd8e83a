"""Settings that exclude each other with the functions of a `ModelSpec`, in one table.

Settings that exclude other settings are in `config.conflicts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spark_dl.config import Config, Train
from spark_dl.scoring.outputs import Squeezed
from spark_dl.spec import ModelSpec


@dataclass(frozen=True)
class FunctionConflict:
    """A row of the table."""

    key: str
    """Setting that the error names."""
    excluded: Callable[[ModelSpec, Config], bool]
    """Whether a spec and a configuration have the conflict."""
    message: str
    """What was expected and found, why, and what to change. A format string with the configuration as `c`."""


def _set_beside_optimizer(name: str) -> FunctionConflict:
    return FunctionConflict(
        f"train.{name}",
        lambda s, c: s.optimizer is not None and getattr(c.train, name) != getattr(_DEFAULTS, name),
        "has no effect with spec.optimizer (a LightningModule: configure_optimizers), which builds the optimizer and "
        "the scheduler; remove it",
    )


_DEFAULTS = Train()

CONFLICTS = (
    *(_set_beside_optimizer(name) for name in (
        "optimizer", "lr", "optimizer_args", "scheduler", "scheduler_args", "scheduler_interval",
    )),
    FunctionConflict("parallel.strategy", lambda s, c: s.optimizer is not None and c.parallel.servers > 0,
                     "expected a strategy without servers with spec.optimizer, found {c.parallel.strategy!r}, whose "
                     "servers have blocks of the weights instead of the model; set ddp"),
    FunctionConflict("parallel.strategy", lambda s, c: s.optimizer is not None and c.parallel.own_optimizer,
                     "expected another strategy with spec.optimizer, found {c.parallel.strategy!r}, which builds a new "
                     "optimizer that a scheduler does not know; set ddp"),
    FunctionConflict("parallel.strategy", lambda s, c: s.set_position is not None and c.parallel.servers > 0,
                     "expected a strategy without servers with spec.set_position, found {c.parallel.strategy!r}, whose "
                     "ranks have no common step; set ddp"),
    FunctionConflict("parallel.strategy", lambda s, c: s.batch_loss is not None and c.parallel.all_gpus,
                     "expected one process for each GPU with spec.batch_loss, found {c.parallel.strategy!r}, which "
                     "splits batches inside the forward pass; set ddp"),
    FunctionConflict("data.weight", lambda s, c: s.batch_loss is not None and c.data.weight is not None,
                     "not supported with spec.batch_loss (a LightningModule: training_step), whose mean over a batch "
                     "gives all rows the same weight; add the column to data.labels, and weight the rows there"),
    FunctionConflict("train.compile", lambda s, c: s.batch_loss is not None and c.train.compile,
                     "not supported with spec.batch_loss (a LightningModule: training_step), which calls the parts of "
                     "the model itself; compile them in spec.build"),
    FunctionConflict("parallel.experts", lambda s, c: s.evaluation is not None and _divides_experts(c),
                     "expected 1 with spec.evaluation (a LightningModule: validation_step), found "
                     "{c.parallel.experts}: ranks evaluate different numbers of batches, and cannot exchange tokens"),
    FunctionConflict("parallel.zero_stage", lambda s, c: s.evaluation is not None and _gathers_weights(c),
                     "expected 0, 1 or 2 with spec.evaluation (a LightningModule: validation_step), found 3: ranks "
                     "evaluate different numbers of batches, and cannot gather weights in each of them"),
    FunctionConflict("parallel.strategy", lambda s, c: _by_batch(s) and c.parallel.planned,
                     "expected another strategy with spec.batch_loss and spec.evaluation (a LightningModule), which "
                     "need the whole model, found {c.parallel.strategy!r}, whose plans can cut it; set ddp, or mesh "
                     "with zero_stage"),
    FunctionConflict("loader.ragged", lambda s, c: _by_batch(s) and c.loader.ragged == "offsets",
                     "expected 'pad' with spec.batch_loss and spec.evaluation, which get the true rows of a batch, "
                     "found 'offsets'"),
    FunctionConflict("data.assemble", lambda s, c: c.data.assemble is not None and _gets_batches(s),
                     "expected null with spec.forward, spec.batch_loss and spec.evaluation, which get the columns of "
                     "the batch, found {c.data.assemble}"),
)  # fmt: skip


def _gets_batches(spec: ModelSpec) -> bool:
    return _by_batch(spec) or not isinstance(spec.forward, (type(None), Squeezed))


def _gathers_weights(config: Config) -> bool:
    return getattr(config.parallel, "zero_stage", 0) == 3


def _divides_experts(config: Config) -> bool:
    return getattr(config.parallel, "experts", 1) > 1


def _by_batch(spec: ModelSpec) -> bool:
    return spec.batch_loss is not None or spec.evaluation is not None


def check_functions(spec: ModelSpec, config: Config) -> None:
    """Raises ValueError for the first conflict in the table. Called on the driver, before any data is read."""
    for conflict in CONFLICTS:
        if conflict.excluded(spec, config):
            raise ValueError(f"{conflict.key}: {conflict.message.format(c=config)}")
