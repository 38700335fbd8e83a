"""`ModelSpec`, the user's functions, and `Run`, which the driver sends to the ranks."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from spark_dl.config.checks import suggestion
from spark_dl.config.data import Assembled
from spark_dl.gather import gather_rows
from spark_dl.hooks import Hooks
from spark_dl.optimization import Optimization

if TYPE_CHECKING:
    from spark_dl.config import Config
    from spark_dl.data.columns.batch import StreamRows
    from spark_dl.data.columns.schema import Column
    from spark_dl.data.dataset.records import ShardSet
    from spark_dl.data.load.mixture import Mixture

Batch = Mapping[str, Tensor]
"""Columns by name, each [rows, *shape of a cell] with the dtype of `data.cast`, else the stored one, and `weight`,
[rows] float32: 1, or the value of `data.weight`, for a true row, 0 for padding."""


class NumberedBatch(dict[str, Tensor]):
    """A batch that knows the numbers of its rows in the global batch (`train.random_by`)."""

    def __init__(self, batch: Mapping[str, Tensor], step: tuple[int, int], streams: Sequence[StreamRows]):
        """step: epoch, and number of the step in it."""
        super().__init__(batch)
        self.step = step
        self._streams = streams

    def row_numbers(self) -> Tensor:
        """Returns a number of each row that no other row of the global batch has. # (rows,) int64"""
        starts = [each.dataset << 56 | each.stream << 32 | each.first for each in self._streams]
        parts = [start + torch.arange(each.rows) for start, each in zip(starts, self._streams, strict=True)]
        rows = len(self["weight"])
        if sum(map(len, parts)) != rows:
            raise ValueError(
                f"train.random_by: it is not known which of the {rows} rows of the batch are from which stream; set it "
                "to 'rank'"
            )
        return torch.cat(parts)


FUNCTIONS = (
    "build", "forward", "predict", "transform", "augment", "optimizer", "batch_loss", "embed", "global_loss", "count",
    "evaluation", "set_position", "hooks",
)  # fmt: skip
"""The fields of a `ModelSpec` that are functions, beside the loss and the metrics."""
Output = Tensor | Mapping[str, Tensor] | Sequence[Tensor]
"""What a model returns for a batch: one tensor, or several by name or position, each [rows, ...]."""


@dataclass(frozen=True)
class Position:
    """The position of a run, before a step or an evaluation."""

    epoch: int
    """Number of finished epochs."""
    step: int
    """Steps done in the current epoch."""
    global_step: int
    """Optimizer steps done, over all epochs."""
    is_validation: bool = False
    """Whether a validation follows, and not a step. A run that ends within an epoch (`train.max_steps`) has one more
    than a run that goes on."""


class Evaluation(Protocol):
    """The values of one evaluation, from the rows of all ranks."""

    def update(self, batch: Batch) -> None:
        """Adds a batch of true rows. Called on a rank, in evaluation mode. Not collective: ranks have different numbers
        of batches."""

    def compute(self) -> Mapping[str, Any]:
        """Returns numbers, or lists of numbers, by name, the same on all ranks. Collective."""


