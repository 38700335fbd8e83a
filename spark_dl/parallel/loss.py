"""The loss of a batch, as all strategies and evaluations compute it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from spark_dl.gather import gather_all_rows, of_true_rows
from spark_dl.generators import generators_kept
from spark_dl.nn.label_means import means_over_labels, of_mean
from spark_dl.nn.moe import add_auxiliary_losses, note_rows
from spark_dl.parallel.modules import module_state_kept
from spark_dl.spec import Batch, ModelSpec, Output, SumOverRow

if TYPE_CHECKING:
    from spark_dl.config import Config
    from spark_dl.data.columns.schema import Column

T = TypeVar("T")
_NEEDS_GRADIENTS = re.compile("does not require grad|[Ii]nference tensor")
_IS_ABOUT_SHAPES = re.compile(
    r"size|shape|dimension|broadcast|target|dtype|scalar type|class probabilities|out of bounds|can't be cast|"
    r"bool tensor",
    re.I,
)
_IS_ABOUT_CALLS = re.compile(
    r"positional argument|keyword argument|must be Tensor|out of range|not implemented for|\dD\b|\d-dimensional", re.I
)
_IS_OF_A_DEVICE = re.compile(r"CUDA|CUBLAS|cuDNN|NCCL|gloo|[Cc]ollective|[Cc]onnection|DefaultCPUAllocator")
"""Failures of devices and connections, which another attempt can do without."""
_NOT_OF_THE_MODEL = (
    "spark_dl.parallel", "spark_dl.gather", "spark_dl.nn.moe", "torch.distributed", "torch.nn.parallel", "horovod",
)  # fmt: skip
"""Modules whose errors are about an exchange, or have an explanation already."""
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


Count: TypeAlias = float | Tensor
"""What the mean loss of a step is over: rows, or a sum of weights. A tensor, [], where a GPU has it."""

_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
"""Losses of torch whose mean has weights."""

Call: TypeAlias = Callable[[Callable[[nn.Module, Batch], Any], Batch], Any]
"""(function, batch) -> function(model, batch). A strategy calls it inside the forward pass of its wrapper of the model,
such as DDP, whose exchange of gradients depends on that."""


@dataclass
class NotedCounts:
    """What losses are over, of those that say it themselves."""

    by_weight: bool
    of_batches: list[Tensor] = field(default_factory=list)  # each () float64, on the device of the batch

    def total(self) -> Tensor | None:
        """Returns their sum, () float64; None if no loss has said it."""
        return torch.stack(self.of_batches).sum() if self.of_batches else None


_noted: NotedCounts | None = None


@contextlib.contextmanager
def noting_counts(*, by_weight: bool = False) -> Iterator[NotedCounts]:
    """Collects what losses are over that return it with the loss: `(losses, weights)`, or `(sum, count)`.

    Of other losses, `count_of` knows it from the batch alone, before the first backward pass. Used on a rank.

    Args:
        by_weight: as of `count_of`.
    """
    global _noted
    before, _noted = _noted, NotedCounts(by_weight)
    try:
        yield _noted
    finally:
        _noted = before


def _note(count: Tensor | None) -> None:
    if _noted is not None and count is not None:
        _noted.of_batches.append(count)


def noted_counts() -> list[Tensor]:
    """Returns what the losses of this step have said that they are over, of each micro-batch so far."""
    return [] if _noted is None else _noted.of_batches


def row_losses(spec: ModelSpec, output: Output, batch: Batch, label: str | None) -> tuple[Tensor, Tensor | None]:
    """Returns the loss of each row of a batch, and what it counts in the mean if `spec.loss` says so, or None.

    The loss of a row is the mean over its values; or the weighted sum of them, if the values of the label have weights,
    or if `spec.loss` returns weights beside the losses. # (rows,) and (rows,) float64
    """
    target: Any = batch if label is None else batch[label]
    assert callable(spec.loss)
    loss = spec.loss.to(batch["weight"].device) if isinstance(spec.loss, nn.Module) else spec.loss
    try:
        losses = loss(output, target)
    except (IndexError, RuntimeError, ValueError) as error:
        # Torch's own errors, such as one about a class that the output does not have, name neither column nor output.
        if type(error) not in (IndexError, RuntimeError, ValueError) or not _IS_ABOUT_SHAPES.search(str(error)):
            raise
        raise ValueError(_explain(error, output, batch, label)) from error
    if type(losses) is tuple:
        return _weighted(spec, losses, batch, label)
    rows = batch["weight"].shape[0]
    _check_not_repeated(loss, losses, output, target, label)
    if not isinstance(losses, Tensor) or losses.ndim == 0 or losses.shape[0] != rows:
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        change = "use reduction='none', or return (losses, weights)"
        if f"{label}_offsets" in batch:
            change = (
                f"the column {label!r} has all values of all rows (loader.ragged=offsets); sum them within each row by "
                f"'{label}_offsets', or set loader.ragged to pad"
            )
        raise ValueError(f"spec.loss: expected one value per row, shape ({rows},), found {found}; {change}")
    weights = element_weights(spec, batch, label)
    if weights is None:
        return (losses.flatten(1).mean(1) if losses.ndim > 1 else losses), None
    if losses.shape[: weights.ndim] != weights.shape:
        raise ValueError(
            f"spec.loss: the column {label!r} is ragged, so expected one value for each of its values, shape "
            f"{tuple(weights.shape)}, found shape {tuple(losses.shape)}, in which padding cannot be told from values; "
            f"for one value per row, set data.label to null, and use the columns {label!r} and '{label}_mask' there; "
            "or return (losses, weights)"
        )
    if losses.ndim > weights.ndim:
        losses = losses.flatten(weights.ndim).mean(-1)
    mask = _mask_of(batch, label)
    if mask is not None:  # torch has applied its weights, and it does not know the padding
        losses = torch.where(mask, losses, 0)
    return _sum_of_rows(losses), None


def _sum_of_rows(values: Tensor) -> Tensor:
    return values.flatten(1).sum(1) if values.ndim > 1 else values


def _weighted(
    spec: ModelSpec, returned: tuple[Any, ...], batch: Batch, label: str | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the sums of losses times weights, and of the weights, of each row. # each (rows,)"""
    rows = batch["weight"].shape
    losses, weights = returned if len(returned) == 2 else (None, None)
    if (
        not isinstance(losses, Tensor)
        or not isinstance(weights, Tensor)
        or losses.shape != weights.shape
        or losses.shape[:1] != rows
    ):
        raise ValueError(
            f"spec.loss: expected (losses, weights), two tensors of one shape, ({rows[0]}, ...), found "
            f"{in_words(returned)}"
        )
    _check_count("spec.loss", "weights", weights, spec)
    mask = _mask_of(batch, label)
    if mask is not None and weights.shape[:2] == mask.shape:  # padding never counts
        weights = weights * mask.view(*mask.shape, *[1] * (weights.ndim - 2))
    losses = torch.where(weights != 0, losses.float(), 0) * weights.float()
    return _sum_of_rows(losses), _sum_of_rows(weights.double())


