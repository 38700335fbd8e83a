"""Validation beside a training: ranks of a second Spark job evaluate each checkpoint, while the training goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from spark_dl import storage
from spark_dl.checks.settings import evaluation_config, launch_of
from spark_dl.config import Config
from spark_dl.driver import evaluating
from spark_dl.launch import preflight
from spark_dl.launch.session import find_session
from spark_dl.prepare import as_sources
from spark_dl.rundir import checkpoint
from spark_dl.spec import ModelSpec
from spark_dl.track import tested
from spark_dl.training import row_metrics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_dl.driver import Source

_log = logging.getLogger("spark_dl")


class Validator:
    """Evaluates each checkpoint of a training with ranks of its own, so that the training does not wait.

    It is a context and a function for `on_event` of `train`, on the driver. The checkpoints wait in line; at the end of
    the block, those that are left are evaluated, and the results become lines of the kind `validation` in
    `metrics.jsonl`, which the report shows, and go to the MLflow run. Each row counts exactly once. The rows of a
    DataFrame are written once. `checkpoint.every_steps` says how often, and `checkpoint.keep` how many checkpoints may
    wait: one that the training has deleted before its turn is left out, with a warning.

    The ranks of the training do not know the results: early stopping and `checkpoint.keep_best` need
    `train.validate_every_steps`, or validation rows given to `train`.

    Args:
        data: the validation rows, a DataFrame, a dataset or its URL.
        spec: the model, as for `train`.
        config: the settings, as for `train`.
        num_ranks: the ranks that evaluate, beside those that train. The cluster needs slots for both.
        spark: the session; by default that of the DataFrame, of this thread or of the process.

    Example:
        >>> config = spark_dl.Config(data=spark_dl.Data(features=("features",)))
        >>> def fit(df, validation, spec):
        ...     with spark_dl.Validator(validation, spec, config) as validator:
        ...         result = spark_dl.train(df, spec, config, run_dir="runs/3", on_event=validator)
        ...     return validator.best()["checkpoint"]
    """

    def __init__(
        self,
        data: Source,
        spec: ModelSpec,
        config: Config | None = None,
        *,
        num_ranks: int = 1,
        spark: SparkSession | None = None,
    ):
        self.results: list[dict[str, Any]] = []
        """The checkpoints that were evaluated: `step`, `epoch`, `checkpoint`, `rows`, `metrics` (the loss and those of
        `train.metrics`), `seconds`, and `time`, when it was done."""
        self.failed: list[tuple[str, Exception]] = []
        """The URLs of checkpoints that could not be evaluated, with the errors."""
        self._data, self._spec, self._config = as_sources(data, "Validator"), spec, config or Config()
        self._num_ranks, self._spark = num_ranks, find_session(self._data, spark)
        self._last: str | None = None
        self._events: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._evaluate_all, name="spark_dl validator", daemon=True)

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Puts a checkpoint in line. Called by `train`, with each event."""
        if event["kind"] == "checkpoint":
            self._events.put(event)

    def best(self, metric: str = "loss", mode: Literal["min", "max"] | None = None) -> dict[str, Any]:
        """Returns the best of `results` by the loss or a metric. NaN is never the best value.

        Raises LookupError if there is none, and ValueError for an unknown metric, and for one that does not say which
        value is better if `mode`, `min` or `max`, is not given.
        """
        if not self.results:
            raise LookupError("Validator.best: no checkpoint has been evaluated")
        if metric not in (known := self.results[0]["metrics"]):
            raise ValueError(f"Validator.best: expected one of {[*known]}, found {metric!r}")
        told = dataclasses.replace(self._config.train, early_stop_metric=metric, early_stop_mode=mode)
        mode = row_metrics.with_mode(self._spec, dataclasses.replace(self._config, train=told)).train.early_stop_mode

        def cost(result: Mapping[str, Any]) -> float:
            value = float(result["metrics"][metric])
            return math.inf if math.isnan(value) else -value if mode == "max" else value

        return min(self.results, key=cost)

    def __enter__(self) -> Validator:
        """Checks that there are slots for both, and starts to wait for checkpoints."""
        launch = launch_of(self._spark, self._config)
        both = dataclasses.replace(launch, num_ranks=launch.num_ranks + self._num_ranks)
        preflight.check_slots(self._spark, both, preflight.build_profile(self._spark, launch))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the checkpoints in line; after an error, for the one that is being evaluated.

        Raises RuntimeError if the last one could not be evaluated.
        """
        if error is not None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._events.get_nowait()
        self._events.put(None)
        self._thread.join()
        for result in self.results:
            run_dir = storage.dirname(storage.dirname(result["checkpoint"]))
            tested.record_line(run_dir, self._config, {"kind": "validation", **result})
        if error is None and self.failed and self.failed[-1][0] == self._last:
            raise RuntimeError(f"the checkpoint {self._last} could not be evaluated") from self.failed[-1][1]

    def _evaluate_all(self) -> None:
        with contextlib.ExitStack() as until_done:
            evaluate: Callable[[checkpoint.Saved], dict[str, Any]] | None = None
            while (event := self._events.get()) is not None:
                start, url = time.perf_counter(), event["url"]
                self._last = url
                try:
                    saved = checkpoint.find(url, only_weights=True, key_file=self._config.checkpoint.signing_key_file)
                    if evaluate is None:
                        evaluate = until_done.enter_context(self._evaluating(saved))
                    metrics = evaluate(saved)
                except Exception as error:  # the training goes on
                    if storage.exists(url):
                        self.failed.append((url, error))
                        _log.warning("validator: step %d could not be evaluated: %s", event["step"], error)
                    else:
                        _log.warning(
                            "validator: the checkpoint of step %d was deleted before its turn; raise checkpoint.keep, "
                            "checkpoint.every_steps or num_ranks", event["step"],
                        )  # fmt: skip
                    continue
                rows, seconds = metrics.pop("rows"), time.perf_counter() - start
                told = {name: event[name] for name in ("step", "epoch", "steps") if name in event}
                self.results.append(
                    {**told, "checkpoint": url, "rows": rows, "metrics": metrics, "seconds": seconds,
                     "time": time.time()}
                )  # fmt: skip
                _log.info("validator: step %d: %s (%.1f s)", event["step"], metrics, seconds)

    def _evaluating(
        self, saved: checkpoint.Saved
    ) -> contextlib.AbstractContextManager[Callable[[checkpoint.Saved], dict[str, Any]]]:
        config = evaluation_config(self._config, self._data)
        launch = dataclasses.replace(config.launch, num_ranks=self._num_ranks, min_ranks=None)
        config = dataclasses.replace(config, launch=launch, parallel=Config().parallel)  # each rank has the whole model
        return evaluating(self._data, self._spec, config, saved, spark=self._spark, progress=False)
