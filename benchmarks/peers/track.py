"""Measures what tracking costs: steps per second of training with MLflow and TensorBoard, and without.

`measure` starts an MLflow server on SQLite on the machine of the driver. With a local master, it shares the cores with
the ranks, so a server on another machine costs less.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.step import build_cnn
from spark_dl import driver
from spark_dl.config import Checkpoint, Config, Data, Launch, Track, Train
from spark_dl.data.write.arrays import write_arrays
from spark_dl.spec import ModelSpec
from spark_dl.track.mlflow_run import answers

PAIRS, EPOCHS = 7, 5
_ROWS, _BATCH = 12_800, 64
_START_S = 180.0


class MlflowServer:
    """`mlflow server` on SQLite, with its database, artifacts and log in a folder. A context manager."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> MlflowServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self) -> None:
        """Starts the server, and waits until it answers. Raises RuntimeError with its log if it does not."""
        command = [
            "env", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false", sys.executable, "-m", "mlflow", "server",
            "--host", "127.0.0.1", "--port", str(self._port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db",
            "--artifacts-destination", str(self._folder / "artifacts"),
        ]  # fmt: skip
        log = self._folder / "mlflow.log"
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=self._folder, start_new_session=True
            )
        end = time.monotonic() + _START_S
        while not answers(self.uri):
            if self._process.poll() is not None or time.monotonic() >= end:
                self.kill()
                raise RuntimeError(f"the MLflow server did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)

    def kill(self) -> None:
        """Kills the server with its processes. Does nothing if it does not run."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def measure(spark: Any, *, num_ranks: int = 2, repeats: int = PAIRS, epochs: int = EPOCHS) -> dict[str, Any]:
    """Measures median steps per second with tracking and without, in neighboring runs: pairs. Called on the driver.

    epochs: of each run, of 200 steps each.
    `ratio` is the median of the pairs, `ratio_quartiles` are the first and the third quartile. `seconds` are those of
    the whole calls of `train`, with the start and the end of the runs of MLflow.
    """
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {"image": rng.random((_ROWS, 64), dtype=np.float32), "digit": rng.integers(0, 10, _ROWS)}
    rates: dict[str, list[float]] = {"plain": [], "tracked": []}
    seconds: dict[str, list[float]] = {"plain": [], "tracked": []}
    with tempfile.TemporaryDirectory() as folder, MlflowServer(folder) as server:
        write_arrays(columns, f"{folder}/data")
        ways = {"plain": Track(), "tracked": Track(tensorboard=True, mlflow=True)}
        import mlflow

        mlflow.set_tracking_uri(server.uri)
        for i in range(repeats + 1):
            for name in sorted(ways, reverse=bool(i % 2)):  # in turn, so that neither always runs first
                config = Config(
                    data=Data(features=("image",), label="digit"),
                    train=Train(global_batch_size=_BATCH, epochs=epochs, lr=0.01, optimizer_args={"momentum": 0.9}),
                    launch=Launch(num_ranks=num_ranks, device="cpu"),
                    checkpoint=Checkpoint(every_epochs=epochs),
                    track=ways[name],
                )
                result = driver.train(
                    f"{folder}/data", ModelSpec(build=build_cnn), config, run_dir=f"{folder}/{name}-{i}",
                    progress=False, spark=spark,
                )  # fmt: skip
                if i:  # the first time warms up
                    rates[name].append(result.rows_per_s / _BATCH)
                    seconds[name].append(result.seconds)
    ratios = [tracked / plain for tracked, plain in zip(rates["tracked"], rates["plain"], strict=True)]
    low, ratio, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    print(f"with tracking to without: {ratio:.3f}, quartiles {low:.3f} and {high:.3f}", file=sys.stderr)
    return {
        **{f"{name}_steps_per_s": statistics.median(values) for name, values in rates.items()},
        **{f"{name}_seconds": statistics.median(values) for name, values in seconds.items()},
        "ratio": ratio, "ratio_quartiles": [low, high], "ratios": ratios, "repeats": repeats,
    }  # fmt: skip
