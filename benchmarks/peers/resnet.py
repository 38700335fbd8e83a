"""ResNet-50, as the benchmarks train it: images uint8 to scores."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_CLASSES = 1000


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
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, NUM_CLASSES),
        )  # fmt: skip

    def forward(self, image: Tensor) -> Tensor:
        pixels = image.float() / 255
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
