"""`ModelSpec`, the user's functions, and `Run`, which the driver sends to the ranks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from spark_dl.config.checks import suggestion

if TYPE_CHECKING:
    from spark_dl.config import Config
    from spark_dl.data.dataset.records import ShardSet
    from spark_dl.data.load.mixture import Mixture

Batch = Mapping[str, Tensor]
"""Columns by name, each [rows, *shape of a cell] with the dtype of `data.cast`, else the stored one, and `weight`,
[rows] float32: 1, or the value of `data.weight`, for a true row, 0 for padding."""
Output = Tensor | Mapping[str, Tensor] | Sequence[Tensor]
"""What a model returns for a batch: one tensor, or several by name or position, each [rows, ...]."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model and its loss.

    build: called without arguments on every rank, after seeding; returns the model on the CPU. Modules in evaluation
        mode, such as a frozen BatchNorm, stay in evaluation mode. If the model itself is in evaluation mode, as many
        pretrained models are, all of it is set to training mode.
    loss: called with (output, label), or with (output, batch) if `data.label` is null; returns one value per row,
        [rows] or [rows, ...] (averaged over the other axes). A name or a class of a loss in `torch.nn` is built with
        `reduction="none"`.
    forward: called with (model, batch); returns the output. The default calls the model with the columns of
        `data.features`, in this order.
    transform: called with each batch on the CPU, in a thread of the loader or in `predict`; returns the batch for
        `forward` and the loss. It must keep the number and the order of rows.
    augment: called after `transform` with (batch, generator), in training only. The `torch.Generator` is seeded by
        epoch, step and rank, so that a resumed run draws the same numbers.
    predict: called with the output; returns the columns that `predict` adds, each [rows, ...]. The default is one
        column, `prediction`, with the output; for a model with several outputs, one column for each of them, with its
        name, or `prediction_0`, `prediction_1` ...
    metrics: metrics of your own by name, beside those of `train.metrics`: functions, called with (output, batch), which
        return one value per row, [rows], and are averaged over all rows by weight; and classes or instances of
        `torchmetrics.Metric`, updated with (output, label), or (output, batch) if `data.label` is null.
    """

    build: Callable[[], nn.Module]
    loss: str | Callable[..., Tensor] = "CrossEntropyLoss"
    forward: Callable[[nn.Module, Batch], Output] | None = None
    predict: Callable[[Any], Mapping[str, Tensor]] | None = None
    transform: Callable[[Batch], Batch] | None = None
    augment: Callable[[Batch, torch.Generator], Batch] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("build", "forward", "predict", "transform", "augment"):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "build"):
                raise ValueError(f"spec.{name}: expected a function, found {value!r}")
        for name, metric in self.metrics.items():
            if not callable(metric):
                raise ValueError(
                    f"spec.metrics[{name!r}]: expected a function or a class of torchmetrics.Metric, found {metric!r}"
                )
        if isinstance(self.build, nn.Module):
            raise ValueError("spec.build: expected a function that returns the model, found the model itself")
        object.__setattr__(self, "loss", build_loss(self.loss))

    def build_to_train(self) -> nn.Module:
        """Builds the model in training mode. Called on every rank. Raises ValueError for another type."""
        model = self.build()
        if not isinstance(model, nn.Module):
            raise ValueError(f"spec.build: expected a function that returns a torch.nn.Module, it returned {model!r}")
        return model if model.training else model.train()

    def prepare(self, batch: Batch, key: Sequence[int] = (), *, augment_seed: int | None = None) -> Batch:
        """Applies `transform` and, with a seed, `augment`. Called in threads of the loader.

        key: unique key of the batch. Raises ValueError for a result that is not a mapping of names to tensors.
        """
        out = batch if self.transform is None else self._checked("transform", self.transform(batch), batch)
        if self.augment is not None and augment_seed is not None:
            generator = torch.Generator()
            seed = np.random.SeedSequence((augment_seed, *key)).generate_state(1, np.uint64)[0]
            generator.manual_seed(int(seed) >> 1)  # manual_seed takes 63 bits
            out = self._checked("augment", self.augment(out, generator), batch)
        return out

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

    def output(self, model: nn.Module, batch: Batch, features: tuple[str, ...]) -> Output:
        """Computes the model's output for a batch. Called on a rank, or in a task of `predict`."""
        return self.forward(model, batch) if self.forward else model(*(batch[name] for name in features))

    def predictions(self, output: Output) -> dict[str, Tensor]:
        """Returns the columns that `predict` adds for an output."""
        if self.predict is not None:
            return dict(self.predict(output))
        if isinstance(output, Tensor):
            return {"prediction": output}
        if isinstance(output, Mapping):
            return {name: value for name, value in output.items() if isinstance(value, Tensor)}
        return {f"prediction_{i}": value for i, value in enumerate(output)}


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
        raise ValueError(
            f"spec.loss: {type(loss).__name__} reduces the rows to one value (reduction={loss.reduction!r}); build it "
            'with reduction="none", so that rows can be weighted and summed exactly'
        )
    if not callable(loss):
        raise ValueError(f"spec.loss: expected a function or the name of a loss of torch.nn, found {loss!r}")
    return cast("Callable[..., Tensor]", loss)


def row_losses(spec: ModelSpec, output: Output, batch: Batch, label: str | None) -> Tensor:
    """The loss of each row of a batch. # (rows,)"""
    target: Any = batch if label is None else batch[label]
    losses = spec.loss(output, target)  # type: ignore[operator]
    rows = batch["weight"].shape[0]
    if not isinstance(losses, Tensor) or losses.ndim == 0 or losses.shape[0] != rows:
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(f"spec.loss: expected one value per row, shape ({rows},), found {found}; use reduction='none'")
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def weighted_loss_sum(spec: ModelSpec, model: nn.Module, batch: Batch, config: Config) -> tuple[Output, Tensor]:
    """Computes the model's output, and the sum of losses over the true rows, a float32 scalar.

    All strategies use this function, so all of them compute the same loss.
    """
    device_type = batch["weight"].device.type
    dtype = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.train.precision]
    with torch.autocast(device_type, dtype=dtype) if dtype else contextlib.nullcontext():
        output = spec.output(model, batch, config.data.features)
        losses = row_losses(spec, output, batch, config.data.label)
    return output, (losses.float() * batch["weight"]).sum()


def import_object(path: str, key: str) -> Any:
    """Imports an object by `package.module:name` or `folder/file.py:name`. Called on the driver.

    Objects of a file are pickled by value, so the file need not exist on executors.
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
    name = f"_spark_dl_file_{Path(where).stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(Path(where).resolve()):
        return loaded
    spec = importlib.util.spec_from_file_location(name, Path(where).resolve())
    if spec is None or spec.loader is None:
        raise ValueError(f"{key}: {where!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
