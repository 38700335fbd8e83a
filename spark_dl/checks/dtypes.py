"""A trial step on the driver: finds columns whose dtype does not fit the model, before ranks are started.

Spark ML vectors and labels are float64, and most models are float32. Without this check, PyTorch raises an error on the
ranks that names no column.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from spark_dl.config import Config
from spark_dl.data.columns.batch import build_batch
from spark_dl.data.columns.inputs import cast_columns, two_rows_of_zeros
from spark_dl.data.columns.schema import Column
from spark_dl.generators import generators_kept
from spark_dl.parallel.loss import weighted_loss_sum
from spark_dl.spec import ModelSpec, check_rows

_IS_ABOUT_DTYPES = re.compile(
    r"dtype|scalar type|Double|Half|not implemented for '(Int|Short|Char|Byte|Bool)'|bool tensor"
)


def check_dtypes(spec: ModelSpec, columns: Sequence[Column], config: Config) -> None:
    """Raises ValueError if the model or the loss cannot take the dtype of a column, with the setting that casts it.

    Called on the driver. Builds the model and computes a step with two rows of zeros, but only if a feature is float64
    or float16, or a label is neither float32 nor int64. Other errors of the step are left to the ranks.
    columns: the columns that are read.
    """
    dtypes = {c.name: c.dtype for c in cast_columns(columns, config.data.cast)}
    features = [name for name in config.data.features if dtypes[name] in ("float64", "float16")]
    labels = [n for n in (config.data.label, *config.data.labels) if n and dtypes[n] not in ("float32", "int64")]
    if not features and not labels:
        return
    with torch.random.fork_rng(devices=[]):
        try:
            model = spec.build_to_train().eval()
        except Exception:
            return  # the ranks raise it, with their devices
        error = _failure(spec, model, columns, config, {})
        if error is None:
            return
        choices = itertools.product([{}, dict.fromkeys(features, "float32")], _label_casts(labels))
        for casts in ({**a, **b} for a, b in choices):
            if casts and _failure(spec, model, columns, config, casts) is None:
                found = ", ".join(f"{name!r} is {dtypes[name]}" for name in casts)
                setting = ", ".join(f"{name}: {dtype}" for name, dtype in casts.items())
                raise ValueError(
                    f"the model or the loss does not take the dtype of a column: column {found}; set data.cast: "
                    f"{{{setting}}}, or cast it in the DataFrame (PyTorch: {error})"
                ) from error


def _label_casts(labels: Sequence[str]) -> list[dict[str, str]]:
    return [{}, *(dict.fromkeys(labels, dtype) for dtype in ("float32", "int64") if labels)]


def _failure(
    spec: ModelSpec, model: nn.Module, columns: Sequence[Column], config: Config, casts: Mapping[str, str]
) -> Exception | None:
    """Returns the error about dtypes of a step with two rows of zeros; None if there is none."""
    read = [c for c in cast_columns(columns, {**config.data.cast, **casts}) if c.name != config.data.weight]
    if config.sequences is not None:
        read = [dataclasses.replace(c, shape=(config.sequences.length, *c.shape)) for c in read]
    batch = build_batch(read, [two_rows_of_zeros(c) for c in read], config.loader.ragged)
    batch["weight"] = torch.ones(2)
    try:
        _, total = weighted_loss_sum(spec, model, spec.prepare(batch), config)
        total.backward()
    except Exception as error:
        return error if _IS_ABOUT_DTYPES.search(str(error)) else None
    return None


def check_predict(spec: ModelSpec, columns: Sequence[Column], config: Config) -> None:
    """Raises ValueError if `spec.predict` returns what `predict` would refuse after the training.

    Called on the driver. Builds the model and computes two rows of zeros, but only if there is a `spec.predict`. Errors
    that the zeros can have caused are left to the ranks. columns: the columns that are read.
    """
    if spec.predict is None or config.sequences is not None:
        return
    features = [c for c in cast_columns(columns, config.data.cast) if c.name in config.data.features]
    with generators_kept(()), torch.inference_mode():
        try:
            batch = build_batch(features, [two_rows_of_zeros(c) for c in features], config.loader.ragged)
            output = spec.output(spec.build_to_train().eval(), spec.prepare(batch), config.inputs)
        except Exception:
            return
        try:
            check_rows(spec.predictions(output), 2)
        except Exception as error:
            if str(error).startswith("spec.predict: "):
                raise
            if isinstance(error, (AttributeError, LookupError, TypeError)):  # which no value of a row has caused
                raise ValueError(
                    f"spec.predict: it raises {type(error).__name__} for the output of the model ({error}), so that "
                    "predict would fail after the training"
                ) from error


def check_transform(spec: ModelSpec, columns: Sequence[Column], config: Config) -> None:
    """Raises ValueError if `spec.transform` draws random numbers. Called on the driver, with two rows of zeros.

    It runs in threads of the loader, beside the model, so that runs with the same seed would draw other numbers. An
    error of the function is left to the ranks. columns: the columns that are read.
    """
    if spec.transform is None:
        return
    read = [c for c in cast_columns(columns, config.data.cast) if c.name != config.data.weight]
    if config.sequences is not None:
        read = [dataclasses.replace(c, shape=(config.sequences.length, *c.shape)) for c in read]
    batch = build_batch(read, [two_rows_of_zeros(c) for c in read], config.loader.ragged)
    batch["weight"] = torch.ones(2)
    with generators_kept(()):
        before = _drawn()
        try:
            spec.transform({name: tensor.clone() for name, tensor in batch.items()})
        except Exception:
            return
        draws = _drawn() != before
    if draws:
        raise ValueError(
            "spec.transform: it draws random numbers, which two runs with the same seed would not draw alike, nor a "
            "resumed one; use spec.augment(batch, generator), whose generator is seeded for each step"
        )


def _drawn() -> tuple[Any, ...]:
    """Returns the states of Python's, NumPy's and PyTorch's generators, to compare them."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, np.asarray(keys).tobytes(), rest, torch.get_rng_state().numpy().tobytes()
