"""This rank's part of a model: its layers, and its slices of them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from spark_dl.config.conflicts import ELEMENTWISE
from spark_dl.optimization import Optimization, check_elementwise
from spark_dl.parallel.loss import Inside
from spark_dl.parallel.mesh.flat import default_units, shard_fully
from spark_dl.parallel.mesh.groups import Groups
from spark_dl.parallel.mesh.layers import (
    Layer,
    balance,
    build_chain,
    check_cut,
    connect_experts,
    cut_experts,
    find_experts,
)
from spark_dl.parallel.mesh.pipedream import PipeDream
from spark_dl.parallel.mesh.pipeline import Pipeline
from spark_dl.parallel.mesh.settings import Mesh
from spark_dl.parallel.mesh.stage import OtherStage
from spark_dl.parallel.mesh.tensor.parallelize import parallelize_tensors
from spark_dl.parallel.mesh.tensor.plan import resolve_tensor_plan
from spark_dl.parallel.mesh.tensor.words import COLUMNS, ROWS
from spark_dl.parallel.modules import (
    check_hooks,
    check_same_model,
    check_shardable,
    check_unshared,
    marks_of,
    names_of,
    replace_parameters,
    set_marks,
)
from spark_dl.parallel.pieces import Layout, of_boxes
from spark_dl.parallel.trainable import build_optimization
from spark_dl.spec import ModelSpec

if TYPE_CHECKING:
    from spark_dl.config import Config
    from spark_dl.parallel.exchange_clock import ExchangeClock
    from spark_dl.world import World


@dataclass(frozen=True)
class Part:
    """This rank's part of a model."""

    module: nn.Module
    """The model, with the layers that this rank has. Parameters have their names in the whole model."""
    optimization: Optimization
    """The optimizer and its schedule, with the groups of the whole model, and of their parameters what this rank has.
    """
    cut: Mapping[str, Layout] = field(default_factory=dict)
    """What this rank has of the parameters that are cut over tensor ranks, by name."""
    experts: Mapping[str, Layout] = field(default_factory=dict)
    """What this rank has of the parameters of experts, by name, if other ranks have other experts."""
    pipeline: Pipeline | PipeDream | None = None
    model_bytes: int = 0
    """Of the weights of the whole model."""
    inside: Inside | None = None
    """What calls functions with the module, if only then its weights are whole (ZeRO-3)."""


