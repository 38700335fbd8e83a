"""The roles of the ranks, servers or trainers, their connections, and the first server.

The first server applies the rules of the mode, sends orders to the other servers, and checks trainers' answers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_dl.baselines.servers.block import shares_of
from spark_dl.baselines.servers.deal import MiniBatchQueue
from spark_dl.baselines.servers.rules import Assignment, Coordinator, Gradient
from spark_dl.baselines.servers.server import Key, ServerState
from spark_dl.baselines.servers.settings import settings_of
from spark_dl.baselines.servers.wire import Message, Transport
from spark_dl.channel import Port, connect_to_rank
from spark_dl.config import Config
from spark_dl.world import World

OnUpdate = Callable[[Sequence[Gradient], Sequence[Mapping[str, Any]]], str | None]
"""(gradients of an update, the head of each gradient's message) -> the reason to pause, or None."""


@dataclass(frozen=True)
class Roles:
    """The roles of all ranks. Raises ValueError if no rank is left to train."""

    rank: int
    world_size: int
    num_servers: int

    def __post_init__(self) -> None:
        if self.num_servers >= self.world_size:
            raise ValueError(
                f"parallel.num_servers: found {self.num_servers}, expected fewer than the {self.world_size} ranks that "
                "were started; set it lower, or start more ranks"
            )

    @property
    def trainers(self) -> range:
        return range(self.world_size - self.num_servers)

    @property
    def servers(self) -> range:
        return range(self.world_size - self.num_servers, self.world_size)

    @property
    def first(self) -> int:
        """Rank of the first server, which decides for all servers."""
        return self.servers[0]

    @property
    def is_server(self) -> bool:
        return self.rank in self.servers

    @property
    def block(self) -> int:
        """Number of this server's block."""
        return self.rank - self.first


def connect_all(world: World, roles: Roles, config: Config, most_numbers: int) -> Transport:
    """Connects every trainer with every server, and every other server with the first one. Collective.

    `most_numbers` is the length of the longest block. Raises RuntimeError if a rank does not connect in time.
    """

    def name(rank: int) -> str:
        return f"parameter_server/{rank}"

    timeout_s = config.launch.start_timeout_s
    wire = Transport(most_numbers)
    try:
        if not roles.is_server:
            for server in roles.servers:
                wire.add(*connect_to_rank(world, name(server), server, timeout_s))
            return wire
        with Port(world, name(world.rank), "the parameter server") as port:
            if world.rank != roles.first:
                wire.add(*connect_to_rank(world, name(roles.first), roles.first, timeout_s))
            followers = roles.servers[1:] if world.rank == roles.first else ()
            for peer in port.accept([*roles.trainers, *followers], timeout_s):
                wire.add(*peer)
    except BaseException:
        wire.close()
        raise
    return wire


class LeadServer:
    """The work of the first server. `followers` are the ranks of the other servers. `first_step` is the number of
    updates in the run before the coordinator's first."""

    def __init__(
        self, server: ServerState, coordinator: Coordinator, followers: range, config: Config, *, first_step: int = 0
    ):
        self._first_step = first_step
        self._server, self._wire, self._coordinator, self._followers = server, server.wire, coordinator, followers
        self._timeout_s = config.launch.collective_timeout_s
        self._by_staleness = settings_of(config).staleness_lr
        self._heads: dict[Key, Mapping[str, Any]] = {}  # heads of the gradients that are not in an update yet
        self._assigned: dict[int, int] = {}  # trainer -> number of its last assignment
        self._unanswered_since: dict[int, float] = {}
        self._keepalive_at = time.monotonic()
        self._backlog: deque[Message] = deque()  # messages that arrived while trainers paused

    def run(self, deal: MiniBatchQueue, epoch: int, on_update: OnUpdate) -> str:
        """Runs the rest of an epoch. Returns the reason why it ended: "epoch", or the result of `on_update`.

        Raises RuntimeError with the rank and host of a trainer that is lost, or does not answer in time.
        """
        self._unanswered_since.clear()
        self._give(self._coordinator.begin(deal), deal, epoch)
        while not self._coordinator.is_done:
            message = self._backlog.popleft() if self._backlog else self._wire.receive(self._wait_s())
            if message is not None:
                self._note_answer(message)
                if message.head["kind"] == "gradient" and (why := self._use(message, deal, epoch, on_update)):
                    return why
            self._check_answers()
            self._send_keepalives()
        return "epoch"

    def pause(self, state: Mapping[str, Any]) -> None:
        """Sends all ranks the order to pause, with `state`. Waits until the trainers have paused."""
        for trainer in range(self._coordinator.num_trainers):
            self._wire.send(trainer, {**state, "kind": "pause"}, replaceable=True)
        self._order("pause", **state)
        self._wire.drain(self._timeout_s)
        self._backlog += self._server.wait_for_pause(self._coordinator.num_trainers, self._timeout_s)

    def _use(self, message: Message, deal: MiniBatchQueue, epoch: int, on_update: OnUpdate) -> str | None:
        """Uses or drops a gradient. Returns the reason to pause, or None."""
        key = (message.rank, message.head["number"])
        self._server.keep(message)
        self._heads[key] = message.head
        outcome = self._coordinator.push(*key, message.head["rows"])
        if outcome.dropped:
            self._order("drop", dropped=outcome.dropped)
            self._server.drop(outcome.dropped)
            for dropped in outcome.dropped:
                del self._heads[dropped]
        if outcome.used:
            used = [(g.trainer, g.number) for g in outcome.used]
            counts = [float(self._heads[key]["count"]) for key in used]
            shares, lr_factor = shares_of(outcome.used, counts, by_staleness=self._by_staleness)
            self._order("update", used=used, shares=shares, lr_factor=lr_factor)
            self._server.update(used, shares, lr_factor)
            if why := on_update(outcome.used, [self._heads.pop(key) for key in used]):
                self._coordinator.stop(outcome.assignments)
                return why
        self._give(outcome.assignments, deal, epoch)
        return None

    def _give(self, assignments: Sequence[Assignment], deal: MiniBatchQueue, epoch: int) -> None:
        if given := [(a.trainer, a.number) for a in assignments if a.sends_weights]:
            self._order("give", given=given)
        for a in assignments:
            head = {
                "kind": "compute", "number": a.number, "sends_weights": a.sends_weights,
                "epoch": epoch, "num_parts": deal.num_parts, "part": a.batch.part, "step": a.batch.step,
                "global_step": self._first_step + self._coordinator.version + 1,
            }  # fmt: skip
            body = self._server.snapshot() if a.sends_weights else None
            self._wire.send(a.trainer, head, body, replaceable=True)
            self._assigned[a.trainer] = a.number
            self._unanswered_since.setdefault(a.trainer, time.monotonic())

    def _order(self, kind: str, **order: Any) -> None:
        for follower in self._followers:
            self._wire.send(follower, {"kind": kind, **order})

    def _note_answer(self, message: Message) -> None:
        if message.head["number"] == self._assigned[message.rank]:
            self._unanswered_since.pop(message.rank, None)
        else:  # it answers an earlier assignment, and may just have received the newest one
            self._unanswered_since[message.rank] = time.monotonic()

    def _wait_s(self) -> float:
        """Returns the seconds until an answer is late or a keepalive is due."""
        oldest = min(self._unanswered_since.values(), default=time.monotonic())
        return max(0.0, min(oldest + self._timeout_s, self._keepalive_at + self._timeout_s / 2) - time.monotonic())

    def _send_keepalives(self) -> None:
        """Sends idle trainers a keepalive, so that they do not time out while they wait for this server."""
        if time.monotonic() - self._keepalive_at < self._timeout_s / 2:
            return
        self._keepalive_at = time.monotonic()
        for trainer in range(self._coordinator.num_trainers):
            if trainer not in self._unanswered_since:
                self._wire.send(trainer, {"kind": "wait", "number": self._assigned.get(trainer, 0)}, replaceable=True)

    def _check_answers(self) -> None:
        late = [r for r, since in self._unanswered_since.items() if time.monotonic() - since > self._timeout_s]
        if late:
            named = ", ".join(f"rank {rank} on host {self._wire.host_of(rank)}" for rank in sorted(late))
            raise RuntimeError(
                f"no gradient from {named} for {self._timeout_s:g} s (launch.collective_timeout_s): a process or its "
                "network hangs, or a mini-batch takes longer than that"
            )
