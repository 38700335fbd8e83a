"""A rank's contribution to a step, and the sum of such contributions, for every way in which Spark moves them.

The results of an RDD are pickles. PySpark unpickles them on the driver, so an executor that an attacker controls
could run code there. Here the driver reads them with a list of names, of which none does more than hold numbers.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from spark_dl.training.finite import NonFinite

if TYPE_CHECKING:
    from pyspark import RDD

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_ARRAYS = {
    f"numpy.{core}.{name}"
    for core in ("_core", "core")
    for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
}
_NAMES = frozenset({
    "spark_dl.baselines.driver_loop.gradient_sum.GradientSum", "spark_dl.training.finite.NonFinite",
    "numpy.ndarray", "numpy.dtype", *_ARRAYS,
})  # fmt: skip


@dataclass
class GradientSum:
    """The gradient of one rank's rows of a global batch, the sum of several ranks' gradients, or a block of either."""

    gradient: Floats
    """Gradients of the trained parameters, concatenated. # (elements,) float32; float64 if a parameter is float64"""
    loss_sum: float = 0.0
    used: Flags | None = None
    """Whether the loss depends on each parameter. # (parameters,) bool; only in the first block"""
    buffers: list[Bytes] | None = None
    """The model's buffers after the step, from `to_arrays`; only in the first block, and only of rank 0."""
    finding: NonFinite | None = None
    """The first NaN or Inf of these ranks; only in the first block."""
    seconds: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Seconds of each of these ranks: waiting for data, computing; only in the first block."""
    count: float = 0.0
    """The divisor of the mean loss of these rows (`count_of`); only in the first block."""

    def cut(self, num_blocks: int) -> Iterator[tuple[int, GradientSum]]:
        """Yields near-equal blocks with their numbers. The arrays are views."""
        size, bounds = len(self.gradient), range(num_blocks + 1)
        ends = [size * i // num_blocks for i in bounds]
        yield 0, dataclasses.replace(self, gradient=self.gradient[: ends[1]])
        for k in bounds[1:-1]:
            yield k, GradientSum(self.gradient[ends[k] : ends[k + 1]])


def add(a: GradientSum, b: GradientSum) -> GradientSum:
    """Adds two gradient sums, or two blocks of the same number, in place. Returns `a` with the sum."""
    a.gradient += b.gradient
    a.loss_sum += b.loss_sum
    a.count += b.count
    if a.used is not None and b.used is not None:
        a.used |= b.used
    a.buffers = b.buffers if a.buffers is None else a.buffers
    a.seconds |= b.seconds
    a.finding = min(filter(None, (a.finding, b.finding)), default=None)
    return a


def join(blocks: Sequence[tuple[int, GradientSum]]) -> GradientSum:
    """Joins all blocks of a gradient sum, given in any order."""
    parts = [part for _, part in sorted(blocks, key=lambda numbered: numbered[0])]
    first = parts[0]
    gradient = np.concatenate([p.gradient for p in parts])
    return dataclasses.replace(first, gradient=gradient)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Returns the trained parameters, in the order of their gradients in a `GradientSum`."""
    return [p for p in model.parameters() if p.requires_grad]


def check_real(model: nn.Module) -> None:
    """Raises ValueError for complex trained parameters. Called on the driver, once."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise ValueError(
                f"spec.build: the parameter {name} is {parameter.dtype}, but Spark aggregates only real gradients; "
                "store it as real numbers (torch.view_as_complex converts them), or set parallel.strategy to ddp"
            )


def frozen(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that are not trained."""
    return [p for p in model.parameters() if not p.requires_grad]


def to_arrays(tensors: Sequence[Tensor]) -> list[Bytes]:
    """Returns the bytes of tensors of any dtype, even those that NumPy lacks. Arrays of CPU tensors share their memory.

    # each: (bytes,) uint8
    """
    return [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for t in tensors]


def from_arrays(arrays: Sequence[Bytes], tensors: Sequence[Tensor]) -> None:
    """Overwrites tensors with arrays that `to_arrays` made."""
    with torch.no_grad():
        for array, tensor in zip(arrays, tensors, strict=True):
            tensor.copy_(torch.from_numpy(array).view(tensor.dtype).view(tensor.shape))


def flat_gradient(parameters: Sequence[nn.Parameter]) -> tuple[Floats, Flags]:
    """Returns the `gradient` and `used` of a `GradientSum` from the `.grad` of parameters; zeros for a missing `.grad`.

    Raises ValueError for a sparse gradient.
    """
    if any(p.grad is not None and p.grad.layout != torch.strided for p in parameters):
        raise ValueError(
            "spec.build: a parameter has a sparse gradient, but Spark aggregates only dense ones; build the embedding "
            "with sparse=False, or set parallel.strategy to ddp"
        )
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([piece.detach().reshape(-1).to(dtype) for piece in pieces])
    return flat.cpu().numpy(), np.array([p.grad is not None for p in parameters])


def set_gradient(total: GradientSum, parameters: Sequence[nn.Parameter]) -> None:
    """Sets the `.grad` of parameters to a sum over all ranks; None if no rank had a gradient."""
    assert total.used is not None
    chunks = torch.from_numpy(total.gradient).split([p.numel() for p in parameters])
    for parameter, chunk, is_used in zip(parameters, chunks, total.used, strict=True):
        parameter.grad = chunk.view(parameter.shape).to(parameter.dtype) if is_used else None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _NAMES:
            raise pickle.UnpicklingError(
                f"a task sent an object with {module}.{name}, expected a sum of gradients; it was not read, and the "
                "executors cannot be trusted"
            )
        return super().find_class(module, name)


def only_gradients(parts: RDD[GradientSum]) -> RDD[GradientSum]:
    """Returns the RDD. The driver reads only gradient sums in its results, and in those of RDDs that are made of it.

    Other results raise pickle.UnpicklingError. Called on the driver.
    """
    from pyspark.serializers import AutoBatchedSerializer, CPickleSerializer

    class Received(CPickleSerializer):  # type: ignore[misc]
        def loads(self, obj: bytes, encoding: str = "bytes") -> Any:
            return _Unpickler(io.BytesIO(obj), encoding=encoding).load()

        def __reduce__(self) -> Any:  # tasks write as ever
            return CPickleSerializer, ()

    # NOTE: RDDs take the serializer of their context. A context with this serializer, which is otherwise the user's
    # own, leaves all other RDDs of the session as they are.
    context = object.__new__(type(parts.ctx))
    context.__dict__.update(vars(parts.ctx), serializer=AutoBatchedSerializer(Received()))
    parts.ctx = context
    return parts
