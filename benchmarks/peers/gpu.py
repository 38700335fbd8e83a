"""Measures a ResNet-50 on a GPU: with the loader, under the worker loop, by NCCL, and in a faster layout.

`measure` starts this file under torchrun, with one rank. Each part runs two loops in turn. Images are random uint8,
read from storage, copied through page-locked memory, and converted on the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import ROOT
from benchmarks.peers.resnet import NUM_CLASSES, ResNet50
from spark_dl.config import Config, Data, Launch, Train
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.data.load.build import build_train_loader
from spark_dl.data.write.arrays import write_arrays
from spark_dl.launch.rank.rendezvous import join
from spark_dl.parallel import ddp, single
from spark_dl.parallel.modules import apply_layout, to_device
from spark_dl.parallel.trainable import Trainable
from spark_dl.rundir.metrics import read_metrics
from spark_dl.spec import Batch, ModelSpec, Run
from spark_dl.worker import main as run_worker
from spark_dl.world import World

PARTS = ("loader", "worker", "nccl", "layout")
_MOMENTUM = 0.9
_KEPT_BATCHES = 8
SPEC = ModelSpec(build=ResNet50)


@dataclass(frozen=True)
class Options:
    """What is measured."""

    device: str = "cuda"
    parts: tuple[str, ...] = PARTS
    """`loader`: the loader, and one batch that stays on the device. `worker`: `worker.main`, and a bare script with its
    batches in memory. `nccl`: one rank with `ddp`, and with `single`. `layout`: bf16, compiled, with channels_last, and
    float32."""
    batch_size: int = 256
    steps: int = 100
    """Steps of each loop in each turn: many more than the batches in the loader's memory at the start."""
    image_size: int = 224
    """Height and width in pixels."""
    compile: bool = True
    """Whether models in bf16 are compiled with torch.compile."""
    repeats: int = 3


Loop: TypeAlias = Callable[[], float]
"""Runs once. Returns images per second."""


def measure(options: Options) -> dict[str, Any]:
    """Measures median images per second of the loops of each part, and the median ratio of neighboring turns.

    Without Spark. Raises ValueError for an unknown part, if the device does not exist, or if `steps` is less than 2.
    """
    if unknown := set(options.parts) - set(PARTS):
        raise ValueError(f"--parts: expected some of {', '.join(PARTS)}, found {', '.join(sorted(unknown))}")
    if options.steps < 2:
        raise ValueError(f"--steps: expected at least 2, as the first is not counted, found {options.steps}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: found no GPU that torch can use; `--device cpu` tries the command without one")
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        rows, side = options.steps * options.batch_size, options.image_size
        columns: dict[str, Any] = {
            "image": rng.integers(0, 256, (rows, 3, side, side), np.uint8),
            "label": rng.integers(0, NUM_CLASSES, rows),
        }
        write_arrays(columns, f"{folder}/data")
        del columns
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        arguments = [folder, json.dumps(asdict(options))]
        subprocess.run([*torchrun, "-m", "benchmarks.peers.gpu", *arguments], check=True, cwd=ROOT)
        result: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    return result


