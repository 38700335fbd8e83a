"""The first server: decides by the rules of the mode, tells the other servers, and sees to it that trainers answer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spark_dl.baselines.servers.block import shares_of
from spark_dl.baselines.servers.deal import MiniBatchQueue
from spark_dl.baselines.servers.rules import Assignment, Coordinator, Gradient
from spark_dl.baselines.servers.server import Key, Server
from spark_dl.baselines.servers.settings import settings_of
from spark_dl.baselines.servers.wire import Message
from spark_dl.config import Config

OnUpdate = Callable[[Sequence[Gradient], Sequence[Mapping[str, Any]]], str | None]
"""(the gradients of an update that was made, what their trainers said with each) -> why to pause, or None."""


class LeadServer:
    """The first server's work. `followers` are the ranks of the other servers; `first_step` are the updates of the run
    before the coordinator's."""

    def __init__(
        self, server: Server, coordinator: Coordinator, followers: range, config: Config, *, first_step: int = 0
    ):
        self._first_step = first_step
        self._server, self._wire, self._coordinator, self._followers = server, server.wire, coordinator, followers
        self._timeout_s = config.launch.collective_timeout_s
        self._by_staleness = settings_of(config).staleness_lr
        self._said: dict[Key, Mapping[str, Any]] = {}  # with the gradients that are in no update yet
        self._owed: dict[int, int] = {}  # the number of each trainer's last assignment
        self._owed_since: dict[int, float] = {}
        self._reassured_at = time.monotonic()
        self._held: deque[Message] = deque()  # what came while trainers went to pause

    def run(self, deal: MiniBatchQueue, epoch: int, on_update: OnUpdate) -> str:
        """Has the trainers work on what is left of an epoch. Returns why it ended: "epoch", or what `on_update` said.

        Raises RuntimeError that names the rank and host of a trainer that goes, or does not answer in time.
        """
        self._owed_since.clear()
        self._give(self._coordinator.begin(deal), deal, epoch)
        while not self._coordinator.is_done:
            message = self._held.popleft() if self._held else self._wire.receive(self._patience_s())
            if message is not None:
                self._hear(message)
                if message.head["kind"] == "gradient" and (why := self._use(message, deal, epoch, on_update)):
                    return why
            self._check_answers()
            self._reassure()
        return "epoch"

    def pause(self, told: Mapping[str, Any]) -> None:
        """Tells all ranks to pause, and waits until the trainers do."""
        for trainer in range(self._coordinator.num_trainers):
            self._wire.send(trainer, {**told, "kind": "pause"}, replaceable=True)
        self._order("pause", **told)
        self._wire.drain(self._timeout_s)
        self._held += self._server.wait_for_pause(self._coordinator.num_trainers, self._timeout_s)

    def _use(self, message: Message, deal: MiniBatchQueue, epoch: int, on_update: OnUpdate) -> str | None:
        """Puts a gradient to use, or drops it; why to pause, or None."""
        key = (message.rank, message.head["number"])
        self._server.keep(message)
        self._said[key] = message.head
        outcome = self._coordinator.push(*key, message.head["rows"])
        if outcome.dropped:
            self._order("drop", dropped=outcome.dropped)
            self._server.drop(outcome.dropped)
            for dropped in outcome.dropped:
                del self._said[dropped]
        if outcome.used:
            used = [(g.trainer, g.number) for g in outcome.used]
            shares, lr_factor = shares_of(outcome.used, by_staleness=self._by_staleness)
            self._order("update", used=used, shares=shares, lr_factor=lr_factor)
            self._server.update(used, shares, lr_factor)
            if why := on_update(outcome.used, [self._said.pop(key) for key in used]):
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
            self._owed[a.trainer] = a.number
            self._owed_since.setdefault(a.trainer, time.monotonic())

    def _order(self, kind: str, **order: Any) -> None:
        for follower in self._followers:
            self._wire.send(follower, {"kind": kind, **order})

    def _hear(self, message: Message) -> None:
        if message.head["number"] == self._owed[message.rank]:
            self._owed_since.pop(message.rank, None)
        else:  # an answer to an earlier assignment; it may just have got the newest one
            self._owed_since[message.rank] = time.monotonic()

    def _patience_s(self) -> float:
        """Until somebody is late, or is to be reassured."""
        oldest = min(self._owed_since.values(), default=time.monotonic())
        return max(0.0, min(oldest + self._timeout_s, self._reassured_at + self._timeout_s / 2) - time.monotonic())

    def _reassure(self) -> None:
        """Lets trainers that have nothing to do know that others have, so that they do not give up on this server."""
        if time.monotonic() - self._reassured_at < self._timeout_s / 2:
            return
        self._reassured_at = time.monotonic()
        for trainer in range(self._coordinator.num_trainers):
            if trainer not in self._owed_since:
                self._wire.send(trainer, {"kind": "wait", "number": self._owed.get(trainer, 0)}, replaceable=True)

    def _check_answers(self) -> None:
        late = [r for r, since in self._owed_since.items() if time.monotonic() - since > self._timeout_s]
        if late:
            named = ", ".join(f"rank {rank} on host {self._wire.host_of(rank)}" for rank in sorted(late))
            raise RuntimeError(
                f"no gradient from {named} for {self._timeout_s:g} s (launch.collective_timeout_s): a process or its "
                "network hangs, or a mini-batch takes longer than that"
            )
