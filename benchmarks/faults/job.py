"""A driver of its own process, whose ranks get faults: it trains the model of `ledger` as often as it is told to.

`python -m benchmarks.faults.job MASTER`: each line of its input is a `Job` as JSON. A line of its output says how
that training ended, as JSON. The events of a training are written to `RUN_DIR.events`, one on each line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import spark_dl
from benchmarks.faults import ledger
from spark_dl import driver
from spark_dl.baselines.servers.settings import ParameterServer
from spark_dl.config import Checkpoint, Config, Launch, Parallel
from spark_dl.launch.failures.errors import RankError
from spark_dl.launch.session import build_session
from spark_dl.parallel.ddp import DDP
from spark_dl.parallel.mesh.settings import Mesh

STRATEGIES: Mapping[str, Parallel] = {
    "ddp": DDP(), "parameter_server": ParameterServer(server_mode="sync"), "mesh": Mesh(zero_stage=1),
}  # fmt: skip
READY = "ready"
"""The first line of the output, once there is a session."""
EPOCHS = 2
TIMEOUT_S = 8.0
"""`launch.collective_timeout_s`, after which a rank that hangs or is cut off is noticed."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training."""

    dataset: str
    run_dir: str
    rows: int
    """Number of rows of the dataset."""
    strategy: str = "ddp"
    num_ranks: int = 2
    sleep_s: float = 0.03
    """Seconds that a step takes at least."""
    every_steps: int = 4
    """Steps between two checkpoints."""
    max_restarts: int = 0
    resume: bool = False

    @property
    def events(self) -> str:
        """Path of the file with the events."""
        return f"{self.run_dir}.events"

    def config(self) -> Config:
        train, loader = ledger.settings(EPOCHS)
        return Config(
            data=ledger.DATA, train=train, loader=loader, parallel=STRATEGIES[self.strategy],
            checkpoint=Checkpoint(every_steps=self.every_steps, every_epochs=100),
            launch=Launch(
                num_ranks=self.num_ranks, device="cpu", max_restarts=self.max_restarts, restart_wait_s=0.1,
                collective_timeout_s=TIMEOUT_S, start_timeout_s=100,
            ),
        )  # fmt: skip


def train(job: Job, spark: Any = None) -> dict[str, Any]:
    """Trains, and returns how it ended. Called on the driver."""
    with open(job.events, "a") as file:

        def write(event: Mapping[str, Any]) -> None:
            known = {key: event[key] for key in ("kind", "rank", "host", "pid", "step", "restarts") if key in event}
            file.write(json.dumps(known) + "\n")
            file.flush()

        try:
            result = driver.train(
                job.dataset, ledger.build_spec(job.rows, job.sleep_s), job.config(), run_dir=job.run_dir,
                resume=job.resume, progress=False, on_event=write, spark=spark,
            )  # fmt: skip
        except RankError as error:
            return {"error": str(error), "earlier": error.earlier}
        except (RuntimeError, ValueError) as error:  # a run that fails is a finding, and the next one begins
            return {"error": f"{type(error).__name__}: {error}"}
        return {"steps": result.steps, "restarts": result.restarts}


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the events that are written so far. None of a line that is not yet written to its end."""
    try:
        with open(path) as file:
            return [json.loads(line) for line in file if line.endswith("\n")]
    except FileNotFoundError:
        return []


def main(master: str) -> None:
    """Serves the jobs of standard input."""
    session = build_session("spark_dl faults", master=master, conf={
        "spark.log.level": "OFF",  # Spark's own account of the faults would hide ours
        "spark.ui.enabled": "false",
        "spark.executor.memory": "512m",
        "spark.executorEnv.PYTHONPATH": os.path.dirname(os.path.dirname(str(spark_dl.__file__))),
    })  # fmt: skip
    print(READY, flush=True)
    for line in sys.stdin:
        print(json.dumps(train(Job(**json.loads(line)), session)), flush=True)
    session.stop()


def to_line(job: Job) -> str:
    """Returns a job as a line of the input."""
    return json.dumps(dataclasses.asdict(job)) + "\n"


if __name__ == "__main__":
    main(sys.argv[1])
