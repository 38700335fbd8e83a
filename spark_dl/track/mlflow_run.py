"""A run of MLflow for a run of spark_dl: parameters, metrics, tags and artifacts, written on the driver.

All calls name the server and the run, so the state of `mlflow` in the user's process does not change.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from spark_dl import storage
from spark_dl._version import __version__
from spark_dl.data.load.mixture import Mixture
from spark_dl.data.load.resume_check import dataset_digest
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint_files import parse_name
from spark_dl.rundir.metrics import read_metrics
from spark_dl.rundir.run_folder import CONFIG, MLFLOW
from spark_dl.spec import Run
from spark_dl.storage.credentials import without_secrets
from spark_dl.storage.owner import temporary_prefix
from spark_dl.track.events import Background, Event, as_key, as_value, flatten, metrics_of, name_of

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput

_PROBE_S = 5.0
"""How long a server may take to answer before it counts as down."""

_log = logging.getLogger("spark_dl")

_LONGEST_KEY, _LONGEST_VALUE = 250, 500
_LONGEST_NAME, _DIGEST = 500, 36
_PARAMS_AT_ONCE, _METRICS_AT_ONCE = 100, 1000


def connect() -> tuple[MlflowClient, str]:
    """Returns a client, and the tracking URI. Called on the driver, before any data is read.

    Raises ValueError without the package, and RuntimeError if the server or the database cannot be used.
    """
    try:
        import mlflow
    except ModuleNotFoundError as error:
        raise ValueError(
            f"track.mlflow: needs the package mlflow on the driver ({error}); install spark_dl[mlflow], or set it to "
            "false"
        ) from error
    uri = mlflow.get_tracking_uri()
    if not answers(uri):
        raise RuntimeError(
            f"track.mlflow: the server {without_secrets(uri)} does not answer; start it, set MLFLOW_TRACKING_URI to "
            "another one, or set track.mlflow to false"
        )
    with explained(uri):
        client = mlflow.MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
    return client, uri


def answers(uri: str) -> bool:
    """Whether a tracking server answers within seconds. True for databases.

    MLflow itself repeats its calls for minutes.
    """
    if not uri.startswith(("http://", "https://")):
        return True
    import requests

    try:
        requests.get(f"{uri.rstrip('/')}/health", timeout=_PROBE_S)
    except (requests.exceptions.SSLError, requests.exceptions.ProxyError):
        return True  # MLflow has settings for these
    except requests.exceptions.RequestException:
        return False
    return True


@contextlib.contextmanager
def explained(uri: str) -> Iterator[None]:
    """Raises RuntimeError with the server for any error of MLflow, but not for errors of the settings."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # of HTTP, of a database or of MLflow
        why = without_secrets(uri, str(error))
        raise RuntimeError(f"track.mlflow: cannot use MLflow at {without_secrets(uri)}: {why}") from error


@dataclass
class MlflowRun:
    """An open run of MLflow."""

    client: MlflowClient
    uri: str
    run_id: str
    experiment_id: str
    is_own: bool
    """Whether spark_dl ends the run."""
    logged_steps: dict[str, int] = field(default_factory=dict)
    """The last step of each metric that has been logged, also by earlier attempts."""
    thread: Background = field(init=False)
    """Passes events on to `write`, and at its end to `end`."""

    def __post_init__(self) -> None:
        self.thread = Background(self.name, self.write, self.end)

    @property
    def name(self) -> str:
        """The server and the run, for messages."""
        at = without_secrets(self.uri).rstrip("/")
        if at.startswith(("http://", "https://")):
            return f"MLflow ({at}/#/experiments/{self.experiment_id}/runs/{self.run_id})"
        return f"MLflow ({at}, run {self.run_id})"

    def write(self, events: Sequence[Event]) -> None:
        """Logs metrics, and the URL of the last checkpoint. Raises OSError if the server does not answer."""
        from mlflow.entities import Metric, RunTag

        metrics = [
            Metric(as_key(name, _LONGEST_KEY), value, round(event["time"] * 1000), event["step"])
            for event in events
            for name, value in metrics_of(event).items()
            if event["step"] > self.logged_steps.get(as_key(name, _LONGEST_KEY), 0)
        ]
        urls = [event["url"] for event in events if event["kind"] == "checkpoint"]
        tags = [RunTag("spark_dl.checkpoint", urls[-1])] if urls else []
        if metrics or tags:
            self.check_answer()
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            some = metrics[start : start + _METRICS_AT_ONCE]
            self._log_batch(metrics=some)
            self.logged_steps |= {metric.key: metric.step for metric in some}
        if tags:
            self._log_batch(tags=tags)

    def _log_batch(self, **values: Any) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self.client.log_batch(self.run_id, synchronous=True, **values)
        except MlflowException as error:
            if error.get_http_status_code() != 400:
                raise
            _log.warning("%s does not accept these values, which are left out: %s", self.name, error)

    def end(self, status: str) -> None:
        """Ends the run, if it is not the user's. Raises OSError if the server does not answer."""
        if self.is_own:
            self.check_answer()
            self.client.set_terminated(self.run_id, status)

    def check_answer(self) -> None:
        """Raises OSError if the server does not answer, for which MLflow itself would wait for minutes."""
        if not answers(self.uri):
            raise OSError("the server does not answer")

    def upload(self, url: str, names: Sequence[str], folder: str) -> None:
        """Uploads files of a folder as artifacts. Raises OSError if the server does not answer."""
        self.check_answer()
        with tempfile.TemporaryDirectory(prefix=temporary_prefix()) as local:
            for name in names:
                source = storage.join(url, name)
                path = storage.absolute(source)
                if not storage.is_local(source):
                    path = os.path.join(local, name)
                    with storage.open_input(source) as remote, open(path, "wb") as file:
                        shutil.copyfileobj(remote, file)
                self.client.log_artifact(self.run_id, path, folder)


