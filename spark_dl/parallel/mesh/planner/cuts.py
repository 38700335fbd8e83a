"""Cuts a chain of layers into the stages of a pipeline: dynamic programming, exact.

The time of a step is that of Alpa (Zheng et al. 2022, arXiv:2201.12023, section 5), with the gradient exchange that is
left when the first stage ends:

    sum t_i + (m - 1) max T_i + max(0, max (sync_i - sum over j < i of behind_j))

t_i is what stage i adds to the time of the first of m micro-batches, and T_i its time for each further one. Stage i
ends its last backward pass earlier than the first stage does, by the sum of `behind`, and then exchanges its gradients.

Alpa tries each value of the maximum. Here, each suffix of the layers keeps the cuts of which none is better in all of:
sum t, sum t with the exchange, max T. The time of a step grows with each of them, so no other cuts can be best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Cost(Protocol):
    """What the cuts need to know of a stage."""

    @property
    def seconds(self) -> float: ...
    @property
    def period_s(self) -> float: ...
    @property
    def behind_s(self) -> float: ...
    @property
    def sync_s(self) -> float: ...


@dataclass(frozen=True)
class Cuts:
    """The best cuts."""

    step_s: float
    starts: tuple[int, ...]
    """First layer of each stage."""


class _Suffix(NamedTuple):
    """Stages of the last layers, and the time of a step that consists of them alone."""

    seconds: float
    with_sync_s: float
    period_s: float
    starts: tuple[int, ...]


def step_s(stages: Sequence[Cost], micro_batches: int) -> tuple[float, float]:
    """Returns the time of a pipeline without the exchange of gradients, and the exchange that is left after it."""
    pipeline_s = sum(stage.seconds for stage in stages) + (micro_batches - 1) * max(stage.period_s for stage in stages)
    exposed_s = hidden_s = 0.0
    for stage in stages:
        exposed_s = max(exposed_s, stage.sync_s - hidden_s)
        hidden_s += stage.behind_s
    return pipeline_s, exposed_s


def best_cuts(
    num_layers: int,
    num_stages: int,
    micro_batches: int,
    cost: Callable[[int, int, int], Cost | None],
    *,
    prefix_s: Sequence[float] | None = None,
    limit_s: float = math.inf,
) -> Cuts | None:
    """Returns the cuts with the shortest step; None if there are none, or none that takes less than `limit_s`.

    cost: (stage, start, end) -> the cost of layers `start` to `end` - 1 as this stage, or None if it does not fit.
    prefix_s: for each number of layers, the least seconds of a micro-batch in this many first layers. It only saves
        time.
    """
    least_s = prefix_s or [0.0] * (num_layers + 1)
    suffixes: dict[int, list[_Suffix]] = {num_layers: [_Suffix(0.0, 0.0, 0.0, ())]}
    for stage in reversed(range(num_stages)):
        starts = range(stage, num_layers - (num_stages - 1 - stage)) if stage else range(1)
        reached: dict[int, list[_Suffix]] = {}
        for start in starts:
            front: list[_Suffix] = []
            for end, found in suffixes.items():
                if end <= start or (own := cost(stage, start, end)) is None:
                    continue
                for after in found:
                    new = _before(own, after, start)
                    period_s = max(new.period_s, least_s[start] / stage if stage else 0.0)
                    once_s = max(least_s[start] + new.seconds, new.with_sync_s)
                    if once_s + (micro_batches - 1) * period_s < limit_s:
                        _insert(front, new)
            if front:
                reached[start] = front
        suffixes = reached
    whole = [Cuts(each.with_sync_s + (micro_batches - 1) * each.period_s, each.starts) for each in suffixes.get(0, [])]
    return min(whole, key=lambda cuts: cuts.step_s, default=None)


def _before(own: Cost, after: _Suffix, start: int) -> _Suffix:
    seconds = own.seconds + after.seconds
    return _Suffix(
        seconds,
        max(seconds + own.sync_s, own.seconds - own.behind_s + after.with_sync_s),
        max(own.period_s, after.period_s),
        (start, *after.starts),
    )


def _insert(front: list[_Suffix], new: _Suffix) -> None:
    """Adds a suffix unless another is as good in all respects, and removes those that it makes needless."""
    if any(_is_as_good(each, new) for each in front):
        return
    front[:] = [each for each in front if not _is_as_good(new, each)]
    front.append(new)


def _is_as_good(one: _Suffix, other: _Suffix) -> bool:
    return one.seconds <= other.seconds and one.with_sync_s <= other.with_sync_s and one.period_s <= other.period_s
