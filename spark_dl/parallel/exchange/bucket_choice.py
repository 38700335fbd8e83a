"""Chooses the bucket size for `parallel.bucket_mib: auto` by measurements with this model, these ranks and network."""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spark_dl.parallel.exchange.buckets import CANDIDATES_MIB, MIB, choose_bucket_mib, interpolate_all_reduce_s

if TYPE_CHECKING:
    from spark_dl.parallel.ddp import DDP
    from spark_dl.world import World

_log = logging.getLogger("spark_dl")
_PROBE_MIB = (1 / 64, 0.25, 1.0, 4.0, 16.0)
_REPEATS = 3


class BucketSize:
    """Bucket size of `parallel.bucket_mib`, measured if it is `auto`. Saved in checkpoints, so that a resumed run has
    the same buckets and the same order of sums."""

    def __init__(self, settings: DDP):
        configured = settings.bucket_mib
        self.mib: float | None = None if isinstance(configured, str) else configured
        self._algorithm = settings.all_reduce

    def state_dict(self) -> dict[str, Any]:
        return {"mib": self.mib}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mib = state["mib"] if self.mib is None else self.mib

    def choose(self, model: nn.Module, backward: Callable[[], object], world: World) -> float:
        """Returns the size in MiB. Collective. With `auto`, the first call measures all-reduces of some sizes.

        Args:
            backward: runs a backward pass of the bare model on this rank, of a micro-batch whose gradients are
                exchanged.
        """
        if self.mib is None:
            ready_s, sizes = time_gradients(model, backward)
            # Not the sum of `sizes`: ranks may use different parameters, but all must measure the same all-reduces.
            total = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
            probes = [mib for mib in _PROBE_MIB if mib * MIB <= max(2 * total, MIB)]
            seconds = [_time_all_reduce(mib, self._algorithm, world.device) for mib in probes]
            all_reduce_s = interpolate_all_reduce_s([mib * MIB for mib in probes], seconds)
            candidates = [mib for mib in CANDIDATES_MIB if mib * MIB < 2 * total] or [CANDIDATES_MIB[0]]
            chosen = torch.tensor(choose_bucket_mib(ready_s, sizes, all_reduce_s, candidates_mib=candidates),
                                  dtype=torch.float64, device=world.device)  # fmt: skip
            dist.broadcast(chosen, 0)
            self.mib = float(chosen)
            _log.info("parallel.bucket_mib: auto is %g on these ranks", self.mib)
        return self.mib


def time_gradients(model: nn.Module, backward: Callable[[], object]) -> tuple[list[float], list[int]]:
    """Returns when each gradient is ready, in seconds after the first one, and its bytes, in the order of these times.

    Runs `backward` twice; the first pass is a warm-up.
    """
    ready: list[tuple[float, int]] = []

    def note(parameter: Tensor) -> None:
        if parameter.device.type == "cuda":
            torch.cuda.synchronize(parameter.device)
        ready.append((time.perf_counter(), parameter.numel() * parameter.element_size()))

    handles = [p.register_post_accumulate_grad_hook(note) for p in model.parameters() if p.requires_grad]
    try:
        backward()
        ready.clear()
        backward()
    finally:
        for handle in handles:
            handle.remove()
    first = ready[0][0]
    return [moment - first for moment, _ in ready], [size for _, size in ready]


def _time_all_reduce(mib: float, algorithm: str, device: torch.device) -> float:
    """Returns the median seconds of an all-reduce by `parallel.all_reduce`, on the slowest rank. Collective."""
    sum_all: Callable[[Tensor], Any] = dist.all_reduce
    if algorithm != "backend":
        from spark_dl.parallel.exchange import collectives

        sum_all = functools.partial(collectives.all_reduce, algorithm=algorithm)
    data, taken = torch.ones(int(mib * MIB) // 4, device=device), []
    for i in range(_REPEATS + 1):
        dist.barrier()
        start = time.perf_counter()
        sum_all(data)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i:  # the first is a warm-up
            taken.append(time.perf_counter() - start)
        data.fill_(1.0)
    slowest = torch.tensor(statistics.median(taken), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
