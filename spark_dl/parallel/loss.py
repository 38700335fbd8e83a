"""The loss of a batch, as all strategies and evaluations compute it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from spark_dl.nn.moe import add_auxiliary_losses, note_rows
from spark_dl.spec import Batch, ModelSpec, Output

if TYPE_CHECKING:
    from spark_dl.config import Config

_IS_ABOUT_SHAPES = re.compile(
    r"size|shape|dimension|broadcast|target|dtype|scalar type|class probabilities|out of bounds|can't be cast", re.I
)
_IS_ABOUT_CALLS = re.compile(
    r"positional argument|keyword argument|must be Tensor|out of range|not implemented for|\dD\b|\d-dimensional", re.I
)
_IS_OF_A_DEVICE = re.compile(r"CUDA|CUBLAS|cuDNN|NCCL|gloo|[Cc]ollective|[Cc]onnection|DefaultCPUAllocator")
"""Failures of devices and connections, which another attempt can do without."""
_NOT_OF_THE_MODEL = (
    "spark_dl.parallel", "spark_dl.gather", "spark_dl.nn.exchange", "torch.distributed", "torch.nn.parallel", "horovod",
)  # fmt: skip
"""Modules whose errors are about an exchange, or have an explanation already."""
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def row_losses(spec: ModelSpec, output: Output, batch: Batch, label: str | None) -> Tensor:
    """The loss of each row of a batch. # (rows,)"""
    target: Any = batch if label is None else batch[label]
    assert callable(spec.loss)
    try:
        losses = spec.loss(output, target)
    except (IndexError, RuntimeError, ValueError) as error:
        # Torch's own errors, such as one about a class that the output does not have, name neither column nor output.
        if type(error) not in (IndexError, RuntimeError, ValueError) or not _IS_ABOUT_SHAPES.search(str(error)):
            raise
        raise ValueError(_explain(error, output, batch, label)) from error
    rows = batch["weight"].shape[0]
    _check_not_paired(losses, output, target, label)
    if not isinstance(losses, Tensor) or losses.ndim == 0 or losses.shape[0] != rows:
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(f"spec.loss: expected one value per row, shape ({rows},), found {found}; use reduction='none'")
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def _explain(error: Exception, output: Output, batch: Batch, label: str | None) -> str:
    text = f"spec.loss: {str(error).rstrip('.')}. "
    if isinstance(error, IndexError) and label is not None and isinstance(output, Tensor):
        low, high = batch[label].aminmax()
        return (
            f"{text}The column {label!r} has values from {low.item():g} to {high.item():g} in this batch, and the "
            f"model's output has the shape {tuple(output.shape)}: one class per entry of its second axis"
        )
    columns = "" if label is None else f", and the column {label!r} is {_in_words(batch[label])}"
    return (
        f"{text}The model's output is {_in_words(output)}{columns}; change the last layer of the model, spec.loss, or "
        "the column (data.cast, spec.transform)"
    )


@contextlib.contextmanager
def misfits_named(batch: Batch) -> Iterator[None]:
    """Makes an error of a forward pass that is about shapes, dtypes or arguments a ValueError with the batch's columns.

    Torch's own errors do not name them. Other errors stay as they are. Used on a rank.
    """
    try:
        yield
    except Exception as error:
        _raise_if_misfit(error, batch)
        raise


def _raise_if_misfit(error: Exception, batch: Batch) -> None:
    if type(error) not in (IndexError, RuntimeError, TypeError, ValueError):  # nor those that are derived, as of memory
        return
    text, frame = str(error).strip().rstrip("."), error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__"))
    if module.startswith(_NOT_OF_THE_MODEL) or _IS_OF_A_DEVICE.search(text):
        return
    if _IS_ABOUT_SHAPES.search(text) or _IS_ABOUT_CALLS.search(text):
        columns = ", ".join(f"{name!r} {_in_words(v)}" for name, v in batch.items() if name != "weight")
        raise ValueError(
            f"the model cannot be computed for a batch: {text}. The batch has the columns {columns}, with the rows "
            "as the first axis; change the model (spec.build, spec.forward), its loss (spec.loss, spec.batch_loss), or "
            "the columns (data.features, data.cast, spec.transform)"
        ) from error


