"""Who a rank is among the others, and by which address they reach it."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """Who a rank is among the others. `rank` is in [0; world_size - 1], `local_rank` counts the ranks of one host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    device: torch.device
    store: dist.Store
    gpus: tuple[torch.device, ...] = ()
    """All GPUs of the task, of which `device` is the first; none where it is the CPU."""
    socket_interface: str = ""
    """Network interface that GLOO_SOCKET_IFNAME names; empty where it names none."""
    report: Callable[[Mapping[str, Any]], None] = field(default=lambda event: None, repr=False)
    """Sends an event (a small dict that JSON can hold) to the driver; never waits and never raises."""

    @property
    def address(self) -> str:
        """IP address by which other ranks reach this host: that of `socket_interface`, or of the host's name.

        Raises RuntimeError if the host's name has none.
        """
        return _ipv4_of(self.socket_interface) or local_address(self.host)

    @property
    def interface(self) -> str | None:
        """Network interface with `address`, or None if no one has it."""
        return interface_of(self.address)


def local_address(host: str) -> str:
    """The IP address of this host by the name that Spark knows it by. Raises RuntimeError if it has none."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RuntimeError(f"the executor's own host name {host!r} does not resolve: {error}") from error
    by_family = sorted(infos, key=lambda info: info[0] != socket.AF_INET)  # IPv4 first
    return str(by_family[0][4][0])


def interface_of(address: str) -> str | None:
    """The network interface with this IPv4 address, or None."""
    return next((name for _, name in socket.if_nameindex() if _ipv4_of(name) == address), None)


def _ipv4_of(interface: str) -> str | None:
    """The IPv4 address of a network interface, or None."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        request = struct.pack("256s", interface.encode()[:15])
        found = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
        return socket.inet_ntoa(found[20:24])
    return None
