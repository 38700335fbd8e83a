"""Messages between trainers and servers over TCP: each message is a small JSON object and float32 numbers.

A send never blocks. Data that the connection does not take at once stays in memory, and is sent while the sender waits
for messages. So two ranks that send to each other cannot deadlock, and a server receives parts of gradients from all
trainers as they arrive. `torch.distributed` does not offer this: its `recv` from any rank waits for a message of one
known size, cannot be cancelled, and closes the connection when it times out.

Wire format: the size of the JSON object (4 bytes), the size of the numbers (8 bytes), then both. Not encrypted, as with
Gloo and NCCL.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float32]
_SIZES = struct.Struct("!IQ")
_MOST_JSON_BYTES = 1 << 20


class Message(NamedTuple):
    """A received message."""

    rank: int
    head: dict[str, Any]
    body: Numbers | None


@dataclass
class _Outgoing:
    views: deque[memoryview]
    replaceable: bool
    begun: bool = False


@dataclass
class _Incoming:
    """A partly received message: first its sizes, then the JSON object and the numbers."""

    view: memoryview
    filled: int = 0
    stage: str = "sizes"
    head: dict[str, Any] = field(default_factory=dict)
    body: Numbers | None = None
    body_bytes: int = 0


def _sizes() -> _Incoming:
    return _Incoming(memoryview(bytearray(_SIZES.size)))


@dataclass
class _Peer:
    rank: int
    host: str
    sock: socket.socket
    out: deque[_Outgoing] = field(default_factory=deque)
    coming: _Incoming = field(default_factory=_sizes)


class Transport:
    """The connections of a rank. `most_numbers` is the maximum length of a received body."""

    def __init__(self, most_numbers: int):
        self._most_bytes = 4 * most_numbers
        self._peers: dict[int, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._inbox: deque[Message] = deque()
        self._spare: list[Numbers] = []

    def add(self, rank: int, host: str, sock: socket.socket) -> None:
        """Adds a connection to a rank, and takes ownership of the socket."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self._peers[rank] = _Peer(rank, host, sock)
        self._selector.register(sock, selectors.EVENT_READ, self._peers[rank])

    def host_of(self, rank: int) -> str:
        return self._peers[rank].host

    def send(
        self, rank: int, head: Mapping[str, Any], body: Numbers | None = None, *, replaceable: bool = False
    ) -> None:
        """Sends a message, now or during `receive` or `drain`. The body must not change until it is sent.

        A replaceable message is dropped if the next replaceable one is sent before its transfer has begun. Only the
        newest counts, so a rank that does not read needs memory for two messages at most.
        """
        peer = self._peers[rank]
        encoded = json.dumps(head).encode()
        data = memoryview(b"") if body is None else body.data.cast("B")
        if replaceable:
            peer.out = deque(o for o in peer.out if o.begun or not o.replaceable)
        views = deque([memoryview(_SIZES.pack(len(encoded), len(data)) + encoded), *([data] if len(data) else [])])
        peer.out.append(_Outgoing(views, replaceable))
        self._write(peer)
        self._watch(peer)

    def receive(self, timeout_s: float) -> Message | None:
        """Returns the next message, in the order of arrival; None if none arrives within `timeout_s`.

        Raises RuntimeError with the rank and its host if a connection has ended.
        """
        self._move(timeout_s, lambda: bool(self._inbox))
        return self._inbox.popleft() if self._inbox else None

    def drain(self, timeout_s: float) -> None:
        """Waits until all messages are written to the connections. Raises RuntimeError if a rank does not read."""
        self._move(timeout_s, lambda: not any(p.out for p in self._peers.values()))
        slow = [f"rank {p.rank} on host {p.host}" for p in self._peers.values() if p.out]
        if slow:
            raise RuntimeError(
                f"{', '.join(slow)} took no data for {timeout_s:g} s (launch.collective_timeout_s): its process or its "
                "network hangs"
            )

    def give_back(self, body: Numbers | None) -> None:
        """Releases the body of a message, whose memory is used for later messages."""
        if body is not None:
            self._spare.append(body)

    def close(self) -> None:
        """Closes all connections."""
        for peer in self._peers.values():
            peer.sock.close()
        self._selector.close()

    def _move(self, timeout_s: float, is_enough: Callable[[], bool]) -> None:
        """Sends and receives until `is_enough()` or for `timeout_s`, but at least the data that is ready now."""
        end = time.monotonic() + timeout_s
        while not is_enough():
            left = end - time.monotonic()
            for key, events in self._selector.select(max(0.0, left)):
                if events & selectors.EVENT_WRITE:
                    self._write(key.data)
                    self._watch(key.data)
                if events & selectors.EVENT_READ:
                    self._read(key.data)
            if left <= 0:
                return

    def _watch(self, peer: _Peer) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        if self._selector.get_key(peer.sock).events != wanted:
            self._selector.modify(peer.sock, wanted, peer)

    def _write(self, peer: _Peer) -> None:
        try:
            while peer.out:
                message = peer.out[0]
                while message.views:
                    sent = peer.sock.send(message.views[0])
                    message.begun = True
                    message.views[0] = message.views[0][sent:]
                    if not message.views[0]:
                        message.views.popleft()
                peer.out.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            raise _lost(peer, error.strerror or str(error)) from error

    def _read(self, peer: _Peer) -> None:
        """Reads the available data of a peer, up to the end of a message."""
        while True:
            coming = peer.coming
            try:
                received = peer.sock.recv_into(coming.view[coming.filled :])
            except BlockingIOError:
                return
            except OSError as error:
                raise _lost(peer, error.strerror or str(error)) from error
            if not received:
                raise _lost(peer, "Connection closed by peer")
            coming.filled += received
            if coming.filled == len(coming.view) and self._next_stage(peer):
                return

    def _next_stage(self, peer: _Peer) -> bool:
        """Prepares for the next part of a message after a complete one. Returns whether the message is complete."""
        coming = peer.coming
        if coming.stage == "sizes":
            json_bytes, coming.body_bytes = _SIZES.unpack(coming.view)
            if not 0 < json_bytes <= _MOST_JSON_BYTES or coming.body_bytes > self._most_bytes or coming.body_bytes % 4:
                raise RuntimeError(
                    f"rank {peer.rank} on host {peer.host} sent a message of {json_bytes} + {coming.body_bytes} bytes, "
                    f"expected at most {_MOST_JSON_BYTES} + {self._most_bytes}"
                )
            coming.stage, coming.view, coming.filled = "json", memoryview(bytearray(json_bytes)), 0
            return False
        if coming.stage == "json":
            coming.head = json.loads(bytes(coming.view))
            if coming.body_bytes:
                coming.body = self._memory(coming.body_bytes // 4)
                coming.stage, coming.view, coming.filled = "body", coming.body.data.cast("B"), 0
                return False
        self._inbox.append(Message(peer.rank, coming.head, coming.body))
        peer.coming = _sizes()
        return True

    def _memory(self, numbers: int) -> Numbers:
        """Returns memory for a body, reused from an earlier one if possible, as new memory costs as much as a copy."""
        for i, spare in enumerate(self._spare):
            if len(spare) == numbers:
                return self._spare.pop(i)
        return np.empty(numbers, dtype=np.float32)


def _lost(peer: _Peer, why: str) -> RuntimeError:
    # From the system's words in `why` the driver sees that another rank's failure caused this error.
    return RuntimeError(f"lost the connection to rank {peer.rank} on host {peer.host}: {why}")
