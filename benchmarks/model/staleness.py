"""Predicts the time of an iteration with randomly slow ranks: the runtime analysis of Dutta et al. 2018, "Slow and
Stale
Gradients Can Win the Race: Error-Runtime Trade-offs in Distributed SGD" (AISTATS). Pure functions.

P workers compute gradients, each in a random time X, and send them to a parameter server. An iteration is one update of
the weights. In the six modes the server waits for:

    sync            the gradients of all workers
    k_sync          the first K workers; the others cancel and start again with the new weights
    k_batch_sync    the first K gradients, several from a fast worker, all with the same weights; others cancel
    async           one gradient; its worker continues with the new weights, the others with their old weights
    k_async         gradients of K different workers, which then continue with the new weights
    k_batch_async   K gradients of any workers; each worker continues at once
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spark_dl.parallel.cost.cost import harmonic

MODES = ("sync", "k_sync", "k_batch_sync", "async", "k_async", "k_batch_async")


@dataclass(frozen=True)
class Delay:
    """A shifted exponential distribution: a gradient takes `constant_s` plus an exponential time with this mean.

    Either may be 0.
    """

    constant_s: float
    exponential_s: float

    @property
    def mean_s(self) -> float:
        return self.constant_s + self.exponential_s


@dataclass(frozen=True)
class Bounds:
    """Bounds of an expected time. They are equal if it is known exactly."""

    lower_s: float
    upper_s: float


def iteration_s(mode: str, num_workers: int, delay: Delay, *, k: int | None = None) -> Bounds:
    """Returns expected seconds between two updates of the weights.

    Exact, except for `k_batch_sync` and `k_async` if the delay has a constant part; these have bounds. `k` is for the
    modes with k in their name. `sync` waits for all workers, and `async` for one. Raises ValueError for an unknown
    mode, and for an invalid k.
    """
    k = _checked_k(mode, num_workers, k)
    # P workers that never pause: Dutta et al., from the rate of a renewal process. This is the fastest mode.
    without_pause = k * delay.mean_s / num_workers
    if mode in ("sync", "k_sync"):
        waited = order_statistic_s(k, num_workers, delay)
        return Bounds(waited, waited)
    if mode in ("async", "k_batch_async"):
        return Bounds(without_pause, without_pause)
    if mode == "k_async":
        if k == 1:
            return Bounds(without_pause, without_pause)
        # A worker in the middle of a gradient ends no later than one that starts: an upper bound, exact if memoryless.
        waited = order_statistic_s(k, num_workers, delay)
        is_exact = delay.constant_s == 0 or k == num_workers
        return Bounds(waited if is_exact else without_pause, waited)
    if delay.constant_s == 0:
        return Bounds(without_pause, without_pause)
    # By Wald's equation, as each worker but the last is in the middle of a gradient when the K-th comes.
    started = (k + num_workers - 1) * delay.mean_s / num_workers
    rounds = math.ceil(k / num_workers)
    in_rounds = rounds * order_statistic_s(min(k, num_workers), num_workers, delay)
    return Bounds(max(without_pause, rounds * delay.constant_s), min(started, in_rounds))


def order_statistic_s(k: int, num_workers: int, delay: Delay) -> float:
    """Returns the expected time of the k-th of P gradients that start together: c + (H(P) - H(P-k)) / mu.

    The gaps between the ends of exponential times are exponential with rates P mu, (P-1) mu, ... (Renyi 1953).
    """
    return delay.constant_s + delay.exponential_s * (harmonic(num_workers) - harmonic(num_workers - k))


def _checked_k(mode: str, num_workers: int, k: int | None) -> int:
    if mode not in MODES:
        raise ValueError(f"mode: unknown {mode!r}; expected one of {', '.join(MODES)}")
    if num_workers < 1:
        raise ValueError(f"num_workers: expected at least 1, found {num_workers}")
    if mode in ("sync", "async"):
        if k is not None:
            raise ValueError(f"k: expected none for {mode}, found {k}")
        return num_workers if mode == "sync" else 1
    most = None if "batch" in mode else num_workers
    if k is None or k < 1 or (most is not None and k > most):
        raise ValueError(f"k: expected from 1 to {most or 'any number'} for {mode}, found {k}")
    return k
