"""TCP connections between ranks, in addition to those of the process group.

A rank opens a port and publishes it by name in the run's store, and other ranks connect to it. Both sides of a
connection prove that they know the token in the store, without sending it (`watch.authenticate`). Other programs on the
network therefore cannot connect, not even with messages that they have overheard.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from multiprocessing import AuthenticationError, connection
from typing import NamedTuple

import torch.distributed as dist

from spark_dl.launch.watch import Address, accept_all, authenticate, shut
from spark_dl.launch.watch import connect as connect_with_secret
from spark_dl.world import World

_MAX_HELLO = 4096
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
        self._clients: set[connection.Connection] = set()
        self._listener = socket.socket(socket.AF_INET6 if ":" in world.address else socket.AF_INET)
        self._listener.bind((world.address, 0))
        self._listener.listen(1024)
        about = {"address": world.address, "port": self._listener.getsockname()[1], "host": world.host}
        world.store.set(name, json.dumps({**about, "title": title, "token": self._token}))

    def __enter__(self) -> Port:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for conn in list(self._clients):  # not let in
            shut(conn)

    def accept(self, expected: Iterable[int], timeout_s: float) -> list[Peer]:
        """Waits for the connections of the expected ranks, and returns them. The ranks wait until all have connected.

        Clients are let in side by side, so that one that says nothing keeps no other waiting.
        Raises RuntimeError that names the ranks that do not connect within `timeout_s`.
        """
        missing, end = set(expected), time.monotonic() + timeout_s
        arrived: queue.Queue[Peer] = queue.Queue()

        def let_in(conn: connection.Connection) -> None:
            with contextlib.suppress(OSError, EOFError, ValueError, KeyError, TypeError), conn:
                is_rank = authenticate(conn, self._token.encode())
                hello = json.loads(conn.recv_bytes(_MAX_HELLO)) if is_rank else {}
                self._clients.discard(conn)  # before it arrives, as `__exit__` shuts down those that are left
                if is_rank:
                    arrived.put(Peer(int(hello["rank"]), str(hello["host"]), _socket_of(conn)))
            self._clients.discard(conn)

        arguments = (self._listener, self._clients, let_in, "spark_dl port")
        threading.Thread(target=accept_all, args=arguments, name="spark_dl port", daemon=True).start()
        peers: list[Peer] = []
        with contextlib.ExitStack() as on_error:
            while missing:
                try:
                    peer = arrived.get(timeout=max(0.001, end - time.monotonic()))
                except queue.Empty:
                    raise RuntimeError(
                        f"ranks {sorted(missing)} did not connect to {self._title} within {timeout_s:g} s "
                        "(launch.start_timeout_s); executors must reach each other on any port"
                    ) from None
                on_error.enter_context(peer.sock)
                if peer.rank not in missing:
                    peer.sock.close()
                    continue
                missing.remove(peer.rank)
                peers.append(peer)
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
    hello = json.dumps({"rank": world.rank, "host": world.host}).encode()
    address = Address(about["address"], about["port"], about["token"].encode())
    try:
        with contextlib.ExitStack() as on_error:
            with connect_with_secret(address, timeout_s) as conn:
                conn.send_bytes(hello)
                sock = on_error.enter_context(_socket_of(conn))
            sock.settimeout(timeout_s)
            if sock.recv(len(_WELCOME)) != _WELCOME:
                raise ConnectionError("Connection closed by peer before all ranks had connected")
            on_error.pop_all()
    except (OSError, AuthenticationError) as error:
        raise RuntimeError(
            f"rank {world.rank} on host {world.host} cannot reach {about['title']}, rank {rank} on host "
            f"{about['host']}, at {about['address']}:{about['port']}: {error}; executors must reach each other on any "
            "port"
        ) from error
    return Peer(rank, about["host"], sock)


def _socket_of(conn: connection.Connection) -> socket.socket:
    """Returns a socket of the connection, which stays open when that is closed."""
    return socket.socket(fileno=os.dup(conn.fileno()))
