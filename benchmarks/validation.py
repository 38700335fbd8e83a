"""Measures for how long a training stands still for its validations: in its loop, and beside it by a `Validator`.

A small CNN trains on one rank and is validated every 20 steps, with a checkpoint each time in all ways. With a local
master, the ranks that validate share the cores with those that train, which slows both down; on a cluster they have
cores of their own.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.peers.step import build_cnn
from spark_dl import driver
from spark_dl.config import Checkpoint, Config, Data, Launch, Train
from spark_dl.data.write.arrays import write_arrays
from spark_dl.rundir.metrics import read_metrics
from spark_dl.spec import ModelSpec
from spark_dl.validator import Validator

_ROWS, _BATCH, _EPOCHS, _EVERY = 12_800, 64, 2, 20
WAYS = ("none", "in the loop", "beside")


def measure(spark: Any, *, repeats: int = 3, scale: float = 1.0) -> dict[str, Any]:
    """Measures the median seconds of each way, after a warm-up. Called on the driver.

    `blocked_s` are the seconds for which the training stood still for validations and checkpoints; `training_s` those
    of the call of `train`; `seconds` those until all validations are done.

    Args:
        scale: of the number of rows.
    """
    rng = np.random.default_rng(0)
    rows = max(4, round(_ROWS / _BATCH * scale)) * _BATCH
    columns: dict[str, Any] = {"image": rng.random((rows, 64), dtype=np.float32), "digit": rng.integers(0, 10, rows)}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    spec = ModelSpec(build=build_cnn)
    with tempfile.TemporaryDirectory() as folder:
        data = write_arrays(columns, f"{folder}/data").url
        for i in range(repeats + 1):
            for way in WAYS:
                config = _config(way)
                start = time.perf_counter()
                validator: Any = Validator(data, spec, config, spark=spark) if way == "beside" else None
                with validator or contextlib.nullcontext():
                    result = driver.train(
                        data, spec, config, run_dir=f"{folder}/{WAYS.index(way)}-{i}", progress=False, spark=spark,
                        validation=data if way == "in the loop" else None, on_event=validator or (),
                    )  # fmt: skip
                seconds = time.perf_counter() - start
                blocked = sum(
                    line["seconds"] if line["kind"] == "checkpoint" else line.get("validation_s") or 0.0
                    for line in read_metrics(result.run_dir)
                    if line["kind"] in ("checkpoint", "epoch", "validation")
                )
                if i:  # the first time warms up
                    found[way].append({"blocked_s": blocked, "training_s": result.seconds, "seconds": seconds})
    medians = {
        way: {name: statistics.median(each[name] for each in values) for name in values[0]}
        for way, values in found.items()
    }
    for way, values in medians.items():
        shown = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
        print(f"validation {way}: {shown}", file=sys.stderr)
    ratio = medians["in the loop"]["blocked_s"] / medians["beside"]["blocked_s"]
    return {
        "ways": medians,
        "blocked_ratio": ratio,
        "validations": rows // _BATCH * _EPOCHS // _EVERY,
        "repeats": repeats,
    }


def _config(way: str) -> Config:
    return Config(
        data=Data(features=("image",), label="digit"),
        train=Train(
            global_batch_size=_BATCH, epochs=_EPOCHS, lr=0.01, optimizer_args={"momentum": 0.9},
            validate_every_steps=_EVERY if way == "in the loop" else 0,
        ),
        launch=Launch(device="cpu"),
        checkpoint=Checkpoint(every_steps=_EVERY, keep=1000),
    )  # fmt: skip
