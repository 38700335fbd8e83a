"""Measures the cost of the worker loop: its steps per second, and those of a bare DDP loop, in one run.

`measure` starts this file under torchrun. Each rank runs both loops in turn, with the same model and batches. The bare
loop has its batches in memory. The worker loop reads them from storage, logs, and saves a checkpoint at its end. It
also runs without the check for NaN and Inf, to show the cost of the check.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import ROOT
from spark_dl import loop
from spark_dl.config import Checkpoint, Config, Data, Launch, Train
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.data.load.loader import ShardLoader
from spark_dl.data.write.arrays import write_arrays
from spark_dl.launch.rank.rendezvous import join
from spark_dl.parallel import ddp
from spark_dl.spec import ModelSpec, Run
from spark_dl.worker import main as run_worker

PAIRS = 15
_ROWS, _BATCH, _EPOCHS = 12_800, 64, 2


def measure(*, num_ranks: int = 2, repeats: int = PAIRS) -> dict[str, Any]:
    """Measures median steps per second of all loops, and ratios of neighboring runs: pairs. Without Spark.

    `ratio` is the worker loop to bare DDP: the median of the pairs. `ratio_quartiles` are the first and the third
    quartile. `check_ratio` is the worker loop to itself without the check for NaN and Inf.
    """
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        columns: dict[str, Any] = {
            "image": rng.random((_ROWS, 64), dtype=np.float32),
            "digit": rng.integers(0, 10, _ROWS),
        }
        write_arrays(columns, f"{folder}/data")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        subprocess.run(
            [*torchrun, "-m", "benchmarks.peers.step", folder, str(repeats), str(num_ranks)], check=True, cwd=ROOT
        )
        result: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    low, high = result["ratio_quartiles"]
    print(f"worker loop to bare DDP: {result['ratio']:.3f}, quartiles {low:.3f} and {high:.3f}", file=sys.stderr)
    return result


def build_cnn() -> nn.Module:
    """The network of the digits example: images [rows, 64] -> scores [rows, 10]."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def _bare_ddp(batches: list[dict[str, torch.Tensor]]) -> float:
    """Returns steps per second of a handwritten loop, inside a process group."""
    torch.manual_seed(0)
    model = DistributedDataParallel(build_cnn())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    start = time.perf_counter()
    for _ in range(_EPOCHS):
        for batch in batches:
            loss = loss_of(model(batch["image"]), batch["digit"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    seconds = time.perf_counter() - start
    return _EPOCHS * len(batches) / seconds


def _rank_main(folder: str, repeats: int, num_ranks: int) -> None:
    """Runs one rank of the measurement, under torchrun."""
    torch.set_num_threads(1)
    shards = read_shards(f"{folder}/data")
    config = Config(
        data=Data(features=("image",), label="digit"),
        train=Train(global_batch_size=_BATCH, epochs=_EPOCHS, lr=0.01, optimizer_args={"momentum": 0.9}),
        launch=Launch(num_ranks=num_ranks, device="cpu"),
        checkpoint=Checkpoint(every_epochs=_EPOCHS),
    )
    rates: dict[str, list[float]] = {"bare_ddp": [], "spark_dl": [], "unchecked": []}
    run = Run(spec=ModelSpec(build=build_cnn), config=config, train=shards, run_dir="")
    rank = 0
    for i in range(repeats + 1):
        for name in sorted(rates, reverse=bool(i % 2)):  # in turn, so that no loop always runs first
            own = dataclasses.replace(run, run_dir=f"{folder}/{name}-{i}")
            if name == "spark_dl":
                done = run_worker(own)
                rate, rank = done.result["steps"] / done.result["seconds"], done.rank
            elif name == "unchecked":
                with join(config.launch) as world:
                    result = loop.train(own, world, ddp.parallelize, check_steps=False)
                rate = result["steps"] / result["seconds"]
            else:
                with join(config.launch) as world:
                    loader = ShardLoader(shards, config, rank=world.rank, world_size=world.world_size)
                    rate = _bare_ddp([step.micro_batches[0] for step in loader.epoch(0)])
            if i:  # the first time warms up
                rates[name].append(rate)
    if rank == 0:
        found: dict[str, Any] = {name: statistics.median(values) for name, values in rates.items()}
        for name, peer in (("ratio", "bare_ddp"), ("check_ratio", "unchecked")):
            ratios = [ours / other for ours, other in zip(rates["spark_dl"], rates[peer], strict=True)]
            quartiles = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
            found |= {name: quartiles[1], f"{name}_quartiles": quartiles[::2], f"{name}s": ratios}
        Path(folder, "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    _rank_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
