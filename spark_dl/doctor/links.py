"""Connections between all pairs of ranks, and their rates. Called on ranks.

Each rank listens on a free port of its address, and sends to the others in turn, first to the next one, so that all
send at the same time to different ranks. A connection begins with the secret of the diagnosis; others are closed.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

CONNECT_S = 3.0
SLOW_LINK = 0.5
"""A link between hosts below this part of the usual rate is slow."""
_MORE_PROBES = 2
_SEND_S = 0.15
_MOST_BYTES = 64 << 20
_CHUNK = bytes(1 << 18)
_SECRET_BYTES = 32
_COUNT = struct.Struct("!Q")


@contextlib.contextmanager
def listening(address: str, secret: bytes) -> Iterator[int]:
    """Receives what other ranks send, for the block. Yields the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen(128)
        thread = threading.Thread(target=_accept, args=(listener, secret), name="spark_dl doctor", daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, secret: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_receive, args=(connection, secret), name="spark_dl doctor", daemon=True).start()


def _receive(connection: socket.socket, secret: bytes) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(CONNECT_S)
        sent = b""
        while len(sent) < _SECRET_BYTES:
            if not (part := connection.recv(_SECRET_BYTES - len(sent))):
                return
            sent += part
        if not hmac.compare_digest(sent, secret):
            return
        buffer, count = bytearray(1 << 18), 0
        while received := connection.recv_into(buffer):
            count += received
        connection.sendall(_COUNT.pack(count))


def measure(rank: int, places: Sequence[tuple[str, int]], secret: bytes) -> list[tuple[float | None, str]]:
    """Returns for each rank the bytes per second to it, or None and why there is no connection.

    A link that looks slow beside the others of this rank is measured again: a host that is busy for a moment is no slow
    link. places: address and port of each rank.
    """
    found: list[tuple[float | None, str]] = [(None, "") for _ in places]
    for step in range(1, len(places)):
        other = (rank + step) % len(places)
        try:
            found[other] = (_rate(*places[other], secret), "")
        except OSError as error:
            found[other] = (None, str(error) or type(error).__name__)
    rates = {
        other: rate for other, (rate, _) in enumerate(found) if rate is not None and places[other][0] != places[rank][0]
    }
    slow = SLOW_LINK * max(rates.values(), default=0.0)
    for other, rate in rates.items():
        for _ in range(_MORE_PROBES):
            if rate < slow:
                with contextlib.suppress(OSError):  # there is a connection, as the first rate shows
                    rate = max(rate, _rate(*places[other], secret))
        found[other] = (rate, "")
    return found


def _rate(address: str, port: int, secret: bytes) -> float:
    with socket.create_connection((address, port), CONNECT_S) as connection:
        connection.sendall(secret)
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < _SEND_S and count < _MOST_BYTES:
            connection.sendall(_CHUNK)
            count += len(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while len(answer) < _COUNT.size:
            if not (part := connection.recv(_COUNT.size - len(answer))):
                raise ConnectionError("the other rank has closed the connection")
            answer += part
        seconds = time.perf_counter() - start
    if _COUNT.unpack(answer)[0] != count:
        raise ConnectionError(f"{_COUNT.unpack(answer)[0]} of {count} bytes arrived")
    return count / seconds
