"""What networks weigh and what their layers cost: every parameter tensor of ResNet-50 and BERT, in forward order.

A layer's share of the compute is its share of the multiply-adds of a forward pass. Only convolutions, linear layers and
the two products of attention are counted, as torchvision and the ptflops and fvcore counters do; biases, normalization,
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
    """Of the time of a forward pass, and of a backward pass; all layers' shares sum to 1."""

    @property
    def num_parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def gradient_bytes(self) -> int:
        """In float32."""
        return self.num_parameters * _FLOAT_BYTES


@dataclass(frozen=True)
class Profile:
    """A network, as far as the exchange of its gradients goes."""

    name: str
    layers: tuple[Layer, ...]
    """In forward order."""
    multiply_adds: int
    """Of a forward pass of one input: an image of 224 x 224, or a sequence of the length that `bert` was given."""

    @property
    def num_parameters(self) -> int:
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def gradient_bytes(self) -> int:
        """Of all layers, in float32."""
        return sum(layer.gradient_bytes for layer in self.layers)

    def backward_layers(self) -> tuple[Layer, ...]:
        """The layers in the order in which their gradients come: the last one first."""
        return self.layers[::-1]

    def ready_s(self, backward_s: float) -> list[float]:
        """Seconds from the start of a backward pass of `backward_s` to each gradient, in backward order."""
        ready, passed = [], 0.0
        for layer in self.backward_layers():
            passed += layer.share
            ready.append(passed * backward_s)
        return ready

    def shrunk(self, fraction: float) -> Profile:
        """The same network with about that fraction of the parameters: each tensor's first axis is shortened.

        Shares stay as they are. `fraction` is above 0 and at most 1; otherwise ValueError.
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"scale: expected a fraction above 0 and at most 1, found {fraction!r}")
        layers = tuple(
            replace(layer, shape=(max(1, round(layer.shape[0] * fraction)), *layer.shape[1:])) for layer in self.layers
        )
        return replace(self, layers=layers)


def resnet50() -> Profile:
    """ResNet-50 for 1000 classes: 161 tensors, 25,557,032 parameters, 4.09 billion multiply-adds per image."""
    tensors = [*_convolution("conv1", 3, 64, kernel=7, size=112), *_norm("bn1", 64)]
    channels, size = 64, 56
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            shrinks = stage > 1 and block == 0
            tensors += _bottleneck(f"layer{stage}.{block}", channels, width, size, shrinks)
            channels, size = 4 * width, size // 2 if shrinks else size
    return _profile("resnet50", [*tensors, *_linear("fc", channels, 1000)])


def bert(name: str, *, hidden: int, num_layers: int, sequence_length: int = 128) -> Profile:
    """BERT's encoder with pooler for the uncased vocabulary.

    Base is 199 tensors and 109,482,240 parameters, large 391 and 335,141,888. By default a sequence is of 128 tokens,
    as in 90 % of the steps of its pre-training (Devlin et al. 2019, appendix A.2).
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
"""Name, shape and multiply-adds of one input."""


def _profile(name: str, tensors: list[_Tensor]) -> Profile:
    total = sum(multiply_adds for _, _, multiply_adds in tensors)
    layers = tuple(Layer(tensor, shape, multiply_adds / total) for tensor, shape, multiply_adds in tensors)
    return Profile(name, layers, total)


def _convolution(name: str, inputs: int, outputs: int, *, kernel: int, size: int) -> list[_Tensor]:
    """A square kernel without bias; `size` is the height and width of what comes out."""
    return [(f"{name}.weight", (outputs, inputs, kernel, kernel), outputs * inputs * kernel**2 * size**2)]


def _norm(name: str, channels: int) -> list[_Tensor]:
    return [(f"{name}.weight", (channels,), 0), (f"{name}.bias", (channels,), 0)]


def _linear(name: str, inputs: int, outputs: int, *, positions: int = 1, further: int = 0) -> list[_Tensor]:
    """Applied at each of `positions`; `further` multiply-adds without weights are done after it."""
    weight = (f"{name}.weight", (outputs, inputs), outputs * inputs * positions + further)
    return [weight, (f"{name}.bias", (outputs,), 0)]


def _bottleneck(name: str, inputs: int, width: int, size: int, shrinks: bool) -> list[_Tensor]:
    """Three convolutions and, where the shape changes, a fourth on the way past them; `size` is that of the input."""
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
    # Queries times keys, and their weights times values: done after the three projections, so backward before them.
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
