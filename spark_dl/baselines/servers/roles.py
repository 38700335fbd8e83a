"""Which ranks are servers and which train, and how they connect: to ports that the servers publish in the run's store.

A server takes a connection only if it begins with the token that the store holds, so that what else runs in the network
cannot join by mistake.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from spark_dl.baselines.servers.wire import Wire
from spark_dl.config import Config
from spark_dl.launch.rendezvous import World

_HELLO_S = 5.0
_WELCOME = b"\x01"


@dataclass(frozen=True)
class Roles:
    """Which ranks are what. Raises ValueError if no rank is left to train."""

    rank: int
    world_size: int
    num_servers: int

    def __post_init__(self) -> None:
        if self.num_servers >= self.world_size:
            raise ValueError(
                f"parallel.num_servers: expected fewer than the {self.world_size} ranks that were started, so that "
                f"some train, found {self.num_servers}"
            )

    @property
    def trainers(self) -> range:
        return range(self.world_size - self.num_servers)

    @property
    def servers(self) -> range:
        return range(self.world_size - self.num_servers, self.world_size)

    @property
    def first(self) -> int:
        """The first server, which decides."""
        return self.servers[0]

    @property
    def is_server(self) -> bool:
        return self.rank in self.servers

    @property
    def block(self) -> int:
        """The number of a server's block."""
        return self.rank - self.first


def connect_all(world: World, roles: Roles, config: Config, most_numbers: int) -> Wire:
    """Connects every trainer with every server, and these with the first of them. Collective.

    `most_numbers` is the length of the longest block. Raises RuntimeError if ranks do not come in time.
    """

    def name(rank: int) -> str:
        return f"parameter_server/{rank}"

    timeout_s = config.launch.start_timeout_s
    wire = Wire(most_numbers)
    try:
        if not roles.is_server:
            for server in roles.servers:
                connect(wire, world, name(server), server, timeout_s)
            return wire
        listener, token = listen(world, name(world.rank))
        with listener:
            if world.rank != roles.first:
                connect(wire, world, name(roles.first), roles.first, timeout_s)
            followers = roles.servers[1:] if world.rank == roles.first else ()
            accept(wire, listener, token, [*roles.trainers, *followers], timeout_s)
    except BaseException:
        wire.close()
        raise
    return wire


def listen(world: World, name: str) -> tuple[socket.socket, str]:
    """Opens a port and publishes it in the run's store by `name`. Returns the socket, and the token that opens it."""
    address = world.address
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen(1024)
    token = secrets.token_hex(32)
    about = {"address": address, "port": listener.getsockname()[1], "host": world.host, "token": token}
    world.store.set(name, json.dumps(about))
    return listener, token


def accept(wire: Wire, listener: socket.socket, token: str, expected: Iterable[int], timeout_s: float) -> None:
    """Takes a connection from each of the expected ranks, which wait until all have come.

    Raises RuntimeError that names those that do not come within `timeout_s`.
    """
    missing, end = set(expected), time.monotonic() + timeout_s
    accepted: list[tuple[dict[str, Any], socket.socket]] = []
    while missing:
        listener.settimeout(max(0.001, end - time.monotonic()))
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            raise RuntimeError(
                f"ranks {sorted(missing)} did not connect to the parameter server within {timeout_s:g} s "
                "(launch.start_timeout_s); executors must reach each other on any port"
            ) from None
        hello = _read_hello(sock)
        is_ours = hmac.compare_digest(str(hello.get("token")).encode(), token.encode())
        if not is_ours or hello["rank"] not in missing:
            sock.close()
            continue
        missing.remove(hello["rank"])
        accepted.append((hello, sock))
    for hello, sock in accepted:
        sock.sendall(_WELCOME)
        wire.add(hello["rank"], hello["host"], sock)


def _read_hello(sock: socket.socket) -> dict[str, Any]:
    """What a new connection says of itself; nothing if it does not within seconds, so that strangers hold up nobody."""
    sock.settimeout(_HELLO_S)
    try:
        hello = json.loads(_read_exactly(sock, min(4096, int.from_bytes(_read_exactly(sock, 4), "big"))))
    except (OSError, ValueError):
        return {}
    return hello if isinstance(hello, dict) else {}


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := sock.recv(size - len(data))):
        data += more
    return data


def connect(wire: Wire, world: World, name: str, rank: int, timeout_s: float) -> None:
    """Connects to the rank that listens by `name`. Raises RuntimeError that names its host if that cannot be."""
    about = json.loads(world.store.get(name))
    hello = json.dumps({"token": about["token"], "rank": world.rank, "host": world.host}).encode()
    try:
        sock = socket.create_connection((about["address"], about["port"]), timeout=timeout_s)
        sock.sendall(len(hello).to_bytes(4, "big") + hello)
        if _read_exactly(sock, len(_WELCOME)) != _WELCOME:
            raise ConnectionError("Connection closed by peer before all ranks had connected")
    except OSError as error:
        raise RuntimeError(
            f"rank {world.rank} on host {world.host} cannot reach the parameter server, rank {rank} on host "
            f"{about['host']}, at {about['address']}:{about['port']}: {error}; executors must reach each other on any "
            "port"
        ) from error
    wire.add(rank, about["host"], sock)
