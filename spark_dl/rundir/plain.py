"""What a checkpoint can hold: tensors and plain data, which `torch.load(weights_only=True)` reads back."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_SCALARS = (type(None), bool, int, float, complex, str, bytes, bytearray)
_OF_TORCH = (torch.Size, torch.dtype, torch.device, torch.layout)
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


def plain_state(
    value: Any, owner: str, *, of_scheduler: bool = False, on_tensor: Callable[[str, Tensor], Tensor] | None = None
) -> Any:
    """Returns a state that can be saved, with new containers and the same tensors. NumPy scalars become numbers.

    Types are compared exactly: a subclass, such as an IntEnum or a namedtuple, would not be read back as what it is.
    owner: names the state in errors, and in the paths of `on_tensor`.
    of_scheduler: leaves out functions and makes dicts of counters, as torch's schedulers make them again.
    on_tensor: (path, tensor) -> the tensor in its place.

    Raises ValueError, with owner, key and type, for anything else, unless it is of a type that
    `torch.serialization.add_safe_globals` allows.
    """
    return _Conversion(of_scheduler, on_tensor).of(value, owner)


class _Conversion:
    def __init__(self, of_scheduler: bool, on_tensor: Callable[[str, Tensor], Tensor] | None):
        self._of_scheduler, self._on_tensor = of_scheduler, on_tensor
        self._around: set[int] = set()
        """Containers that the value is in."""
        self._safe = {kind for kind in torch.serialization.get_safe_globals() if isinstance(kind, type)}

    def of(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _TENSORS or (isinstance(value, Tensor) and kind in self._safe):
            return self._on_tensor(path, value) if self._on_tensor is not None else value
        if isinstance(value, np.generic) and type(number := value.item()) in _SCALARS:
            return number
        if kind in _SCALARS or kind in _OF_TORCH or kind in self._safe:
            return value
        if self._of_scheduler and kind in (Counter, defaultdict):
            kind = dict
        if kind in (dict, OrderedDict, Counter, list, tuple, set):
            return self._of_container(kind, value, path)
        raise ValueError(
            f"{path}: found a {type(value).__module__}.{type(value).__qualname__} in its state, which cannot be saved "
            "in a checkpoint; expected tensors, numbers and strings, in dicts, lists and tuples"
        )

    def _of_container(self, kind: type, value: Any, path: str) -> Any:
        if id(value) in self._around:
            raise ValueError(f"{path}: found a {kind.__name__} that contains itself, which cannot be saved")
        self._around.add(id(value))
        found: Any
        if kind in (list, tuple):
            found = kind(self.of(part, f"{path}[{i}]") for i, part in enumerate(value))
        elif kind is set:
            found = {self.of(part, path) for part in value}
        else:
            items = value.items()
            if self._of_scheduler:
                items = [(key, part) for key, part in items if not callable(part)]
            found = kind()
            for key, part in items:
                found[self.of(key, path)] = self.of(part, f"{path}[{key!r}]")
            if kind is OrderedDict and (about := getattr(value, "_metadata", None)) is not None:
                found._metadata = self.of(about, f"{path}._metadata")  # versions of modules, which loading needs
        self._around.remove(id(value))
        return found
