"""Plans the mesh of a run with `parallel.strategy: auto`, on the driver, before its ranks start.

A short job of the ranks tells before it on which hosts they are, and how fast the network is.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from spark_dl.config import Config, Launch
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.build import build_train_loader
from spark_dl.data.load.mixture import Mixture
from spark_dl.gather import gather_json
from spark_dl.launch.barrier import run_barrier
from spark_dl.launch.rank import rendezvous
from spark_dl.launch.rank.task import RankResult
from spark_dl.parallel.cost.cost import ExchangeSize, Network, Point, fit
from spark_dl.parallel.mesh.auto.settings import Auto
from spark_dl.parallel.mesh.planner.records import Cluster, States
from spark_dl.parallel.mesh.planner.search import MeshPlan, Problem, search
from spark_dl.parallel.mesh.planner.stages import PlanChoice
from spark_dl.parallel.mesh.settings import Mesh
from spark_dl.planning import page
from spark_dl.rundir.checkpoint import Saved
from spark_dl.spec import Batch, ModelSpec
from spark_dl.world import World

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
"""Bytes of the all-reduces that are measured."""
_REPEATS = 5

_log = logging.getLogger("spark_dl")
_NO_LIMIT = Network(0.0, math.inf)


@dataclass(frozen=True)
class Probed:
    """What the ranks have found."""

    ranks_of_hosts: tuple[int, ...]
    """Number of ranks of each host, in the order of the ranks."""
    within: Network | None
    """Between the ranks of a host; None if each host has one."""
    between: Network | None
    """Between hosts; None if there is one."""


def probe(spark: Any, launch: Launch, *, description: str) -> Probed:
    """Starts the ranks, and measures all-reduces within hosts and between hosts. Called on the driver.

    Raises as `run_barrier` does.
    """
    answers: list[Mapping[str, Any]] = run_barrier(
        spark, functools.partial(measure_as_rank, launch), launch=launch, description=description
    )  # fmt: skip
    first = answers[0]
    hosts = Counter(first["hosts"])  # keeps the order in which the ranks have them
    within = [points for rank in answers if (points := rank["within"])]
    between = [points for rank in answers if (points := rank["between"])]
    return Probed(tuple(hosts.values()), fit_slowest(within), fit_slowest(between))


def fit_slowest(points: Sequence[Sequence[Sequence[float]]]) -> Network | None:
    """Returns the network that fits what the ranks measured; None without measurements. Pure.

    Args:
        points: of each rank, (ranks, bytes, seconds) for each size. Of all ranks, the slowest counts.
    """
    if not points:
        return None
    slowest = [max(of_size, key=lambda point: point[2]) for of_size in zip(*points, strict=True)]
    return fit([Point(ExchangeSize("ring", int(ranks), size), seconds) for ranks, size, seconds in slowest])


def measure_as_rank(launch: Launch, *, report: Any = None) -> RankResult:
    """Measures as one rank. Collective."""
    with rendezvous.join(launch, report=report) as world:
        hosts = gather_json(f"{world.host}") if world.world_size > 1 else [world.host]
        timeout = datetime.timedelta(seconds=launch.collective_timeout_s)
        by_host = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
        firsts = [ranks[0] for ranks in by_host]
        within = between = None
        for ranks in by_host:
            group = dist.new_group(ranks, timeout=timeout) if len(ranks) > 1 else None
            if group is not None and world.rank in ranks:
                within = group
        if len(firsts) > 1:
            between = dist.new_group(firsts, timeout=timeout)
        measured: dict[str, Any] = {"hosts": hosts, "within": [], "between": []}
        if within is not None:
            measured["within"] = _measure(within, world)
        if world.world_size > 1:
            dist.barrier()
        if between is not None and world.rank in firsts:
            measured["between"] = _measure(between, world)
        return RankResult(world.rank, measured)


def _measure(group: dist.ProcessGroup, world: World) -> list[list[float]]:
    """Returns (ranks, bytes, seconds) for each size: the medians of all-reduces, after a first one."""
    points = []
    for size in SIZES:
        tensor = torch.zeros(size // 4, device=world.device)
        seconds = []
        for _ in range(_REPEATS + 1):
            start = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            seconds.append(time.perf_counter() - start)
        points.append([float(group.size()), float(size), statistics.median(seconds[1:])])
    return points


def plan_mesh_of(
    spark: Any, spec: ModelSpec | None, train: ShardSet | Mixture, config: Config, saved: Saved | None
) -> Config:
    """Returns the settings with the best mesh, and its micro-batches, in place of `auto`; others as they are.

    Called on the driver. Builds the model, measures its layers on one batch, and starts the ranks once to measure the
    network. saved: the checkpoint to resume, whose mesh is used again if the number of ranks is the same.
    Raises ValueError, with what to set, for a model that is no chain of layers, and if no plan fits.
    """
    if not isinstance(config.parallel, Auto):
        return config
    assert spec is not None, "trials are refused before"
    if (again := _mesh_of(saved, config)) is not None:
        _log.info("auto: going on with the mesh of the checkpoint")
        return again
    # A second of imports, which only these meshes need.
    from spark_dl.parallel.mesh.auto.profile import measure_profile, state_bytes
    from spark_dl.parallel.mesh.build import units_of
    from spark_dl.parallel.mesh.layers import build_chain
    from spark_dl.parallel.mesh.trial import check_chain

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = spec.build_to_train()
        _check_batchnorm(model)
        chain = build_chain(model, spec.layers)
        words = _tensor_words(spec, model)
        batch = _global_batch(spec, train, config)
        check_chain(spec, model, chain, {name: tensor[:2] for name, tensor in batch.items()}, config)
        cluster = _cluster(spark, config)
        sizes = _tensor_sizes(spec, model, cluster.ranks_per_host) if words else []
        layers = measure_profile(spec, model, chain, words if sizes else {}, batch, config)
        held = states_of(state_bytes(spec, config), model)
    problem = _problem(layers, cluster, held, config, sizes)
    try:
        best = search(problem)[0]
    except ValueError as error:
        key = "parallel.strategy" if math.isinf(cluster.memory_bytes) else "parallel.memory_gib"
        raise ValueError(
            f"{key}: {error}. The number of data ranks must also divide loader.num_streams={config.loader.num_streams}"
        ) from error
    return with_plan(config, best, units_of(chain, words if sizes else {}))


def mesh_in_words(config: Config) -> str:
    """Returns the sizes of a planned mesh, for the progress."""
    mesh = config.parallel
    assert isinstance(mesh, Mesh)
    data = config.launch.num_ranks // (mesh.pipeline * mesh.tensor)
    return f"pipeline {mesh.pipeline}, data {data}, tensor {mesh.tensor}, ZeRO stage {mesh.zero_stage}"


def states_of(state_bytes: float, model: nn.Module) -> States:
    """Returns the bytes per parameter of weights, gradients and optimizer. # state_bytes: of a float32 parameter"""
    weights = sum(p.nbytes for p in model.parameters()) / max(1, sum(p.numel() for p in model.parameters()))
    return States(weights, weights, state_bytes * weights / 4)


