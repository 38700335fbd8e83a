"""How the tensors of a step are laid out and computed: memory format, and `torch.compile`."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spark_dl.spec import Batch

if TYPE_CHECKING:
    from spark_dl.config import Config


def apply_layout(module: nn.Module, config: Config) -> None:
    """Applies `train.channels_last` and `train.compile` to a module, in place. Called on a rank, before the first step.

    Parameters stay the same objects, with the same names. Wrappers such as DDP call the compiled module.
    """
    if config.train.channels_last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # of tensors with 4 axes
    if config.train.compile:
        _compile(module)


def _compile(module: nn.Module) -> None:
    """Compiles the calls of a module, in place, so that wrappers such as DDP need not know.

    NOTE: `module.compile()` compiles nothing if the class of the module is torch's own, such as `nn.Sequential`: torch
    skips the frames of its own files. This function's frame is not skipped. Its code is a copy, as torch keeps compiled
    graphs by code, at most eight: a process that trains nine models, one after another, would stop compiling.
    """
    call = module._call_impl

    def call_module(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    own = types.FunctionType(call_module.__code__.replace(), globals(), closure=call_module.__closure__)
    module._compiled_call_impl = torch.compile(own)


def to_device(batch: Batch, device: torch.device, config: Config) -> Batch:
    """Copies a batch to a device. With `train.channels_last`, columns of images get that memory format there."""
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    if not config.train.channels_last:
        return moved
    # After the copy: a copy that also changes the format would first change it on the CPU, and then wait.
    return {n: t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t for n, t in moved.items()}
