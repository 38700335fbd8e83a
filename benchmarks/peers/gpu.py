"""Measures spark_dl on a GPU beside bare loops of torch: training of three models, the loader, a mesh, and scoring.

`measure` starts this file under torchrun, with one rank. Each part runs two loops in turn. The rows are random, read
from storage, copied through page-locked memory, and images are converted on the device.

The models are in `CASES`: a ResNet-50, a GPT-2 of 124 M parameters, and a small network on rows of a table, whose step
on a GPU is shorter than the Python of a careless loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import ROOT
from benchmarks.peers.gpt import VOCABULARY, build_gpt, flops_per_token, token_losses
from benchmarks.peers.resnet import NUM_CLASSES, ResNet50
from spark_dl.config import Config, Data, Launch, Loader, Train
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.data.load.build import build_train_loader
from spark_dl.data.write.arrays import write_arrays
from spark_dl.launch.rank.rendezvous import join
from spark_dl.parallel import ddp, single
from spark_dl.parallel.mesh.settings import Mesh
from spark_dl.parallel.modules import apply_layout, to_device
from spark_dl.parallel.trainable import Trainable
from spark_dl.rundir.metrics import read_metrics
from spark_dl.scoring.scorer import Scorer
from spark_dl.spec import Batch, ModelSpec, Run
from spark_dl.worker import main as run_worker
from spark_dl.world import World

PARTS = ("loader", "worker", "gpt", "mlp", "mesh", "predict", "nccl", "layout")
_MOMENTUM = 0.9
_KEPT_BATCHES = 8
SPEC = ModelSpec(build=ResNet50)
PEAK_TFLOPS = {
    "H100 PCIe": 756.0, "H100": 989.0, "H200": 989.0, "GH200": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0,
    "A10": 125.0,
}  # fmt: skip
"""Dense bf16 TFLOP/s by a part of the card's name, of NVIDIA's data sheets: the first that is found."""


@dataclass(frozen=True)
class Options:
    """What is measured."""

    device: str = "cuda"
    parts: tuple[str, ...] = PARTS
    """`loader`: the loader, and one batch that stays on the device. `worker`, `gpt`, `mlp`: `worker.main`, and a bare
    script with its batches in memory, of a ResNet-50, a GPT and a small network. `mesh`: ZeRO-3 and DDP, of the GPT.
    `predict`: what a task of `predict` computes, and a bare loop, of the ResNet-50. `nccl`: one rank with `ddp`, and
    with `single`. `layout`: bf16, compiled, with channels_last, and float32."""
    batch_size: int = 256
    steps: int = 100
    """Steps of each loop in each turn: many more than the batches in the loader's memory at the start."""
    image_size: int = 224
    """Height and width in pixels."""
    compile: bool = True
    """Whether the ResNet-50 in bf16 is compiled with torch.compile."""
    gpt_rows: int = 32
    """Texts of a batch, of 512 tokens each."""
    gpt_blocks: int = 12
    gpt_width: int = 768
    mlp_rows: int = 4096
    """Rows of a batch of the small network."""
    mlp_steps: int = 1000
    """Steps of each loop of the small network in each turn."""
    peak_tflops: float | None = None
    """Dense bf16 TFLOP/s of the device, for the MFU of the GPT. None: of `PEAK_TFLOPS`."""
    repeats: int = 3


Loop: TypeAlias = Callable[[], float]
"""Runs once. Returns rows per second."""


