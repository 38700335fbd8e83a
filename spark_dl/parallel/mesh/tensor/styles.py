"""How a module is cut and called: one of torch's parallel styles for each word of a tensor plan.

The parameters stay plain tensors: a rank's slices. torch's own styles make them DTensors, which `clip_grad_norm_` does
not take together with other tensors, and send three all-reduces in the backward pass where three projections have the
same input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from spark_dl.parallel.mesh.tensor.flow import Flow, map_input, wrap_forward
from spark_dl.parallel.mesh.tensor.functions import joined, scattered, sliced, summed, with_equal_gradients
from spark_dl.parallel.mesh.tensor.words import COLUMNS, is_conv1d, outputs


class Columns(ParallelStyle):
    """A linear layer whose outputs are cut.

    enter: turns the input into what the layer gets, whose gradient is summed over the ranks.
    """

    def __init__(self, name: str, word: str, flow: Flow, enter: Callable[[Tensor], Tensor]):
        self.name, self.word, self.flow, self.enter = name, word, flow, enter

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        flow, features = self.flow, outputs(module)
        parts = COLUMNS[self.word]
        if is_conv1d(module):
            vars(module)["nf"] = features // flow.ranks.size
        gathers = self.word == "colwise_gather_output"

        def around(inner: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            args, kwargs = map_input(self.enter, args, kwargs)
            out = _packed(module, args[0]) if parts > 1 and is_conv1d(module) else inner(*args, **kwargs)
            if gathers:
                flow.leave(sequence=None)
                return joined(out, out.ndim - 1, features, flow.ranks)
            flow.columns, flow.columns_of = out.shape, self.name
            return out

        wrap_forward(module, around)
        return module


class Rows(ParallelStyle):
    """A linear layer whose inputs are cut, and whose outputs are summed over the ranks.

    sequence: axis of the output of which this rank gets a slice; None: it gets the whole output.
    """

    def __init__(self, name: str, word: str, flow: Flow, sequence: int | None):
        self.name, self.splits, self.flow, self.sequence = name, word == "rowwise_split_input", flow, sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        flow, is_conv = self.flow, is_conv1d(module)

        def multiply(x: Tensor) -> Tensor:
            if self.splits:
                x = sliced(x, x.ndim - 1, flow.ranks)
            weight: Any = module.weight.t() if is_conv else module.weight  # type: ignore[operator]
            if x.shape[-1] != weight.shape[1]:
                raise ValueError(
                    f"spec.tensor_plan: expected {weight.shape[1]} inputs for {self.name!r}, this rank's slice of what "
                    f"a layer before has cut, found {x.shape[-1]}; 'rowwise_split_input' takes whole inputs"
                )
            return end_rows(F.linear(x, weight), module.bias, flow, self.sequence)  # type: ignore[arg-type]

        wrap_forward(module, lambda inner, x: multiply(x))
        return module


class Vocabulary(ParallelStyle):
    """An embedding of which each rank has some rows."""

    def __init__(self, flow: Flow):
        self.flow = flow

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        ranks = self.flow.ranks
        start, stop = ranks.bounds(module.num_embeddings)
        if module.padding_idx is not None:
            padding = module.padding_idx - start
            module.padding_idx = padding if 0 <= padding < stop - start else None

        def around(inner: Callable[..., Tensor], ids: Tensor) -> Tensor:
            if ids.device.type == "cpu" and not ((ids >= 0) & (ids < module.num_embeddings)).all():
                low, high = ids.aminmax()
                raise IndexError(f"expected indices in [0, {module.num_embeddings}), found {int(low)} to {int(high)}")
            own = (ids >= start) & (ids < stop)
            out = inner((ids - start).where(own, 0))
            return summed(out.masked_fill(~own.unsqueeze(-1), 0), ranks)

        wrap_forward(module, around)
        return module


def end_rows(out: Tensor, bias: Tensor | None, flow: Flow, sequence: int | None) -> Tensor:
    """Returns the output of a layer that is cut by rows, from this rank's part of the sum. Collective."""
    flow.leave(sequence=sequence)
    if sequence is None:
        out = summed(out, flow.ranks)
    else:
        flow.length = out.shape[sequence]
        out = scattered(out, sequence, flow.ranks)
    if bias is None:
        return out
    if torch.is_grad_enabled() and bias.requires_grad:
        (bias,) = with_equal_gradients([bias], flow.ranks, sums=sequence is not None)
    return out + bias.to(out.dtype)


def _packed(module: Any, x: Tensor) -> Tensor:
    """Calls Hugging Face's Conv1D with slices of the matrices in its weight, [matrices, inputs, outputs / matrices]."""
    weight = module.weight.transpose(0, 1).flatten(1)
    out = torch.addmm(module.bias, x.reshape(-1, x.shape[-1]), weight)
    return out.view(*x.shape[:-1], out.shape[-1])
