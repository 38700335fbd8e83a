"""Which gradients make an update, and who is given the new weights: the variants of SGD of Dutta et al. 2018. Pure.

Sanghamitra Dutta, Gauri Joshi, Soumyadip Ghosh, Parijat Dube, Priya Nagpurkar: Slow and Stale Gradients Can Win the
Race: Error-Runtime Trade-offs in Distributed SGD, AISTATS 2018 (PMLR 84:803-812), section 2. With P trainers:

    sync            the servers wait for all P trainers; all get the new weights
    k_sync          they wait for the first K trainers; the others are cancelled; all get the new weights
    k_batch_sync    they wait for the first K mini-batches; a trainer that is done begins another one at the same
                    weights; at the update the others are cancelled; all get the new weights
    async           every gradient is an update; its trainer gets the new weights, the others go on
    k_async         the servers wait for the first K trainers, which get the new weights; the others go on
    k_batch_async   they wait for the first K mini-batches; a trainer gets the weights of now after each of its own

So a mode is three answers: how many gradients make an update, whether an update cancels what is under way, and
whether a trainer goes on after each mini-batch or waits for the update that its gradient is part of.

The gradients of an update are averaged, each weighted by the true rows of its mini-batch. With all P trainers these are
the parts of one global batch, so sync is exactly what one process does with that batch. What is cancelled or too old is
not lost: the same mini-batch is computed anew, by the same trainer, at the weights of then. (In the paper, mini-batches
are drawn with replacement, and a cancelled one is not missed.) At the end of an epoch, when too little is under way to
make K, an update is made of what there is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from spark_dl.baselines.servers.deal import MiniBatch, MiniBatchQueue
from spark_dl.baselines.servers.settings import ParameterServer


@dataclass(frozen=True)
class Rules:
    """What tells the modes from each other."""

    k: int
    """Gradients that make an update."""
    cancels: bool
    """Whether an update ends the computations that are under way."""
    goes_on: bool
    """Whether a trainer begins another mini-batch before the update that its gradient is part of."""
    max_staleness: int | None = None


def rules_of(settings: ParameterServer, num_trainers: int) -> Rules:
    """The rules of `parallel.server_mode`."""
    mode = settings.server_mode
    k = {"sync": num_trainers, "async": 1}.get(mode, settings.server_k or num_trainers)
    return Rules(
        k=k,
        cancels=mode in ("sync", "k_sync", "k_batch_sync"),
        goes_on=mode in ("k_batch_sync", "k_batch_async"),
        max_staleness=settings.max_staleness,
    )


@dataclass(frozen=True)
class Gradient:
    """A gradient that has come. A trainer's computations are numbered from 1."""

    trainer: int
    number: int
    rows: int
    """True rows of its mini-batch, of which it is the mean."""
    staleness: int
    """Updates between the weights that it was computed at and those that it is added to."""


@dataclass(frozen=True)
class Assignment:
    """What a trainer is to compute next, and whether it must be sent the weights for it."""

    trainer: int
    number: int
    batch: MiniBatch
    sends_weights: bool


@dataclass(frozen=True)
class Outcome:
    """What follows from a gradient that has come."""

    used: tuple[Gradient, ...] = ()
    """Those that make up an update, by trainer and number; empty where there is none."""
    dropped: tuple[tuple[int, int], ...] = ()
    """Trainer and number of those that are in no update."""
    assignments: tuple[Assignment, ...] = ()


@dataclass
class Coordinator:
    """What the first server decides. It is told of gradients in the order in which they come."""

    rules: Rules
    num_trainers: int
    version: int = 0
    """Updates so far: the number of the weights of now."""
    staleness: Counter[int] = field(default_factory=Counter)
    """How many gradients were used, by their staleness."""
    discarded: int = 0
    """Computations that were cancelled, or too old to be used."""

    def __post_init__(self) -> None:
        self._numbers = [0] * self.num_trainers
        self._weights_of: list[int | None] = [None] * self.num_trainers  # the version that each has
        self._deal = MiniBatchQueue(self.num_trainers, ())
        self._busy: dict[int, int] = {}  # trainer -> version that it computes at
        self._waiting: set[int] = set()  # for the update that their gradient is part of
        self._gathered: list[Gradient] = []

    def begin(self, deal: MiniBatchQueue) -> tuple[Assignment, ...]:
        """Begins to work on what is left of an epoch; what was under way before counts no more."""
        self._deal, self._busy, self._waiting, self._gathered = deal, {}, set(), []
        self._weights_of = [None] * self.num_trainers
        return self._assign(range(self.num_trainers))

    def push(self, trainer: int, number: int, rows: int) -> Outcome:
        """A trainer's gradient, of `rows` true rows, has come."""
        if trainer not in self._busy or number != self._numbers[trainer]:  # cancelled while it was on its way
            return Outcome(dropped=((trainer, number),))
        staleness = self.version - self._busy.pop(trainer)
        if self.rules.max_staleness is not None and staleness > self.rules.max_staleness:
            self.discarded += 1
            return Outcome(dropped=((trainer, number),), assignments=self._assign([trainer]))
        self._deal.finish(trainer)
        self._gathered.append(Gradient(trainer, number, rows, staleness))
        outcome = self._gathered_all(trainer) if len(self._gathered) >= self.rules.k else self._gathered_some(trainer)
        if not self._busy and self._gathered:  # no other gradient will come before this update
            assert not outcome.used
            assert not outcome.assignments
            outcome = self._gathered_all(trainer)
        return outcome

    def stop(self, not_given: Sequence[Assignment]) -> None:
        """Gives up what is under way, to be computed anew. The last assignments were not given to their trainers."""
        self.discarded += len(self._busy) - len(not_given)
        self._busy.clear()

    @property
    def is_done(self) -> bool:
        """Whether all mini-batches are used."""
        return not self._busy and not self._gathered

    def _gathered_some(self, trainer: int) -> Outcome:
        if self.rules.goes_on:
            return Outcome(assignments=self._assign([trainer]))
        self._waiting.add(trainer)
        return Outcome()

    def _gathered_all(self, trainer: int) -> Outcome:
        gathered = tuple(sorted(self._gathered, key=lambda g: (g.trainer, g.number)))
        self._gathered = []
        given, self._waiting = {trainer, *self._waiting}, set()
        if not any(g.rows for g in gathered):  # a mean of no rows is no gradient
            dropped = tuple((g.trainer, g.number) for g in gathered)
            return Outcome(dropped=dropped, assignments=self._assign(given))
        self.version += 1
        self.staleness.update(g.staleness for g in gathered if g.rows)
        if self.rules.cancels:
            self.discarded += len(self._busy)
            self._busy.clear()
            given = set(range(self.num_trainers))
        return Outcome(used=gathered, assignments=self._assign(given))

    def _assign(self, trainers: Iterable[int]) -> tuple[Assignment, ...]:
        assigned = []
        for trainer in sorted(trainers):
            batch = self._deal.of(trainer)
            if batch is None:
                continue
            self._numbers[trainer] += 1
            self._busy[trainer] = self.version
            sends_weights = self._weights_of[trainer] != self.version
            self._weights_of[trainer] = self.version
            assigned.append(Assignment(trainer, self._numbers[trainer], batch, sends_weights))
        return tuple(assigned)
