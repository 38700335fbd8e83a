"""What TCP makes of the links: each rank streams as many bytes as a ring sends, and nobody waits for another rank."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Callable

from spark_dl.launch.rendezvous import World

_PIECE_BYTES = 1 << 20
_TIMEOUT_S = 120.0


def stream_to_next(world: World, num_bytes: int, until_done: contextlib.ExitStack) -> Callable[[], None]:
    """Connects this rank to the next one and the one before. Collective.

    Returns a function that sends `num_bytes` random bytes to the next rank while it receives as many. No all-reduce
    that sends so much can be faster on these hosts with their TCP. Raises OSError for a connection that fails or does
    nothing for two minutes.
    """
    ahead, behind = _connect(world, until_done)
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
            errors.append(ConnectionError(f"the rank before {world.rank} left {left} bytes before the end"))
        if errors:
            raise errors[0]

    return exchange


def _connect(world: World, until_done: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """Sockets to the next rank and from the one before."""
    family = socket.AF_INET6 if ":" in world.address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((world.address, 0))
        listener.listen()
        listener.settimeout(_TIMEOUT_S)
        token = secrets.token_hex(32)
        world.store.set(f"stream/{world.rank}", json.dumps([world.address, listener.getsockname()[1], token]))
        address, port, its_token = json.loads(world.store.get(f"stream/{(world.rank + 1) % world.world_size}"))
        ahead = until_done.enter_context(socket.create_connection((address, port), timeout=_TIMEOUT_S))
        ahead.sendall(its_token.encode())
        while True:
            behind = until_done.enter_context(listener.accept()[0])
            behind.settimeout(_TIMEOUT_S)
            if hmac.compare_digest(behind.recv(len(token), socket.MSG_WAITALL), token.encode()):
                return ahead, behind