def _check_count(function: str, name: str, value: Any, spec: ModelSpec) -> None:
    """Raises ValueError for weights or a count that have a gradient, or that `spec.count` returns, too."""
    if spec.count is not None:
        raise ValueError(f"{function}: it returns {name}, so spec.count has no effect; remove one of them")
    if isinstance(value, Tensor) and value.requires_grad:
        raise ValueError(
            f"{function}: expected {name} without a gradient, as the mean of a step divides by those of all ranks; "
            f"use {name}.detach()"
        )


def element_weights(spec: ModelSpec, batch: Batch, label: str | None) -> Tensor | None:
    """Returns the weight of each value of a label in the mean of a loss; None if all count the same.

    Padding of a ragged label has the weight 0. CrossEntropyLoss and NLLLoss give the weight of their class to each
    value, and 0 to those of `ignore_index`, and torch's mean divides by the sum of these weights. # (rows, ...)
    """
    if label is None or spec.batch_loss is not None:
        return None
    target, mask, loss = batch[label], _mask_of(batch, label), spec.loss
    weights = None if mask is None else mask.float()
    if not isinstance(loss, _OF_CLASSES) or target.is_floating_point() or (mask is None and _is_plain(loss)):
        return weights
    counted = target != loss.ignore_index
    of_class = counted.float()
    if loss.weight is not None:
        table = loss.weight.to(target.device)
        of_class = torch.where(counted, table[target.clamp(0, len(table) - 1).long()].float(), 0)
    return of_class if weights is None else of_class * weights


