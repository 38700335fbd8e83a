"""Checks before training: every rank can read the datasets and write to the run folder, and columns fit the model.

A host that does not mount a folder would fail at its first read, or write checkpoints that other hosts cannot read.
Spark ML vectors and labels are float64, and most models are float32: PyTorch would raise an error on the ranks that
names no column, so the driver tries a step.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from spark_dl import storage
from spark_dl.config import Config
from spark_dl.data.columns.batch import build_batch, cast_columns, two_rows_of_zeros
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.mixture import Mixture
from spark_dl.generators import generator_states, generators_kept
from spark_dl.parallel.loss import weighted_loss_sum
from spark_dl.rundir.checkpoint_files import MANIFEST
from spark_dl.spec import ModelSpec, Run, check_rows
from spark_dl.training.initial import InitialWeights

if TYPE_CHECKING:
    from spark_dl.data.load.local import Gather

_IS_ABOUT_DTYPES = re.compile(
    r"dtype|scalar type|Double|Half|not implemented for '(Int|Short|Char|Byte|Bool)'|bool tensor"
)


def check_reach(run: Run, gather: Gather, *, rank: int, host: str, writes: bool) -> None:
    """Opens a shard of each dataset and the checkpoint, and with `writes` writes to the run folder. Collective.

    Raises the same RuntimeError on all ranks, with the path and the hosts that have no access.
    """
    problem = _cannot_read(run)
    probe = storage.join(run.run_dir, f"probe-{uuid.uuid4().hex}")
    if writes and not problem:
        problem = _cannot_write(probe)
    try:
        reports = gather("reach", {"host": host, "problem": problem, "probe": probe})
        _raise_first(reports)
        if not writes:
            return
        problem = "" if is_there(reports[0]["probe"]) else (
            f"the run_dir {run.run_dir} is another folder than on the host of rank 0 ({reports[0]['host']})"
        )  # fmt: skip
        _raise_first(gather("reach each other", {"host": host, "problem": problem}))
    finally:
        if writes:
            delete_probe(probe)


def _raise_first(found: list[dict[str, str]]) -> None:
    bad = [(rank, f["host"], f["problem"]) for rank, f in enumerate(found) if f["problem"]]
    if not bad:
        return
    rank, host, problem = bad[0]
    hosts = sorted({h for _, h, _ in bad[1:]})
    more = f" (and on {len(bad) - 1} more ranks, on {', '.join(hosts[:8])})" if hosts else ""
    raise RuntimeError(
        f"rank {rank} on host {host}: {problem}{more}; all executors need access to datasets and run_dir by the same "
        "path: use a folder on shared storage, and check its permissions"
    )


def _cannot_read(run: Run) -> str:
    """Returns what this rank cannot read, and why; empty if it can read everything."""
    files = [("dataset", url) for url in _first_shards(run.train)]
    files += [("validation dataset", url) for url in _first_shards(run.validation)]
    if run.checkpoint is not None:
        files.append(("checkpoint", storage.join(run.checkpoint, MANIFEST)))
    if run.spec is not None and isinstance(run.spec.build, InitialWeights):
        files.append(("checkpoint of train.init_from", run.spec.build.index_url))
    for name, url in files:
        try:
            storage.open_input(url).close()
        except (OSError, ValueError, RuntimeError) as error:  # ValueError if a package is missing on this host
            return f"the {name} {storage.dirname(url)} is not readable: {error}"
    return ""


def _first_shards(data: ShardSet | Mixture | None) -> list[str]:
    """Returns the first shard of each dataset, except datasets on the local disks of ranks."""
    datasets = data.datasets.values() if isinstance(data, Mixture) else [data] if data is not None else []
    return [storage.join(d.url, d.shards[0].name) for d in datasets if d.shards and d.placement is None]


def _cannot_write(probe: str) -> str:
    why = write_probe(probe)
    return why and f"the run_dir {storage.dirname(probe)} is not writable: {why}"


def write_probe(probe: str) -> str:
    """Returns why this host cannot write a file and read it again; empty if it can."""
    content = b"spark_dl writes here, and deletes this"
    try:
        storage.write_bytes(probe, content)
        return "" if storage.read_bytes(probe) == content else f"{probe} does not have the content that was written"
    except (OSError, ValueError, RuntimeError) as error:
        return str(error)


def is_there(url: str) -> bool:
    """Whether this host sees a file. An error of the storage counts as no."""
    try:
        return storage.exists(url)
    except (OSError, RuntimeError):
        return False


def delete_probe(probe: str) -> None:
    """Deletes a file of these checks, if possible."""
    try:
        storage.delete_file(probe)
    except (OSError, ValueError, RuntimeError):  # reported before
        return


def check_dtypes(spec: ModelSpec, columns: Sequence[Column], config: Config) -> None:
    """Raises ValueError if the model or the loss cannot take the dtype of a column, with the setting that casts it.

    Called on the driver. Builds the model and computes a step with two rows of zeros, but only if a feature is float64
    or float16, or a label is neither float32 nor int64. Other errors of the step are left to the ranks.

    Args:
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
    read = [c for c in cast_columns(columns, {**config.data.cast, **casts}) if c.name not in config.data.not_in_batch]
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
    read = [c for c in cast_columns(columns, config.data.cast) if c.name not in config.data.not_in_batch]
    if config.sequences is not None:
        read = [dataclasses.replace(c, shape=(config.sequences.length, *c.shape)) for c in read]
    batch = build_batch(read, [two_rows_of_zeros(c) for c in read], config.loader.ragged)
    batch["weight"] = torch.ones(2)
    with generators_kept(()):
        before = generator_states()
        try:
            spec.transform({name: tensor.clone() for name, tensor in batch.items()})
        except Exception:
            return
        draws = generator_states() != before
    if draws:
        raise ValueError(
            "spec.transform: it draws random numbers, which two runs with the same seed would not draw alike, nor a "
            "resumed one; use spec.augment(batch, generator), whose generator is seeded for each step"
        )