@dataclass(frozen=True)
class _GlobalLoss:
    """The `batch_loss` of `embed` and `global_loss`."""

    embed: Callable[[nn.Module, Batch], Any]
    global_loss: Callable[[Any], Tensor]

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.global_loss(tree_map(gather_rows, self.embed(model, batch)))


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model and its loss.

    Args:
        build: called without arguments on every rank, after seeding; returns the model on the CPU. Modules in
            evaluation mode, such as a frozen BatchNorm, stay in evaluation mode. If the model itself is in evaluation
            mode, as many pretrained models are, all of it is set to training mode.
        loss: called with (output, label), or with (output, batch) if `data.label` is null; returns one value per row,
            [rows] or [rows, ...] (averaged over the other axes), or `(losses, weights)`, two tensors of one shape,
            [rows, ...], whose mean is sum(losses * weights) / sum(weights) over the global batch. Or a loss of
            `torch.nn`: its name, its class, or an instance with the reduction `mean`, `none` or `batchmean`. The loss
            of a step is the mean over the rows of the global batch; with class weights or an `ignore_index`, it is
            torch's mean, which divides by the sum of the weights of the labels. If the label is ragged, it is the mean
            over its values, without padding. The default is `CrossEntropyLoss`.
        forward: called with (model, batch); returns the output. `model` is what `build` returns, and the function may
            call parts of it. The default calls the model with the columns of `data.features`, in this order, or with
            one tensor of them all (`data.assemble`).
        transform: called with each batch on the CPU, in a thread of the loader or in `predict`; returns the batch for
            `forward` and the loss. It must keep the number and the order of rows.
        augment: called after `transform` with (batch, generator), in training only, with the rows of each stream by
            themselves (`loader.num_streams`). The `torch.Generator` is seeded by epoch, step and stream, so that a
            resumed run draws the same numbers, and so does a run on another number of ranks. The results become one
            batch, so columns other than the rows have the same shape for all of them. With `loader.ragged: offsets`,
            it gets the batch of a rank, and draws other numbers on other ranks.
        predict: called with the output; returns the columns that `predict` adds, each [rows, ...]. The default is one
            column, `prediction`, with the output; for a model with several outputs, one column for each of them, with
            its name, or `prediction_0`, `prediction_1` ...
        metrics: metrics of your own by name, beside those of `train.metrics`: functions, called with (output, batch),
            which return one value per row, [rows], and are averaged over all rows by weight; and classes or instances
            of `torchmetrics.Metric`, updated with (output, label), or (output, batch) if `data.label` is null.
        optimizer: called with the model, on every rank; returns an optimizer, or an `Optimization`, which also has a
            scheduler, instead of `train.optimizer` and `train.scheduler`. If it has a parameter `total_steps`, it gets
            the number of steps of the run. `train.lr_scaling` multiplies its learning rates.
        batch_loss: called with (model, batch) instead of `forward` and `loss`; returns the mean loss of the rows of the
            batch, one value. The batch has only true rows, so the sum of these means times their rows is exact. For a
            mean over something else, such as tokens, return `(sum of losses, number of tokens)`, or give `count`. The
            `.loss` of a model of transformers, returned as it is, is known to be a mean over the labels that are not
            -100. Before the first step, the ranks check that the mean is one (`train.check_batch_loss`). If a rank has
            no true row in a micro-batch, the batch is padding, of weight 0, and the result counts nothing. If it has
            one, and the model has a BatchNorm that needs two, the batch has this row twice. A loss that compares the
            rows of a batch gets those of all ranks from `gather_rows`.
        embed: called with (model, batch), a batch of true rows as of `batch_loss`; returns the tensors that
            `global_loss` compares: one, or a tuple or a dict of them, each [rows, ...].
        global_loss: called with what `embed` returns for all rows of the global batch, in the order of ranks and
            micro-batches; returns its mean loss, one value. Instead of `loss` and `batch_loss`, for a loss that
            compares the rows of the global batch. With `train.accumulation_steps` above 1, each micro-batch is embedded
            twice, the second time with gradients, so that memory is needed for one of them (GradCache, Gao et al. 2021,
            arXiv:2101.06983).
        count: called with a batch of true rows; returns what the mean loss of these rows is over, if that is not the
            rows: the number of tokens, or the sum of the weights of classes. The loss of a step is then the mean over
            all of them in the global batch, on any number of ranks. Must depend on the batch alone. Unlike a count that
            the loss returns, it is known before the forward pass, which `local_sgd` and `pipedream` need.
        evaluation: called with the model at the start of an evaluation; returns an `Evaluation`, which gets the true
            rows of each batch and computes the values of the evaluation, such as `loss`, instead of `loss` and
            `batch_loss`.
        layers: names or patterns of modules which, called in order on each other's output, are the model, such as
            `["embed", "layers.*", "norm", "head"]`: where `parallel.pipeline` cuts it. The default is the children of
            an `nn.Sequential`.
        tensor_plan: how `parallel.tensor` cuts modules: words such as `colwise` and `rowwise` by names or patterns, as
            in Hugging Face's `base_model_tp_plan`. The default is the model's own plan, or that of its kind of layers.
        experts: names or patterns of the `spark_dl.nn.MoE` layers whose experts `parallel.experts` divides among ranks,
            such as `["layers.*.moe"]`. The default is all of them.
        set_position: called with the model and a `Position` before every step and before every validation.
        hooks: a class derived from `Hooks`, or a function that returns one of its objects; called without arguments on
            every rank. The run calls its methods around steps, validations and checkpoints, which have its state.

    Example:
        >>> spec = spark_dl.ModelSpec(build=lambda: torch.nn.Linear(2, 2), loss="CrossEntropyLoss")
    """

    build: Callable[[], nn.Module]
    loss: str | Callable[..., Tensor | tuple[Tensor, Tensor]] | None = None
    forward: Callable[[nn.Module, Batch], Output] | None = None
    predict: Callable[[Any], Mapping[str, Tensor]] | None = None
    transform: Callable[[Batch], Batch] | None = None
    augment: Callable[[Batch, torch.Generator], Batch] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., torch.optim.Optimizer | Optimization] | None = None
    batch_loss: Callable[[nn.Module, Batch], Tensor | tuple[Tensor, Tensor | float]] | None = None
    embed: Callable[[nn.Module, Batch], Any] | None = None
    global_loss: Callable[[Any], Tensor] | None = None
    count: Callable[[Batch], Tensor | float] | None = None
    evaluation: Callable[[nn.Module], Evaluation] | None = None
    set_position: Callable[[nn.Module, Position], None] | None = None
    hooks: Callable[[], Hooks] | None = None
    layers: Sequence[str] | None = None
    tensor_plan: Mapping[str, str] | None = None
    experts: Sequence[str] | None = None

    @classmethod
    def from_lightning(
        cls,
        module: Any,
        *,
        batch: Callable[[Batch], Any] | None = None,
        ignore_hooks: Sequence[str] = (),
        **functions: Any,
    ) -> ModelSpec:
        """Returns the spec of a LightningModule, which is trained without Lightning's Trainer. Called on the driver.

        The methods `training_step`, `validation_step`, `configure_optimizers`, `forward` and `predict_step` are used.

        `training_step` must return the mean loss over the rows of its batch, or over what `count` returns, or a tuple
        (sum of losses, what their mean is over), which `validation_step` may return, too. What it logs
        is not kept: spark_dl logs the loss. What `validation_step` returns is averaged over the rows, or over what
        `count` returns, as `loss`, and what it logs for the epoch are metrics, combined over all rows and ranks as
        Lightning does. Without `validation_step`, `loss` is that of `training_step`. In the steps, `self.trainer` has
        only the epoch, the step and the rank.

        Args:
            module: a function or a class that is called without arguments and builds the module, on every rank, after
                seeding, and once here, to check it; or a module, of which every rank trains a copy, with its weights.
            batch: called with the columns of the true rows and `weight`; returns the argument `batch` of the steps. The
                default is the tuple of the columns: features, label, `data.labels`; for `predict_step`, of the
                features.
            ignore_hooks: names of overridden methods that may be left out, because spark_dl does not call them.
            functions: `transform`, `augment`, `predict`, `metrics` and `count` of the spec.

        Raises:
            ValueError: For manual optimization, several optimizers or schedulers, and overridden methods that spark_dl
                does not call.
        """
        from spark_dl.lightning.module import spec_fields

        fields = spec_fields(module, batch=batch, ignore_hooks=ignore_hooks, count=functions.get("count"))
        return cls(**fields, **functions)

    def with_total_steps(self, total_steps: Callable[[], int]) -> ModelSpec:
        """Returns the spec whose `optimizer` gets the number of steps of the run, if it asks for it."""
        if self.optimizer is None or "total_steps" not in inspect.signature(self.optimizer).parameters:
            return self
        return dataclasses.replace(self, optimizer=functools.partial(self.optimizer, total_steps=total_steps()))

    def __post_init__(self) -> None:
        for name in FUNCTIONS:
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "build"):
                raise ValueError(f"spec.{name}: expected a function, found {value!r}")
        if isinstance(self.experts, str):
            raise ValueError(f"spec.experts: expected a list of names or patterns, found {self.experts!r}")
        for name, metric in self.metrics.items():
            if not callable(metric):
                raise ValueError(
                    f"spec.metrics[{name!r}]: expected a function or a class of torchmetrics.Metric, found {metric!r}"
                )
        if isinstance(self.build, nn.Module):
            raise ValueError("spec.build: expected a function that returns the model, found the model itself")
        self._take_global_loss()
        if self.batch_loss is None:
            object.__setattr__(self, "loss", build_loss("CrossEntropyLoss" if self.loss is None else self.loss))
        elif self.loss is not None:
            raise ValueError(
                "spec.loss: has no effect with spec.batch_loss, which computes the loss; remove one of them"
            )

    def _take_global_loss(self) -> None:
        """Makes a `batch_loss` of `embed` and `global_loss`."""
        if isinstance(self.batch_loss, _GlobalLoss):  # of the spec that `dataclasses.replace` has copied
            object.__setattr__(self, "batch_loss", None)
        for name, other in (("embed", "global_loss"), ("global_loss", "embed")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise ValueError(f"spec.{name}: expected spec.{other}, too, found none")
        if self.embed is None or self.global_loss is None:
            return
        for name in ("batch_loss", "count"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"spec.{name}: has no effect with spec.global_loss, the mean loss of all rows; remove it"
                )
        object.__setattr__(self, "batch_loss", _GlobalLoss(self.embed, self.global_loss))

    def build_to_train(self) -> nn.Module:
        """Builds the model in training mode. Called on every rank. Raises ValueError for another type."""
        model = self.build()
        if not isinstance(model, nn.Module):
            raise ValueError(f"spec.build: expected a function that returns a torch.nn.Module, it returned {model!r}")
        for name, parameter in model.named_parameters():
            if is_lazy(parameter):
                raise ValueError(
                    f"spec.build: the shape of {name!r} is not known yet, as its module is lazy; call the model once "
                    "in spec.build, with an example of its features, or give the sizes of its layers"
                )
            if parameter.is_meta:
                raise ValueError(
                    f"spec.build: expected weights with values, found {name!r} on the device 'meta'; call to_empty("
                    "device='cpu') and initialize the weights, or build the model without torch.device('meta')"
                )
        return model if model.training else model.train()

    def prepare(self, batch: Batch, key: Sequence[int] = (), *, augment_seed: int | None = None) -> Batch:
        """Applies `transform` and, with a seed, `augment`. Called in threads of the loader.

        Args:
            key: unique key of the batch.

        Raises:
            ValueError: For a result that is not a mapping of names to tensors.
        """
        out = batch if self.transform is None else self._checked("transform", self.transform(batch), batch)
        if self.augment is not None and augment_seed is not None:
            out = self._augmented(dict(out), key, augment_seed)
        return out

    def _augmented(self, batch: Batch, key: Sequence[int], seed: int) -> Batch:
        """Calls `augment` with the rows of each stream, so that what they draw does not depend on the ranks."""
        assert self.augment is not None
        streams: Sequence[StreamRows] = getattr(key, "streams", ())
        rows = sum(each.rows for each in streams)
        if not rows or not all(tensor.ndim and len(tensor) == rows for tensor in batch.values()):
            numbers = [number for number in key if isinstance(number, int)]
            return self._checked("augment", self.augment(batch, _generator(seed, *numbers)), batch)
        epoch, step, *_ = key
        cut = {name: tensor.split([each.rows for each in streams]) for name, tensor in batch.items()}
        parts = []
        for i, each in enumerate(streams):
            rows_of_stream = {name: tensors[i] for name, tensors in cut.items()}
            generator = _generator(seed, epoch, step, each.dataset, each.stream, each.first)
            parts.append(self._checked("augment", self.augment(rows_of_stream, generator), rows_of_stream))
        try:
            return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        except (KeyError, RuntimeError) as error:
            shapes = [{name: tuple(tensor.shape) for name, tensor in part.items()} for part in parts]
            raise ValueError(
                "spec.augment: it is called with the rows of each stream (loader.num_streams), whose results become "
                f"one batch, but their columns or shapes differ: found {shapes[0]} and "
                f"{next((shape for shape in shapes if shape != shapes[0]), shapes[-1])}; change only the rows, and "
                "resize whole batches in spec.forward"
            ) from error

    def prepare_in_loader(self, augment_seed: int | None = None) -> Callable[..., Batch] | None:
        """Returns `prepare` for a loader; None without `transform` and `augment`.

        A loader that has nothing to call passes several steps on at once, which wakes the training loop less often.
        """
        if self.transform is None and (self.augment is None or augment_seed is None):
            return None
        return functools.partial(self.prepare, augment_seed=augment_seed)

    def _checked(self, name: str, out: Any, batch: Batch) -> Batch:
        if not isinstance(out, Mapping) or not all(isinstance(t, Tensor) for t in out.values()):
            raise ValueError(f"spec.{name}: expected a mapping of names to tensors, found {type(out).__name__}")
        return {**out, "weight": batch["weight"]} if "weight" in batch else out

    def output(self, model: nn.Module, batch: Batch, inputs: tuple[str, ...] | Assembled) -> Output:
        """Computes the model's output for a batch. Called on a rank, or in a task of `predict`.

        Args:
            inputs: the features as the model gets them, `Config.inputs`.
        """
        return self.forward(model, batch) if self.forward else model(*_arguments(batch, inputs))

    def predictions(self, output: Output) -> dict[str, Tensor]:
        """Returns the columns that `predict` adds for an output."""
        if self.predict is not None:
            predicted = self.predict(output)
            if not isinstance(predicted, Mapping) or not all(isinstance(v, Tensor) for v in predicted.values()):
                raise ValueError(
                    "spec.predict: expected a dict of column names to tensors, each with one entry per row, found "
                    f"{_kinds(predicted)}"
                )
            if named := [name for name in predicted if not isinstance(name, str)]:
                raise ValueError(f"spec.predict: expected names of columns, found the key {named[0]!r:.100}")
            return dict(predicted)
        if isinstance(output, Tensor):
            return {"prediction": output}
        if isinstance(output, Mapping):
            return {name: value for name, value in output.items() if isinstance(value, Tensor)}
        if isinstance(output, (list, tuple)) and all(isinstance(value, Tensor) for value in output):
            return {f"prediction_{i}": value for i, value in enumerate(output)}
        raise ValueError(
            f"spec.predict: the model returns {_kinds(output)}, expected a tensor, or several by name or position; set "
            "spec.predict, which returns a dict of column names to tensors"
        )


def _generator(*key: int) -> torch.Generator:
    seed = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(seed) >> 1)  # manual_seed takes 63 bits


def _arguments(batch: Batch, inputs: tuple[str, ...] | Assembled) -> list[Tensor]:
    """Returns the features of a batch as the model gets them: each by itself, or all as one tensor # [rows, n]"""
    if not isinstance(inputs, Assembled):
        return [batch[name] for name in inputs]
    axis, columns = inputs.cell_axis, [batch[name] for name in inputs.names]
    return [torch.cat([t.flatten(axis) if t.ndim > axis else t.unsqueeze(axis) for t in columns], dim=axis)]


