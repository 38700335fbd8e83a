"""Random numbers of a forward pass that depend on the row, and not on the rank or the micro-batch that has it.

Each operation of torch that draws numbers, such as dropout, gets a key from the generator of this process, which all
ranks and micro-batches seed with the same number in a step. An element of the result is a hash of this key, the number
of its row in the global batch, and its places along the other axes: a counter-based generator (Salmon et al. 2011,
"Parallel Random Numbers: As Easy as 1, 2, 3") with the mixing function of SplitMix64 (Steele et al. 2014). So neither
the ranks nor the padding of ragged columns change it. As checkpointed layers get the state of the generator back, they
draw the same numbers again.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from spark_dl.spec import NumberedBatch

_GOLDEN, _FIRST, _SECOND = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_OFF = ("dropout_p", "dropout")
"""Arguments of operations, such as attention, that draw nothing if these are 0."""


def check_rows_are_first(model: nn.Module) -> None:
    """Raises ValueError for layers of torch that draw numbers for [positions, rows, ...]. Called on every rank."""
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            change = f"nn.{type(module).__name__} of one layer, with nn.Dropout between them"
        elif isinstance(module, nn.MultiheadAttention) and not module.batch_first:
            change = "batch_first=True"
        else:
            continue
        raise ValueError(
            f"train.random_by: the layer {name!r} draws numbers for positions of all rows, expected the rows as the "
            f"first axis: use {change}, or set it to 'rank'"
        )


@contextlib.contextmanager
def random_by_row(batch: NumberedBatch, rows: Tensor, seed: int) -> Iterator[None]:
    """Draws the random numbers in this block by row. For a forward pass and its backward pass. Used on a rank.

    Args:
        rows: the numbers of the rows that the model gets, [rows] int64, on its device.
        seed: `train.seed`.
    """
    of_step = int(np.random.SeedSequence((seed, *batch.step, 0x52)).generate_state(1, np.uint64)[0]) >> 1
    random.seed(of_step)
    np.random.seed(of_step % 2**32)
    torch.manual_seed(of_step)
    # Fused kernels of attention draw their own numbers.
    with sdpa_kernel(SDPBackend.MATH), _RowRandom(rows):
        yield


class _RowRandom(TorchDispatchMode):
    def __init__(self, rows: Tensor):
        super().__init__()
        self._rows = rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        given = _arguments(func, args, kwargs)
        if given.get("generator") is not None or any(given.get(name) == 0 for name in _OFF):
            return func(*args, **kwargs)
        shape, device = _result_of(given)
        draw = _DRAWS.get(func.overloadpacket.__name__)
        if draw is not None and math.prod(shape) == 1 and tuple(shape) != tuple(self._rows.shape):
            return func(*args, **kwargs)  # one number for all rows: the same on all ranks
        if draw is None or not shape or not len(self._rows) or shape[0] % len(self._rows):
            rows = f"expected the {len(self._rows)} rows of the batch as the first axis"
            why = "are not known to be by row" if draw is None else f"have the shape {tuple(shape)}, {rows}"
            raise ValueError(
                f"train.random_by: the random numbers of {func} {why}; set it to 'rank', or draw them "
                "from a generator of their own (generator=...)"
            )
        return draw(given, _Bits(self._rows, shape, device))


def _arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name, with the defaults of those that are left out."""
    declared = func._schema.arguments
    defaults = {each.name: each.default_value for each in declared if each.has_default_value()}
    return {**defaults, **dict(zip([each.name for each in declared], args, strict=False)), **kwargs}


def _result_of(given: Mapping[str, Any]) -> tuple[Sequence[int], torch.device]:
    like = next((given[name] for name in ("self", "input") if isinstance(given.get(name), Tensor)), None)
    if like is not None:
        return like.shape, like.device
    return given.get("size", ()), torch.device(given.get("device") or "cpu")


