"""The bytes of all tensors of a process, from their storages, while a block runs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Knows the storages of all tensors that operations return in the block, until they are freed.

    So nothing is left out: flat buffers, gathered weights, what an exchange needs, activations. Each storage counts
    once, with the bytes that it has at that time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}
        """Of the live storages, by their address, which later ones can have again."""
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._bytes: dict[int, int] = {}
        """Of the live storages, when they were last seen, by their number."""
        self._next = itertools.count()
        self._total = 0
        self._peak: dict[int, int] | None = None
        self._peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, found)):
            if isinstance(leaf, Tensor):
                self._see(storage_of(leaf))
        # FSDP frees gathered weights without an operation, so the total can be too large until all are seen.
        if self._peak is not None and self._total > self._peak_bytes:
            now = self.now()
            if self._total > self._peak_bytes:
                self._peak, self._peak_bytes = now, self._total
        return found

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "meta":
            return
        address, size = storage._cdata, storage.nbytes()
        if address not in self._numbers:
            number = self._numbers[address] = next(self._next)
            self._live[number] = weakref.ref(storage, lambda _: self._forget(address))
        number = self._numbers[address]
        self._total += size - self._bytes.get(number, 0)
        self._bytes[number] = size

    def _forget(self, address: int) -> None:
        number = self._numbers.pop(address)
        del self._live[number]
        self._total -= self._bytes.pop(number)

    def now(self) -> dict[int, int]:
        """Returns the bytes of each storage that exists now, by its number."""
        for ref in list(self._live.values()):
            if (storage := ref()) is not None:
                self._see(storage)
        return dict(self._bytes)

    def by_kind(self, by_storage: Mapping[int, int], kinds: Mapping[str, Iterable[Tensor]]) -> dict[str, int]:
        """Returns the bytes of each kind of tensors, and of all others as `other`. A storage is of the first kind."""
        left = dict(by_storage)
        found = {}
        for kind, tensors in kinds.items():
            numbers = (self._numbers.get(storage_of(tensor)._cdata, -1) for tensor in tensors)
            found[kind] = sum(left.pop(number, 0) for number in numbers)
        return {**found, "other": sum(left.values())}

    def start_peak(self) -> None:
        """Forgets the peak so far."""
        self._peak, self._peak_bytes = {}, 0

    @property
    def peak(self) -> dict[int, int]:
        """The bytes of each storage at the time when they were most in all, since `start_peak`."""
        assert self._peak is not None, "call start_peak first"
        return dict(self._peak)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Returns the storage of a tensor; of a DTensor, that of the elements that this rank has."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