def build_part(
    spec: ModelSpec, world: World, config: Config, groups: Groups, clock: ExchangeClock | None = None
) -> Part:
    """Builds the model, and keeps this rank's part of it on its device. Collective.

    Raises ValueError as `build_chain`, `resolve_tensor_plan` and `find_experts` do.

    Args:
        clock: measures the exchange of tokens between experts.
    """
    settings = config.parallel
    assert isinstance(settings, Mesh)
    model = spec.build_to_train()
    check_same_model(model, world)
    if settings.zero_stage or settings.model > 1 or settings.context > 1:
        check_unshared(model, "parallel.strategy='mesh'")
    # Of the whole model, before anything is cut: a function can choose parameters by their place, or by their marks.
    optimization = build_optimization(spec, model, config, groups.dims.parts)
    if spec.optimizer is not None and (settings.zero_stage or settings.tensor > 1 or settings.experts > 1):
        check_elementwise(optimization, ELEMENTWISE)
    names, model_bytes = names_of(model), sum(p.numel() * p.element_size() for p in model.parameters())
    plan = None
    if settings.tensor > 1:
        plan = resolve_tensor_plan(model, spec.tensor_plan, settings.tensor, sequence=settings.sequence)
    layers = find_experts(model, spec.experts, settings)
    experts = cut_experts(model, layers, groups)
    pipeline: Pipeline | PipeDream | None = None
    chain: list[Layer] | None = None
    if groups.pipeline is not None:
        chain = build_chain(model, spec.layers)
        sizes = [float(1 + sum(p.numel() for p in layer.module.parameters())) for layer in chain]
        cut = cut_of(chain, settings, plan or {}, sizes)
        if settings.schedule == "pipedream":
            check_hooks(model, {name for name, _ in model.named_parameters()}, "parallel.schedule='pipedream'")
            pipeline = PipeDream(
                spec, model, chain, cut, config, group=groups.pipeline, device=world.device,
                vertical_sync=settings.vertical_sync,
            )  # fmt: skip
        else:
            pipeline = Pipeline(
                spec, model, chain, cut, config, group=groups.pipeline, device=world.device,
                schedule=settings.schedule, stages_per_rank=settings.stages_per_rank,
            )  # fmt: skip
    model.to(world.device)
    kept = {name for name, module in model.named_modules() if not isinstance(module, OtherStage)}
    layouts: dict[str, Layout] = {}
    mesh = groups.device_mesh(world.device.type)
    marks = marks_of(model)
    if plan is not None:
        assert mesh is not None
        slices = parallelize_tensors(
            model, {name: word for name, word in plan.items() if name in kept}, mesh["tensor"],
            sequence=settings.sequence,
        )  # fmt: skip
        layouts = {name: of_boxes(s.shape, s.boxes) for name, s in slices.items() if not s.is_replicated}
        set_marks(model, marks)
    _broadcast(model, groups, experts)
    connect_experts(model, layers, groups, clock)
    inside = None
    if config.train.precision == "bf16" and groups.shards is None:  # there is nothing to gather in bfloat16
        raise ValueError("train.precision: expected float32 or bf16-mixed with one data rank in a mesh; use single")
    if settings.zero_stage == 3 and groups.shards is not None:
        assert mesh is not None
        axes = ("replicas", "shards") if groups.replicas is not None else ("shards",)
        if chain is None:
            chain = build_chain(model, spec.layers) if spec.layers is not None else None
        units = default_units(model) if chain is None else [layer.module for layer in chain if layer.name in kept]
        check_hooks(model, {name for name, _ in model.named_parameters()}, "parallel.zero_stage=3")
        check_shardable(model)
        # A pipeline calls the layers, and never the model.
        in_bf16 = config.train.precision == "bf16"
        inside = shard_fully(model, units, mesh[axes], with_rest=pipeline is None, in_bf16=in_bf16)
        set_marks(model, marks)
    replace_parameters(optimization.optimizer, names, model)
    return Part(model, optimization, layouts, experts, pipeline, model_bytes, inside)


def cut_of(chain: Sequence[Layer], settings: Mesh, plan: Mapping[str, str], times: Sequence[float]) -> list[int]:
    """Returns the number of layers of each stage: as `parallel.stages` says, or with near-equal times. On any side.

    Args:
        times: seconds, or any cost, of each layer.
        plan: how modules are cut over tensor ranks, by name.

    Raises:
        ValueError: If the stages cannot be cut so.
    """
    units, num_stages = units_of(chain, plan), settings.pipeline * settings.stages_per_rank
    ends = [0, *itertools.accumulate(units)]
    if settings.stages is None:
        of_stages = balance([sum(times[a:b]) for a, b in itertools.pairwise(ends)], num_stages)
        last = [0, *itertools.accumulate(of_stages)]
        return [ends[b] - ends[a] for a, b in itertools.pairwise(last)]
    cut = check_cut(settings.stages, len(chain), num_stages)
    for end in itertools.accumulate(cut):
        if end not in ends:
            raise ValueError(
                f"parallel.stages: a stage ends between the layers {chain[end - 1].name!r} and {chain[end].name!r}, "
                "which tensor ranks cut by columns and by rows, so that one stage must have both"
            )
    return cut


def units_of(chain: Sequence[Layer], plan: Mapping[str, str]) -> list[int]:
    """Returns numbers of consecutive layers that one stage must have: from one cut by columns to one cut by rows."""
    units: list[int] = []
    is_open = False
    for layer in chain:
        if is_open:
            units[-1] += 1
        else:
            units.append(1)
        word = plan.get(layer.name)
        if word in COLUMNS and word != "colwise_gather_output":
            is_open = True
        elif word in ROWS:
            is_open = False
    return units


def _broadcast(model: nn.Module, groups: Groups, experts: Collection[str]) -> None:
    """Makes the weights of all data ranks those of the first one that has them, as DDP does. Kinds of CPUs can differ
    in bits.

    Args:
        experts: names of the parameters that only the ranks with the same experts have.
    """
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        group = groups.holders(of_experts=name in experts).everyone
        if group is not None:
            dist.broadcast(tensor.detach(), group_src=0, group=group)