def check_rows(added: Mapping[str, Tensor], rows: int) -> None:
    """Raises ValueError for a column of `spec.predict` that does not have one entry per row."""
    for name, value in added.items():
        if value.ndim == 0 or value.shape[0] != rows:
            raise ValueError(
                f"spec.predict: expected one entry per row in the column {name!r}, shape ({rows}, ...), found "
                f"shape {tuple(value.shape)}"
            )


def _kinds(value: Any) -> str:
    """Names the type of a value, and of what it has."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r:.40}: {type(v).__name__}" for name, v in list(value.items())[:8]) + "}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {', '.join(type(v).__name__ for v in value[:8])}"
    return f"a {type(value).__name__}"


def check_spec(spec: Any) -> None:
    """Raises ValueError for anything but a `ModelSpec`. Called on the driver."""
    if not isinstance(spec, ModelSpec):
        raise ValueError(
            f"spec: expected a spark_dl.ModelSpec, found a {type(spec).__name__}; pass ModelSpec(build=function), with "
            "a function that returns the model"
        )
    if isinstance(spec.loss, nn.Module) and (name := next((n for n, _ in spec.loss.named_parameters()), None)):
        raise ValueError(
            f"spec.loss: {type(spec.loss).__name__} has the parameter {name!r}, which no optimizer would train and no "
            "checkpoint have; make the loss a part of the model in spec.build, and call it in spec.batch_loss"
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training or evaluation run, as the driver sends it to every rank."""

    spec: ModelSpec
    config: Config
    train: ShardSet | Mixture
    """The rows to train on or to evaluate. Empty if they are streamed to the ranks (`shards.storage` "local")."""
    run_dir: str
    validation: ShardSet | None = None
    generation: int = 0
    """Number of this attempt. Ranks of older attempts must not commit checkpoints."""
    checkpoint: str | None = None
    """Checkpoint to resume from, or to evaluate."""
    checkpoint_sha256: str | None = None
    """Checksum of its manifest, computed on the driver; None if it was not checked."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Checksums of the functions of `spec`, for checkpoints."""
    reference_columns: tuple[Column, ...] = ()
    """Columns of another dataset, whose vocabularies rows that are streamed to the ranks get."""


