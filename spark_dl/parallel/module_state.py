"""What modules keep beside their parameters: buffers, plain attributes, generators. To restore it, or name changes."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module that are no state of the user's: parameters, buffers, modules, hooks."""
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter)


class ModuleState:
    """The state of a model's modules at one moment, without its parameters.

    Attributes of other types than numbers, strings, arrays, tensors, generators and containers of these are not kept.
    """

    def __init__(self, model: nn.Module):
        self._modules = dict(model.named_modules())
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._attributes = {name: _attributes_of(module) for name, module in self._modules.items()}
        generators = [v for m in self._modules.values() for v in vars(m).values() if isinstance(v, torch.Generator)]
        self._generators = [(generator, generator.get_state()) for generator in generators]

    @torch.no_grad()
    def restore(self) -> None:
        """Sets everything as it was."""
        for buffer, before in self._buffers:
            buffer.copy_(before)
        for generator, state in self._generators:
            generator.set_state(state)
        for name, module in self._modules.items():
            before_of, now = self._attributes[name], module.__dict__
            for key, value in before_of.items():
                if not _same(now.get(key, _MISSING), value):
                    now[key] = value
            for key in [k for k, v in now.items() if k not in before_of and k not in _OF_TORCH and _is_plain(v)]:
                del now[key]

    def changed_unsaved(self) -> list[str]:
        """Returns the names of what has changed since, and is not in checkpoints.

        These are attributes, generators, and buffers that are not persistent; not those of modules that save a state
        of their own (`get_extra_state`), nor of metrics, which begin anew in each epoch.
        """
        found = []
        before_of = {id(buffer): before for buffer, before in self._buffers}
        for name, module in self._modules.items():
            if type(module).get_extra_state is not nn.Module.get_extra_state or hasattr(module, "compute_on_cpu"):
                continue
            of = f"{type(module).__name__}{f' ({name})' if name else ''}"
            now, before = vars(module), self._attributes[name]
            for key, value in now.items():
                if key in _OF_TORCH or key == "training":
                    continue
                if isinstance(value, torch.Generator):
                    if any(g is value and not torch.equal(g.get_state(), state) for g, state in self._generators):
                        found.append(f"{key!r} of {of}")
                elif key in before and not _same(value, before[key]):
                    found.append(f"{key!r} of {of}")
            for key in sorted(module._non_persistent_buffers_set):
                buffer = module._buffers.get(key)
                if buffer is not None and id(buffer) in before_of and not _same(buffer, before_of[id(buffer)]):
                    found.append(f"the buffer {key!r} of {of}")
        return found


@contextlib.contextmanager
def module_state_kept(model: nn.Module) -> Iterator[None]:
    """Restores buffers, plain attributes and generators of a model's modules after the block."""
    state = ModuleState(model)
    try:
        yield
    finally:
        state.restore()


_MISSING = object()


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {n: _copied(v) for n, v in vars(module).items() if n not in _OF_TORCH and _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, _ATOMS):
        return True
    if isinstance(value, (Tensor, np.ndarray)):
        # A tensor with a graph belongs to a pass, and a cast of a lazy tensor is no copy.
        return not isinstance(value, nn.Parameter) and not (isinstance(value, Tensor) and value.requires_grad)
    if type(value) in _MAPPINGS:
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    return type(value) in _CONTAINERS and all(map(_is_plain, value))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in _MAPPINGS:
        return type(value)((k, _copied(v)) for k, v in value.items())
    if isinstance(value, collections.deque):
        return collections.deque(map(_copied, value), value.maxlen)
    return type(value)(map(_copied, value)) if type(value) in _CONTAINERS else value


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (Tensor, np.ndarray)):
        if a.shape != b.shape or a.dtype != b.dtype or (isinstance(a, Tensor) and a.device != b.device):
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if type(a) in _MAPPINGS:
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    if type(a) in (list, tuple, collections.deque):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or (a != a and b != b)
