"""Measures what asynchronous checkpoints cost the steps: those of spark_dl, and `dcp.async_save` in a bare DDP loop.

`measure` starts this file under torchrun. Each rank runs all loops in turn, on the same rows, with the same model and
Adam, and a checkpoint in every tenth step. The bare loop has its batches in memory; each loop is compared with itself
without checkpoints, so that this is no part of the figures.

`..._async_steps_ratio`: steps per second with checkpoints, to those without. `..._checkpoint_costs_s`: the seconds that
one checkpoint adds to its ten steps. `..._longest_stall_s`: what the longest step takes longer than the median of those
without checkpoints.
"""

from __future__ import annotations

import functools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import ROOT
from benchmarks.faults.recovery import EVERY, NUM_RANKS, WARM_UP, Options, build_network, columns_of, settings
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.data.load.loader import ShardLoader
from spark_dl.data.write.arrays import write_arrays
from spark_dl.launch.rank.rendezvous import join
from spark_dl.rundir.metrics import read_metrics
from spark_dl.spec import ModelSpec, Run
from spark_dl.worker import main as run_worker

LOOPS = ("ours", "ours_async", "bare", "bare_dcp_async")


def measure(options: Options) -> dict[str, Any]:
    """Returns the figures of both. Without Spark."""
    with tempfile.TemporaryDirectory() as folder:
        write_arrays(columns_of(options), f"{folder}/data")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
        given = [folder, str(options.repeats), str(options.steps), str(options.width)]
        subprocess.run([*torchrun, "-m", "benchmarks.faults.async_saves", *given], check=True, cwd=ROOT)
        times: dict[str, list[list[float]]] = json.loads(Path(folder, "times.json").read_text())
    return summary(times)


def summary(times: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Returns the figures. times: of each loop and repetition, the time at which each step after the warm-up ended"""
    found: dict[str, Any] = {}
    for name, (saves, plain) in {"ours": ("ours_async", "ours"), "dcp": ("bare_dcp_async", "bare")}.items():
        pairs = list(zip(times[saves], times[plain], strict=True))
        seconds = [(a[-1] - a[0], b[-1] - b[0]) for a, b in pairs]
        found |= {
            f"{name}_async_steps_ratio": statistics.median(without / having for having, without in seconds),
            f"{name}_checkpoint_costs_s": statistics.median(
                (having - without) * EVERY / (len(pairs[0][0]) - 1) for having, without in seconds
            ),
            f"{name}_longest_stall_s": statistics.median(
                float(np.diff(a).max()) - statistics.median(np.diff(b).tolist()) for a, b in pairs
            ),
            f"{name}_steps_per_s": statistics.median((len(b) - 1) / (b[-1] - b[0]) for _, b in pairs),
        }
    return found


def _bare(batches: Iterator[Any], last: int, width: int, folder: str) -> list[float]:
    """Returns when each step ended, in a handwritten loop. # folder: of checkpoints; empty for none"""
    torch.manual_seed(0)
    model = DistributedDataParallel(build_network(width))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    loss_of = nn.CrossEntropyLoss()
    group: Any = dist.new_group(backend="gloo") if folder else None  # the collectives of the steps have their own
    future: Any = None
    ends: list[float] = []
    for step in range(1, last + 1):
        batch = next(batches)
        loss = loss_of(model(batch["features"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if folder and step % EVERY == 0:
            if future is not None:
                future.result()
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            future = dcp.async_save(state, checkpoint_id=f"{folder}/step-{step}", process_group=group)
        ends.append(time.time())
    if future is not None:
        future.result()
    return ends


def _rank_main(folder: str, repeats: int, steps: int, width: int) -> None:
    """Runs one rank of the measurement, under torchrun."""
    torch.set_num_threads(1)
    shards, last = read_shards(f"{folder}/data"), WARM_UP + steps + 1
    spec = ModelSpec(build=functools.partial(build_network, width))
    times: dict[str, list[list[float]]] = {name: [] for name in LOOPS}
    rank = 0
    for i in range(repeats + 1):
        for name in LOOPS[:: -1 if i % 2 else 1]:  # in turn, so that no loop always runs first
            place = f"{folder}/{name}-{i}"
            how = {"every_steps": EVERY, "asynchronous": True} if name == "ours_async" else {}
            config = settings(last, how)
            if name.startswith("ours"):
                rank = run_worker(Run(spec=spec, config=config, train=shards, run_dir=place)).rank
                lines = [line for line in read_metrics(place) if line["kind"] == "step"] if rank == 0 else []
                ends = [line["time"] for line in lines]
            else:
                with join(config.launch) as world:
                    loader = ShardLoader(shards, config, rank=world.rank, world_size=world.world_size)
                    batches = [step.micro_batches[0] for step in loader.epoch(0)]
                    ends = _bare(iter(batches), last, width, place if name == "bare_dcp_async" else "")
            if i and rank == 0:  # the first time warms up
                times[name].append(ends[WARM_UP:])
            with join(config.launch):
                dist.barrier()
                if rank == 0:  # the disk need not hold the checkpoints of all loops
                    shutil.rmtree(place, ignore_errors=True)
                dist.barrier()
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(times))


if __name__ == "__main__":
    _rank_main(sys.argv[1], *map(int, sys.argv[2:]))
