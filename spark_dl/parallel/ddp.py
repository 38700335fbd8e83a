"""Ring all-reduce of bucketed gradients: PyTorch's DistributedDataParallel (Li et al. 2020, VLDB 13(12))."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from spark_dl.config import Config
from spark_dl.parallel.trainable import Trainable, build_optimizer
from spark_dl.spec import Batch, ModelSpec, weighted_loss_sum

if TYPE_CHECKING:
    from spark_dl.launch.rendezvous import World


def parallelize(spec: ModelSpec, world: World, config: Config) -> Trainable:
    """A copy of the model on every rank, with gradients averaged in buckets while backward runs. Collective."""
    model = spec.build().to(world.device)
    optimizer = build_optimizer(model, config, world.world_size)
    parallel = config.parallel
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        bucket_cap_mb=parallel.bucket_mib,
        find_unused_parameters=parallel.find_unused_parameters,
        static_graph=parallel.static_graph,
        gradient_as_bucket_view=True,
    )
    scaler = torch.amp.GradScaler(world.device.type, enabled=config.train.precision == "fp16")
    settled = False

    def backward(micro_batches: Sequence[Batch], rows: int) -> Tensor:
        total = torch.zeros((), device=world.device)
        for i, batch in enumerate(micro_batches):
            on_device = {name: tensor.to(world.device, non_blocking=True) for name, tensor in batch.items()}
            is_last = i == len(micro_batches) - 1
            with contextlib.nullcontext() if is_last else wrapped.no_sync():
                _, losses = weighted_loss_sum(spec, wrapped, on_device, config)
                # DDP divides the sum over the ranks by their number; the mean is to be over the true rows.
                scaler.scale(losses * (world.world_size / rows)).backward()
            total += losses.detach()
        return total

    def forward_backward(micro_batches: Sequence[Batch], rows: int) -> Tensor:
        nonlocal settled
        if not settled:
            _settle_buckets(model, lambda: backward(micro_batches, rows))
            settled = True
        total = backward(micro_batches, rows)
        if scaler.is_enabled():
            scaler.unscale_(optimizer)
        return total

    def step() -> None:  # without fp16 the scaler only passes on to optimizer.step
        scaler.step(optimizer)
        scaler.update()

    return Trainable(
        modules=[model],
        optimizer=optimizer,
        forward_backward=forward_backward,
        clip_grad_norm=lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm),
        step=step,
        extra_state={"scaler": scaler} if scaler.is_enabled() else {},
    )


def _settle_buckets(model: nn.Module, backward: Callable[[], object]) -> None:
    """Runs one backward pass that leaves no trace, so that DDP's buckets are final before the first step.

    NOTE: DDP lays its buckets out anew after the first backward pass, in the order in which gradients came. With three
    ranks or more the order of the sums in a ring depends on that layout, so without this a resumed run, whose first
    pass comes later, could differ from an uninterrupted one in the last bits. Costs one step at the start of a run.
    """
    buffers = [b.detach().clone() for b in model.buffers()]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(d for d in devices if d is not None)):
        backward()
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    model.zero_grad(set_to_none=True)