def _config(options: Options, *, fast: bool = True) -> Config:
    """# fast: bf16, channels_last and, unless switched off, compiled"""
    return Config(
        data=Data(features=("image",), label="label"),
        train=Train(
            global_batch_size=options.batch_size, lr=0.01, optimizer_args={"momentum": _MOMENTUM},
            precision="bf16" if fast else "float32", compile=fast and options.compile, channels_last=fast,
            log_every=max(1, options.steps // 5),
        ),
        parallel=single.Single(),
        launch=Launch(num_ranks=1, device=options.device),  # type: ignore[arg-type]
    )  # fmt: skip


def _rank_main(folder: str, options: Options) -> None:
    """Runs the measurement, under torchrun."""
    result: dict[str, Any] = {"torch": torch.__version__}
    for part in options.parts:
        with _LOOPS[part](folder, options) as loops:
            result[part] = _in_turn(loops, options.repeats)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    result["device"] = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    Path(folder, "result.json").write_text(json.dumps(result))


def _in_turn(loops: dict[str, Loop], repeats: int) -> dict[str, Any]:
    """Returns median rates by name, and the ratio of the first loop to the second: of each turn, and their median."""
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(1 + repeats):
        for name in sorted(loops, reverse=bool(turn % 2)):
            rate = loops[name]()
            if turn:  # the first one warms up
                rates[name].append(rate)
    ours, other = (rates[name] for name in loops)
    ratios = [a / b for a, b in zip(ours, other, strict=True)]
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {**medians, "ratio": statistics.median(ratios), "ratios": ratios}


@contextlib.contextmanager
def _loader_loops(folder: str, options: Options) -> Iterator[dict[str, Loop]]:
    config, epochs = _config(options), itertools.count()
    with join(config.launch) as world:
        trainable = _build(single.parallelize, world, config)
        kept = _kept_batch(folder, config, world)
        loader = _loader(folder, config, world)

        def fed() -> float:
            return _rate(trainable, (step.micro_batches[0] for step in loader.epoch(next(epochs))), options, world)

        yield {"spark_dl": fed, "on_device": lambda: _rate(trainable, _again(kept, options), options, world)}


@contextlib.contextmanager
def _nccl_loops(folder: str, options: Options) -> Iterator[dict[str, Loop]]:
    config = _config(options)
    of_ddp = dataclasses.replace(config, parallel=ddp.DDP())
    with join(config.launch) as world:
        kept = _kept_batch(folder, config, world)
        loops = {
            "ddp": _build(ddp.parallelize, world, of_ddp),
            "single": _build(single.parallelize, world, config),
        }  # fmt: skip
        try:
            yield {name: _loop(trainable, kept, options, world) for name, trainable in loops.items()}
        finally:
            loops["ddp"].close()


@contextlib.contextmanager
def _layout_loops(folder: str, options: Options) -> Iterator[dict[str, Loop]]:
    fast, plain = _config(options), _config(options, fast=False)
    with join(fast.launch) as world:
        kept = _kept_batch(folder, fast, world)
        pixels = {name: tensor.contiguous() for name, tensor in kept.items()}
        yield {
            "fast": _loop(_build(single.parallelize, world, fast), kept, options, world),
            "float32": _loop(_build(single.parallelize, world, plain), pixels, options, world),
        }


@contextlib.contextmanager
def _worker_loops(folder: str, options: Options) -> Iterator[dict[str, Loop]]:
    """`worker.main` starts and ends its own process group. It also reads the rows, logs, checks and saves."""
    config = dataclasses.replace(_config(options), parallel=ddp.DDP())
    names = (f"{folder}/run-{i}" for i in itertools.count())

    def worker() -> float:
        run = Run(spec=SPEC, config=config, train=read_shards(f"{folder}/data"), run_dir=next(names))
        run_worker(run)
        lines = [line for line in read_metrics(run.run_dir) if line["kind"] == "step"]
        steps = lines[-1]["step"] - lines[0]["step"]  # the first line has the compilation
        return float(steps * options.batch_size / sum(line["seconds"] for line in lines[1:]))

    def bare() -> float:
        with join(config.launch) as world:
            loader = _loader(folder, config, world).epoch(0)
            batches = [step.micro_batches[0] for step in itertools.islice(loader, _KEPT_BATCHES)]
            loader.close()
            return _bare_script(batches, config, options, world.device)

    yield {"worker": worker, "bare": bare}


_LOOPS = {"loader": _loader_loops, "worker": _worker_loops, "nccl": _nccl_loops, "layout": _layout_loops}


def _bare_script(batches: list[Batch], config: Config, options: Options, device: torch.device) -> float:
    """A loop as PyTorch's documentation has it, in a process group. Returns images per second."""
    torch.manual_seed(0)
    model = ResNet50().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    wrapped: nn.Module = DistributedDataParallel(torch.compile(model) if options.compile else model)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.train.lr, momentum=_MOMENTUM)
    loss_of, start = nn.CrossEntropyLoss(), 0.0
    for step in range(options.steps):
        batch = to_device(batches[step % len(batches)], device, config)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(wrapped(batch["image"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == config.train.log_every - 1:
            _wait_for(device)
            start = time.perf_counter()
    _wait_for(device)
    del wrapped  # before the process group
    return (options.steps - config.train.log_every) * options.batch_size / (time.perf_counter() - start)


def _build(parallelize: Callable[[ModelSpec, World, Config], Trainable], world: World, config: Config) -> Trainable:
    trainable = parallelize(SPEC, world, config)
    trainable.modules[0].train()
    apply_layout(trainable.modules[0], config)
    return trainable


def _loader(folder: str, config: Config, world: World) -> Any:
    pin = world.device.type == "cuda"
    return build_train_loader(read_shards(f"{folder}/data"), SPEC, config, rank=0, world_size=1, pin=pin)


def _kept_batch(folder: str, config: Config, world: World) -> Batch:
    """Returns the first batch, on the device."""
    epoch = _loader(folder, config, world).epoch(0)
    kept = to_device(next(epoch).micro_batches[0], world.device, config)
    epoch.close()
    return kept


def _loop(trainable: Trainable, kept: Batch, options: Options, world: World) -> Loop:
    return lambda: _rate(trainable, _again(kept, options), options, world)


def _again(batch: Batch, options: Options) -> Iterator[Batch]:
    return itertools.repeat(batch, options.steps)


def _rate(trainable: Trainable, batches: Iterable[Batch], options: Options, world: World) -> float:
    """Returns the rate without the first step, which waits for the start of the epoch."""
    start, steps = 0.0, -1
    for batch in batches:
        trainable.forward_backward([batch], options.batch_size)
        trainable.step()
        trainable.optimizer.zero_grad()
        steps += 1
        if steps == 0:
            _wait_for(world.device)
            start = time.perf_counter()
    _wait_for(world.device)
    return steps * options.batch_size / (time.perf_counter() - start)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    _rank_main(sys.argv[1], Options(**json.loads(sys.argv[2])))
