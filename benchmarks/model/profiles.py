"""Sizes and costs of the layers of networks: each parameter tensor of ResNet-50 and BERT, in forward order.

A layer's share of the computation is its share of the multiply-adds of a forward pass. Only convolutions, linear layers
and the two products of attention are counted, as torchvision, ptflops and fvcore do. Biases, normalization,
activations, pooling and embeddings have a share of 0. Sources: He et al. 2016, "Deep Residual Learning for Image
Recognition", table 1, with the stride in the 3x3 convolution as in torchvision; Devlin et al. 2019, "BERT", section 3,
with the tensors of Hugging Face's `BertModel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Layer:
    """One parameter tensor."""

    name: str
    shape: tuple[int, ...]
    share: float
    """Fraction of the time of a forward pass, and of a backward pass. The fractions of all layers sum to 1."""

    @property
    def num_parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def gradient_bytes(self) -> int:
        """In float32."""
        return self.num_parameters * _FLOAT_BYTES


@dataclass(frozen=True)
class Profile:
    """Layers of a network, for the exchange of its gradients."""

    name: str
    layers: tuple[Layer, ...]
    """In forward order."""
    multiply_adds: int
    """Multiply-adds of a forward pass of one input: an image of 224 x 224, or a sequence of `bert`'s length."""

    @property
    def num_parameters(self) -> int:
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all layers, in float32."""
        return sum(layer.gradient_bytes for layer in self.layers)

    def backward_layers(self) -> tuple[Layer, ...]:
        """Returns the layers in the order of their gradients: the last layer first."""
        return self.layers[::-1]

    def ready_s(self, backward_s: float) -> list[float]:
        """Returns seconds from the start of a backward pass to each gradient, in backward order."""
        ready, passed = [], 0.0
        for layer in self.backward_layers():
            passed += layer.share
            ready.append(passed * backward_s)
        return ready

    def shrunk(self, fraction: float) -> Profile:
        """Returns the network with about this fraction of the parameters, by shortening each tensor's first axis.

        Shares do not change. Raises ValueError unless 0 < `fraction` <= 1.
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"scale: expected a fraction above 0 and at most 1, found {fraction!r}")
        layers = tuple(
            replace(layer, shape=(max(1, round(layer.shape[0] * fraction)), *layer.shape[1:])) for layer in self.layers
        )
        return replace(self, layers=layers)


def resnet50() -> Profile:
    """Returns ResNet-50 for 1000 classes: 161 tensors, 25,557,032 parameters, 4.09 billion multiply-adds per image."""
    tensors = [*_convolution("conv1", 3, 64, kernel=7, size=112), *_norm("bn1", 64)]
    channels, size = 64, 56
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            shrinks = stage > 1 and block == 0
            tensors += _bottleneck(f"layer{stage}.{block}", channels, width, size, shrinks)
            channels, size = 4 * width, size // 2 if shrinks else size
    return _profile("resnet50", [*tensors, *_linear("fc", channels, 1000)])


def bert(name: str, *, hidden: int, num_layers: int, sequence_length: int = 128) -> Profile:
    """Returns BERT's encoder with pooler for the uncased vocabulary.

    Base has 199 tensors and 109,482,240 parameters, large has 391 and 335,141,888. By default a sequence has 128
    tokens, as in 90 % of the steps of BERT's pre-training (Devlin et al. 2019, appendix A.2).
    """
    tensors = [
        ("embeddings.word_embeddings.weight", (30522, hidden), 0),
        ("embeddings.position_embeddings.weight", (512, hidden), 0),
        ("embeddings.token_type_embeddings.weight", (2, hidden), 0),
        *_norm("embeddings.LayerNorm", hidden),
    ]
    for i in range(num_layers):
        tensors += _encoder_layer(f"encoder.layer.{i}", hidden, sequence_length)
    return _profile(name, [*tensors, *_linear("pooler.dense", hidden, hidden)])


def bert_base() -> Profile:
    return bert("bert_base", hidden=768, num_layers=12)


def bert_large() -> Profile:
    return bert("bert_large", hidden=1024, num_layers=24)


PROFILES: dict[str, Callable[[], Profile]] = {"resnet50": resnet50, "bert_base": bert_base, "bert_large": bert_large}


_Tensor = tuple[str, tuple[int, ...], int]
"""Name, shape and multiply-adds for one input."""


def _profile(name: str, tensors: list[_Tensor]) -> Profile:
    total = sum(multiply_adds for _, _, multiply_adds in tensors)
    layers = tuple(Layer(tensor, shape, multiply_adds / total) for tensor, shape, multiply_adds in tensors)
    return Profile(name, layers, total)


def _convolution(name: str, inputs: int, outputs: int, *, kernel: int, size: int) -> list[_Tensor]:
    """Returns a square kernel without bias. # size: height and width of the output"""
    return [(f"{name}.weight", (outputs, inputs, kernel, kernel), outputs * inputs * kernel**2 * size**2)]


def _norm(name: str, channels: int) -> list[_Tensor]:
    return [(f"{name}.weight", (channels,), 0), (f"{name}.bias", (channels,), 0)]


def _linear(name: str, inputs: int, outputs: int, *, positions: int = 1, further: int = 0) -> list[_Tensor]:
    """Returns a linear layer at each of `positions`, followed by `further` multiply-adds without weights."""
    weight = (f"{name}.weight", (outputs, inputs), outputs * inputs * positions + further)
    return [weight, (f"{name}.bias", (outputs,), 0)]


def _bottleneck(name: str, inputs: int, width: int, size: int, shrinks: bool) -> list[_Tensor]:
    """Returns three convolutions and, if the shape changes, a fourth in the shortcut. # size: of the input"""
    outputs, out = 4 * width, size // 2 if shrinks else size
    tensors = [
        *_convolution(f"{name}.conv1", inputs, width, kernel=1, size=size),
        *_norm(f"{name}.bn1", width),
        *_convolution(f"{name}.conv2", width, width, kernel=3, size=out),
        *_norm(f"{name}.bn2", width),
        *_convolution(f"{name}.conv3", width, outputs, kernel=1, size=out),
        *_norm(f"{name}.bn3", outputs),
    ]
    if inputs != outputs:
        tensors += _convolution(f"{name}.downsample.0", inputs, outputs, kernel=1, size=out)
        tensors += _norm(f"{name}.downsample.1", outputs)
    return tensors


def _encoder_layer(name: str, hidden: int, length: int) -> list[_Tensor]:
    # Queries times keys, and weights times values: after the three projections, so before them in the backward pass.
    attention = 2 * length * length * hidden
    return [
        *_linear(f"{name}.attention.self.query", hidden, hidden, positions=length),
        *_linear(f"{name}.attention.self.key", hidden, hidden, positions=length),
        *_linear(f"{name}.attention.self.value", hidden, hidden, positions=length, further=attention),
        *_linear(f"{name}.attention.output.dense", hidden, hidden, positions=length),
        *_norm(f"{name}.attention.output.LayerNorm", hidden),
        *_linear(f"{name}.intermediate.dense", hidden, 4 * hidden, positions=length),
        *_linear(f"{name}.output.dense", 4 * hidden, hidden, positions=length),
        *_norm(f"{name}.output.LayerNorm", hidden),
    ]