def _in_words(value: Any) -> str:
    """Returns the shape and the element type of a tensor, or of the tensors of an output."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_in_words(v)}" for name, v in value.items()) + "}"
    return f"[{', '.join(map(_in_words, value))}]" if isinstance(value, (list, tuple)) else type(value).__name__


def _check_not_paired(losses: Any, output: Any, target: Any, label: str | None) -> None:
    """Raises ValueError if an output [rows, 1] and a label [rows], or the reverse, were broadcast to [rows, rows].

    Torch only warns of it. The mean of each row would compare the output of a row with the labels of all rows.
    """
    if not (isinstance(losses, Tensor) and isinstance(output, Tensor) and isinstance(target, Tensor)):
        return
    if losses.shape in (output.shape, target.shape):
        return
    with contextlib.suppress(RuntimeError):  # shapes that cannot be broadcast
        if losses.shape == torch.broadcast_shapes(output.shape, target.shape):
            raise ValueError(
                f"spec.loss: the model's output has the shape {tuple(output.shape)}, and the column {label!r} the "
                f"shape {tuple(target.shape)}, so that torch computes {tuple(losses.shape)} losses, each output with "
                "each label; expected the same shape: return output[:, 0], for example in spec.forward, or change the "
                "column in spec.transform"
            )


Call: TypeAlias = Callable[[Callable[[nn.Module, Batch], Any], Batch], Any]
"""(function, batch) -> function(model, batch). A strategy calls it inside the forward pass of its wrapper of the model,
such as DDP, whose exchange of gradients depends on that."""


class Inside(nn.Module):
    """A module whose forward pass calls a function with a model: what a wrapper such as DDP wraps.

    So the user's functions get the model itself, whatever the strategy, and may call parts of it. With the wrapper,
    they would have to take the model out of it, and a forward pass that goes around DDP exchanges no gradients.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module, Batch], Any], batch: Batch) -> Any:
        return function(self.model, batch)


def weighted_loss_sum(
    spec: ModelSpec, model: nn.Module, batch: Batch, config: Config, *, call: Call | None = None
) -> tuple[Output | None, Tensor]:
    """Computes the model's output, and the sum of losses over the true rows, a float32 scalar.

    All strategies use this function, so all of them compute the same loss. The output is None with `spec.batch_loss`.
    The gradient of the sum includes the auxiliary losses of mixtures of experts, the value does not.
    call: calls the functions of the spec; by default with the model.
    """
    call = call or (lambda function, batch: function(model, batch))
    output = None
    with autocast(batch, config):
        if spec.batch_loss is not None:
            losses = _batch_loss_sum(spec.batch_loss, model, batch, call)
        else:
            note_rows(model, batch["weight"])
            output = call(lambda model, batch: spec.output(model, batch, config.data.features), batch)
    if output is not None:
        losses = loss_sum(spec, output, batch, config)
    return output, add_auxiliary_losses(model, losses, batch["weight"])


def loss_sum(spec: ModelSpec, output: Output, batch: Batch, config: Config) -> Tensor:
    """Computes the sum of losses over the true rows from the model's output, a float32 scalar."""
    with autocast(batch, config):
        losses = row_losses(spec, output, batch, config.data.label)
    return (losses.float() * batch["weight"]).sum()


def autocast(batch: Batch, config: Config) -> contextlib.AbstractContextManager[Any]:
    """Returns the context of `train.precision` for computations with a batch."""
    dtype = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.train.precision]
    return torch.autocast(batch["weight"].device.type, dtype=dtype) if dtype else contextlib.nullcontext()


def _batch_loss_sum(
    loss: Callable[[nn.Module, Batch], Tensor], model: nn.Module, batch: Batch, call: Call
) -> Tensor:  # fmt: skip
    """The mean loss of the true rows, times their number; 0 with a gradient of 0 if there are none."""
    rows = true_rows(batch, model)
    note_rows(model, rows["weight"])
    mean = call(loss, rows)
    if not isinstance(mean, Tensor) or mean.numel() != 1:
        found = f"shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
        raise ValueError(f"spec.batch_loss: expected the mean loss of the rows, a tensor with one value, found {found}")
    return mean.reshape(()).float() * int((batch["weight"] > 0).sum())


def true_rows(batch: Batch, model: nn.Module) -> Batch:
    """Returns the rows whose weight is above 0; the batch itself if there are none.

    A single row is returned twice to a model in training that has a BatchNorm of torch, which needs two rows. The mean
    over the batch stays the same. # each (rows, ...)
    """
    weight = batch["weight"]
    (index,) = torch.nonzero(weight > 0, as_tuple=True)
    if len(index) == 1 and any(type(module) in _BATCH_NORMS and module.training for module in model.modules()):
        index = index.repeat(2)
    elif len(index) in (0, len(weight)):
        return batch
    for name, tensor in batch.items():
        if not tensor.ndim or len(tensor) != len(weight):
            raise ValueError(
                f"spec.batch_loss: expected one entry per row in the column {name!r}, shape ({len(weight)}, ...), "
                f"found shape {tuple(tensor.shape)}"
            )
    return {name: tensor[index] for name, tensor in batch.items()}
