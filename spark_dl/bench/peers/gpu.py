"""Measures whether the loader keeps a GPU busy: a bf16 ResNet-50 with the loader, and with one batch on the device.

`measure` starts this file under torchrun, with one rank, which runs both loops in turn. Images are random uint8, read
from storage, copied through page-locked memory, and converted on the device.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spark_dl.config import Config, Data, Launch, Train
from spark_dl.data.columns.batch import Batch
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.data.load.build import build_train_loader
from spark_dl.data.write.arrays import write_arrays
from spark_dl.launch.rendezvous import join
from spark_dl.parallel import single
from spark_dl.parallel.trainable import Trainable
from spark_dl.spec import ModelSpec

_CLASSES = 1000
_WARM_UPS = 2


@dataclass(frozen=True)
class Options:
    """What is measured."""

    device: str = "cuda"
    batch_size: int = 256
    steps: int = 100
    """Steps of each loop in each turn: many more than the batches in the loader's memory at the start."""
    image_size: int = 224
    """Height and width in pixels."""
    compile: bool = True
    """Whether the model is compiled with torch.compile."""
    repeats: int = 7


def measure(options: Options) -> dict[str, Any]:
    """Measures median images per second of both loops, and the median ratio of neighboring turns. Without Spark.

    Raises ValueError if the device does not exist, or if `steps` is less than 2.
    """
    if options.steps < 2:
        raise ValueError(f"--steps: expected at least 2, as the first is not counted, found {options.steps}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: found no GPU that torch can use; `--device cpu` tries the command without one")
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        rows, side = options.steps * options.batch_size, options.image_size
        columns: dict[str, Any] = {
            "image": rng.integers(0, 256, (rows, 3, side, side), np.uint8),
            "label": rng.integers(0, _CLASSES, rows),
        }
        write_arrays(columns, f"{folder}/data")
        del columns
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        arguments = [folder, json.dumps(asdict(options))]
        subprocess.run([*torchrun, "-m", "spark_dl.bench.peers.gpu", *arguments], check=True)
        result: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    return result


class ResNet50(nn.Module):
    """Images uint8 [rows, 3, height, width] -> scores [rows, 1000].

    He et al. 2016, "Deep Residual Learning for Image Recognition", table 1; as is usual today, the 3 x 3
    convolutions have the strides.
    """

    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        channels = 64
        for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for i in range(count):
                blocks.append(_Bottleneck(channels, width, stride=2 if width > 64 and i == 0 else 1))
                channels = 4 * width
        self.layers = nn.Sequential(
            *_convolution(3, 64, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *blocks,
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, _CLASSES),
        )  # fmt: skip

    def forward(self, image: Tensor) -> Tensor:
        pixels = image.to(memory_format=torch.channels_last).float() / 255
        scores: Tensor = self.layers(pixels)
        return scores


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.path = nn.Sequential(
            *_convolution(channels, width, 1), nn.ReLU(), *_convolution(width, width, 3, stride), nn.ReLU(),
            *_convolution(width, 4 * width, 1),
        )  # fmt: skip
        is_same = stride == 1 and channels == 4 * width
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*_convolution(channels, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.path(x) + self.shortcut(x))


def _convolution(channels: int, out: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(out)]


def _build(compiled: bool) -> nn.Module:
    model = ResNet50().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if compiled:
        model.compile()
    return model  # type: ignore[no-any-return]


def _rank_main(folder: str, options: Options) -> None:
    """Runs the measurement, under torchrun."""
    config = Config(
        data=Data(features=("image",), label="label"),
        train=Train(global_batch_size=options.batch_size, lr=0.01, precision="bf16", optimizer_args={"momentum": 0.9}),
        parallel=single.Single(),
        launch=Launch(num_ranks=1, device=options.device),  # type: ignore[arg-type]
    )
    spec = ModelSpec(build=lambda: _build(options.compile))
    rates: dict[str, list[float]] = {"spark_dl": [], "on_device": []}
    with join(config.launch) as world:
        trainable = single.parallelize(spec, world, config)
        trainable.modules[0].train()
        is_gpu = world.device.type == "cuda"
        loader = build_train_loader(read_shards(f"{folder}/data"), spec, config, rank=0, world_size=1, pin=is_gpu)
        with_first = loader.epoch(0)
        kept = {name: tensor.to(world.device) for name, tensor in next(with_first).micro_batches[0].items()}
        with_first.close()
        for turn in range(_WARM_UPS + options.repeats):
            fed = (step.micro_batches[0] for step in loader.epoch(turn))
            for name, batches in (("spark_dl", fed), ("on_device", _again(kept, options.steps))):
                rate = _images_per_s(trainable, batches, options.batch_size, world.device)
                if turn >= _WARM_UPS:
                    rates[name].append(rate)
    ratios = [ours / bare for ours, bare in zip(*rates.values(), strict=True)]
    medians = {name: statistics.median(values) for name, values in rates.items()}
    gpu = torch.cuda.get_device_name() if is_gpu else "cpu"
    result = {**medians, "ratio": statistics.median(ratios), "ratios": ratios, "device": gpu}
    Path(folder, "result.json").write_text(json.dumps(result))


def _again(batch: Batch, times: int) -> Iterator[Batch]:
    return (batch for _ in range(times))


def _images_per_s(trainable: Trainable, batches: Iterable[Batch], rows: int, device: torch.device) -> float:
    """Returns the rate without the first step, which waits for the start of the epoch."""
    start, steps = 0.0, -1
    for batch in batches:
        trainable.forward_backward([batch], rows)
        trainable.step()
        trainable.optimizer.zero_grad()
        steps += 1
        if steps == 0:
            _wait_for(device)
            start = time.perf_counter()
    _wait_for(device)
    return steps * rows / (time.perf_counter() - start)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    _rank_main(sys.argv[1], Options(**json.loads(sys.argv[2])))