@contextlib.contextmanager
def tracking(run: Run, *, resume: bool) -> Iterator[MlflowRun]:
    """Yields the run of MLflow, whose thread logs events. Called on the driver.

    The run is the one that is active in this thread; else, with `resume`, that of the earlier attempts; else a new one,
    which ends with the block as FINISHED, FAILED or KILLED.
    Raises RuntimeError if the server cannot be used.
    """
    client, uri = connect()
    with explained(uri):
        logged = _open_run(client, uri, run, resume=resume)
    status = "FAILED"
    try:
        with explained(uri):
            _log_start(logged, run)
        _log.info("%s", logged.name)
        yield logged
        status = "FINISHED"
    except (KeyboardInterrupt, SystemExit):
        status = "KILLED"
        raise
    finally:
        logged.thread.close(status)


def _open_run(client: MlflowClient, uri: str, run: Run, *, resume: bool) -> MlflowRun:
    import mlflow

    active = mlflow.active_run()
    saved_id = _saved_run(run.run_dir, uri) if resume else None
    if active is not None:
        active_run = client.get_run(active.info.run_id)
        steps = _last_steps(active_run) if saved_id == active_run.info.run_id else {}
        return MlflowRun(
            client, uri, active_run.info.run_id, active_run.info.experiment_id, is_own=False, logged_steps=steps
        )
    if saved_id is not None:
        step = _went_back_to(run)
        if step is not None:
            return _branch_off(client, uri, saved_id, run, step)
        return _reopen(client, uri, saved_id, run.run_dir)
    return _create(client, uri, storage.name(run.run_dir))


def log_after(run_dir: str, event: Event) -> None:
    """Logs the metrics of an event to the MLflow run of a run that has ended. Called on the driver.

    Raises RuntimeError if the server cannot be used.
    """
    client, uri = connect()
    with explained(uri):
        if (run_id := _saved_run(run_dir, uri)) is not None:
            found = client.get_run(run_id)
            logged = MlflowRun(client, uri, run_id, found.info.experiment_id, is_own=False)
            try:
                logged.write([event])
            finally:
                logged.thread.close("FINISHED")


def _saved_run(run_dir: str, uri: str) -> str | None:
    """Returns the id of the MLflow run of earlier attempts; None if there is none on this server."""
    url = storage.within(run_dir, MLFLOW)
    if not storage.exists(url):
        return None
    try:
        saved = json.loads(storage.read_bytes(url))
        return str(saved["run_id"]) if saved["tracking_uri"] == without_secrets(uri) else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{url} is damaged ({error}); delete it to log to a new MLflow run") from error


def _went_back_to(run: Run) -> int | None:
    """Returns the step of a checkpoint that the user has gone back to; None for a run that goes on from the last."""
    last = checkpoint.latest(run.run_dir)
    named = None if run.checkpoint is None else parse_name(storage.name(run.checkpoint))
    if last is None or named is None or (last.generation, last.step) == named:
        return None
    return named[1]


def _branch_off(client: MlflowClient, uri: str, saved_id: str, run: Run, step: int) -> MlflowRun:
    """Creates an MLflow run with the metrics up to a step, as those after it stay in the run that was left.

    MLflow cannot take back a metric. The tags of both runs name the other.
    """
    from mlflow.exceptions import MlflowException

    new = _create(client, uri, storage.name(run.run_dir))
    client.set_tag(new.run_id, "spark_dl.branch_of", saved_id)
    with contextlib.suppress(MlflowException):  # the run that was left has been deleted
        client.set_tag(saved_id, "spark_dl.left_at_step", str(step))
        client.set_tag(saved_id, "spark_dl.continued_by", new.run_id)
    new.write([line for line in read_metrics(run.run_dir) if line["step"] <= step])
    _log.info("%s: the metrics after step %d stay in the MLflow run %s", new.name, step, saved_id)
    return new