def build_loss(loss: Any) -> Callable[..., Tensor]:
    """Returns a loss with one value per row, given a function, or a name, class or instance of a loss in `torch.nn`."""
    if isinstance(loss, str):
        known = [
            n for n, c in vars(nn).items() if n.endswith("Loss") and "reduction" in inspect.signature(c).parameters
        ]
        if loss not in known:
            raise ValueError(f"spec.loss: no loss {loss!r} in torch.nn{suggestion(loss, known)}")
        loss = getattr(nn, loss)
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        arguments = {"reduction": "none"} if "reduction" in inspect.signature(loss).parameters else {}
        try:
            return cast("Callable[..., Tensor]", loss(**arguments))
        except TypeError as error:
            raise ValueError(f"spec.loss: cannot build {loss.__name__}: {error}; pass it built") from error
    if isinstance(loss, nn.Module) and getattr(loss, "reduction", "none") != "none":
        return _without_reduction(loss)
    if not callable(loss):
        raise ValueError(f"spec.loss: expected a function or the name of a loss of torch.nn, found {loss!r}")
    return cast("Callable[..., Tensor]", loss)


class SumOverRow(nn.Module):
    """Sums the values of each row of a loss: what the reduction `batchmean` does before its mean over the rows."""

    def __init__(self, loss: nn.Module):
        super().__init__()
        self.loss = loss

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        losses: Tensor = self.loss(output, label)
        return losses.flatten(1).sum(1) if losses.ndim > 1 else losses


