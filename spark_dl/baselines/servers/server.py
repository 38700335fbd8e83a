"""The work of a server between two pauses. The first server decides (`lead.py`); the other servers follow its orders.

Every server receives its block of every gradient. All servers must use the same gradients in the same updates, or a
trainer would get blocks of different versions. So only the first server counts gradients. It sends orders to the other
servers: which gradients make an update, which are dropped, and who gets weights. They execute the orders one by one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spark_dl.baselines.servers.wire import Message, Numbers, Transport

Key = tuple[int, int]
"""A trainer and the number of its computation."""
Update = Callable[[Sequence[Numbers], Sequence[float], float], None]
"""(gradients, their shares, factor of the learning rate): updates this server's block."""
_LATE = 0.4
"""Limit of an ordered gradient, times the timeout. Trainers wait for weights a little longer (`trainer.py`)."""


class ServerState:
    """Received gradients of a server's block, and its connections to trainers and other servers."""

    def __init__(self, wire: Transport, update: Update, snapshot: Callable[[], Numbers]):
        self.wire, self.snapshot = wire, snapshot
        self.orders: deque[Mapping[str, Any]] = deque()
        """Orders of the first server that are not executed yet. Some may arrive before the pause that ends an epoch."""
        self._update = update
        self._gradients: dict[Key, Numbers] = {}
        self._unwanted: set[Key] = set()

    def keep(self, message: Message) -> None:
        """Keeps a gradient until it is used or dropped."""
        key = (message.rank, message.head["number"])
        assert message.body is not None
        if key in self._unwanted:
            self._unwanted.remove(key)
            self.wire.give_back(message.body)
        else:
            self._gradients[key] = message.body

    def wait_for_pause(self, trainers: int, timeout_s: float) -> list[Message]:
        """Receives messages until every trainer has sent 'pausing'. Returns all other messages.

        So a gradient that other servers have already used arrives completely. Raises RuntimeError with the rank and
        host of a trainer that is lost, or sends nothing for too long.
        """
        messages, pausing = [], set[int]()
        while len(pausing) < trainers:
            message = self.wire.receive(timeout_s)
            if message is None:
                late = [f"rank {r} on host {self.wire.host_of(r)}" for r in range(trainers) if r not in pausing]
                raise RuntimeError(
                    f"no message from {', '.join(late)} for {timeout_s:g} s (launch.collective_timeout_s): a process "
                    "or its network hangs, or a mini-batch takes longer than that"
                )
            if message.head["kind"] == "pausing":
                pausing.add(message.rank)
            else:
                messages.append(message)
        return messages

    def missing(self, keys: Sequence[Key]) -> list[Key]:
        """Returns those of these gradients that have not arrived."""
        return [key for key in keys if tuple(key) not in self._gradients]

    def drop(self, keys: Sequence[Key]) -> None:
        """Drops gradients, including those that have not arrived yet."""
        for trainer, number in keys:
            if (trainer, number) in self._gradients:
                self.wire.give_back(self._gradients.pop((trainer, number)))
            else:
                self._unwanted.add((trainer, number))

    def update(self, keys: Sequence[Key], shares: Sequence[float], lr_factor: float) -> None:
        """Updates the block with these gradients."""
        gradients = [self._gradients.pop((trainer, number)) for trainer, number in keys]
        self._update(gradients, shares, lr_factor)
        for gradient in gradients:
            self.wire.give_back(gradient)


def follow(server: ServerState, first: int, trainers: int, timeout_s: float) -> dict[str, Any]:
    """Executes the first server's orders until an order to pause. Returns that order. Called on the other servers.

    Raises RuntimeError if a rank is lost, or no message arrives for twice `timeout_s`. The first server waits half as
    long, as its error names the rank that is late. A trainer that stops between its two messages is late here only.
    """
    orders, pausing = server.orders, 0
    late_since: float | None = None
    while True:
        missing: list[Key] = []
        while orders and not (missing := server.missing(orders[0].get("used", ()))):
            late_since = None
            if orders[0]["kind"] != "pause":
                _execute(server, orders.popleft())
            elif pausing == trainers:  # unsent weights stay unsent, as a pausing trainer does not read them
                return dict(orders.popleft())
            else:
                break
        if missing and late_since is None:
            late_since = time.monotonic()
        left_s = 2 * timeout_s if late_since is None else late_since + _LATE * timeout_s - time.monotonic()
        message = server.wire.receive(max(0.0, left_s))
        if message is None:
            raise RuntimeError(_silence(server, first, missing, timeout_s))
        if message.rank == first:
            orders.append(message.head)
        elif message.head["kind"] == "pausing":  # its earlier gradients have arrived completely
            pausing += 1
        else:
            server.keep(message)


def _silence(server: ServerState, first: int, missing: Sequence[Key], timeout_s: float) -> str:
    """Returns which rank has sent nothing: the trainer of an ordered gradient, or else the first server."""
    rank = missing[0][0] if missing else first
    on = f"from rank {rank} on host {server.wire.host_of(rank)}"
    if missing:
        return (
            f"no gradient {on} for {_LATE * timeout_s:g} s ({_LATE:g} times launch.collective_timeout_s), which the "
            "first server has: a process or its network hangs"
        )
    return (
        f"no message {on}, the first server, for {2 * timeout_s:g} s (twice launch.collective_timeout_s): its process "
        "or its network hangs"
    )


def _execute(server: ServerState, order: Mapping[str, Any]) -> None:
    if order["kind"] == "update":
        server.update(order["used"], order["shares"], order["lr_factor"])
    elif order["kind"] == "drop":
        server.drop(order["dropped"])
    else:
        for trainer, number in order["given"]:
            server.wire.send(trainer, {"kind": "weights", "number": number}, server.snapshot(), replaceable=True)
