"""Plans how a model is laid out on ranks: pipeline, data and tensor ranks, ZeRO stage, micro-batches, stages."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_dl import storage
from spark_dl.config.checks import suggestion
from spark_dl.parallel.cost.cost import Network
from spark_dl.parallel.mesh.planner.choices import Problem
from spark_dl.parallel.mesh.planner.memory import GPIPE, ONE_F_ONE_B, STATES, ZERO_STAGES
from spark_dl.parallel.mesh.planner.records import Cluster
from spark_dl.parallel.mesh.planner.search import Plan, search
from spark_dl.planning import page as pages
from spark_dl.planning import tables
from spark_dl.planning.profile import read_profile


@dataclass(frozen=True)
class MeshPlans:
    """What `plan_mesh` returns: the best plan of each mesh that fits, the shortest step first."""

    name: str
    """Of the profile."""
    problem: Problem
    plans: tuple[Plan, ...]
    page: str | None
    """Path or URL of the page, if one was written."""

    @property
    def best(self) -> Plan:
        return self.plans[0]

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The settings of a run with the best plan, by section of the configuration."""
        return tables.settings(self.best)

    @property
    def text(self) -> str:
        """The stages of the best plan and the other plans, as tables for a terminal."""
        return "\n".join(tables.text(self.problem, self.plans))

    def to_dict(self) -> dict[str, Any]:
        """Returns the plans as plain data, for JSON."""
        return {
            "settings": self.settings,
            "plans": [tables.as_dict(self.problem, plan) for plan in self.plans],
            **({"page": self.page} if self.page else {}),
        }


def plan_mesh(
    profile: str | os.PathLike[str] | Mapping[str, Any],
    *,
    num_ranks: int,
    global_batch_size: int,
    hosts: int = 1,
    memory_gib: float | None = None,
    optimizer: str = "adam",
    rate_mbit: float = 10_000.0,
    latency_ms: float = 0.1,
    local_rate_mbit: float = 80_000.0,
    local_latency_ms: float = 0.02,
    zero_stages: Sequence[int] = ZERO_STAGES,
    schedules: Sequence[str] = (ONE_F_ONE_B, GPIPE),
    page: str | os.PathLike[str] | None = None,
) -> MeshPlans:
    """Finds the fastest ways to lay out a model on ranks, by a cost model. Needs no ranks and no Spark session.

    profile: path or URL of a JSON file with the times and sizes of the model's layers, or its content.
    num_ranks, hosts: ranks with equal devices, equally many on each host.
    global_batch_size: rows of a step.
    memory_gib: memory of a rank's device. Without it, all plans fit.
    optimizer: `adam`, `momentum`, `sgd` in float32, or `mixed_adam`, Adam in mixed precision.
    rate_mbit, latency_ms: of the link of a host, in each direction, and of a message.
    local_rate_mbit, local_latency_ms: the same between two ranks of a host.
    zero_stages, schedules: those to choose from, of 0, 1, 2, 3 and `1f1b`, `gpipe`.
    page: path or URL of an HTML page to write, with a picture of the stages. An earlier plan is replaced.

    Raises ValueError for what is no profile, and, with the least memory that is needed, if no plan fits.
    ModuleNotFoundError for a page without the packages of `pip install 'spark_dl[plot]'`.
    """
    _check(num_ranks, hosts, global_batch_size, memory_gib, optimizer)
    url = None if page is None else storage.absolute(page)
    if url:
        pages.check(url)
    name, layers = read_profile(profile)
    cluster = Cluster(
        num_ranks,
        hosts,
        within=_network("local_", local_rate_mbit, local_latency_ms),
        between=_network("", rate_mbit, latency_ms),
        memory_bytes=math.inf if memory_gib is None else memory_gib * 2**30,
    )
    problem = Problem(layers, cluster, STATES[optimizer], global_batch_size, tuple(zero_stages), tuple(schedules))
    plans = tuple(search(problem))
    if url:
        about = {"optimizer": optimizer, "rate_mbit": rate_mbit, "latency_ms": latency_ms,
                 "local_rate_mbit": local_rate_mbit, "local_latency_ms": local_latency_ms}  # fmt: skip
        pages.write(url, name, problem, plans, about)
    return MeshPlans(name, problem, plans, url)


def _check(num_ranks: int, hosts: int, global_batch_size: int, memory_gib: float | None, optimizer: str) -> None:
    for key, number in (("num_ranks", num_ranks), ("hosts", hosts), ("global_batch_size", global_batch_size)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{key}: expected a whole number >= 1, found {number!r}")
    if memory_gib is not None and not 0 < memory_gib < math.inf:
        raise ValueError(f"memory_gib: expected a number above 0, found {memory_gib!r}")
    if optimizer not in STATES:
        raise ValueError(f"optimizer: unknown {optimizer!r}{suggestion(str(optimizer), list(STATES))}")


def _network(prefix: str, rate_mbit: float, latency_ms: float) -> Network:
    if not rate_mbit > 0:
        raise ValueError(f"{prefix}rate_mbit: expected a number above 0, found {rate_mbit!r}")
    if not 0 <= latency_ms < math.inf:
        raise ValueError(f"{prefix}latency_ms: expected a number >= 0, found {latency_ms!r}")
    return Network(alpha_s=latency_ms / 1e3, bytes_per_s=rate_mbit * 1e6 / 8)
