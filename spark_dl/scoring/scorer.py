"""A trained model and all that a Spark task needs to compute its predictions."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from spark_dl.config import Config
from spark_dl.config.checks import listed, suggestion
from spark_dl.config.load import as_read
from spark_dl.data.columns.batch import build_batch, cast_columns, check_assembled, two_rows_of_zeros
from spark_dl.data.columns.ragged import Array, Ragged, from_lengths, lengths_of, padded_length, take, take_rows
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.write.shards import first_row_columns
from spark_dl.evaluate import load_model
from spark_dl.inputs import as_source, as_written, shards_of
from spark_dl.parallel.loss import EvaluationMode, autocast_to
from spark_dl.rundir import checkpoint
from spark_dl.scoring import saved_model
from spark_dl.spec import Batch, ModelSpec, check_rows

OnBadRows = Literal["raise", "null"]

MOST_ROWS_AT_ONCE = 1024
"""Rows of one call of the model, without `loader.rows_at_once`."""
_BYTES_AT_ONCE = 32 << 20
"""Bytes of the padded rows of one call. A value of a ragged column, such as a token, counts as vectors of a model."""
_RAGGED_BYTES, _RAGGED_BYTES_ON_CPU = 1 << 10, 16 << 10
"""Bytes that such a value counts as: at most 32,768 values at once on a GPU, and 2,048 on a CPU, whose caches hold
their vectors. A small BERT on one core: 745 rows/s with 2,048, 485 with 32,768."""
_KEPT_MODELS = 2

_loaded: OrderedDict[tuple[str, str], nn.Module] = OrderedDict()
"""The last models of this Python worker, by scorer and device. Spark uses a worker for many tasks, and, in a streaming
query, for many batches."""


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A trained model: its functions, the place of its weights, and the columns it was trained on."""

    spec: ModelSpec
    config: Config
    columns: tuple[Column, ...]
    """The features as they were trained on, in the order of `config.data.features`."""
    url: str
    """A checkpoint, or a saved model."""
    sha256: str
    """Checksum of the manifest of the checkpoint, or of the description of the saved model: a task must load the model
    that the driver has read. Also part of the key by which a Python worker keeps the model."""
    is_saved_model: bool = False
    varying: tuple[tuple[str, str], ...] = ()
    """New columns with one value for each value of a ragged feature: (name, feature). Their padding is cut off."""
    on_bad_rows: OnBadRows = "raise"
    """What a row that cannot be a feature of the model does: it ends the job, or its new columns are null, whose types
    `output_schema` then has."""
    output_schema: str = ""
    """The new columns as the caller declared them, as JSON of Spark's StructType; empty if a trial finds them."""

    def load(self) -> nn.Module:
        """Loads the model, on the CPU, in evaluation mode. Raises ValueError if the files are missing or damaged."""
        if not self.url:  # not trained here: the same weights in each task, also if they are random
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.config.train.seed)
                return self.spec.build_to_train().eval()
        if self.is_saved_model:
            return saved_model.load_model(self.url, sha256=self.sha256)
        return load_model(self.spec, self.url, sha256=self.sha256)

    def outputs(
        self, model: nn.Module, cells: Sequence[Array | Ragged], device: torch.device | str
    ) -> dict[str, Tensor | Ragged]:
        """Computes the new columns of some rows. # cells: of each feature; returns each (rows, ...)

        Rows with ragged features are sorted by length, so that little of what the model computes is padding.
        """
        order = None
        if any(isinstance(c, Ragged) for c in cells):
            order = np.argsort(-lengths_of(cells, len(cells[0])), kind="stable")
            cells = [take_rows(c, order) for c in cells]
        columns = cast_columns(self.columns, self.config.data.cast)
        parts: list[dict[str, Tensor]] = []
        lengths: dict[str, list[npt.NDArray[np.int64]]] = {name: [] for name, _ in self.varying}
        start, rows = 0, len(cells[0])
        while start < rows or not parts:
            stop = start + self._rows_at_once([c[start : start + MOST_ROWS_AT_ONCE] for c in cells], device)
            some = [c[start:stop] for c in cells]
            batch = self.spec.prepare(self._batch(columns, some, self.config.loader.pad_to))
            named = dict(self.predictions(model, batch, len(some[0]), device))
            for name, feature in self.varying:
                cut = some[self.config.data.features.index(feature)]
                assert isinstance(cut, Ragged)
                longest = padded_length(int(cut.lengths.max(initial=0)), self.config.loader.pad_to)
                named[name] = _without_padding(name, named[name], cut, longest, feature)
                lengths[name].append(cut.lengths)
            parts.append(named)
            start = stop
        whole: dict[str, Tensor | Ragged] = {name: _joined(name, [part[name] for part in parts]) for name in parts[0]}
        for name, of_parts in lengths.items():
            whole[name] = from_lengths(cast("Tensor", whole[name]).numpy(), np.concatenate(of_parts))
        if order is not None:
            back = np.argsort(order)
            whole = {n: take(c, back) if isinstance(c, Ragged) else c[torch.from_numpy(back)] for n, c in whole.items()}
        return whole

    def _batch(self, columns: Sequence[Column], cells: Sequence[Array | Ragged], pad_to: Sequence[int] = ()) -> Batch:
        """Builds the batch of some rows, each of which has the weight 1, as rows to train on have. # cells: as there"""
        return {"weight": torch.ones(len(cells[0])), **build_batch(columns, cells, self.config.loader.ragged, pad_to)}

    def _rows_at_once(self, cells: Sequence[Array | Ragged], device: torch.device | str) -> int:
        """Returns how many of some rows the model gets at once, at least one. # cells: of each feature"""
        loader, most = self.config.loader, max(1, len(cells[0]))
        if loader.rows_at_once is not None:
            return loader.rows_at_once
        if loader.max_tokens is not None:
            longest = padded_length(int(lengths_of(cells, most).max(initial=0)), loader.pad_to) if len(cells[0]) else 0
            return max(1, loader.max_tokens // max(1, longest))
        for column, of_column in zip(self.columns, cells, strict=True):
            if isinstance(of_column, Ragged):
                longest = max(1, padded_length(int(of_column.lengths.max(initial=0)), loader.pad_to))
                are_many = torch.device(device).type == "cpu" and column.dtype != "uint8"  # bytes are no tokens yet
                value_bytes = _RAGGED_BYTES_ON_CPU if are_many else _RAGGED_BYTES
                row_bytes = longest * math.prod(column.inner) * value_bytes
            else:
                row_bytes = column.value_bytes
            most = min(most, max(1, _BYTES_AT_ONCE // max(1, row_bytes)))
        return most

    def predictions(
        self, model: nn.Module, batch: Batch, rows: int, device: torch.device | str
    ) -> Mapping[str, Tensor]:
        """Computes the new columns of a batch. # returns each (rows, ...), on the CPU"""
        # A copy from page-locked memory does not wait for what the GPU computes.
        pin = torch.device(device).type == "cuda"
        on_device = {
            name: (tensor.pin_memory() if pin else tensor).to(device, non_blocking=pin)
            for name, tensor in batch.items()
        }
        precision = self.config.loader.predict_precision

        def compute() -> Mapping[str, Tensor]:
            with autocast_to(precision, torch.device(device)):
                output = self.spec.output(model, on_device, self.config.inputs)
            return self.spec.predictions(output)

        added = EvaluationMode()(compute)
        check_rows(added, rows)
        return {name: _storable(name, value.detach()).cpu() for name, value in added.items()}

    def outputs_of_zeros(self, model: nn.Module) -> dict[str, Tensor | Ragged]:
        """Computes the new columns of two rows of zeros, to know their types. Called on the driver. # each (2, ...)"""
        return self.outputs(model, [two_rows_of_zeros(c) for c in self.columns], "cpu")

    def with_varying(self) -> Scorer:
        """Returns the scorer, which knows which of its columns have a value for each value of a ragged feature.

        Called on the driver. Such a column has a second axis that grows with the longest row of the feature. There is
        none for a model that does not take zeros: its padded columns have one length in all batches, or are an error.
        Raises ValueError for a ragged feature that would be a part of one tensor.
        """
        check_assembled(self.columns, self.config.data)
        ragged = [c.name for c in self.columns if c.is_ragged] if self.config.loader.ragged == "pad" else []
        if not ragged or self.varying:
            return self
        model, varying = self.load(), []
        shapes = [self._shapes(model, {}), *(self._shapes(model, {name: 3}) for name in ragged)]
        for name, shape in shapes[0].items():
            for feature, changed in zip(ragged, shapes[1:], strict=True):
                other = changed.get(name, shape)
                if len(shape) > 1 and other[1:2] == (3,) and shape[1] == 1:
                    varying.append((name, feature))
                    break
                if len(shape) > 1 and other[1:2] != shape[1:2]:
                    raise ValueError(
                        f"spec.predict: the column {name!r} has {shape[1]} values for a row with 1 value of the "
                        f"feature {feature!r}, and {other[1]} for rows padded to 3; return one value for each value "
                        "of it, or as many for every row"
                    )
        return replace(self, varying=tuple(varying))

    def _shapes(self, model: nn.Module, longest: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the columns of two rows of zeros; no shapes if the model does not take them."""
        columns = cast_columns(self.columns, self.config.data.cast)
        cells = [two_rows_of_zeros(c, longest.get(c.name, 1)) for c in self.columns]
        try:
            batch = self.spec.prepare(self._batch(columns, cells))
            return {name: tuple(value.shape) for name, value in self.predictions(model, batch, 2, "cpu").items()}
        except Exception:
            return {}


def _without_padding(name: str, value: Tensor, cells: Ragged, longest: int, feature: str) -> Tensor:
    """Returns the values of all rows, one after the other. # value: (rows, longest, ...), returns: (values, ...)"""
    if value.ndim < 2 or value.shape[1] != longest:
        raise ValueError(
            f"spec.predict: expected one value in the column {name!r} for each value of {feature!r}, shape "
            f"({len(cells)}, {longest}, ...), found shape {tuple(value.shape)}"
        )
    return value[torch.arange(longest) < torch.from_numpy(cells.lengths)[:, None]]


def _joined(name: str, parts: Sequence[Tensor]) -> Tensor:
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = ", ".join(dict.fromkeys(str(tuple(part.shape[1:])) for part in parts))
        raise ValueError(
            f"spec.predict: the column {name!r} has entries of the shapes {shapes}, expected one shape in all batches"
        )
    return torch.cat(list(parts))


def find_scorer(
    model: Any, checkpoint_url: Any = None, config: Config | None = None, *, data: Any = None
) -> Scorer:  # fmt: skip
    """Returns the scorer of a `ModelSpec` with a checkpoint, of a model of `spark_dl.ml`, or of a saved model's URL.

    Called on the driver. data: rows with the features of a `ModelSpec` without a checkpoint. Raises ValueError for
    other models, and as `scorer_of` and `read_saved_model` do.
    """
    if isinstance(model, ModelSpec):
        return (
            scorer_of_build(model, config, data) if checkpoint_url is None else scorer_of(model, checkpoint_url, config)
        )
    if checkpoint_url is not None or config is not None:
        raise ValueError("checkpoint_url, config: expected only with a ModelSpec, as other models have their own")
    if isinstance(model, (str, os.PathLike)):
        return saved_scorer(saved_model.read_saved_model(model))
    scorer = getattr(model, "scorer", None)
    if not isinstance(scorer, Scorer):
        raise ValueError(
            "model: expected a ModelSpec, a model of spark_dl.ml, or the URL of a saved model, found "
            f"{type(model).__name__}"
        )
    return scorer


def saved_scorer(saved: saved_model.SavedModel) -> Scorer:
    """Returns the scorer of a saved model."""
    scorer = Scorer(
        spec=saved.spec, config=saved.config, columns=saved.columns, url=saved.url, sha256=saved.sha256,
        is_saved_model=True,
    )  # fmt: skip
    return scorer.with_varying()


def scorer_of_build(spec: ModelSpec, config: Config | None, data: Any) -> Scorer:
    """Returns the scorer of the model that `spec.build` returns, with its weights. Called on the driver.

    Raises ValueError without settings or rows, and for features that only a training can encode.

    Args:
        data: a DataFrame, of which the first row is read, or a dataset, for the types and shapes of the features.
    """
    if config is None or data is None:
        raise ValueError(
            "checkpoint_url: expected a checkpoint or a run_dir, found None; or, for the weights of spec.build, config "
            "(whose data.features are the columns) and data (rows with these columns)"
        )
    features = saved_model.features_only(config.data)
    for name, settings in features.encode.items():
        if settings.get("as") == "vocabulary" and settings.get("values") is None:
            raise ValueError(
                f"data.encode.{name}: no dataset of a training has its vocabulary; set values, or as: hash"
            )
    config, source = replace(config, data=features), as_source(data)
    if isinstance(source, (str, ShardSet)):
        with contextlib.ExitStack() as until_done:
            to_read = replace(config, data=as_written(features, source))
            columns = shards_of(source, "", to_read, until_done, (), reuse="no").select(features.features)
    else:
        columns = first_row_columns(source, features.features, features)
    return Scorer(spec=spec, config=config, columns=columns, url="", sha256="").with_varying()


def scorer_of(
    spec: ModelSpec, checkpoint_url: Any, config: Config | None = None, key_file: str | None = None
) -> Scorer:
    """Returns the scorer of a checkpoint, or of the last checkpoint of a run. Called on the driver.

    Args:
        key_file: of the signature; by default that of `config`. Without both, signatures are ignored.

    Raises:
        ValueError: If the checkpoint lacks a feature, and for models that read sequences.
    """
    key_file = config.checkpoint.signing_key_file if config and key_file is None else key_file
    saved = checkpoint.find(checkpoint_url, only_weights=True, key_file=key_file)
    config = config or as_read(saved.manifest["config"])
    if config.sequences is not None:
        raise ValueError(
            f"the model reads sequences (sequences.length={config.sequences.length}), which predict, predict_udf and "
            "save_model do not form from rows; call the model of TrainResult.load_model on your own sequences"
        )
    trained = {c.name: c for c in saved.columns}
    for name in config.data.features:
        if name not in trained:
            raise ValueError(
                f"data.features: the checkpoint {saved.url} has no column {name!r}, its columns are "
                f"[{listed(list(trained))}]{suggestion(name, list(trained))}"
            )
    features = tuple(trained[name] for name in config.data.features)
    scorer = Scorer(spec=spec, config=config, columns=features, url=saved.url, sha256=saved.sha256)
    return scorer.with_varying()


def loaded_model(scorer: Scorer, packed: bytes, device: torch.device) -> nn.Module:
    """Returns the model of a scorer on a device, which this Python worker keeps for later tasks.

    Args:
        packed: the scorer as it was sent to the tasks.
    """
    key = (hashlib.sha256(packed).hexdigest(), str(device))
    if key not in _loaded:
        while len(_loaded) >= _KEPT_MODELS:
            _loaded.popitem(last=False)
        _loaded[key] = scorer.load().to(device)
    _loaded.move_to_end(key)
    return _loaded[key]


def _storable(name: str, value: Tensor) -> Tensor:
    """Returns the value in a type that Spark has. Raises ValueError if there is none."""
    wider = {
        torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.uint8: torch.int16,
        torch.uint16: torch.int32, torch.uint32: torch.int64,
    }  # fmt: skip
    value = value.to(wider.get(value.dtype, value.dtype))
    known = (torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64)
    if value.dtype not in known or value.is_sparse:
        found = "a sparse tensor" if value.is_sparse else str(value.dtype).removeprefix("torch.")
        raise ValueError(f"spec.predict: the column {name!r} is {found}, which Spark does not have; convert it")
    return value