def _without_reduction(loss: nn.Module) -> nn.Module:
    """Returns a loss whose mean over the rows, or over the weights of labels, is what the loss reduces to."""
    name, reduction = type(loss).__name__, loss.reduction
    is_torch = type(loss).__module__ == "torch.nn.modules.loss"
    if is_torch and reduction in ("mean", "batchmean") and not isinstance(loss, nn.CTCLoss):
        by_element: Any = copy.deepcopy(loss)
        by_element.reduction = "none"
        return SumOverRow(by_element) if reduction == "batchmean" else cast("nn.Module", by_element)
    if reduction == "sum":
        raise ValueError(
            f"spec.loss: found {name} with reduction='sum', whose gradient grows with the batch; spark_dl takes the "
            "mean over the rows. For the mean over all values of a row as well, pass reduction='mean'; to keep the sum "
            f"of a row's values, pass a function that returns {name}(reduction='none')(output, label)"
            ".flatten(1).sum(1)"
        )
    why = (
        "divides each row by its length, which spark_dl does not know" if is_torch else "reduces the rows to one value"
    )
    raise ValueError(
        f"spec.loss: {name} with reduction={reduction!r} {why}; pass a function that returns one value per row, "
        "or a loss with reduction='none', and note that its mean over the rows can be another one"
    )


