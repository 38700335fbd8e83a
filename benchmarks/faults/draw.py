"""Draws faults from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("kill a rank", "stop a rank", "kill an executor", "unplug a host", "lose frames of a host")
PER_RUN = 2
"""Faults of a run, of different kinds."""
_LONGEST_DELAY_S = 0.2


@dataclass(frozen=True)
class Fault:
    """A fault of a rank, or of the host of a rank."""

    kind: str
    step: int
    """The step after which it happens."""
    delay_s: float
    """Seconds from the end of that step to the fault, so that it can happen anywhere in a step, or in a checkpoint."""
    rank: int
    seconds: float | None = None
    """How long it lasts; None for ever."""


def draw(seed: str, *, num_ranks: int, steps: int, timeout_s: float, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """Returns the faults of a run in their order. The same for the same seed.

    They begin in the first two thirds of the steps, so that the run does not end before them. Those that end by
    themselves last shorter or longer than `timeout_s`, after which ranks fail: both without and with a restart.
    """
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    found = []
    for kind in rng.sample(list(kinds), min(PER_RUN, len(kinds))):
        short, long = rng.uniform(1, timeout_s / 3), rng.uniform(timeout_s * 1.2, timeout_s * 1.6)
        lasting = {
            "stop a rank": rng.choice([short, long, None]),
            "unplug a host": rng.choice([short, long]),
            "lose frames of a host": short,
        }
        step, rank = rng.randrange(1, steps * 2 // 3), rng.randrange(num_ranks)
        found.append(Fault(kind, step, rng.uniform(0, _LONGEST_DELAY_S), rank, lasting.get(kind)))
    return sorted(found, key=lambda fault: fault.step)
