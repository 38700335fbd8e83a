"""The strategy `mesh`: data ranks whose states are sharded, and models that are cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spark_dl.parallel import ddp
from spark_dl.parallel.ddp import DDP
from spark_dl.parallel.exchange_clock import ExchangeClock, build_clock
from spark_dl.parallel.mesh.experts import divide_experts, release_peers
from spark_dl.parallel.mesh.flat import FlatGradients, local
from spark_dl.parallel.mesh.fsdp import default_units, shard_fully
from spark_dl.parallel.mesh.groups import Groups, build_groups
from spark_dl.parallel.mesh.settings import Mesh
from spark_dl.parallel.mesh.state import MeshState
from spark_dl.parallel.trainable import Trainable, add_gradients, build_optimization
from spark_dl.spec import Batch, ModelSpec

if TYPE_CHECKING:
    from spark_dl.config import Config
    from spark_dl.world import World

_MIB = 1 << 20


def parallelize(spec: ModelSpec, world: World, config: Config) -> Trainable:
    """Builds this rank's part of the model. Where nothing is cut or sharded, trains as DDP does. Collective."""
    settings = config.parallel
    assert isinstance(settings, Mesh)
    groups = build_groups(world, settings.dims(world.world_size), config.launch.collective_timeout_s)
    clock = build_clock(world)
    if settings.model == settings.experts == 1 and not settings.zero_stage:
        return _as_ddp(spec, world, config, settings, groups, clock)
    model = spec.build_to_train().to(world.device)
    _broadcast(model, groups)
    experts = divide_experts(model, spec.experts, groups, clock)
    if settings.zero_stage == 3:
        mesh = groups.device_mesh(world.device.type)
        if mesh is not None and groups.shards is not None:
            shard_fully(model, default_units(model), mesh)
    optimization = build_optimization(spec, model, config, groups.dims.data)
    optimizer = optimization.optimizer
    flat = None
    if settings.zero_stage < 3:
        flat = FlatGradients(
            model, optimizer, groups, stage=settings.zero_stage, bucket_bytes=int(settings.bucket_mib * _MIB),
            experts=experts, clock=clock,
        )  # fmt: skip

    def forward_backward(micro_batches: Sequence[Batch], rows: int) -> Tensor:
        if flat is None:
            return add_gradients(
                spec, model, micro_batches, config, device=world.device, scale=lambda losses: losses / rows,
                clock=clock,
            )  # fmt: skip
        flat.start(len(micro_batches))
        total = add_gradients(
            spec, model, micro_batches, config, device=world.device, scale=lambda losses: losses / rows,
            before_last=flat.no_sync,
        )  # fmt: skip
        flat.finish()
        return total

    def step() -> None:
        optimizer.step()
        if flat is not None:
            flat.gather_weights()

    def close() -> None:
        release_peers(model)
        if flat is not None:
            flat.close()

    of_experts = {id(parameter) for name, parameter in model.named_parameters() if name in experts}
    return Trainable(
        modules=[model],
        optimizer=optimizer,
        optimization=optimization,
        forward_backward=forward_backward,
        clip_grad_norm=lambda norm: clip_grad_norm(
            optimizer, groups, norm, is_sharded=settings.zero_stage > 0, experts=of_experts
        ),
        step=step,
        sync_weights=lambda: _broadcast_buffers(model, groups),
        clock=clock,
        sum_over_data=lambda tensor: _sum_over_data(tensor, groups),
        state=MeshState(model, optimizer, groups, buckets=flat.buckets if flat else (), experts=experts),
        close=close,
    )


def _as_ddp(
    spec: ModelSpec, world: World, config: Config, settings: Mesh, groups: Groups, clock: ExchangeClock | None
) -> Trainable:
    spec, model = ddp.build_model(spec, world, config, sync_batchnorm=False, clock=clock)
    optimization = build_optimization(spec, model, config, groups.dims.data)
    plain = ddp.average_gradients(
        spec, model, optimization, world, config, settings=DDP(bucket_mib=settings.bucket_mib), clock=clock
    )
    # The size of buckets is no setting here, and other meshes do not have its state.
    extra = {name: part for name, part in plain.extra_state.items() if name != "bucket_size"}
    state = MeshState(model, optimization.optimizer, groups)
    return dataclasses.replace(plain, state=state, extra_state=extra)


def clip_grad_norm(
    optimizer: torch.optim.Optimizer, groups: Groups, most: float, *, is_sharded: bool, experts: Collection[int] = ()
) -> Tensor:
    """Scales the gradients to at most this L2 norm over the whole model. Returns the norm before. Collective.

    Each rank adds the squares of the gradients that it alone has, or has as the first of several ranks.

    experts: ids of the parameters that only the ranks with the same experts have. Shards of them are as other shards.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    gradients = [local(p.grad) for p in parameters]
    dims, at = groups.dims, groups.at
    squares = torch.zeros((), dtype=torch.float64, device=gradients[0].device if gradients else None)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parts = dims.shards if is_sharded else dims.experts if id(parameter) in experts else 1
        if at.data < parts:
            squares += torch.linalg.vector_norm(gradient).double() ** 2
    if dims.num_ranks > 1:
        dist.all_reduce(squares)
    norm = squares.sqrt()
    factor = most / (norm + 1e-6)
    if factor < 1:
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
    return norm.float()


def _sum_over_data(tensor: Tensor, groups: Groups) -> None:
    if groups.data is not None:
        dist.all_reduce(tensor, group=groups.data)


def _broadcast(model: nn.Module, groups: Groups) -> None:
    """Makes the weights of all data ranks those of the first one, as DDP does. Kinds of CPUs can differ in bits."""
    if groups.data is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), group_src=0, group=groups.data)


def _broadcast_buffers(model: nn.Module, groups: Groups) -> None:
    if groups.data is not None:
        for buffer in model.buffers():
            dist.broadcast(local(buffer), group_src=0, group=groups.data)
