"""What a server rank does between two pauses. The first server decides (`lead.py`); the others do what it says.

All servers see all gradients, each its own block of them, and must put the same ones into the same updates, or the
weights that a trainer gets would be of no one moment. So the first server alone counts gradients, and sends the others
orders: which gradients make an update, which are dropped, and who is given weights. They carry them out one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spark_dl.baselines.servers.wire import Message, Numbers, Transport

Key = tuple[int, int]
"""A trainer and the number of its computation."""
Update = Callable[[Sequence[Numbers], Sequence[float], float], None]
"""(gradients, the share of each, factor of the learning rate): one step of this server's block."""


class Server:
    """The gradients of a block that have come, and the connections to trainers and other servers."""

    def __init__(self, wire: Transport, update: Update, snapshot: Callable[[], Numbers]):
        self.wire, self.snapshot = wire, snapshot
        self.orders: deque[Mapping[str, Any]] = deque()
        """Of the first server, not carried out yet: some may come before the pause that ends an epoch."""
        self._update = update
        self._gradients: dict[Key, Numbers] = {}
        self._unwanted: set[Key] = set()

    def keep(self, message: Message) -> None:
        """Keeps a gradient until it is said what becomes of it."""
        key = (message.rank, message.head["number"])
        assert message.body is not None
        if key in self._unwanted:
            self._unwanted.remove(key)
            self.wire.give_back(message.body)
        else:
            self._gradients[key] = message.body

    def wait_for_pause(self, trainers: int, timeout_s: float) -> list[Message]:
        """Takes what trainers have sent up to their word that they pause; returns it, without that word.

        So a gradient that the other servers have used, and that has come here in part, comes whole. Raises RuntimeError
        that names who goes, or who says nothing for too long.
        """
        found, pausing = [], set[int]()
        while len(pausing) < trainers:
            message = self.wire.receive(timeout_s)
            if message is None:
                late = [f"rank {r} on host {self.wire.host_of(r)}" for r in range(trainers) if r not in pausing]
                raise RuntimeError(
                    f"no word from {', '.join(late)} for {timeout_s:g} s (launch.collective_timeout_s): a process or "
                    "its network hangs, or a mini-batch takes longer than that"
                )
            if message.head["kind"] == "pausing":
                pausing.add(message.rank)
            else:
                found.append(message)
        return found

    def has(self, keys: Sequence[Key]) -> bool:
        """Whether these gradients have come."""
        return all(tuple(key) in self._gradients for key in keys)

    def drop(self, keys: Sequence[Key]) -> None:
        """These gradients are in no update. They may be on their way still."""
        for trainer, number in keys:
            if (trainer, number) in self._gradients:
                self.wire.give_back(self._gradients.pop((trainer, number)))
            else:
                self._unwanted.add((trainer, number))

    def update(self, keys: Sequence[Key], shares: Sequence[float], lr_factor: float) -> None:
        """One step of the block, with these gradients."""
        gradients = [self._gradients.pop((trainer, number)) for trainer, number in keys]
        self._update(gradients, shares, lr_factor)
        for gradient in gradients:
            self.wire.give_back(gradient)


def follow(server: Server, first: int, trainers: int, timeout_s: float) -> dict[str, Any]:
    """Carries out the orders of the first server, up to one to pause, which is returned. Called on the other servers.

    Raises RuntimeError if a rank goes, or nothing comes for twice `timeout_s`: the first server waits for half as long,
    and knows better whom for.
    """
    orders, pausing = server.orders, 0
    while True:
        while orders and server.has(orders[0].get("used", ())):
            if orders[0]["kind"] != "pause":
                _carry_out(server, orders.popleft())
            elif pausing == trainers:  # what is not sent yet stays so: a trainer that pauses does not read it
                return dict(orders.popleft())
            else:
                break
        message = server.wire.receive(2 * timeout_s)
        if message is None:
            host = server.wire.host_of(first)
            raise RuntimeError(
                f"no word from rank {first} on host {host}, the first server, for {2 * timeout_s:g} s (twice "
                "launch.collective_timeout_s): its process or its network hangs"
            )
        if message.rank == first:
            orders.append(message.head)
        elif message.head["kind"] == "pausing":  # what it has sent before has come whole
            pausing += 1
        else:
            server.keep(message)


def _carry_out(server: Server, order: Mapping[str, Any]) -> None:
    if order["kind"] == "update":
        server.update(order["used"], order["shares"], order["lr_factor"])
    elif order["kind"] == "drop":
        server.drop(order["dropped"])
    else:
        for trainer, number in order["given"]:
            server.wire.send(trainer, {"kind": "weights", "number": number}, server.snapshot(), replaceable=True)
