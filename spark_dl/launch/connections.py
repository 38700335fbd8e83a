"""TCP connections between ranks, in addition to those of the process group.

A rank opens a port and publishes it by name in the run's store, and other ranks connect to it. A connection must begin
with the token in the store. Other programs on the network therefore cannot connect by mistake.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch.distributed as dist

from spark_dl.world import World

_HELLO_S = 5.0
_WELCOME = b"\x01"


class Peer(NamedTuple):
    """The rank at the other end of a connection."""

    rank: int
    host: str
    sock: socket.socket


class Port:
    """A port of this rank, published in the run's store as `name`. Error messages call it `title`.

    A context manager. It closes the port, but not the accepted connections.
    """

    def __init__(self, world: World, name: str, title: str):
        self._title, self._token = title, secrets.token_hex(32)
        self._listener = socket.socket(socket.AF_INET6 if ":" in world.address else socket.AF_INET)
        self._listener.bind((world.address, 0))
        self._listener.listen(1024)
        about = {"address": world.address, "port": self._listener.getsockname()[1], "host": world.host}
        world.store.set(name, json.dumps({**about, "title": title, "token": self._token}))

    def __enter__(self) -> Port:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.close()

    def accept(self, expected: Iterable[int], timeout_s: float) -> list[Peer]:
        """Waits for the connections of the expected ranks, and returns them. The ranks wait until all have connected.

        Raises RuntimeError that names the ranks that do not connect within `timeout_s`.
        """
        missing, end = set(expected), time.monotonic() + timeout_s
        peers: list[Peer] = []
        with contextlib.ExitStack() as on_error:
            while missing:
                self._listener.settimeout(max(0.001, end - time.monotonic()))
                try:
                    sock, _ = self._listener.accept()
                except TimeoutError:
                    raise RuntimeError(
                        f"ranks {sorted(missing)} did not connect to {self._title} within {timeout_s:g} s "
                        "(launch.start_timeout_s); executors must reach each other on any port"
                    ) from None
                on_error.enter_context(sock)
                hello = _read_hello(sock)
                has_token = hmac.compare_digest(str(hello.get("token")).encode(), self._token.encode())
                if not has_token or hello["rank"] not in missing:
                    sock.close()
                    continue
                missing.remove(hello["rank"])
                peers.append(Peer(hello["rank"], hello["host"], sock))
            for peer in peers:
                peer.sock.settimeout(timeout_s)
                peer.sock.sendall(_WELCOME)
            on_error.pop_all()
        return peers


def connect(world: World, name: str, rank: int, timeout_s: float) -> Peer:
    """Connects to the port that `rank` publishes as `name`. Returns when all ranks that it expects have connected.

    Operations on the socket wait at most `timeout_s`, also on the sockets of `Port.accept`.
    Raises RuntimeError with the rank and its host if the connection fails, and if `rank` does not publish a port in
    time.
    """
    try:
        about = json.loads(world.store.get(name))
    except dist.DistStoreError as error:
        raise RuntimeError(
            f"rank {world.rank} on host {world.host} waited for rank {rank} to open a port ({name}) for longer than "
            "launch.start_timeout_s; if that rank is slow, for example in spec.build, raise launch.start_timeout_s"
        ) from error
    hello = json.dumps({"token": about["token"], "rank": world.rank, "host": world.host}).encode()
    try:
        with contextlib.ExitStack() as on_error:
            address = (about["address"], about["port"])
            sock = on_error.enter_context(socket.create_connection(address, timeout=timeout_s))
            sock.sendall(len(hello).to_bytes(4, "big") + hello)
            if _read_exactly(sock, len(_WELCOME)) != _WELCOME:
                raise ConnectionError("Connection closed by peer before all ranks had connected")
            on_error.pop_all()
    except OSError as error:
        raise RuntimeError(
            f"rank {world.rank} on host {world.host} cannot reach {about['title']}, rank {rank} on host "
            f"{about['host']}, at {about['address']}:{about['port']}: {error}; executors must reach each other on any "
            "port"
        ) from error
    return Peer(rank, about["host"], sock)


def _read_hello(sock: socket.socket) -> dict[str, Any]:
    """Reads the first message of a connection. Returns {} if none comes in time: no client may block others."""
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