def count_of(spec: ModelSpec, batch: Batch, config: Config, *, by_weight: bool = False) -> Tensor:
    """Returns what the mean loss of a batch is over: its true rows, or what `spec.count` or the weights say.

    # returns: () float64, on the device of the batch

    Args:
        by_weight: counts a row by its weight, as `data.weight_mean: weights` does.
    """
    true = batch["weight"] > 0
    if spec.count is not None:
        return _own_count(spec.count, batch, true)
    of_row = batch["weight"].double() if by_weight or config.data.weight_mean == "weights" else true.double()
    weights = element_weights(spec, batch, config.data.label)
    if weights is None:
        return of_row.sum()
    return ((weights.flatten(1).sum(1, dtype=torch.float64) if weights.ndim > 1 else weights.double()) * of_row).sum()


def counts_elements(spec: ModelSpec, config: Config, columns: Sequence[Column]) -> bool:
    """Whether the mean loss is over something else than rows, so that ranks must sum it in each step.

    Args:
        columns: those of the batches. Depends on nothing that differs between ranks.
    """
    is_ragged = any(c.name == config.data.label and c.is_ragged for c in columns) and config.loader.ragged == "pad"
    has_weights = isinstance(spec.loss, _OF_CLASSES) and not _is_plain(spec.loss)
    by_weight = config.data.weight_mean == "weights"
    return spec.count is not None or (spec.batch_loss is None and (is_ragged or has_weights or by_weight))


def check_ignored(spec: ModelSpec, batch: Batch, label: str | None) -> None:
    """Raises ValueError if labels are left out by the default `ignore_index` of a loss. batch: on the CPU.

    To count them, ranks would have to exchange a number in each step, for which most runs have no use.
    """
    if label is None or not isinstance(spec.loss, _OF_CLASSES) or spec.count is not None or not _is_plain(spec.loss):
        return
    target = batch.get(label)
    if target is None or target.is_floating_point() or _mask_of(batch, label) is not None or not target.numel():
        return
    ignored = spec.loss.ignore_index
    if int(target.min()) == ignored:
        num_ignored = int((target == ignored).sum())
        raise ValueError(
            f"spec.loss: the column {label!r} has {num_ignored} values of {ignored} in a batch of {len(target)} rows, "
            f"which {type(spec.loss).__name__} leaves out, so that its mean is not over the rows; say what it is over, "
            f"ModelSpec(count=lambda batch: (batch[{label!r}] != {ignored}).sum()), or leave these rows out "
            "(data.filters)"
        )


def _is_plain(loss: nn.CrossEntropyLoss | nn.NLLLoss) -> bool:
    return loss.weight is None and loss.ignore_index == -100


def _mask_of(batch: Batch, label: str | None) -> Tensor | None:
    """Returns which values of a ragged label are no padding. # (rows, longest)"""
    mask = batch.get(f"{label}_mask")
    if mask is None or label is None:
        return None
    if batch[label].shape[:2] != mask.shape:
        raise ValueError(
            f"spec.transform: the column {label!r} has the shape {tuple(batch[label].shape)}, and its mask "
            f"'{label}_mask' the shape {tuple(mask.shape)}; change both in the same way"
        )
    return mask


def _own_count(count: Callable[[Batch], Any], batch: Batch, true: Tensor) -> Tensor:
    device = batch["weight"].device
    if not bool(true.any()):
        return torch.zeros((), dtype=torch.float64, device=device)
    rows = batch if bool(true.all()) else select_rows(batch, true.nonzero()[:, 0])
    counted = count(rows)
    if not isinstance(counted, (int, float, Tensor)) or (isinstance(counted, Tensor) and counted.numel() != 1):
        shape = f"shape {tuple(counted.shape)}" if isinstance(counted, Tensor) else type(counted).__name__
        raise ValueError(f"spec.count: expected one number for the batch, found {shape}")
    return torch.as_tensor(counted, dtype=torch.float64, device=device).reshape(())


