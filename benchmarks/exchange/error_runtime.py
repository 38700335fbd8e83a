"""Loss against time and against steps under stragglers: the error-runtime trade-off of Dutta et al. 2018.

Each strategy trains the same small network on the UCI handwritten digits (from scikit-learn). Each gradient computation
is delayed by an exponentially distributed time.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from benchmarks.exchange.log import Log
from benchmarks.exchange.methods import METHODS, measured_in, settings_of
from benchmarks.model.staleness import Delay, iteration_s
from spark_dl import driver
from spark_dl.baselines.servers.rules import rules_of
from spark_dl.baselines.servers.settings import ParameterServer
from spark_dl.config import Config, Data, Faults, Launch, Loader, Parallel, Train
from spark_dl.data.write.arrays import write_arrays
from spark_dl.rundir import metrics
from spark_dl.spec import ModelSpec

_HELD_OUT = 5  # every fifth image is for validation
_OTHERWISE: Mapping[str, Mapping[str, Any]] = {
    "ddp threshold": {"threshold": 0.01},
    "parameter_server async": {"staleness_lr": True},
}
"""Settings of asynchronous servers. At the other methods' learning rate, with gradients two updates old, their accuracy
was 26 to 90 %."""


def strategies(num_ranks: int) -> dict[str, Parallel]:
    """Returns the compared strategies by their names in the report. Horovod only if it is installed."""
    here = [m for m in measured_in("stragglers", [*METHODS]) if m != "horovod" or importlib.util.find_spec(m)]
    return {m: dataclasses.replace(settings_of(m, num_ranks), **_OTHERWISE.get(m, {})) for m in here}


def build_network() -> nn.Module:
    """Images [rows, 64] -> scores [rows, 10]."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def measure(
    spark: Any,
    folder: str,
    *,
    num_hosts: int,
    straggler_s: float,
    methods: Sequence[str] | None = None,
    epochs: int = 8,
    log: Log | None = None,
) -> list[dict[str, Any]]:
    """Rows of `method, seconds, loss, accuracy, staleness, exact, curve` for the report. Called on the driver.

    Each of `num_hosts` hosts has one rank; with parameter servers, one of the ranks is a server. All hosts must have
    access to `folder`. `methods` are names of `strategies`, by default all. A method that fails is left out.
    """
    write_digits(folder)
    log = log or Log()
    rows = []
    known = strategies(num_hosts)
    for method in known if methods is None else methods:
        parallel = known[method]
        run_dir = f"{folder}/{method.replace(' ', '-')}"
        config = _config(parallel, num_hosts, straggler_s, epochs)
        spec = ModelSpec(build=build_network)
        with log.attempt(f"{method} under stragglers"):
            result = driver.train(
                f"{folder}/train", spec, config, validation=f"{folder}/test", run_dir=run_dir, progress=False
            )
            rows.append({
                "method": method, "seconds": result.seconds, "loss": result.train_loss,
                "accuracy": result.metrics["accuracy"], "staleness": result.staleness,
                "exact": METHODS[method].is_exact, "curve": curve_of(run_dir),
                "update_s": _update_s(curve_of(run_dir)), "theory_s": _theory_s(parallel, num_hosts, straggler_s),
            })  # fmt: skip
            log.show(f"{method}: accuracy {result.metrics['accuracy']:.3f} after {result.seconds:.1f} s")
    return rows


def _update_s(curve: Sequence[Mapping[str, float]]) -> float | None:
    """Returns mean seconds between two updates."""
    return (curve[-1]["seconds"] - curve[0]["seconds"]) / (len(curve) - 1) if len(curve) > 1 else None


def _theory_s(parallel: Parallel, num_hosts: int, straggler_s: float) -> float | None:
    """Returns expected seconds of an update from the delays alone (Dutta et al. 2018)."""
    if parallel.strategy == "local_sgd" or not straggler_s:
        return None
    delay = Delay(constant_s=0.0, exponential_s=straggler_s)
    if not isinstance(parallel, ParameterServer):
        return iteration_s("sync", num_hosts, delay).upper_s
    mode, trainers = parallel.server_mode, num_hosts - parallel.num_servers
    k = None if mode in ("sync", "async") else rules_of(parallel, trainers).k
    return iteration_s(mode, trainers, delay, k=k).upper_s


def _config(parallel: Parallel, num_hosts: int, straggler_s: float, epochs: int) -> Config:
    faults = Faults(straggler="exponential", straggler_s=straggler_s) if straggler_s else Faults()
    accuracy = {"class": "MulticlassAccuracy", "num_classes": 10, "average": "micro"}
    return Config(
        data=Data(features=("image",), label="digit"),
        loader=Loader(num_streams=4 * num_hosts),
        train=Train(
            global_batch_size=16 * num_hosts,
            epochs=epochs,
            lr=0.2,
            optimizer_args={"momentum": 0.8},
            scheduler="ExponentialLR",
            scheduler_args={"gamma": 0.8},
            log_every=1,
            metrics={"accuracy": accuracy},
        ),
        parallel=parallel,
        faults=faults,
        launch=Launch(num_ranks=num_hosts, device="cpu"),
    )


def write_digits(folder: str) -> None:
    """Writes the datasets `<folder>/train` and `<folder>/test`: columns `image`, [64] float32, and `digit`."""
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    is_test = np.arange(len(digits)) % _HELD_OUT == 0
    for name, rows in (("train", ~is_test), ("test", is_test)):
        columns = {"image": (images[rows] / 16).astype(np.float32), "digit": digits[rows].astype(np.int64)}
        write_arrays(columns, f"{folder}/{name}")


def curve_of(run_dir: str) -> list[dict[str, float]]:
    """Returns `seconds, step, loss` of each update of a run. Seconds count from the first update."""
    lines = [line for line in metrics.read_metrics(run_dir) if line["kind"] == "step"]
    return [{"seconds": s["time"] - lines[0]["time"], "step": s["step"], "loss": s["loss"]} for s in lines]
