"""Logs a trained model to MLflow: MLflow's PyTorch flavor in its format `pt2`, a program of `torch.export`.

Nothing is pickled, and the model is loaded without spark_dl and without the code of the model.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spark_dl.config import Config
from spark_dl.data.columns.schema import Column
from spark_dl.data.load.build import build_loader
from spark_dl.evaluate import load_model
from spark_dl.rundir import checkpoint
from spark_dl.scoring.program import check_other_lengths, zeros_for
from spark_dl.spec import ModelSpec, Run
from spark_dl.storage.owner import temporary_prefix
from spark_dl.track.mlflow_run import MlflowRun

NAME = "model"
_EXAMPLE_ROWS = 2
"""Rows of the input example. With one row, `torch.export` would fix the number of rows."""


@dataclass(frozen=True)
class Example:
    """A few rows of the features, as the model gets them: a ragged one padded, with its mask after it."""

    inputs: dict[str, np.ndarray[Any, Any]]
    longer: dict[str, np.ndarray[Any, Any]] | None = None
    """The same with longer ragged features; None without any."""

    @classmethod
    def of_run(cls, run: Run) -> Example | None:
        """Reads the first rows of the training data; zeros for ragged features. Returns None if only the ranks have
        them."""
        if not run.train.columns:
            return None
        config = run.config
        features = run.train.select(config.data.features)
        if any(c.is_ragged for c in features):
            return cls.of_zeros(run, features)
        loader = build_loader(run.train, config, rank=0, world_size=config.data_size, shuffle=False)
        batches = loader.epoch(0)
        try:
            batch = next(batches).micro_batches[0]
        finally:
            batches.close()
        return cls({name: _two_rows(batch[name]) for name in config.data.features})

    @classmethod
    def of_zeros(cls, run: Run, columns: Sequence[Column]) -> Example:
        """Returns two rows of zeros, for rows that only the ranks have."""
        features, ragged = [c for c in columns if c.name in run.config.data.features], run.config.loader.ragged
        is_ragged = [c.name for c in features if c.is_ragged]
        if is_ragged and ragged != "pad":
            raise ValueError(
                f"track.mlflow_log_model: supports ragged features with loader.ragged: pad, found {ragged!r} for "
                f"{is_ragged[0]!r}; set it to false, and save the model with spark_dl.save_model"
            )
        short, longer = (
            {name: value.numpy() for name, value in zeros_for(run.config, features, longest).items()}
            for longest in (3, 5)
        )
        return cls(short, longer if is_ragged else None)


def _two_rows(values: Tensor) -> np.ndarray[Any, Any]:
    rows: np.ndarray[Any, Any] = values[:_EXAMPLE_ROWS].numpy()
    return rows if len(rows) == _EXAMPLE_ROWS else np.repeat(rows, _EXAMPLE_ROWS, axis=0)


def check(run: Run, example: Example | None) -> None:
    """Raises ValueError if the model cannot be exported. Called on the driver, before ranks start; builds the model."""
    import mlflow.pytorch

    if "serialization_format" not in inspect.signature(mlflow.pytorch.save_model).parameters:
        raise ValueError(
            f"track.mlflow_log_model: needs a version of mlflow that saves programs of torch.export, found "
            f"{mlflow.__version__}; install spark_dl[mlflow], or set it to false"
        )
    if example is None:
        return
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory(prefix=temporary_prefix()) as folder:
        _save(run.spec.build().eval(), run, example, f"{folder}/model")


def log_model(logged: MlflowRun, run: Run, example: Example | None, checkpoint_url: str, step: int) -> str:
    """Logs the model of a checkpoint, and returns its URI, `models:/<id>`. Called on the driver, after training."""
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model

    logged.check_answer()
    key_file = run.config.checkpoint.signing_key_file
    saved = checkpoint.find(checkpoint_url, only_weights=True, key_file=key_file)
    example = example or Example.of_zeros(run, saved.columns)
    model, client = load_model(run.spec, saved.url, sha256=saved.sha256), logged.client
    created = client.create_logged_model(logged.experiment_id, name=NAME, source_run_id=logged.run_id)
    status = "FAILED"
    try:
        about = Model(
            artifact_path=created.artifact_location, run_id=logged.run_id, model_uuid=created.model_id,
            model_id=created.model_id,
        )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix=temporary_prefix()) as folder:
            _save(model, run, example, f"{folder}/model", mlflow_model=about)
            client.log_model_artifacts(created.model_id, f"{folder}/model")
        client.log_outputs(logged.run_id, models=[LoggedModelOutput(created.model_id, step)])
        status = "READY"
    finally:
        client.finalize_logged_model(created.model_id, status)
    if name := run.config.track.mlflow_registered_model_name:
        _register(logged, name, created)
    return f"models:/{created.model_id}"


def _register(logged: MlflowRun, name: str, created: Any) -> None:
    from mlflow.exceptions import MlflowException

    try:
        logged.client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
            raise
    # NOTE: not `models:/<id>`, which MLflow resolves on the server of `mlflow.get_tracking_uri()`.
    source = created.artifact_location
    logged.client.create_model_version(name, source, run_id=logged.run_id, model_id=created.model_id)


def _save(model: nn.Module, run: Run, example: Example, path: str, **options: Any) -> None:
    """Writes a model with its signature in MLflow's format. Raises ValueError if it cannot be exported."""
    import mlflow.pytorch
    from mlflow.models import infer_signature

    program = _Program(model, run.spec, run.config, list(example.inputs))
    arrays = list(example.inputs.values())
    try:
        signature = infer_signature(arrays[0] if len(arrays) == 1 else example.inputs, _to_numpy(_run(program, arrays)))
        if example.longer is not None:
            longer = list(example.longer.values())
            signature = _with_open_lengths(signature, longer, _run(program, longer))
        mlflow.pytorch.save_model(
            program, path, signature=signature, input_example=arrays[0] if len(arrays) == 1 else arrays,
            serialization_format="pt2", pip_requirements=_requirements(), **options,
        )  # fmt: skip
        if example.longer is not None:
            check_other_lengths(mlflow.pytorch.load_model(path), program, [torch.from_numpy(a) for a in longer])
    except Exception as error:  # torch.export and MLflow raise many types
        cause = str(error).partition("\n")[0]
        raise ValueError(
            f"track.mlflow_log_model: the model cannot be exported with torch.export ({type(error).__name__}: {cause});"
            " set it to false, and save the model with spark_dl.save_model"
        ) from error


