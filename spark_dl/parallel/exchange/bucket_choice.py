"""The bucket size of `parallel.bucket_mib: auto`: the best one for this model, on these ranks, on this network."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spark_dl.parallel.exchange import collectives
from spark_dl.parallel.exchange.buckets import CANDIDATES_MIB, MIB, choose_bucket_mib, interpolate_all_reduce_s

if TYPE_CHECKING:
    from spark_dl.parallel.ddp import DDP
    from spark_dl.world import World

_log = logging.getLogger("spark_dl")
_PROBE_MIB = (1 / 64, 0.25, 1.0, 4.0, 16.0)
_REPEATS = 3


class BucketSize:
    """What `parallel.bucket_mib` says or, with `auto`, what was measured to be best. Goes with a checkpoint, so that a
    resumed run has the same buckets, and with them the same order of sums."""

    def __init__(self, settings: DDP):
        asked = settings.bucket_mib
        self.mib: float | None = None if isinstance(asked, str) else asked
        self._algorithm = settings.all_reduce

    def state_dict(self) -> dict[str, Any]:
        return {"mib": self.mib}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mib = state["mib"] if self.mib is None else self.mib

    def settle(self, model: nn.Module, backward: Callable[[], object], world: World) -> float:
        """The size in MiB. Collective; the first call measures, where nothing is set, with all-reduces of some sizes.

        backward: a backward pass of the bare model on this rank, as the one whose gradients are exchanged.
        """
        if self.mib is None:
            ready_s, sizes = time_gradients(model, backward)
            # Not the sum of `sizes`: a rank may use other parameters than the others, but must measure what they do.
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
    """When each parameter's gradient comes, in seconds from the first one on, and its bytes, in the order of coming.

    Runs `backward` twice, the first time to warm up.
    """
    came: list[tuple[float, int]] = []

    def note(parameter: Tensor) -> None:
        if parameter.device.type == "cuda":
            torch.cuda.synchronize(parameter.device)
        came.append((time.perf_counter(), parameter.numel() * parameter.element_size()))

    handles = [p.register_post_accumulate_grad_hook(note) for p in model.parameters() if p.requires_grad]
    try:
        backward()
        came.clear()
        backward()
    finally:
        for handle in handles:
            handle.remove()
    first = came[0][0]
    return [moment - first for moment, _ in came], [size for _, size in came]


def _time_all_reduce(mib: float, algorithm: str, device: torch.device) -> float:
    """Median seconds of the all-reduce that `parallel.all_reduce` names, of the slowest rank. Collective."""
    data, taken = torch.ones(int(mib * MIB) // 4, device=device), []
    for i in range(_REPEATS + 1):
        dist.barrier()
        start = time.perf_counter()
        if algorithm == "backend":
            dist.all_reduce(data)
        else:
            collectives.all_reduce(data, algorithm)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i:  # the first one warms up
            taken.append(time.perf_counter() - start)
        data.fill_(1.0)
    slowest = torch.tensor(statistics.median(taken), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
