"""Tracks a run on the driver: its events go to TensorBoard and MLflow, as the section `track` selects."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spark_dl import storage
from spark_dl.config import Track
from spark_dl.rundir import checkpoint_files
from spark_dl.rundir.checkpoint_files import MANIFEST
from spark_dl.rundir.run_folder import PROFILE
from spark_dl.spec import Run
from spark_dl.track import mlflow_model, mlflow_run, tensorboard
from spark_dl.track.events import Background
from spark_dl.track.mlflow_model import Example
from spark_dl.track.mlflow_run import MlflowRun

_log = logging.getLogger("spark_dl")


def check(track: Track) -> None:
    """Checks packages and the MLflow server. Called on the driver, before any data is read.

    Raises ValueError for a missing package, RuntimeError for a server that cannot be used.
    """
    if track.tensorboard:
        tensorboard.check()
    if track.mlflow:
        mlflow_run.connect()


@dataclass(frozen=True)
class Tracker:
    """The open trackers of a run."""

    run: Run
    threads: tuple[Background, ...]
    """The threads of TensorBoard and MLflow."""
    mlflow: MlflowRun | None
    example: Example | None
    """Rows for the signature of the model that is logged at the end; None if only the ranks have rows."""

    def put(self, event: Mapping[str, Any]) -> None:
        """Passes an event on to all trackers. Does not block."""
        for thread in self.threads:
            thread.put(event)

    def finish(self, result: Mapping[str, Any], stage: Callable[[str], None]) -> None:
        """Logs the model and the checkpoint of a run that has ended. Errors are warnings, as the run has its result."""
        track = self.run.config.track
        if track.profile_steps is not None and not _has_profiles(self.run.run_dir):
            _log.warning(
                "track.profile_steps: no profile was written, as this attempt did not take the steps %d to %d",
                *track.profile_steps,
            )
        if self.mlflow is None or not self.mlflow.thread.drain():  # which logs the reason
            return
        stage("logging to MLflow")
        url = result["checkpoint"]
        names = storage.list_names(url) if track.mlflow_log_checkpoint else [MANIFEST]
        with self._as_warning("the checkpoint"):
            self.mlflow.upload(url, [name for name in names if checkpoint_files.is_own_file(name)], "checkpoint")
        if track.mlflow_log_model:
            with self._as_warning("the model"):
                uri = mlflow_model.log_model(self.mlflow, self.run, self.example, url, result["steps"])
                _log.info("the model is logged to MLflow as %s", uri)

    @contextlib.contextmanager
    def _as_warning(self, what: str) -> Iterator[None]:
        assert self.mlflow is not None
        try:
            yield
        except Exception as error:  # of the server, the network or torch.export
            _log.warning("%s: %s was not logged: %s", self.mlflow.name, what, error)


@contextlib.contextmanager
def tracking(run: Run, *, resume: bool) -> Iterator[Tracker]:
    """Yields the trackers of a run, which are closed with the block. Called on the driver, before ranks start.

    Args:
        resume: whether the call resumes a run, and so its MLflow run, even if there is no checkpoint yet.

    Raises:
        ValueError: For settings that do not fit the run.
        RuntimeError: For a server that cannot be used.
    """
    track, example = run.config.track, None
    parsed = None if run.checkpoint is None else checkpoint_files.parse_name(storage.name(run.checkpoint))
    first_step = parsed[1] if parsed else 0
    if track.mlflow_log_model:
        example = Example.of_run(run)
        mlflow_model.check(run, example)
    with contextlib.ExitStack() as stack:
        threads, logged = [], None
        if track.tensorboard:
            threads.append(stack.enter_context(tensorboard.tracking(run, first_step)))
        if track.mlflow:
            logged = stack.enter_context(mlflow_run.tracking(run, resume=resume))
            threads.append(logged.thread)
        yield Tracker(run, tuple(threads), logged, example)


def _has_profiles(run_dir: str) -> bool:
    return bool(storage.list_names(storage.within(run_dir, PROFILE)))