def _mesh_of(saved: Saved | None, config: Config) -> Config | None:
    """Returns the settings with the mesh and the micro-batches of a checkpoint, if it has as many ranks."""
    if saved is None:
        return None
    before = saved.manifest["config"]
    if before["launch"]["num_ranks"] != config.launch.num_ranks or before["parallel"]["strategy"] != Mesh.strategy:
        return None
    parallel = before["parallel"]
    fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in parallel.items()}
    del fields["strategy"]
    return _replaced(config, Mesh(**fields), before["train"]["accumulation_steps"])


def with_plan(config: Config, plan: MeshPlan, units: Sequence[int]) -> Config:
    """Returns the settings of a run with a plan, and logs them. Raises ValueError as `Config` does.

    Args:
        units: number of the model's layers in each layer of the profile.
    """
    plan_settings = page.settings(plan)
    mesh_settings = {key: value for key, value in plan_settings["parallel"].items() if key != "strategy"}
    if "stages" in mesh_settings:
        ends = [*plan.starts, len(units)]
        mesh_settings["stages"] = tuple(sum(units[a:b]) for a, b in itertools.pairwise(ends))
    before, steps = config.train.accumulation_steps, plan_settings["train"]["accumulation_steps"]
    _log.info("auto: %s", page.summary(plan))
    if steps != before:
        _log.info(
            "auto: train.accumulation_steps is %d and not %d, the number of micro-batches of the plan; the weights are "
            "the same, up to rounding", steps, before,
        )  # fmt: skip
    _log.info(
        "auto: to train with the same mesh again, set parallel.strategy=mesh and %s", _as_text(mesh_settings, steps)
    )
    return _replaced(config, Mesh(**mesh_settings), steps)


def _as_text(own: dict[str, Any], accumulation_steps: int) -> str:
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in own.items()}
    settings = [f"parallel.{key}={value}" for key, value in plain.items()]
    return ", ".join([*settings, f"train.accumulation_steps={accumulation_steps}"])


def _replaced(config: Config, mesh: Mesh, accumulation_steps: int) -> Config:
    train = dataclasses.replace(config.train, accumulation_steps=accumulation_steps)
    return dataclasses.replace(config, parallel=mesh, train=train)


def _check_batchnorm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise ValueError(
                f"parallel.strategy: found 'auto' for a model with the {type(module).__name__} {name!r}, whose mean "
                "and variance depend on the numbers of data ranks and of micro-batches, which auto chooses; set "
                "parallel.strategy to 'mesh', or use a LayerNorm or a GroupNorm"
            )


