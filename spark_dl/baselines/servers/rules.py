"""Which gradients make an update, and who gets the new weights: the SGD variants of Dutta et al. 2018. Pure.

Sanghamitra Dutta, Gauri Joshi, Soumyadip Ghosh, Parijat Dube, Priya Nagpurkar: Slow and Stale Gradients Can Win the
Race: Error-Runtime Trade-offs in Distributed SGD, AISTATS 2018 (PMLR 84:803-812), section 2. With P trainers:

    sync            the servers wait for all P trainers; all get the new weights
    k_sync          they wait for the first K trainers; the others are cancelled; all get the new weights
    k_batch_sync    they wait for the first K mini-batches; a trainer that is done begins another one at the same
                    weights; at the update the others are cancelled; all get the new weights
    async           every gradient is an update; its trainer gets the new weights; the others continue
    k_async         the servers wait for the first K trainers, which get the new weights; the others continue
    k_batch_async   they wait for the first K mini-batches; a trainer gets the current weights after each mini-batch

So three rules define a mode: how many gradients make an update, whether an update cancels running computations, and
whether a trainer continues after each mini-batch or waits for the update with its gradient.

The gradients of an update are averaged, weighted by the true rows of their mini-batches. With all P trainers these are
the parts of one global batch, so sync is the same as one process with that batch. A cancelled or too old mini-batch is
not lost: the same trainer computes it again, at its next weights. (In the paper, mini-batches are drawn with
replacement, and cancelled ones are not repeated.) At the end of an epoch, with fewer than K gradients left, an update
is made of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from spark_dl.baselines.servers.deal import MiniBatch, MiniBatchQueue
from spark_dl.baselines.servers.settings import ParameterServer


@dataclass(frozen=True)
class UpdateRules:
    """Rules of a mode."""

    k: int
    """Number of gradients of an update."""
    cancels: bool
    """Whether an update cancels running computations."""
    goes_on: bool
    """Whether a trainer begins another mini-batch before the update with its gradient."""
    max_staleness: int | None = None


def rules_of(settings: ParameterServer, num_trainers: int) -> UpdateRules:
    """Returns the rules of `parallel.server_mode`."""
    mode = settings.server_mode
    k = {"sync": num_trainers, "async": 1}.get(mode, settings.server_k or num_trainers)
    return UpdateRules(
        k=k,
        cancels=mode in ("sync", "k_sync", "k_batch_sync"),
        goes_on=mode in ("k_batch_sync", "k_batch_async"),
        max_staleness=settings.max_staleness,
    )


@dataclass(frozen=True)
class Gradient:
    """A received gradient. A trainer's computations are numbered from 1."""

    trainer: int
    number: int
    rows: int
    """True rows of its mini-batch. The gradient is the mean over them."""
    staleness: int
    """Number of updates between the weights at which it was computed and the weights to which it is added."""


@dataclass(frozen=True)
class Assignment:
    """The next mini-batch of a trainer, and whether the trainer needs new weights."""

    trainer: int
    number: int
    batch: MiniBatch
    sends_weights: bool


@dataclass(frozen=True)
class Outcome:
    """Consequences of a received gradient."""

    used: tuple[Gradient, ...] = ()
    """Gradients of an update, in the order of trainer and number; empty without an update."""
    dropped: tuple[tuple[int, int], ...] = ()
    """Trainer and number of gradients that are not used."""
    assignments: tuple[Assignment, ...] = ()


@dataclass
class Coordinator:
    """State and decisions of the first server. `push` is called for each gradient, in the order of arrival."""

    rules: UpdateRules
    num_trainers: int
    version: int = 0
    """Number of updates so far, the version of the current weights."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of used gradients by staleness."""
    discarded: int = 0
    """Number of computations that were cancelled, or too old to be used."""

    def __post_init__(self) -> None:
        self._numbers = [0] * self.num_trainers
        self._weights_of: list[int | None] = [None] * self.num_trainers  # version at each trainer
        self._deal = MiniBatchQueue(self.num_trainers, ())
        self._busy: dict[int, int] = {}  # trainer -> version of its weights
        self._waiting: set[int] = set()  # trainers that wait for the update with their gradient
        self._gathered: list[Gradient] = []

    def begin(self, deal: MiniBatchQueue) -> tuple[Assignment, ...]:
        """Begins the rest of an epoch. Earlier computations are ignored. Returns the first assignments."""
        self._deal, self._busy, self._waiting, self._gathered = deal, {}, set(), []
        self._weights_of = [None] * self.num_trainers
        return self._assign(range(self.num_trainers))

    def push(self, trainer: int, number: int, rows: int) -> Outcome:
        """Decides on a trainer's gradient, of `rows` true rows, that has arrived."""
        if trainer not in self._busy or number != self._numbers[trainer]:  # cancelled before it arrived
            return Outcome(dropped=((trainer, number),))
        staleness = self.version - self._busy.pop(trainer)
        if self.rules.max_staleness is not None and staleness > self.rules.max_staleness:
            self.discarded += 1
            return Outcome(dropped=((trainer, number),), assignments=self._assign([trainer]))
        self._deal.finish(trainer)
        self._gathered.append(Gradient(trainer, number, rows, staleness))
        outcome = self._gathered_all(trainer) if len(self._gathered) >= self.rules.k else self._gathered_some(trainer)
        if not self._busy and self._gathered:  # no other gradient can arrive before this update
            assert not outcome.used
            assert not outcome.assignments
            outcome = self._gathered_all(trainer)
        return outcome

    def stop(self, not_sent: Sequence[Assignment]) -> None:
        """Cancels running computations, to repeat them later. `not_sent` are assignments that no trainer received."""
        self.discarded += len(self._busy) - len(not_sent)
        self._busy.clear()

    @property
    def is_done(self) -> bool:
        """Whether all mini-batches of the epoch are used."""
        return not self._busy and not self._gathered

    def _gathered_some(self, trainer: int) -> Outcome:
        if self.rules.goes_on:
            return Outcome(assignments=self._assign([trainer]))
        self._waiting.add(trainer)
        return Outcome()

    def _gathered_all(self, trainer: int) -> Outcome:
        gathered = tuple(sorted(self._gathered, key=lambda g: (g.trainer, g.number)))
        self._gathered = []
        ready, self._waiting = {trainer, *self._waiting}, set()
        if not any(g.rows for g in gathered):  # no true rows, so no mean
            dropped = tuple((g.trainer, g.number) for g in gathered)
            return Outcome(dropped=dropped, assignments=self._assign(ready))
        self.version += 1
        self.staleness.update(g.staleness for g in gathered if g.rows)
        if self.rules.cancels:
            self.discarded += len(self._busy)
            self._busy.clear()
            ready = set(range(self.num_trainers))
        return Outcome(used=gathered, assignments=self._assign(ready))

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