def _explain(error: Exception, output: Output, batch: Batch, label: str | None) -> str:
    text = f"spec.loss: {str(error).rstrip('.')}. "
    if isinstance(error, IndexError) and label is not None and isinstance(output, Tensor):
        low, high = batch[label].aminmax()
        return (
            f"{text}The column {label!r} has values from {low.item():g} to {high.item():g} in this batch, and the "
            f"model's output has the shape {tuple(output.shape)}: one class per entry of its second axis"
        )
    columns = "" if label is None else f", and the column {label!r} is {in_words(batch[label])}"
    return (
        f"{text}The model's output is {in_words(output)}{columns}; change the last layer of the model, spec.loss, or "
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
    text = str(error).strip().rstrip(".")
    if is_of_exchange(error):
        return
    if _IS_ABOUT_SHAPES.search(text) or _IS_ABOUT_CALLS.search(text):
        columns = ", ".join(f"{name!r} {in_words(v)}" for name, v in batch.items() if name != "weight")
        raise ValueError(
            f"the model cannot be computed for a batch: {text}. The batch has the columns {columns}, with the rows "
            "as the first axis; change the model (spec.build, spec.forward), its loss (spec.loss, spec.batch_loss), or "
            "the columns (data.features, data.cast, spec.transform)"
        ) from error


def is_of_exchange(error: Exception) -> bool:
    """Whether an error is about an exchange or a device, and not about the model or its batch."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__"))
    return module.startswith(_NOT_OF_THE_MODEL) or bool(_IS_OF_A_DEVICE.search(str(error)))


def in_words(value: Any) -> str:
    """Returns the shape and the element type of a tensor, or of the tensors of an output."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {in_words(v)}" for name, v in value.items()) + "}"
    return f"[{', '.join(map(in_words, value))}]" if isinstance(value, (list, tuple)) else type(value).__name__


def _check_not_repeated(loss: Any, losses: Any, output: Any, target: Any, label: str | None) -> None:
    """Raises ValueError if an output and a label of other shapes were broadcast: [rows, 1] and [rows] to [rows, rows].

    Torch only warns of it, at most. Each output would be compared with labels that it is not meant for. A function of
    the user's own may repeat the label, such as one that compares several quantiles with one value.
    """
    if not (isinstance(losses, Tensor) and isinstance(output, Tensor) and isinstance(target, Tensor)):
        return
    if output.shape == target.shape or (losses.shape == output.shape and not _is_of_torch(loss)):
        return
    if losses.ndim < max(output.ndim, target.ndim):  # as of scores of classes; the rest takes time
        return
    with contextlib.suppress(RuntimeError):  # shapes that cannot be broadcast
        if losses.shape == torch.broadcast_shapes(output.shape, target.shape):
            raise ValueError(
                f"spec.loss: the model's output has the shape {tuple(output.shape)}, and the column {label!r} the "
                f"shape {tuple(target.shape)}, so that torch repeats values, and computes {tuple(losses.shape)} "
                "losses; expected the same shape: return output[:, 0], for example in spec.forward, change the column "
                "in spec.transform, or expand the output there if one value is meant for several"
            )


def _is_of_torch(loss: Any) -> bool:
    inner = loss.loss if isinstance(loss, SumOverRow) else loss
    return type(inner).__module__ == "torch.nn.modules.loss"


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

    Args:
        call: calls the functions of the spec; by default with the model.
    """
    call = call or (lambda function, batch: function(model, batch))
    output = None
    with autocast(batch, config):
        if spec.batch_loss is not None:
            losses, count = _batch_loss_sum(spec, model, batch, config, call)
        else:
            note_rows(model, batch["weight"])
            output = call(lambda model, batch: spec.output(model, batch, config.inputs), batch)
    if output is not None:
        losses, count = _loss_sum(spec, output, batch, config)
    _note(count)
    return output, add_auxiliary_losses(
        model, losses, lambda: count_of(spec, batch, config) if count is None else count
    )


def loss_and_count(
    spec: ModelSpec, model: nn.Module, batch: Batch, config: Config, *, call: Call | None = None
) -> tuple[float, float]:
    """Returns the sum of losses of a batch, and what their mean is over, whether the loss says it or the batch."""
    with noting_counts() as noted:
        _, losses = weighted_loss_sum(spec, model, batch, config, call=call)
    count = noted.total()
    return float(losses.detach()), float(count_of(spec, batch, config) if count is None else count)


def loss_sum(spec: ModelSpec, output: Output, batch: Batch, config: Config) -> Tensor:
    """Computes the sum of losses over the true rows from the model's output, a float32 scalar."""
    losses, count = _loss_sum(spec, output, batch, config)
    _note(count)
    return losses


