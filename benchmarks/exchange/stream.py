"""Measures the rate of TCP on the links: each rank streams as many bytes as a ring sends, without synchronization."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from spark_dl.channel import Port, connect_to_rank
from spark_dl.world import World

_PIECE_BYTES = 1 << 20


def stream_to_next(
    world: World, num_bytes: int, until_done: contextlib.ExitStack, timeout_s: float
) -> Callable[[], None]:
    """Connects this rank to the next and the previous rank. Collective.

    Returns a function that sends `num_bytes` random bytes to the next rank and receives as many. A ring with one TCP
    connection to each neighbor cannot be faster on these hosts. Raises RuntimeError if ranks do not connect within
    `timeout_s`, and OSError if a connection fails or has no traffic for that time.
    """
    ahead, behind = (until_done.enter_context(sock) for sock in _connect(world, timeout_s))
    piece, buffer = memoryview(secrets.token_bytes(_PIECE_BYTES)), bytearray(_PIECE_BYTES)

    def send(errors: list[OSError]) -> None:
        try:
            for first in range(0, num_bytes, _PIECE_BYTES):
                ahead.sendall(piece[: num_bytes - first])
        except OSError as error:
            errors.append(error)

    def exchange() -> None:
        errors: list[OSError] = []
        sender = threading.Thread(target=send, args=(errors,), name="spark_dl stream", daemon=True)
        sender.start()
        left = num_bytes
        while left and (received := behind.recv_into(buffer, min(left, _PIECE_BYTES))):
            left -= received
        sender.join()
        if left:
            errors.append(
                ConnectionError(f"the rank before {world.rank} closed the connection {left} bytes before the end")
            )
        if errors:
            raise errors[0]

    return exchange


def _connect(world: World, timeout_s: float) -> tuple[socket.socket, socket.socket]:
    """Returns sockets to the next rank and from the previous rank."""
    ahead, behind = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    with Port(world, f"stream/{world.rank}", "the next rank") as port, ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(port.accept, [behind], timeout_s)  # all ranks connect and accept at once
        return connect_to_rank(world, f"stream/{ahead}", ahead, timeout_s).sock, accepting.result()[0].sock
