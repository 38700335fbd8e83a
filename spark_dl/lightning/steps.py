"""The steps of a LightningModule, as functions of a `ModelSpec`. Called on ranks, and by `predict` in its tasks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from spark_dl.lightning.log import EpochLog, TrainingLog, logging_to
from spark_dl.lightning.trainer import attached_trainer
from spark_dl.nn.label_means import means_over_labels, of_mean

if TYPE_CHECKING:
    from spark_dl.spec import Batch

    MakeBatch = Callable[[Batch], Any]


def columns_of(batch: Batch) -> tuple[Tensor, ...]:
    """Returns the columns of a batch, in their order, without the weight. The default of `batch`."""
    return tuple(tensor for name, tensor in batch.items() if name != "weight")


def training_loss(model: nn.Module, batch: Batch, *, make_batch: MakeBatch) -> Tensor | tuple[Tensor, Tensor]:
    """Returns the loss of `training_step` (`ModelSpec.batch_loss`): the mean over the rows, or (sum, count)."""
    trainer, log = attached_trainer(model), TrainingLog()
    with logging_to(model, log):
        output = _call(model.training_step, make_batch(batch), trainer.batch_idx)  # type: ignore[arg-type]
    log.reset()
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) and not _has_count(loss):
        raise ValueError(
            "training_step: expected the mean loss of the batch, a tensor, or a dict with `loss`, or (sum, count), "
            f"found {type(output).__name__}; a step cannot be skipped, as ranks take all steps together"
        )
    return loss  # type: ignore[return-value]


def _has_count(loss: Any) -> bool:
    return isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[0], Tensor)


class ModuleEvaluation:
    """The evaluation of a LightningModule (`ModelSpec.evaluation`): the loss, and what `validation_step` logs.

    Args:
        step: name of the method. What `training_step` logs is not kept.
        count: `ModelSpec.count`, what its loss is over.
    """

    def __init__(
        self, model: nn.Module, *, step: str, make_batch: MakeBatch, count: Callable[[Batch], Tensor | float] | None
    ):  # fmt: skip
        self._model, self._step, self._make_batch, self._count = model, step, make_batch, count
        self._logged, self._losses = EpochLog(model), EpochLog(model)
        self._num_batches = 0
        attached_trainer(model)

    def update(self, batch: Batch) -> None:
        """Calls the step with a batch of true rows. batch_idx is the number of this rank's batches so far."""
        step = getattr(self._model, self._step)
        rows, index = len(batch["weight"]), self._num_batches
        count = rows if self._count is None else float(self._count(batch))
        self._num_batches += 1
        with means_over_labels(self._model) as means:
            if self._step == "training_step":
                loss: Any = training_loss(self._model, batch, make_batch=self._make_batch)
            else:
                with self._logged.receiving(rows):
                    output = _call(step, self._make_batch(batch), index)
                loss = output.get("loss") if isinstance(output, Mapping) else output
        if _has_count(loss):
            total, count = loss[0], float(loss[1])
            loss = total / count if count else total
        elif self._count is None and (labels := of_mean(loss, means)) is not None:
            count = float(labels)
        if isinstance(loss, Tensor) and loss.numel() == 1 and count:
            self._losses.add("loss", loss, count)

    def compute(self) -> dict[str, Any]:
        """Returns the means over the rows of all ranks, or over `count`, and the metrics. Collective."""
        return {**self._losses.compute(), **self._logged.compute()}


def predict_step(model: nn.Module, batch: Batch, *, make_batch: MakeBatch) -> Any:
    """Returns the output of `predict_step` (`ModelSpec.forward`, if the module overrides it)."""
    attached_trainer(model)
    return _call(model.predict_step, make_batch(batch), 0)  # type: ignore[arg-type]


def _call(step: Callable[..., Any], batch: Any, index: int) -> Any:
    """Calls a step with the batch, and with `batch_idx` if it takes a second argument."""
    parameters = list(inspect.signature(step).parameters.values())
    many = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return step(batch, index) if many or len(positional) > 1 else step(batch)