def _loss_sum(spec: ModelSpec, output: Output, batch: Batch, config: Config) -> tuple[Tensor, Tensor | None]:
    """Returns the sum of losses over the true rows, and what it is over if `spec.loss` says so."""
    weight = batch["weight"]
    with autocast(batch, config):
        losses, counts = row_losses(spec, output, batch, config.data.label)
    if counts is not None:
        by_weight = config.data.weight_mean == "weights" or (_noted is not None and _noted.by_weight)
        counts = (counts * (weight.double() if by_weight else (weight > 0).double())).sum()
    return (losses.float() * weight).sum(), counts


def autocast(batch: Batch, config: Config) -> contextlib.AbstractContextManager[Any]:
    """Returns the context of `train.precision` for computations with a batch."""
    return autocast_to(config.train.precision, batch["weight"].device)


def autocast_to(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Returns the context of a precision for computations on a device."""
    dtype = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(precision)
    return torch.autocast(device.type, dtype=dtype) if dtype else contextlib.nullcontext()


def _batch_loss_sum(
    spec: ModelSpec, model: nn.Module, batch: Batch, config: Config, call: Call
) -> tuple[Tensor, Tensor | None]:
    """Returns the sum of losses of the true rows, and what it is over if the loss says so, () float64.

    The sum is 0 with a gradient of 0 if there are none.
    """
    rows = true_rows(batch, model)
    note_rows(model, rows["weight"])
    assert spec.batch_loss is not None
    with of_true_rows(batch["weight"]), means_over_labels(model) as means:
        returned = call(spec.batch_loss, rows)
    share = (batch["weight"] > 0).sum() / len(rows["weight"])  # 0.5 of a row that is there twice, 0 of padding
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        total, count = (each if isinstance(each, Tensor) else torch.as_tensor(each) for each in returned)
        if not isinstance(returned[0], Tensor) or total.numel() != 1 or count.numel() != 1:
            raise ValueError(
                "spec.batch_loss: expected (sum of losses, what their mean is over), each with one value, found "
                f"{in_words(returned)}"
            )
        _check_count("spec.batch_loss", "the count", count, spec)
        share = share.to(total.device)
        total = torch.where(share > 0, total.reshape(()).float(), 0) * share
        return total, count.to(share.device).reshape(()).double() * share
    if not isinstance(returned, Tensor) or returned.numel() != 1:
        found = f"shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else type(returned).__name__
        raise ValueError(
            f"spec.batch_loss: expected the mean loss of the rows, a tensor with one value, found {found}; or return "
            "(sum of losses, what their mean is over)"
        )
    labels = None if spec.count is not None else of_mean(returned, means)
    noted = None if labels is None else labels.double() * share
    count = (count_of(spec, batch, config) if noted is None else noted).float()
    # A mean over nothing is NaN in torch, and counts nothing here.
    return torch.where(count > 0, returned.reshape(()).float(), 0) * count, noted


class CachedGlobalLoss:
    """`weighted_loss_sum` of a step with several micro-batches, whose `spec.global_loss` compares all of their rows.

    GradCache (Gao et al. 2021, arXiv:2101.06983): all micro-batches are embedded without gradients, the loss of the
    embeddings of all ranks is differentiated by them, and each micro-batch is embedded once more, with the same random
    numbers, to pass its part of this gradient on to the weights. Collective.

    Args:
        batches: of the step, on the device, in the order in which they are computed once more, each with the context
            in which it is computed (`train.random_by`).
        call: as of `weighted_loss_sum`.
    """

    def __init__(
        self, spec: ModelSpec, model: nn.Module,
        batches: Iterable[tuple[Batch, contextlib.AbstractContextManager[None]]], config: Config, *,
        call: Call | None = None,
    ):  # fmt: skip
        self._spec, self._model, self._config = spec, model, config
        self._call = call or (lambda function, batch: function(model, batch))
        devices = {p.device for p in model.parameters()}
        gpus = sorted(device.index for device in devices if device.type == "cuda" and device.index is not None)
        embedded = []
        with generators_kept(gpus), module_state_kept(model), torch.no_grad():
            for batch, random in batches:
                with random:
                    embedded.append(self._embed(batch))
        own = [torch.cat(parts) for parts in zip(*(leaves for leaves, _ in embedded), strict=True)]
        gathered = [gather_all_rows(leaf) for leaf in own]
        with torch.enable_grad():
            everywhere = [rows.requires_grad_(rows.is_floating_point()) for rows, _ in gathered]
            assert spec.global_loss is not None
            with autocast({"weight": everywhere[0]}, config):
                loss = spec.global_loss(tree_unflatten(everywhere, embedded[0][1]))
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ValueError(
                    "spec.global_loss: expected the mean loss of the global batch, a tensor with one value, found "
                    f"{in_words(loss)}"
                )
            differentiable = [rows for rows in everywhere if rows.requires_grad]
            found = iter(torch.autograd.grad(loss.float().reshape(()), differentiable, allow_unused=True))
        self._loss, self._rows = loss.detach().float().reshape(()), len(everywhere[0])
        gradients = [next(found) if rows.requires_grad else None for rows in everywhere]
        lengths = [len(leaves[0]) for leaves, _ in embedded]
        of_leaves = [
            [None] * len(lengths) if g is None else g[start : start + sum(lengths)].split(lengths)
            for g, (_, start) in zip(gradients, gathered, strict=True)
        ]
        self._gradients = iter(zip(*of_leaves, strict=True))

    def _embed(self, batch: Batch) -> tuple[list[Tensor], Any]:
        """Returns the tensors of `spec.embed` for the true rows of a batch, and how they are arranged."""
        rows = true_rows(batch, self._model)
        note_rows(self._model, rows["weight"])
        assert self._spec.embed is not None
        with autocast(batch, self._config):
            leaves, structure = tree_flatten(self._call(self._spec.embed, rows))
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.shape[:1] != rows["weight"].shape:
                raise ValueError(
                    f"spec.embed: expected tensors with one entry for each of the {len(rows['weight'])} rows, found "
                    f"{in_words(leaf)}"
                )
        return [leaf[: int((batch["weight"] > 0).sum())] for leaf in leaves], structure

    def __call__(self, *, batch: Batch) -> tuple[None, Tensor]:
        """Returns None, and the sum of losses, as `weighted_loss_sum` does."""
        leaves, _ = self._embed(batch)
        pairs = [(leaf.float(), g) for leaf, g in zip(leaves, next(self._gradients), strict=True) if g is not None]
        # Its gradient is that of the mean loss, which the strategy divides by the rows.
        surrogate = self._rows * torch.stack([(leaf * g).sum() for leaf, g in pairs]).sum()
        total = surrogate + (self._loss * len(leaves[0]) - surrogate).detach()
        return None, add_auxiliary_losses(self._model, total, lambda: (batch["weight"] > 0).sum())


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
    return select_rows(batch, index)


def select_rows(batch: Batch, index: Tensor) -> Batch:
    """Returns some rows of a batch. # index: (n,)"""
    rows = len(batch["weight"])
    for name, tensor in batch.items():
        if not tensor.ndim or len(tensor) != rows:
            raise ValueError(
                f"spec.batch_loss: expected one entry per row in the column {name!r}, shape ({rows}, ...), found shape "
                f"{tuple(tensor.shape)}"
            )
    return {name: tensor[index] for name, tensor in batch.items()}


def unused_message(names: Sequence[str]) -> str:
    """Returns the error about parameters that have no gradient in a step. # names: at least one"""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (
        f"spec.build: the loss of a step does not depend on the parameters {', '.join(names[:8])}{more}; use them in "
        "the forward pass, freeze them (requires_grad_(False)), or, without a pipeline, set "
        "parallel.find_unused_parameters to true"
    )


class EvaluationMode:
    """Calls functions without gradients, or with them for a model that computes derivatives in its forward or loss.

    Such as forces, the derivatives of an energy by positions. It is known after the first call.
    """

    def __init__(self) -> None:
        self._needs_gradients = False

    def __call__(self, function: Callable[[], T]) -> T:
        """Returns what a function returns. It is called again, with gradients, if it needs them."""
        if not self._needs_gradients:
            try:
                with torch.inference_mode():
                    return function()
            except RuntimeError as error:
                if not _NEEDS_GRADIENTS.search(str(error)):
                    raise
                self._needs_gradients = True
        with torch.enable_grad():
            return function()


def without_gradient(output: Any) -> Any:
    """Returns an output with its tensors detached."""
    if isinstance(output, Tensor):
        return output.detach()
    if type(output) in (list, tuple):
        return type(output)(without_gradient(part) for part in output)
    if type(output) is dict:
        return {name: without_gradient(part) for name, part in output.items()}
    return output