class _Bits:
    """Random bits by row for one operation, in the shape of its result, whose first axis has entries of each row."""

    def __init__(self, rows: Tensor, shape: Sequence[int], device: torch.device):
        self.shape, self.device = tuple(shape), device
        key = int(torch.randint(-(2**62), 2**62, ()))
        mixed = torch.zeros((), dtype=torch.int64, device=device)
        for i, size in enumerate(self.shape):
            place = torch.arange(size, device=device)
            if i == 0:
                each = size // len(rows)  # entries of a row
                place = _mixed(rows.to(device).repeat_interleave(each)) + place % each
            place = _mixed(place + (key + (i + 1) * _GOLDEN) % (1 << 63))
            mixed = mixed + place.view(-1, *[1] * (len(self.shape) - 1 - i))
        self._mixed = _mixed(mixed)

    def uniform(self, dtype: torch.dtype, *, nth: int = 0) -> Tensor:
        """Returns numbers in [0, 1). nth: others for other values."""
        bits = _mixed(self._mixed + nth) if nth else self._mixed
        digits = 53 if dtype == torch.float64 else 24
        value = ((bits >> (64 - digits)) & ((1 << digits) - 1)).to(torch.float64 if digits == 53 else torch.float32)
        return value * 2.0**-digits

    def normal(self, dtype: torch.dtype) -> Tensor:
        """Returns numbers of the standard normal distribution, by Box and Muller."""
        radius = (-2 * torch.log1p(-self.uniform(dtype))).sqrt()
        return radius * torch.cos(2 * math.pi * self.uniform(dtype, nth=1))


def _mixed(value: Tensor) -> Tensor:
    """The mixing function of SplitMix64. # int64"""
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * _FIRST
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * _SECOND
    return value ^ ((value >> 31) & ((1 << 33) - 1))


def _dropout(given: Mapping[str, Any], bits: _Bits) -> tuple[Tensor, Tensor]:
    inputs, p = given["input"], given["p"]
    if given.get("train") is False or p == 0:
        return inputs.clone(), torch.ones_like(inputs, dtype=torch.bool)
    kept = bits.uniform(torch.float32) >= p
    return torch.where(kept, inputs / (1 - p), 0) if p < 1 else torch.zeros_like(inputs), kept


def _in_place(function: Callable[[Mapping[str, Any], _Bits, torch.dtype], Tensor]) -> Callable[..., Tensor]:
    def draw(given: Mapping[str, Any], bits: _Bits) -> Tensor:
        tensor: Tensor = given["self"]
        return tensor.copy_(function(given, bits, tensor.dtype))

    return draw


def _new(function: Callable[[Mapping[str, Any], _Bits, torch.dtype], Tensor]) -> Callable[..., Tensor]:
    def draw(given: Mapping[str, Any], bits: _Bits) -> Tensor:
        like = given.get("self")
        default = like.dtype if isinstance(like, Tensor) else torch.get_default_dtype()
        dtype = given.get("dtype") or default
        if not isinstance(dtype, torch.dtype):  # of integers, whose default in the schema is a number
            dtype = torch.int64
        return function(given, bits, dtype).to(dtype)

    return draw


def _bernoulli(given: Mapping[str, Any], bits: _Bits, dtype: torch.dtype) -> Tensor:
    less: Tensor = bits.uniform(torch.float32) < given.get("p", given["self"])
    return less


def _uniform(given: Mapping[str, Any], bits: _Bits, dtype: torch.dtype) -> Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return bits.uniform(dtype).mul_(high - low).add_(low)


def _normal(given: Mapping[str, Any], bits: _Bits, dtype: torch.dtype) -> Tensor:
    return bits.normal(dtype).mul_(given.get("std", 1.0)).add_(given.get("mean", 0.0))


def _exponential(given: Mapping[str, Any], bits: _Bits, dtype: torch.dtype) -> Tensor:
    return torch.log1p(-bits.uniform(dtype)).div_(-given.get("lambd", 1.0))


def _integers(given: Mapping[str, Any], bits: _Bits, dtype: torch.dtype) -> Tensor:
    low, high = given.get("low", 0), given["high"]
    return bits.uniform(torch.float64).mul_(high - low).floor_().add_(low)


_DRAWS: Mapping[str, Callable[..., Any]] = {
    "native_dropout": _dropout,
    "bernoulli": _new(_bernoulli),
    "bernoulli_": _in_place(_bernoulli),
    "uniform_": _in_place(_uniform),
    "rand": _new(_uniform),
    "rand_like": _new(_uniform),
    "normal_": _in_place(_normal),
    "randn": _new(_normal),
    "randn_like": _new(_normal),
    "exponential_": _in_place(_exponential),
    "randint": _new(_integers),
    "randint_like": _new(_integers),
}
