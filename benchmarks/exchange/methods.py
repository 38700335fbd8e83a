"""Table of the compared ways to exchange gradients: settings, kind of measurement, and sections."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from benchmarks.exchange.accelerator import GRADIENT_STD
from spark_dl.baselines.driver_loop.shuffle_reduce import ShuffleReduce
from spark_dl.baselines.driver_loop.tree_reduce import TreeReduce
from spark_dl.baselines.servers.settings import ParameterServer, ServerMode
from spark_dl.config import Parallel
from spark_dl.parallel.ddp import DDP, AllReduce
from spark_dl.parallel.hvd import Horovod
from spark_dl.parallel.local_sgd import LocalSGD

RING = "ddp"
"""Baseline of the comparison: the backend's ring, through DDP."""
How = Literal["backward", "all_reduce", "job", "weights", "stream"]
_EVERYWHERE = ("exchange", "breakdown", "stragglers")


@dataclass(frozen=True)
class Method:
    """One way to exchange gradients."""

    how: How
    """Kind of measurement: a backward pass of the strategy, one all-reduce of one tensor, or the training steps of a
    run. Methods that send `weights` in intervals are compared only as runs. `stream` does not exchange gradients."""
    parallel: Parallel
    counted_as: str = ""
    """Name in the cost model (`work.METHODS`), or empty."""
    is_exact: bool = True
    """Whether the weights equal those of a single process with the same global batches."""
    warm_ups: int = 3
    """Exchanges that are not counted, until compression has started (`parallel.compression_start_step`)."""
    sections: Sequence[str] = _EVERYWHERE
    """Sections of the report that measure it. `compression` measures compressed methods and the ring."""

    @property
    def is_compressed(self) -> bool:
        """Whether it sends less than whole gradients."""
        return getattr(self.parallel, "compression", "none") != "none"

    @property
    def is_bucketed(self) -> bool:
        """Whether gradients are sent in the buckets of `parallel.bucket_mib`."""
        return self.how == "backward"


def _ddp(counted_as: str = "ring", warm_ups: int = 3, scales: bool = False, **settings: object) -> Method:
    parallel = DDP(**settings)  # type: ignore[arg-type]
    sections = (*_EVERYWHERE, "scaling") if scales else _EVERYWHERE
    return Method("backward", parallel, counted_as, parallel.compression == "none", warm_ups, sections)


def _all_reduce(algorithm: AllReduce) -> Method:
    sections = ("exchange", "scaling") if algorithm == "reduce_broadcast" else ("exchange",)
    counted_as = "ring" if algorithm == "backend" else algorithm
    return Method("all_reduce", DDP(all_reduce=algorithm), counted_as, warm_ups=1, sections=sections)


def _servers(mode: ServerMode) -> Method:
    sections = _EVERYWHERE if mode == "sync" else ("exchange", "stragglers")
    return Method(
        "job", ParameterServer(server_mode=mode), "parameter_server", is_exact=mode == "sync", sections=sections
    )


METHODS: Mapping[str, Method] = {
    RING: _ddp(scales=True),
    "ddp ring": _ddp(all_reduce="ring", scales=True),
    "ddp fp16": _ddp(compression="fp16"),
    "ddp powersgd": _ddp(compression="powersgd"),
    # A threshold needs warm-ups until elements reach it: a random walk needs about 31 steps.
    # Sparse gradients are sent from each rank to all others.
    "ddp threshold": _ddp("naive", 40, compression="threshold", threshold=5 * GRADIENT_STD),
    "ddp topk": _ddp("naive", compression="topk"),
    "horovod": Method("backward", Horovod(), "ring", sections=("exchange", "stragglers")),
    **{name: _all_reduce(name) for name in get_args(AllReduce)},
    "tree_reduce": Method("job", TreeReduce(), "tree_reduce"),
    "shuffle_reduce": Method("job", ShuffleReduce(), "shuffle_reduce"),
    **{f"parameter_server {mode}": _servers(mode) for mode in get_args(ServerMode)},
    "local_sgd": Method("weights", LocalSGD(), is_exact=False, sections=("stragglers",)),
    # Limit of TCP; measured only on request.
    "stream": Method("stream", DDP(), is_exact=False, warm_ups=1, sections=("exchange",)),
}
"""Methods by their names in the report."""


def measured_in(section: str, asked: Sequence[str]) -> list[str]:
    """Returns the given methods that a section measures, in the given order."""
    if section == "compression":
        compressed = [name for name in asked if METHODS[name].is_compressed]
        return [*(name for name in asked if name == RING), *compressed] if compressed else []
    return [name for name in asked if section in METHODS[name].sections]


def settings_of(name: str, num_ranks: int) -> Parallel:
    """Returns the settings of a method. Modes that wait for K gradients wait for all but one."""
    parallel = METHODS[name].parallel
    if isinstance(parallel, ParameterServer) and parallel.server_mode not in ("sync", "async"):
        return dataclasses.replace(parallel, server_k=max(1, num_ranks - 2))
    return parallel