def _tensor_words(spec: ModelSpec, model: nn.Module) -> dict[str, str]:
    """Returns how modules are cut over tensor ranks, by name; nothing for a model without a plan of its own."""
    from spark_dl.parallel.mesh.tensor.plan import resolve_tensor_plan

    try:
        return resolve_tensor_plan(model, spec.tensor_plan, 1)
    except ValueError as reason:
        if spec.tensor_plan is not None:
            raise
        _log.info("auto: no tensor ranks: %s", reason)
        return {}


def _tensor_sizes(spec: ModelSpec, model: nn.Module, most: int) -> list[int]:
    """Returns the numbers of tensor ranks, from 2 to `most`, that divide what the plan cuts."""
    from spark_dl.parallel.mesh.tensor.plan import resolve_tensor_plan

    sizes = []
    for size in range(2, most + 1):
        try:
            resolve_tensor_plan(model, spec.tensor_plan, size)
        except ValueError as reason:
            _log.debug("auto: not %d tensor ranks: %s", size, reason)
        else:
            sizes.append(size)
    return sizes


def _global_batch(spec: ModelSpec, train: ShardSet | Mixture, config: Config) -> Batch:
    """Returns the rows of the first step, as one batch."""
    whole = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulation_steps=1))
    steps = build_train_loader(train, spec, whole, rank=0, world_size=1).epoch(0)
    try:
        return next(steps).micro_batches[0]
    finally:
        steps.close()


def _problem(
    layers: tuple[Any, ...], cluster: Cluster, states: States, config: Config, tensor_sizes: Sequence[int]
) -> Problem:  # fmt: skip
    settings, streams = config.parallel, config.loader.num_streams
    assert isinstance(settings, Auto)

    def allows(choice: PlanChoice) -> bool:
        # Data ranks with equally many streams have equally many rows.
        return choice.dims.tensor in (1, *tensor_sizes) and streams % choice.dims.data == 0

    return Problem(
        layers, cluster, states, config.train.global_batch_size, tuple(settings.zero_stages),
        tuple(settings.schedules), allows,
    )  # fmt: skip


def _cluster(spark: Any, config: Config) -> Cluster:
    """Returns the ranks with their network, as set or as measured by the ranks."""
    settings, num_ranks = config.parallel, config.launch.num_ranks
    assert isinstance(settings, Auto)
    hosts, within, between = settings.hosts or 1, _NO_LIMIT, _NO_LIMIT
    if num_ranks > 1 and _is_unknown(settings, num_ranks):
        probed = probe(spark, config.launch, description=f"spark_dl: network of {num_ranks} ranks")
        hosts = settings.hosts or _equal_hosts(probed.ranks_of_hosts)
        within, between = probed.within or within, probed.between or between
    if num_ranks > hosts:
        within = _network("within hosts", within, settings.local_rate_mbit, settings.local_latency_ms)
    if hosts > 1:
        between = _network("between hosts", between, settings.rate_mbit, settings.latency_ms)
    memory = math.inf if settings.memory_gib is None else settings.memory_gib * 2**30
    return Cluster(num_ranks, hosts, within, between, memory)


def _is_unknown(settings: Auto, num_ranks: int) -> bool:
    hosts = settings.hosts
    return (
        hosts is None
        or (hosts < num_ranks and None in (settings.local_rate_mbit, settings.local_latency_ms))
        or (hosts > 1 and None in (settings.rate_mbit, settings.latency_ms))
    )


def _equal_hosts(ranks_of_hosts: Sequence[int]) -> int:
    if len({*ranks_of_hosts}) > 1:
        raise ValueError(
            "parallel.hosts: auto plans for hosts with equally many ranks, found hosts with "
            f"{', '.join(map(str, ranks_of_hosts))} ranks; change launch.num_ranks or the executors, set "
            "parallel.hosts to a divisor of launch.num_ranks, or set parallel.strategy to 'mesh'"
        )
    return len(ranks_of_hosts)


def _network(where: str, measured: Network, rate_mbit: float | None, latency_ms: float | None) -> Network:
    """Returns a network with the numbers that are set in place of the measured ones, and logs them."""
    if rate_mbit is not None and latency_ms is not None:
        network = Network(latency_ms / 1e3, rate_mbit * 1e6 / 8)
    elif rate_mbit is not None:
        network = dataclasses.replace(measured, bytes_per_s=rate_mbit * 1e6 / 8, gamma_s_per_byte=0.0)
    elif latency_ms is not None:
        network = dataclasses.replace(measured, alpha_s=latency_ms / 1e3, overhead_s=0.0)
    else:
        network = measured
    texts = [
        f"{network.bytes_per_s * 8 / 1e6:,.0f} Mbit/s ({'measured' if rate_mbit is None else 'set'})",
        f"{(network.alpha_s + network.overhead_s) * 1e3:.3g} ms ({'measured' if latency_ms is None else 'set'})",
    ]
    _log.info("auto: network %s: %s", where, ", ".join(texts))
    return network
