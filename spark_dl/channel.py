"""Authenticated connections: of ranks to the driver, and of ranks to each other beside those of the process group.

Each side of a connection proves that it knows a secret, by an HMAC-SHA256 of a random question, without sending it.
Other programs on the network therefore cannot connect, not even with messages that they have overheard.
(`multiprocessing.connection` does the same with MD5 before Python 3.12, which hosts in FIPS mode refuse.) Messages are
frames of bytes with their length; nothing is unpickled.

For connections of ranks to each other, a rank opens a port and publishes it by name in the run's store, with a token as
the secret (`Port`, `connect_to_rank`).
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import logging
import math
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import AuthenticationError, connection
from typing import NamedTuple

from spark_dl.world import World

_log = logging.getLogger("spark_dl")
CRASH = "crash"
"""Kind of the first message of a connection for what the handler of a signal writes, and of the event."""
MAX_FRAME = 1 << 20
"""Bytes of an event."""
_AUTH_TIMEOUT_S = 2.0
"""A rank that takes longer, as its imports hold the GIL, connects again (`connect`)."""
_CONNECT_TIMEOUT_S = 10.0
_PROOF_S = 60.0
MEETING_S = 10.0
"""How long ranks wait for the others in the driver's listener, before all of them use Spark's `allGather`."""
_BACKLOG = 1024
_CLOSE_S = 2.0
_ACCEPT_AGAIN_S = 0.1
"""How long to wait after a connection could not be taken, for example as too many files are open."""
_QUESTION_BYTES = 32
_CLIENT, _SERVER = b"client", b"server"
"""The roles in a proof, so that what one side has proved is no proof of the other side."""
_RIGHT, _WRONG = b"right", b"wrong"
_MAX_HELLO = 4096
_WELCOME = b"\x01"


@dataclass(frozen=True)
class Address:
    """The address of a listener, and the secret for connections to it."""

    host: str
    port: int
    secret: bytes


def listen_at(address: str) -> socket.socket:
    """Returns a socket that listens on a free port of an IP address of this host."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen(_BACKLOG)
    return listener


