"""Exchanges of DDP's gradient buckets that replace DDP's all-reduce."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from spark_dl.parallel.exchange.compression import Average, Bucket, PowerSgd, average_largest, average_thresholded

if TYPE_CHECKING:
    from spark_dl.parallel.ddp import DDP
    from spark_dl.parallel.exchange.serial import SerialCollectives
    from spark_dl.world import World

Hook: TypeAlias = Callable[[dist.GradBucket], "Future[Tensor]"]
"""A bucket with this rank's gradients -> a future of its buffer, which then holds their mean over the ranks."""


@dataclass(frozen=True)
class Exchange:
    """A replacement of DDP's all-reduce. Its hook is collective: called for the same buckets on all ranks."""

    hook: Hook
    rank_state: Mapping[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None


def build_exchange(model: nn.Module, world: World, settings: DDP, *, timeout_s: float) -> Exchange | None:
    """Builds the exchange for `parallel.compression` or `parallel.all_reduce`; None: DDP's all-reduce. Collective.

    Raises ValueError on every rank if the backend cannot sum the dtype that is sent, or not send it between GPUs.
    """
    _check_backend(world, settings)
    if settings.all_reduce != "backend":
        return build_all_reduce(settings.all_reduce, timeout_s=timeout_s)
    if settings.compression == "none":
        return None
    if settings.compression == "fp16":
        return Exchange(functools.partial(default_hooks.fp16_compress_hook, None))  # type: ignore[arg-type]
    if settings.compression == "bf16":
        check_can_sum(torch.bfloat16, world.device)
        return Exchange(functools.partial(default_hooks.bf16_compress_hook, None))  # type: ignore[arg-type]
    if name := next((name for name, p in model.named_parameters() if p.is_complex()), None):
        raise ValueError(
            f"parallel.compression: found {settings.compression!r} with complex weights ({name!r}), which it does not "
            "compress; set it to none"
        )
    from spark_dl.parallel.exchange.serial import SerialCollectives

    state: dict[str, Any] = {}
    average: Average
    if settings.compression == "threshold":
        average = functools.partial(average_thresholded, threshold=settings.threshold)
    elif settings.compression == "topk":
        average = functools.partial(average_largest, ratio=settings.topk_ratio)
    else:
        powersgd = PowerSgd(settings.powersgd_rank)
        average, state = powersgd.average, {"powersgd": powersgd}
    in_order = SerialCollectives(timeout_s)
    feedback = ErrorFeedback(average, model, in_order, start_step=settings.compression_start_step)
    return Exchange(feedback.hook, {"error_feedback": feedback, **state}, in_order.close)


def _check_backend(world: World, settings: DDP) -> None:
    """Raises ValueError if ranks share a GPU, and the exchange needs more than Gloo can do with tensors on GPUs."""
    if world.device.type == "cpu" or world.backend == "nccl":
        return
    if settings.all_reduce != "backend" or settings.compression in ("powersgd", "threshold", "topk"):
        key = "all_reduce" if settings.all_reduce != "backend" else "compression"
        raise ValueError(
            f"parallel.{key}: found {getattr(settings, key)!r}, which needs NCCL, and NCCL takes one rank on a GPU; "
            f"set it to {'backend' if key == 'all_reduce' else 'none, fp16 or bf16'}, or launch.gpus_per_rank to 1"
        )


def build_all_reduce(algorithm: str, *, timeout_s: float) -> Exchange:
    """Builds an exchange that averages buckets by one of `collectives.ALGORITHMS`. Collective.

    No wait for another rank takes longer than `timeout_s`. Raises ValueError for an unknown algorithm.
    """
    from spark_dl.parallel.exchange import collectives
    from spark_dl.parallel.exchange.serial import SerialCollectives

    collectives.check_algorithm(algorithm)
    in_order = SerialCollectives(timeout_s)

    def hook(bucket: dist.GradBucket) -> Future[Tensor]:
        flat = bucket.buffer()
        return in_order.run(functools.partial(collectives.average, flat, algorithm), flat)

    return Exchange(hook, close=in_order.close)


def average_whole(bucket: dist.GradBucket) -> Future[Tensor]:
    """Averages whole gradients by the backend's all-reduce, as DDP does without a hook. Collective."""
    return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type] # None is the group of all ranks


def check_can_sum(dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError on every rank if the backend cannot sum this dtype. Collective."""
    try:
        dist.all_reduce(torch.zeros(1, dtype=dtype, device=device))
    except RuntimeError as error:
        if "scalar type" not in str(error):  # not about the dtype
            raise
        raise ValueError(
            f"parallel.compression: {dist.get_backend()} of torch {torch.__version__} cannot sum {dtype}; use fp16, or "
            "a newer torch"
        ) from error


class ErrorFeedback:
    """Compressed averages of buckets, and each bucket's residual: the part that this rank has not sent yet."""

    def __init__(self, average: Average, model: nn.Module, in_order: SerialCollectives, *, start_step: int):
        """Steps before `start_step` send whole gradients."""
        self._average, self._in_order, self._start_step, self._step = average, in_order, start_step, 0
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._shapes: dict[int, dict[str, torch.Size]] = {}
        self._residuals: dict[int, Tensor] = {}
        self._loaded: dict[str, Tensor] = {}

    def hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Averages a bucket over the ranks. Called by DDP once its buckets are final, in one order on all ranks."""
        is_whole = self._step < self._start_step
        self._step += bucket.is_last()
        if is_whole:
            return average_whole(bucket)
        index, gradient = bucket.index(), bucket.buffer()
        if index not in self._residuals:
            self._shapes[index] = {self._names[id(p)]: p.shape for p in bucket.parameters()}
            self._residuals[index] = torch.cat(
                [
                    self._loaded.pop(name).to(gradient) if name in self._loaded else gradient.new_zeros(shape.numel())
                    for name, shape in self._shapes[index].items()
                ]
            )
        assert [*self._shapes[index]] == [self._names[id(p)] for p in bucket.parameters()], "buckets are final"
        flat = Bucket(gradient, self._residuals[index], self._shapes[index])
        return self._in_order.run(lambda group: self._average(flat, group), gradient)

    def state_dict(self) -> dict[str, Any]:
        """Returns the residuals by parameter, [elements] each, as buckets may differ in a resumed run."""
        residuals = dict(self._loaded)
        for index, shapes in self._shapes.items():
            parts = self._residuals[index].split([shape.numel() for shape in shapes.values()])
            residuals |= zip(shapes, parts, strict=True)
        return {"step": self._step, "residuals": residuals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step, self._loaded = state["step"], dict(state["residuals"])
        self._residuals, self._shapes = {}, {}  # the next step makes them again, from the loaded ones
