"""Data parallelism beside pipelines, for the layers of VGG-16 as the authors of PipeDream measured them.

The layers sleep for the times of the profile (Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for
DNN Training", SOSP). Their weights and activations have the bytes of the profile over `SCALE`, and the links the rate
of a network over `SCALE`, so that all times are those of the true sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from benchmarks.parallel.plans import fit_network
from benchmarks.parallel.sleeping import Scale, SleepingLayer, Times
from benchmarks.parallel.stages import timed_steps
from benchmarks.parallel.training import build_config
from spark_dl.parallel.mesh.planner.records import STATES, Cluster, LayerProfile, Seconds
from spark_dl.parallel.mesh.planner.search import MeshPlan, Problem, plans_of_choices
from spark_dl.parallel.mesh.settings import Mesh
from spark_dl.world import World

SCALE = 256
RATES_GBIT = (10.0, 1.0)
"""Rates of the networks. The authors published plans for 10 Gbit/s."""
FORMS = ("data parallel", "gpipe", "1f1b", "pipedream")
_IMAGES = 128
"""Images of a mini-batch of the profile, by the size of its activations. A row stands for a mini-batch."""
_INPUT_BYTES = 4 * _IMAGES * 3 * 224 * 224
_BUCKET_BYTES = 25 * 2**20
_SMALL, _LARGE = 1 << 14, 1 << 19  # bytes of the messages that the network is fitted to


def link_mbit(rate_gbit: float) -> float:
    """Returns the rate of the links of the hosts that stand for a network."""
    return 1e3 * rate_gbit / SCALE


def measure(
    world: World, *, layers: Sequence[tuple[float, float, float, float]], rate_gbit: float, steps: int = 3,
    mini_batches: int = 24,
) -> list[dict[str, Any]]:  # fmt: skip
    """Returns a row for each form. Collective.

    layers: forward and backward seconds, bytes of the output and of the weights, for a mini-batch.
    steps: of the forms whose step has a mini-batch for each rank. mini_batches: of PipeDream, each of which is a step.
    """
    chain = [LayerProfile("scale", Seconds(), Seconds(), 4, _INPUT_BYTES / SCALE)]
    for forward_s, backward_s, output_bytes, weight_bytes in layers:
        seconds = Seconds(per_row=forward_s), Seconds(per_row=backward_s)
        chain.append(LayerProfile("", *seconds, int(weight_bytes / SCALE), output_bytes / SCALE))
    network = fit_network(world, _SMALL, _LARGE)
    cluster = Cluster(world.world_size, world.world_size, within=network, between=network)
    found = []
    for form in FORMS:
        row = _measure(form, chain, cluster, world, mini_batches if form == "pipedream" else steps)
        found.append({"form": form, "rate_gbit": rate_gbit, **row})
    for row in found:
        row["times_data_parallel"] = found[0]["mini_batch_s"] / row["mini_batch_s"]
    return found


def _measure(form: str, chain: Sequence[LayerProfile], cluster: Cluster, world: World, steps: int) -> dict[str, Any]:
    p = world.world_size
    bucket_mib = _BUCKET_BYTES / SCALE / 2**20
    if form == "data parallel":
        plan = _plan(chain, cluster, pipeline=1, micro_batches=1)
        parallel, micro_batches, predicted_s = Mesh(bucket_mib=bucket_mib), 1, plan.step_s / p
    elif form == "pipedream":
        plan = _plan(chain, cluster, pipeline=p, micro_batches=steps)
        parallel = Mesh(pipeline=p, schedule="pipedream", stages=plan.cut)
        micro_batches, predicted_s = 1, max(stage.period_s for stage in plan.stages)
    else:
        plan = _plan(chain, cluster, pipeline=p, micro_batches=p, schedule=form)
        parallel = Mesh(pipeline=p, schedule=form, stages=plan.cut)  # type: ignore[arg-type]
        micro_batches, predicted_s = p, plan.step_s / p
    config = build_config(parallel, p, micro_batches=micro_batches)
    shape = (_INPUT_BYTES // SCALE // 4,)
    found = timed_steps(lambda: _build(chain), shape, world, config, steps)
    return {
        "stages": list(plan.cut), "mini_batches": config.train.global_batch_size,
        "mini_batch_s": found["seconds"] / steps / config.train.global_batch_size, "predicted_s": predicted_s,
        "passes": found["passes"],
    }  # fmt: skip


def _plan(
    chain: Sequence[LayerProfile], cluster: Cluster, *, pipeline: int, micro_batches: int, schedule: str = "1f1b"
) -> MeshPlan:
    """Returns the plan with the best cuts."""
    data = cluster.num_ranks // pipeline
    problem = Problem(
        tuple(chain), cluster, STATES["sgd"], micro_batches * data, zero_stages=(0,), schedules=(schedule,),
        allows=lambda choice: choice.dims.pipeline == pipeline and choice.micro_batches == micro_batches,
    )  # fmt: skip
    return plans_of_choices(problem)[0]


def _build(chain: Sequence[LayerProfile]) -> nn.Module:
    layers = []
    for layer in chain[1:]:
        of_one = Seconds(per_row=layer.backward.per_row / 2)  # the profile has one time for both gradients
        features = int(layer.output_bytes) // 4
        layers.append(SleepingLayer(Times(layer.forward, of_one, of_one), features, layer.parameter_bytes))
    return nn.Sequential(Scale(), *layers)
