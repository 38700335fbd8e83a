"""The choices that a plan consists of, except its cuts: mesh, schedule, micro-batches and ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spark_dl.parallel.mesh.dims import Dims
from spark_dl.parallel.mesh.planner.memory import GPIPE, ONE_F_ONE_B, ZERO_STAGES, States
from spark_dl.parallel.mesh.planner.records import Cluster, Layer
from spark_dl.parallel.mesh.planner.stages import Choice


@dataclass(frozen=True)
class Problem:
    """What is to be planned.

    Raises ValueError for no layers, and for sizes that no mesh has.
    """

    layers: tuple[Layer, ...]
    cluster: Cluster
    states: States
    global_batch_size: int
    zero_stages: tuple[int, ...] = ZERO_STAGES
    schedules: tuple[str, ...] = (ONE_F_ONE_B, GPIPE)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers: expected at least one, found none")
        for key, found, known in (
            ("zero_stages", self.zero_stages, ZERO_STAGES), ("schedules", self.schedules, (ONE_F_ONE_B, GPIPE)),
        ):  # fmt: skip
            if not found or not set(found) <= set(known):
                raise ValueError(f"{key}: expected some of {', '.join(map(str, known))}, found {found}")
        if self.global_batch_size < 1:
            raise ValueError(f"global_batch_size: expected at least 1, found {self.global_batch_size}")


def choices(problem: Problem) -> Iterator[Choice]:
    """Returns all choices but those of the cuts, simple ones first.

    Tensor ranks are on one host. There are as many stages as layers at most. 1F1B needs a micro-batch for each stage.
    There is no ZeRO-2 in a pipeline, whose micro-batches in flight need whole gradients.
    """
    for dims in meshes(problem.cluster, problem.layers):
        if problem.global_batch_size % dims.data:
            continue
        of_rank = problem.global_batch_size // dims.data
        for zero_stage in problem.zero_stages:
            if zero_stage and (dims.data == 1 or (zero_stage == 2 and dims.pipeline > 1)):
                continue
            for schedule in problem.schedules if dims.pipeline > 1 else problem.schedules[:1]:
                for micro_batches in _divisors(of_rank):
                    if schedule == GPIPE or dims.pipeline == 1 or micro_batches >= dims.pipeline:
                        yield Choice(dims, zero_stage, schedule, micro_batches, of_rank // micro_batches)


def meshes(cluster: Cluster, layers: Sequence[Layer]) -> Iterator[Dims]:
    """Returns the meshes of the ranks. There are several tensor ranks only if a layer can be cut over them."""
    can_cut = any(layer.tensor for layer in layers)
    for tensor in _divisors(cluster.ranks_per_host) if can_cut else [1]:
        for pipeline in _divisors(cluster.num_ranks // tensor):
            if pipeline <= len(layers):
                yield Dims(pipeline, cluster.num_ranks // tensor // pipeline, tensor)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