def _reopen(client: MlflowClient, uri: str, run_id: str, run_dir: str) -> MlflowRun:
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
        is_there = run.info.lifecycle_stage == "active"
    except MlflowException as error:
        if error.get_http_status_code() != 404:
            raise
        is_there = False
    if not is_there:
        raise ValueError(
            f"track.mlflow: the MLflow run {run_id} of earlier attempts has been deleted; restore it, or delete "
            f"{storage.within(run_dir, MLFLOW)} to log to a new run"
        )
    client.update_run(run_id, status="RUNNING")
    return MlflowRun(client, uri, run_id, run.info.experiment_id, is_own=True, logged_steps=_last_steps(run))


def _last_steps(found: Any) -> dict[str, int]:
    """Returns the last step of each metric of a run."""
    return {metric.key: metric.step for metric in found.data.to_proto().metrics}


def _create(client: MlflowClient, uri: str, name: str) -> MlflowRun:
    from mlflow.tracking.context.registry import resolve_tags
    from mlflow.tracking.fluent import _get_experiment_id

    experiment_id = str(_get_experiment_id() or "0")
    created = client.create_run(experiment_id, run_name=name, tags=resolve_tags())
    return MlflowRun(client, uri, created.info.run_id, experiment_id, is_own=True)


def _log_start(logged: MlflowRun, run: Run) -> None:
    """Logs the settings as parameters and as an artifact, and the tags. The run folder gets the id of the run."""
    from mlflow.entities import Param

    client, run_id = logged.client, logged.run_id
    saved = {"tracking_uri": without_secrets(logged.uri), "experiment_id": logged.experiment_id, "run_id": run_id}
    storage.write_bytes(storage.within(run.run_dir, MLFLOW), json.dumps(saved).encode())
    before: Mapping[str, str] = client.get_run(run_id).data.params
    params = {as_key(name, _LONGEST_KEY): as_value(value, _LONGEST_VALUE) for name, value in _params(run).items()}
    if changed := sorted(name for name in params if before.get(name, params[name]) != params[name]):
        _log.warning(
            "%s: parameters of a run cannot change, so it keeps its values of %s; its artifact %s has the new ones",
            logged.name, ", ".join(changed), CONFIG,
        )  # fmt: skip
    new = [Param(name, value) for name, value in params.items() if name not in before]
    client.set_tag(run_id, "spark_dl.run_dir", run.run_dir)
    for start in range(0, len(new), _PARAMS_AT_ONCE):
        client.log_batch(run_id, params=new[start : start + _PARAMS_AT_ONCE], synchronous=True)
    client.log_text(run_id, yaml.safe_dump(run.config.to_dict(), sort_keys=False), CONFIG)
    if inputs := list(_inputs(run)):
        client.log_inputs(run_id, datasets=inputs)


def _inputs(run: Run) -> Iterator[DatasetInput]:
    """Yields the datasets of a run: the URL, a digest of the rows and their files, the columns, and the rows."""
    from mlflow.data.schema import TensorDatasetSchema
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.types import Schema, TensorSpec

    for context, given in (("training", run.train), ("validation", run.validation)):
        datasets = dict(given.datasets) if isinstance(given, Mixture) else {"": given}
        for name, dataset in datasets.items():
            if dataset is None or not dataset.shards:  # the ranks write the rows to their disks
                continue
            specs = {
                column.name: TensorSpec(np.dtype(column.dtype), (-1, *(n or -1 for n in column.shape)), column.name)
                for column in dataset.select(run.config.data.columns)
            }
            of_features = [specs[feature] for feature in run.config.data.features]
            others = [spec for column, spec in specs.items() if column not in run.config.data.features]
            schema = TensorDatasetSchema(Schema(of_features), Schema(others) if others else None)
            url = without_secrets(dataset.url)
            about = Dataset(
                as_value(name or storage.name(dataset.url), _LONGEST_NAME),
                str(dataset_digest(dataset)["sha256"])[:_DIGEST],
                source_type=storage.scheme(dataset.url) or "local",
                source=json.dumps({"uri": url}),
                schema=json.dumps(schema.to_dict()),
                profile=json.dumps({"num_rows": dataset.rows, "num_shards": dataset.num_shards}),
            )
            yield DatasetInput(about, [InputTag("mlflow.data.context", context)])


def _params(run: Run) -> dict[str, str]:
    """The settings by their keys, the model, and what the run depends on besides."""
    from importlib import metadata

    datasets = run.train.datasets if isinstance(run.train, Mixture) else {"": run.train}
    rows = sum(shards.rows for shards in datasets.values())
    versions = {name: metadata.version(name) for name in ("torch", "pyspark")}
    return {
        **flatten(run.config.to_dict()),
        "model": name_of(run.spec.build),
        "loss": name_of(run.spec.loss or run.spec.batch_loss),
        **({"train_rows": str(rows)} if rows else {}),  # unknown with local storage
        **flatten({"version": {"spark_dl": __version__, **versions, "python": platform.python_version()}}),
    }