class Server:
    """Serves clients that prove that they know the secret, each in a thread, on a socket that is bound and listens.

    A connection is closed when `serve` returns, and when it raises as the client has gone or sends no messages of ours.

    Args:
        name: of the threads, and in messages.
    """

    def __init__(
        self, listener: socket.socket, secret: bytes, serve: Callable[[connection.Connection], None], name: str
    ):
        self._listener, self._secret, self._serve, self._name = listener, secret, serve, name
        self._connections: set[connection.Connection] = set()
        self._thread = threading.Thread(target=self._accept, name=f"{name} listener", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Closes the port. Connections stay open."""
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        """Closes the port and all connections."""
        self.stop()
        for conn in list(self._connections):
            shut(conn)
        self._thread.join(_CLOSE_S)

    def take(self, conn: connection.Connection) -> socket.socket:
        """Returns a socket of a connection, which stays open when `serve` returns, and on `close`."""
        self._connections.discard(conn)
        return _socket_of(conn)

    def _accept(self) -> None:
        is_said = False
        while True:
            try:
                sock, _ = self._listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                conn = connection.Connection(sock.detach())
                self._connections.add(conn)
                threading.Thread(target=self._serve_client, args=(conn,), name=self._name, daemon=True).start()
            except (OSError, RuntimeError) as error:  # RuntimeError: no more threads
                if self._listener.fileno() < 0 or getattr(error, "errno", None) in (errno.EBADF, errno.EINVAL):
                    return
                if not is_said:
                    _log.warning("%s: cannot take a connection: %s; trying again (see `ulimit -n`)", self._name, error)
                is_said = True
                time.sleep(_ACCEPT_AGAIN_S)

    def _serve_client(self, conn: connection.Connection) -> None:
        with conn, contextlib.suppress(OSError, EOFError, ValueError, KeyError, TypeError):
            try:
                if _authenticate(conn, self._secret):
                    self._serve(conn)
            finally:
                self._connections.discard(conn)


def connect(address: Address, proof_s: float = _PROOF_S, *, lost_s: float = math.inf) -> connection.Connection:
    """Returns a connection on which both sides have proved that they know the secret, within `proof_s`.

    The other side closes the connection of a process that takes seconds to prove it, so it is tried three times.

    Raises OSError if the other side cannot be reached or closes the connection, and AuthenticationError.

    Args:
        lost_s: to send is an error if the other host has not confirmed what was sent for so long. Only on Linux.
    """
    end = time.monotonic() + proof_s
    for is_last in (False, False, True):
        conn = _open(address, lost_s)
        timer = threading.Timer(max(0.0, end - time.monotonic()), shut, (conn,))
        timer.daemon = True
        timer.start()
        try:
            _prove(conn, address.secret, _CLIENT)
            _ask_for_proof(conn, address.secret, _SERVER)
        except (EOFError, ConnectionError):
            conn.close()
            if is_last or time.monotonic() >= end:
                raise ConnectionError("Connection closed by peer") from None
        except BaseException:
            conn.close()
            raise
        else:
            return conn
        finally:
            timer.cancel()
    raise AssertionError


def _open(address: Address, lost_s: float) -> connection.Connection:
    sock = socket.create_connection((address.host, address.port), timeout=_CONNECT_TIMEOUT_S)
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if math.isfinite(lost_s) and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(1000 * lost_s)))
    return connection.Connection(sock.detach())


def _authenticate(conn: connection.Connection, secret: bytes) -> bool:
    """Authenticates a client in bounded time. The connection of a client that sends nothing is closed."""
    timer = threading.Timer(_AUTH_TIMEOUT_S, shut, (conn,))
    timer.daemon = True
    timer.start()
    try:
        _ask_for_proof(conn, secret, _CLIENT)
        _prove(conn, secret, _SERVER)
    except (OSError, EOFError, AuthenticationError):
        return False
    finally:
        timer.cancel()
    return True


def _ask_for_proof(conn: connection.Connection, secret: bytes, role: bytes) -> None:
    """Raises AuthenticationError unless the other side, in its role, knows the secret. Tells it the result."""
    question = os.urandom(_QUESTION_BYTES)
    conn.send_bytes(question)
    is_right = hmac.compare_digest(conn.recv_bytes(_QUESTION_BYTES), _proof(secret, role, question))
    conn.send_bytes(_RIGHT if is_right else _WRONG)
    if not is_right:
        raise AuthenticationError("the other side does not know the secret")


def _prove(conn: connection.Connection, secret: bytes, role: bytes) -> None:
    """Answers `_ask_for_proof`. Raises AuthenticationError if the other side does not take the answer."""
    question = conn.recv_bytes(_QUESTION_BYTES)
    conn.send_bytes(_proof(secret, role, question))
    if conn.recv_bytes(len(_RIGHT)) != _RIGHT:
        raise AuthenticationError("the other side has another secret")


def _proof(secret: bytes, role: bytes, question: bytes) -> bytes:
    return hmac.digest(secret, role + question, "sha256")


def shut(conn: connection.Connection) -> None:
    """Shuts down a connection that another thread reads, so that the thread gets EOFError."""
    with contextlib.suppress(OSError):
        sock = socket.socket(fileno=conn.fileno())  # not a duplicate, for which a descriptor may be missing
        try:
            sock.shutdown(socket.SHUT_RDWR)
        finally:
            sock.detach()


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
        self._title, token = title, secrets.token_hex(32)
        listener = listen_at(world.address)
        about = {"address": world.address, "port": listener.getsockname()[1], "host": world.host}
        self._arrived: queue.Queue[Peer] = queue.Queue()
        self._server = Server(listener, token.encode(), self._let_in, "spark_dl port")
        world.store.set(name, json.dumps({**about, "title": title, "token": token}))

    def __enter__(self) -> Port:
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.close()

    def _let_in(self, conn: connection.Connection) -> None:
        hello = json.loads(conn.recv_bytes(_MAX_HELLO))
        self._arrived.put(Peer(int(hello["rank"]), str(hello["host"]), self._server.take(conn)))

    def accept(self, expected: Iterable[int], timeout_s: float) -> list[Peer]:
        """Waits for the connections of the expected ranks, and returns them. The ranks wait until all have connected.

        Clients are let in side by side, so that one that says nothing keeps no other waiting.
        Raises RuntimeError that names the ranks that do not connect within `timeout_s`.
        """
        missing, end = set(expected), time.monotonic() + timeout_s
        peers: list[Peer] = []
        with contextlib.ExitStack() as on_error:
            while missing:
                try:
                    peer = self._arrived.get(timeout=max(0.001, end - time.monotonic()))
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


def connect_to_rank(world: World, name: str, rank: int, timeout_s: float) -> Peer:
    """Connects to the port that `rank` publishes as `name`. Returns when all ranks that it expects have connected.

    Operations on the socket wait at most `timeout_s`, also on the sockets of `Port.accept`.
    Raises RuntimeError with the rank and its host if the connection fails, and if `rank` does not publish a port in
    time.
    """
    import torch.distributed as dist  # what the driver does without

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
            with connect(address, timeout_s) as conn:
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
