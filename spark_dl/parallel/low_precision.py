"""Models whose weights are in bfloat16 (`train.precision: bf16`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree


@dataclass(frozen=True)
class InBfloat16:
    """A `ModelSpec.build` whose model has its weights, and computes, in bfloat16. Called on every rank."""

    build: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        """Builds the model. It takes and returns float32 tensors as before."""
        model = self.build()
        if isinstance(model, nn.Module):  # another type is reported by the caller
            to_bfloat16(model)
        return model


def to_bfloat16(model: nn.Module) -> None:
    """Casts the weights of a model to bfloat16, in place. Modules with weights cast what they get as they are called.

    Modules with a floating point buffer of their own stay in float32, such as BatchNorm: a running mean in bfloat16
    stands still, as its updates are too small. The model returns float32 tensors.
    """
    for module in model.modules():
        if any(buffer.is_floating_point() for buffer in module.buffers(recurse=False)):
            module.register_forward_pre_hook(_cast_inputs(torch.float32), with_kwargs=True)
            if module is not model:
                module.register_forward_hook(_cast_outputs(torch.bfloat16))
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.bfloat16)
        if module is model or next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(_cast_inputs(torch.bfloat16), with_kwargs=True)
    model.register_forward_hook(_cast_outputs(torch.float32))


def _cast_inputs(dtype: torch.dtype) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast(args, dtype), _cast(kwargs, dtype) if kwargs else kwargs

    return hook


def _cast_outputs(dtype: torch.dtype) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, dtype)

    return hook


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Casts the tensors of float32 and bfloat16 in nested values."""
    if isinstance(values, Tensor):
        return values.to(dtype) if values.dtype in (torch.float32, torch.bfloat16) else values
    if type(values) is tuple and len(values) == 1:  # the argument of most modules
        return (_cast(values[0], dtype),)
    return _pytree.tree_map(lambda value: _cast(value, dtype) if isinstance(value, Tensor) else value, values)
