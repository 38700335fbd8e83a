"""A rank's place among the ranks, and its network address."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


def no_driver(event: Mapping[str, Any]) -> None:
    """The report of a rank that no driver has started, such as under torchrun."""


@dataclass(frozen=True)
class World:
    """A rank's place among the ranks: `rank` in [0, world_size), `local_rank` in [0, local_world_size).

    Local ranks number the ranks of a host. Ranks of a host that see different GPUs are numbered apart.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    device: torch.device
    store: dist.Store
    gpus: tuple[torch.device, ...] = ()
    """All GPUs of the task; `device` is the first one. Empty on the CPU."""
    backend: str = "gloo"
    """Backend of the default process group: `nccl`, or `gloo` on CPUs, and on GPUs that several ranks share."""
    child_env: Mapping[str, str] = field(default_factory=dict)
    """Variables for a child process, in which the GPU of local rank n has the index n. Empty on the CPU."""
    part: int | None = None
    """Which part of each global batch this rank trains on, if not that of its rank."""
    num_parts: int | None = None
    """Number of parts of each global batch, if not one per rank."""
    seed_part: int | None = None
    """Number that sets the random numbers of this rank apart, if not its rank."""
    holds_store: bool = False
    """Whether this process holds the store, so that it must leave last."""
    socket_interface: str = ""
    """Network interface of GLOO_SOCKET_IFNAME; empty if it is not set."""
    report: Callable[[Mapping[str, Any]], None] = field(default=no_driver, repr=False)
    """Sends an event, a small JSON-serializable dict, to the driver. Does not block and does not raise."""
    ends_run: Callable[[Mapping[str, Any]], bool] | None = field(default=None, repr=False)
    """Called on rank 0 after each epoch, with its entry in the history: whether the run ends there, as a trial that is
    pruned does. None: it never does. Waits for the driver."""

    @property
    def data_rank(self) -> int:
        """Which part of each global batch this rank trains on, in [0, data_size)."""
        return self.rank if self.part is None else self.part

    @property
    def data_size(self) -> int:
        """Number of parts of each global batch: of ranks, or groups of ranks, that train on different rows."""
        return self.world_size if self.num_parts is None else self.num_parts

    @property
    def seed_rank(self) -> int:
        """Number that sets the random numbers of this rank apart. Ranks with the same one draw the same numbers."""
        return self.rank if self.seed_part is None else self.seed_part

    @property
    def address(self) -> str:
        """IP address of this host for other ranks: that of `socket_interface`, or of the host name.

        Raises RuntimeError if the host name does not resolve.
        """
        return address_of(self.host, self.socket_interface)

    @property
    def interface(self) -> str | None:
        """Network interface with `address`, or None."""
        return interface_of(self.address)


def address_of(host: str, socket_interface: str) -> str:
    """Returns the IP address of this host for other ranks: that of `socket_interface`, or of the host name.

    Raises RuntimeError if the host name does not resolve.
    """
    return _ipv4_of(socket_interface) or local_address(host)


def local_address(host: str) -> str:
    """Returns the IP address of a host name that Spark uses. Raises RuntimeError if it does not resolve."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RuntimeError(f"the executor's host name {host!r} does not resolve: {error}") from error
    by_family = sorted(infos, key=lambda info: info[0] != socket.AF_INET)  # IPv4 first
    return str(by_family[0][4][0])


def interface_of(address: str) -> str | None:
    """Returns the network interface with this IP address, or None."""
    if ":" in address:
        return _ipv6_interfaces().get(ipaddress.ip_address(address.partition("%")[0]))
    return next((name for _, name in socket.if_nameindex() if _ipv4_of(name) == address), None)


def _ipv6_interfaces() -> dict[Any, str]:
    """Returns the network interfaces of this host by their IPv6 addresses. See proc_net(5)."""
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        return {ipaddress.IPv6Address(bytes.fromhex(line.split()[0])): line.split()[-1] for line in file}
    return {}


def _ipv4_of(interface: str) -> str | None:
    """Returns the IPv4 address of a network interface, or None."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        request = struct.pack("256s", interface.encode()[:15])
        found = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
        return socket.inet_ntoa(found[20:24])
    return None