def import_object(path: str, key: str) -> Any:
    """Imports an object by `package.module:name` or `folder/file.py:name`. Called on the driver.

    Objects of a file are pickled by value, so the file need not exist on executors.

    Example:
        >>> build_model = spark_dl.import_object("torch.nn:Linear", "model")
    """
    where, _, name = path.partition(":")
    if not where or not name:
        raise ValueError(f"{key}: expected 'package.module:name' or 'folder/file.py:name', found {path!r}")
    if where.endswith(".py"):
        module = _import_file(where, key)
    else:
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise ValueError(f"{key}: no module {error.name!r} (looked for {path!r})") from error
    if not hasattr(module, name):
        raise ValueError(f"{key}: {where} has no {name!r}")
    return getattr(module, name)


def _import_file(where: str, key: str) -> Any:
    if not Path(where).is_file():
        raise ValueError(f"{key}: no file {where!r} (the working directory is {Path.cwd()})")
    name, text = f"_spark_dl_file_{Path(where).stem}", Path(where).read_bytes()
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(Path(where).resolve()) and loaded._spark_dl_text == text:
        return loaded
    spec = importlib.util.spec_from_file_location(name, Path(where).resolve())
    assert spec is not None  # of a name that ends with .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module._spark_dl_text = text  # type: ignore[attr-defined]
    sys.modules[name] = module
    # Not by the loader: its compiled file has the time in whole seconds, and an edit can be in the same one.
    code = compile(text, str(Path(where).resolve()), "exec", dont_inherit=True)
    try:
        exec(code, module.__dict__)  # noqa: S102 - the user's own file
    except BaseException:  # a half of the module would be found by the next call
        del sys.modules[name]
        raise
    return module