def _run(program: Any, inputs: Sequence[np.ndarray[Any, Any]]) -> Any:
    with torch.no_grad():
        return program(*map(torch.from_numpy, inputs))


def _with_open_lengths(signature: Any, inputs: Sequence[np.ndarray[Any, Any]], output: Any) -> Any:
    """Returns a signature with -1 for the axes that have another size in longer rows, and in their output."""
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    named = _to_numpy(output)
    of_longer_rows = (inputs, list(named.values()) if isinstance(named, dict) else [named])
    schemas = [
        Schema([
            TensorSpec(
                spec.type, tuple(n if n == m else -1 for n, m in zip(spec.shape, longer.shape, strict=True)), spec.name
            )
            for spec, longer in zip(schema.inputs, arrays, strict=True)
        ])
        for schema, arrays in zip((signature.inputs, signature.outputs), of_longer_rows, strict=True)
    ]  # fmt: skip
    return ModelSignature(*schemas)


def _to_numpy(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.numpy()
    named = output if isinstance(output, dict) else {f"output_{i}": value for i, value in enumerate(output)}
    return {name: value.numpy() for name, value in named.items()}


def _requirements() -> list[str]:
    """What the model needs to be loaded. Without it, MLflow would start a process to find out."""
    return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in ("torch", "numpy")]


class _Program(nn.Module):
    """From features to the output of the model, with `transform` and `forward` of the spec.

    `forward` has as many parameters as there are inputs, because MLflow gives torch.export a shape for each of them.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec, config: Config, names: Sequence[str]):
        super().__init__()
        self.model = model
        self.forward: Callable[..., Any] = _with_parameters(_Compute(model, spec, config, names), len(names))
        self.eval()


@dataclass(frozen=True)
class _Compute:
    model: nn.Module
    spec: ModelSpec
    config: Config
    names: Sequence[str]
    """Names of the inputs."""

    def __call__(self, *inputs: Tensor) -> Any:
        data = self.config.data
        if data.nonfinite == "fill":  # as the rows to train on, and as predict does
            pairs = zip(self.names, inputs, strict=True)
            inputs = tuple(
                torch.where(torch.isfinite(x), x, float(data.fill.get(name, 0))) if x.is_floating_point() else x
                for name, x in pairs
            )
        weight = torch.ones(inputs[0].shape[0], device=inputs[0].device)
        batch = self.spec.prepare({"weight": weight, **dict(zip(self.names, inputs, strict=True))})
        return self.spec.output(self.model, batch, self.config.inputs)


def _with_parameters(compute: Callable[..., Any], count: int) -> Callable[..., Any]:
    def forward(*inputs: Tensor) -> Any:
        return compute(*inputs)

    kind = inspect.Parameter.POSITIONAL_ONLY
    names = [f"input_{i}" for i in range(count)]
    forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return forward
