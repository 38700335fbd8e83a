"""A trained model and all that a Spark task needs to compute its predictions."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spark_dl.config import Config
from spark_dl.config.checks import suggestion
from spark_dl.config.load import build_config
from spark_dl.data.columns.batch import build_batch
from spark_dl.data.columns.inputs import cast_columns, two_rows_of_zeros
from spark_dl.data.columns.ragged import Array, Ragged
from spark_dl.data.columns.schema import Column
from spark_dl.evaluate import load_model
from spark_dl.rundir import checkpoint
from spark_dl.scoring import saved_model
from spark_dl.spec import Batch, ModelSpec

ROWS_AT_ONCE = 1024
"""Rows of one call of the model."""
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
    """Checksum of the manifest of the checkpoint; empty for a saved model."""

    def load(self) -> nn.Module:
        """Loads the model, on the CPU, in evaluation mode. Raises ValueError if the files are missing or damaged."""
        if self.sha256:
            return load_model(self.spec, self.url, sha256=self.sha256)
        return saved_model.load_model(self.url)

    def outputs(
        self, model: nn.Module, cells: Sequence[Array | Ragged], device: torch.device | str
    ) -> dict[str, Tensor]:
        """Computes the new columns of some rows. # cells: of each feature; returns each (rows, ...)"""
        columns = cast_columns(self.columns, self.config.data.cast)
        rows = len(cells[0])
        parts = []
        for start in range(0, rows, ROWS_AT_ONCE):
            some = [c[start : start + ROWS_AT_ONCE] for c in cells]
            batch = self.spec.prepare(build_batch(columns, some, self.config.loader.ragged))
            parts.append(self.predictions(model, batch, len(some[0]), device))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def predictions(
        self, model: nn.Module, batch: Batch, rows: int, device: torch.device | str
    ) -> Mapping[str, Tensor]:
        """Computes the new columns of a batch. # returns each (rows, ...), on the CPU"""
        with torch.inference_mode():
            on_device = {name: tensor.to(device) for name, tensor in batch.items()}
            added = self.spec.predictions(self.spec.output(model, on_device, self.config.data.features))
        for name, value in added.items():
            if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] != rows:
                raise ValueError(f"spec.predict: column {name!r} must be a tensor with one entry per row")
        return {name: _storable(value).cpu() for name, value in added.items()}

    def trial(self) -> dict[str, Tensor]:
        """Computes the new columns of two rows of zeros, to know their types. Called on the driver. # each (2, ...)"""
        return self.outputs(self.load(), [two_rows_of_zeros(c) for c in self.columns], "cpu")


def find_scorer(model: Any, checkpoint_url: Any = None, config: Config | None = None) -> Scorer:
    """Returns the scorer of a `ModelSpec` with a checkpoint, of a model of `spark_dl.ml`, or of a saved model's URL.

    Called on the driver. Raises ValueError for other models, and as `scorer_of` and `read_saved_model` do.
    """
    if isinstance(model, ModelSpec):
        if checkpoint_url is None:
            raise ValueError("checkpoint_url: expected a checkpoint, or a run_dir, with a ModelSpec; found None")
        return scorer_of(model, checkpoint_url, config)
    if checkpoint_url is not None or config is not None:
        raise ValueError("checkpoint_url, config: expected only with a ModelSpec, as other models have their own")
    if isinstance(model, (str, os.PathLike)):
        return saved_scorer(saved_model.read_saved_model(model))
    found = getattr(model, "scorer", None)
    if not isinstance(found, Scorer):
        raise ValueError(
            "model: expected a ModelSpec, a model of spark_dl.ml, or the URL of a saved model, found "
            f"{type(model).__name__}"
        )
    return found


def saved_scorer(saved: saved_model.SavedModel) -> Scorer:
    """Returns the scorer of a saved model."""
    return Scorer(spec=saved.spec, config=saved.config, columns=saved.columns, url=saved.url, sha256="")


def scorer_of(
    spec: ModelSpec, checkpoint_url: Any, config: Config | None = None, key_file: str | None = None
) -> Scorer:
    """Returns the scorer of a checkpoint, or of the last checkpoint of a run. Called on the driver.

    key_file: of the signature; by default that of `config`. Without both, signatures are ignored.
    Raises ValueError if the checkpoint lacks a feature, and for models that read sequences.
    """
    key_file = config.checkpoint.signing_key_file if config and key_file is None else key_file
    saved = checkpoint.find(checkpoint_url, only_weights=True, key_file=key_file)
    config = config or build_config(saved.manifest["config"])
    if config.sequences is not None:
        raise ValueError(
            f"predict: the model reads sequences (sequences.length={config.sequences.length}), found rows of a "
            "DataFrame; call the model of TrainResult.load_model on your own sequences"
        )
    trained = {c.name: c for c in saved.columns}
    for name in config.data.features:
        if name not in trained:
            raise ValueError(
                f"data.features: the checkpoint {saved.url} has no column {name!r}, its columns are {list(trained)}"
                f"{suggestion(name, list(trained))}"
            )
    features = tuple(trained[name] for name in config.data.features)
    return Scorer(spec=spec, config=config, columns=features, url=saved.url, sha256=saved.sha256)


def loaded_model(scorer: Scorer, packed: bytes, device: torch.device) -> nn.Module:
    """Returns the model of a scorer on a device, which this Python worker keeps for later tasks.

    packed: the scorer as it was sent to the tasks.
    """
    key = (hashlib.sha256(packed).hexdigest(), str(device))
    if key not in _loaded:
        while len(_loaded) >= _KEPT_MODELS:
            _loaded.popitem(last=False)
        _loaded[key] = scorer.load().to(device)
    _loaded.move_to_end(key)
    return _loaded[key]


def _storable(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
