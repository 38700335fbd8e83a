"""Closes the ports of Gloo to others as soon as the ranks have connected.

Gloo listens for as long as its process group exists, and takes the connections of anybody. Ranks that have connected
need no further ones. From then on the kernel drops what arrives at these ports: a filter of the listening socket, which
needs no privileges and which Gloo does not notice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import distributed_c10d

_HELPER = "_new_process_group_helper"
"""The function of torch that makes every process group. Gloo has connected when it returns."""
_SO_ATTACH_FILTER = getattr(socket, "SO_ATTACH_FILTER", 26)
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET, 0 bytes of each packet


def close_when_connected() -> Callable[[], None]:
    """Closes the ports of each Gloo process group of this process from now on, in `torch` or by it, when it is made.

    Returns a function that ends this.
    """
    make: Callable[..., Any] | None = getattr(distributed_c10d, _HELPER, None)
    if make is None or not sys.platform.startswith("linux"):
        return lambda: None

    def make_and_close(*args: Any, **kwargs: Any) -> Any:
        before = _listening()
        made = make(*args, **kwargs)
        backend = args[3] if len(args) > 3 else kwargs.get("backend")
        if _is_gloo(backend):
            for inode, descriptor in _listening().items():
                if inode not in before:
                    _drop_all(descriptor)
        return made

    setattr(distributed_c10d, _HELPER, make_and_close)
    return lambda: setattr(distributed_c10d, _HELPER, make)


@contextlib.contextmanager
def closed_when_connected() -> Iterator[None]:
    """Closes the ports of each Gloo process group that is made in the block, as `close_when_connected` does."""
    end = close_when_connected()
    try:
        yield
    finally:
        end()


def _is_gloo(backend: Any) -> bool:
    """Whether a process group only has Gloo, and has connected: NCCL and MPI connect when the first tensor is sent."""
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() in ("1", "true", "on", "yes"):
        return False
    name = str(backend).lower()
    return name == "gloo" or (not torch.cuda.is_available() and name in ("none", "undefined", "cpu:gloo,cuda:nccl"))


def _listening() -> dict[str, int]:
    """Returns the listening TCP sockets of this process: a descriptor for each inode."""
    ports: dict[str, int] = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime
            inode = os.readlink(f"/proc/self/fd/{entry}")
            if inode.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry))) as sock:
                    is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
                    if is_tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        ports[inode] = int(entry)
    return ports


def _drop_all(descriptor: int) -> None:
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