@dataclass(frozen=True)
class Case:
    """A model that is trained, with its rows."""

    spec: ModelSpec
    data: Data
    rows: int
    """Of a batch."""
    steps: int
    columns: Callable[[np.random.Generator, int], dict[str, Any]]
    """Makes this many random rows."""
    train: dict[str, Any] = field(default_factory=dict)
    """Settings of the training beside the batch."""

    @property
    def log_every(self) -> int:
        return max(1, self.steps // 5)


def build_mlp() -> nn.Module:
    """Rows of a table [rows, 39] -> scores [rows, 2]."""
    return nn.Sequential(
        nn.Linear(39, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2)
    )  # fmt: skip


def _case(name: str, options: Options) -> Case:
    rows, side, momentum = (
        options.batch_size,
        options.image_size,
        {"lr": 0.01, "optimizer_args": {"momentum": _MOMENTUM}},
    )
    if name == "gpt":
        build = functools.partial(build_gpt, options.gpt_blocks, options.gpt_width)
        return Case(
            ModelSpec(build=build, loss=token_losses), Data(features=("tokens",), label="next"), options.gpt_rows,
            options.steps,
            lambda rng, n: {k: rng.integers(0, VOCABULARY, (n, 512), np.int32) for k in ("tokens", "next")},
            {**momentum, "precision": "bf16-mixed"},
        )  # fmt: skip
    if name == "mlp":
        return Case(
            ModelSpec(build=build_mlp), Data(features=("features",), label="label"), options.mlp_rows,
            options.mlp_steps,
            lambda rng, n: {"features": rng.standard_normal((n, 39), np.float32), "label": rng.integers(0, 2, n)},
            momentum,
        )  # fmt: skip
    return Case(
        SPEC, Data(features=("image",), label="label"), rows, options.steps,
        lambda rng, n: {
            "image": rng.integers(0, 256, (n, 3, side, side), np.uint8), "label": rng.integers(0, NUM_CLASSES, n),
        },
        {**momentum, "precision": "bf16-mixed", "compile": options.compile, "channels_last": True},
    )  # fmt: skip


CASES = {"gpt": "gpt", "mesh": "gpt", "mlp": "mlp"}
"""The model of each part; of the others the ResNet-50."""


def measure(options: Options) -> dict[str, Any]:
    """Measures median rows per second of the loops of each part, and the median ratio of neighboring turns.

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
        for name in {CASES.get(part, "resnet") for part in options.parts}:
            case = _case(name, options)
            # The rows of 100 steps are enough: a longer run has several epochs.
            write_arrays(case.columns(rng, min(case.steps, 100) * case.rows), f"{folder}/{name}")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        arguments = [folder, json.dumps(asdict(options))]
        subprocess.run([*torchrun, "-m", "benchmarks.peers.gpu", *arguments], check=True, cwd=ROOT)
        result: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    return result


def _config(options: Options, case: Case, **train: Any) -> Config:
    """# train: settings beside those of the case"""
    return Config(
        data=case.data,
        train=Train(
            global_batch_size=case.rows, max_steps=case.steps, epochs=case.steps, log_every=case.log_every,
            **{**case.train, **train},
        ),
        parallel=single.Single(),
        loader=Loader(num_streams=min(16, case.rows)),
        launch=Launch(num_ranks=1, device=options.device),  # type: ignore[arg-type]
    )  # fmt: skip


def _rank_main(folder: str, options: Options) -> None:
    """Runs the measurement, under torchrun."""
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    result: dict[str, Any] = {"torch": torch.__version__, "device": name}
    for part in options.parts:
        case = _case(CASES.get(part, "resnet"), options)
        with _LOOPS.get(part, _worker_loops)(folder, options, case) as loops:
            result[part] = _in_turn(loops, options.repeats)
        if part in ("gpt", "mesh"):
            result[part] |= _of_tokens(result[part], options, name)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    Path(folder, "result.json").write_text(json.dumps(result))


def _of_tokens(measured: dict[str, Any], options: Options, device: str) -> dict[str, Any]:
    """Returns tokens per second, and the model FLOPs utilization, where the peak of the device is known."""
    peak = options.peak_tflops or next((peak for part, peak in PEAK_TFLOPS.items() if part in device), None)
    flops = flops_per_token(options.gpt_blocks, options.gpt_width)
    rates = {name: 512 * rate for name, rate in measured.items() if isinstance(rate, float) and name != "ratio"}
    mfu = {name: None if peak is None else rate * flops / (peak * 1e12) for name, rate in rates.items()}
    return {"tokens_per_s": rates, "mfu": mfu}


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
def _loader_loops(folder: str, options: Options, case: Case) -> Iterator[dict[str, Loop]]:
    config, epochs = _config(options, case), itertools.count()
    with join(config.launch) as world:
        trainable = _build(single.parallelize, world, config)
        kept = _kept_batch(folder, config, world)
        loader = _loader(f"{folder}/resnet", SPEC, config, world)

        def fed() -> float:
            return _rate(trainable, (step.micro_batches[0] for step in loader.epoch(next(epochs))), options, world)

        yield {"spark_dl": fed, "on_device": lambda: _rate(trainable, _again(kept, options), options, world)}


@contextlib.contextmanager
def _nccl_loops(folder: str, options: Options, case: Case) -> Iterator[dict[str, Loop]]:
    config = _config(options, case)
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
def _layout_loops(folder: str, options: Options, case: Case) -> Iterator[dict[str, Loop]]:
    fast = _config(options, case)
    plain = _config(options, case, precision="float32", compile=False, channels_last=False)
    with join(fast.launch) as world:
        kept = _kept_batch(folder, fast, world)
        pixels = {name: tensor.contiguous() for name, tensor in kept.items()}
        yield {
            "fast": _loop(_build(single.parallelize, world, fast), kept, options, world),
            "float32": _loop(_build(single.parallelize, world, plain), pixels, options, world),
        }


@contextlib.contextmanager
def _worker_loops(folder: str, options: Options, case: Case) -> Iterator[dict[str, Loop]]:
    """`worker.main` starts and ends its own process group. It also reads the rows, logs, checks and saves."""
    config = dataclasses.replace(_config(options, case), parallel=ddp.DDP())
    name = "resnet" if case.spec is SPEC else "gpt" if case.data.label == "next" else "mlp"

    def bare() -> float:
        with join(config.launch) as world:
            loader = _loader(f"{folder}/{name}", case.spec, config, world).epoch(0)
            batches = [step.micro_batches[0] for step in itertools.islice(loader, _KEPT_BATCHES)]
            loader.close()
            return _bare_script(batches, case, config, world.device)

    yield {"worker": _worker(f"{folder}/{name}", case, config), "bare": bare}


@contextlib.contextmanager
def _mesh_loops(folder: str, options: Options, case: Case) -> Iterator[dict[str, Loop]]:
    config = _config(options, case)
    ways = {"zero3": Mesh(zero_stage=3), "ddp": ddp.DDP()}
    yield {name: _worker(f"{folder}/gpt", case, dataclasses.replace(config, parallel=p)) for name, p in ways.items()}


@contextlib.contextmanager
def _predict_loops(folder: str, options: Options, case: Case) -> Iterator[dict[str, Loop]]:
    """What a task does with the rows of a partition, from arrays on the host to arrays on the host."""
    shards, device = read_shards(f"{folder}/resnet"), torch.device(options.device)
    loader = Loader(rows_at_once=case.rows, predict_precision="bf16-mixed")
    data = dataclasses.replace(case.data, label=None)
    columns = tuple(shards.select(["image"]))
    scorer = Scorer(spec=case.spec, config=Config(data=data, loader=loader), columns=columns, url="", sha256="")
    model = scorer.load().to(device)
    images = np.random.default_rng(0).integers(
        0, 256, (min(case.steps, 16) * case.rows, 3, options.image_size, options.image_size), np.uint8
    )

    def ours() -> float:
        start = time.perf_counter()
        scorer.outputs(model, [images], device)
        return len(images) / (time.perf_counter() - start)

    def bare() -> float:
        start = time.perf_counter()
        with torch.inference_mode(), torch.autocast(device.type, dtype=torch.bfloat16):
            parts = [torch.from_numpy(images[i : i + case.rows]) for i in range(0, len(images), case.rows)]
            torch.cat([model(part.to(device)).float().cpu() for part in parts])
        return len(images) / (time.perf_counter() - start)

    yield {"spark_dl": ours, "bare": bare}


_LOOPS = {
    "loader": _loader_loops, "nccl": _nccl_loops, "layout": _layout_loops, "mesh": _mesh_loops,
    "predict": _predict_loops,
}  # fmt: skip
"""Of the parts that do not compare `worker.main` with a bare script."""


def _worker(url: str, case: Case, config: Config) -> Loop:
    names = (f"{url}-run-{config.parallel.strategy}-{i}" for i in itertools.count())

    def worker() -> float:
        run = Run(spec=case.spec, config=config, train=read_shards(url), run_dir=next(names))
        run_worker(run)
        lines = [line for line in read_metrics(run.run_dir) if line["kind"] == "step"]
        steps = lines[-1]["step"] - lines[0]["step"]  # the first line has the compilation
        return float(steps * case.rows / sum(line["seconds"] for line in lines[1:]))

    return worker


def _bare_script(batches: list[Batch], case: Case, config: Config, device: torch.device) -> float:
    """A loop as PyTorch's documentation has it, in a process group. Returns rows per second."""
    torch.manual_seed(0)
    train, label = config.train, case.data.label or ""
    model = case.spec.build().to(device)
    if train.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    wrapped: nn.Module = DistributedDataParallel(torch.compile(model) if train.compile else model)
    optimizer = torch.optim.SGD(model.parameters(), lr=train.lr, momentum=_MOMENTUM)
    start = 0.0
    for step in range(case.steps):
        batch = to_device(batches[step % len(batches)], device, config)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=train.precision == "bf16-mixed"):
            scores = wrapped(batch[case.data.features[0]])
            loss = nn.functional.cross_entropy(scores.flatten(0, -2), batch[label].flatten().long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == case.log_every - 1:
            _wait_for(device)
            start = time.perf_counter()
    _wait_for(device)
    del wrapped  # before the process group
    return (case.steps - case.log_every) * case.rows / (time.perf_counter() - start)


def _build(parallelize: Callable[[ModelSpec, World, Config], Trainable], world: World, config: Config) -> Trainable:
    trainable = parallelize(SPEC, world, config)
    trainable.modules[0].train()
    apply_layout(trainable.modules[0], config)
    return trainable


def _loader(url: str, spec: ModelSpec, config: Config, world: World) -> Any:
    pin = world.device.type == "cuda"
    return build_train_loader(read_shards(url), spec, config, rank=0, world_size=1, pin=pin)


def _kept_batch(folder: str, config: Config, world: World) -> Batch:
    """Returns the first batch, on the device."""
    epoch = _loader(f"{folder}/resnet", SPEC, config, world).epoch(0)
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
