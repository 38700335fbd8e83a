"""Ring all-reduce of bucketed gradients: PyTorch's DistributedDataParallel (Li et al. 2020, VLDB 13(12))."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from spark_dl.config import Config
from spark_dl.parallel.batchnorm import synchronize_batchnorm
from spark_dl.parallel.exchange.bucket_choice import BucketSize
from spark_dl.parallel.exchange.exchange import average_whole, build_exchange
from spark_dl.parallel.generators import generators_kept
from spark_dl.parallel.trainable import Scaler, Trainable, add_gradients, build_optimizer
from spark_dl.spec import Batch, ModelSpec

if TYPE_CHECKING:
    from spark_dl.world import World


def parallelize(spec: ModelSpec, world: World, config: Config) -> Trainable:
    """A copy of the model on every rank, with gradients averaged in buckets while backward runs. Collective.

    Raises ValueError on every rank if the backend cannot send what `parallel.compression` asks for.
    """
    spec, model = build_model(spec, world, config)
    return average_gradients(spec, model, build_optimizer(model, config, world.world_size), world, config)


def build_model(spec: ModelSpec, world: World, config: Config) -> tuple[ModelSpec, nn.Module]:
    """The model on the rank's device, with synchronized BatchNorm if asked for, and the spec to call it by."""
    model = spec.build_to_train()
    if config.parallel.sync_batchnorm:
        spec, model = synchronize_batchnorm(spec, model, config, world.device)
    return spec, model.to(world.device)


def average_gradients(
    spec: ModelSpec, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, config: Config
) -> Trainable:
    """A model that is the same on all ranks, trained by DDP. Collective; raises as `parallelize` does."""
    bucket_size = BucketSize(config)
    exchange = build_exchange(model, world, config)
    settled = False
    wrapped: DistributedDataParallel | None = None
    scaler = Scaler(optimizer, config, world.device)

    def backward(micro_batches: Sequence[Batch], rows: int) -> Tensor:
        # DDP divides the sum over the ranks by their number; the mean is to be over the true rows.
        factor = world.world_size / rows
        return add_gradients(
            spec, wrapped or model, micro_batches, config,
            device=world.device, scale=lambda losses: scaler.scale(losses * factor),
            before_last=wrapped.no_sync if wrapped else contextlib.nullcontext,
        )  # fmt: skip

    def forward_backward(micro_batches: Sequence[Batch], rows: int) -> Tensor:
        nonlocal settled, wrapped
        if wrapped is None:
            # The last micro-batch alone, as its gradients are those that are exchanged while they come. Torch's static
            # graph also fails where its first backward pass exchanges nothing.
            trial = functools.partial(_run_without_trace, model, lambda: backward(micro_batches[-1:], rows))
            size_mib = bucket_size.settle(model, trial, world)
            wrapped = _wrap(model, size_mib, world, config)
            if exchange is not None:
                hook = exchange.hook
                wrapped.register_comm_hook(None, lambda _, bucket: hook(bucket) if settled else average_whole(bucket))
            for _ in range(2 if config.parallel.static_graph else 1):
                trial()
            settled = True
        total = backward(micro_batches, rows)
        scaler.unscale()
        return total

    def settle() -> None:
        # DDP hands out the buffers of rank 0 before each forward pass; what came after that differs.
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)

    def close() -> None:
        # NOTE: DDP's objects go before the process group does. Its reducer holds the group, and lets go of it under
        # Python's lock: if it is the last to do so, it waits for Gloo's threads, which may wait for the lock to let go
        # of a tensor (pytorch/pytorch#56297), and the rank hangs.
        nonlocal wrapped
        wrapped = None
        if exchange is not None:
            exchange.close()

    return Trainable(
        modules=[model],
        optimizer=optimizer,
        forward_backward=forward_backward,
        clip_grad_norm=lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm),
        step=scaler.step,
        extra_state={"bucket_size": bucket_size, **scaler.state},
        settle=settle,
        rank_state=exchange.rank_state if exchange else {},
        close=close,
    )


def _wrap(model: nn.Module, bucket_mib: float, world: World, config: Config) -> DistributedDataParallel:
    return DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        bucket_cap_mb=bucket_mib,
        find_unused_parameters=config.parallel.find_unused_parameters,
        static_graph=config.parallel.static_graph,
        gradient_as_bucket_view=True,
    )


def _run_without_trace(model: nn.Module, backward: Callable[[], object]) -> None:
    """Runs a backward pass that leaves no trace: before the first step, so that DDP's buckets are final then.

    NOTE: DDP lays its buckets out anew after the first backward pass, in the order in which gradients came. With three
    ranks or more the order of the sums in a ring depends on that layout, so without this a resumed run, whose first
    pass comes later, could differ from an uninterrupted one in the last bits. What compression leaves out is kept for
    each bucket, so it must not begin before either. With a static graph DDP learns the graph in the first pass and
    the order of the gradients in the second, so it takes both. Costs a step at the start of a run.
    """
    buffers = [b.detach().clone() for b in model.buffers()]
    gpus = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with generators_kept(sorted(gpu for gpu in gpus if gpu is not None)):
        backward()
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    model.zero_grad(set_to_none=True)
