"""Ring all-reduce of bucketed gradients: PyTorch's DistributedDataParallel (Li et al. 2020, VLDB 13(12))."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from spark_dl.config.checks import SettingError, check, check_bool, check_choices, check_number
from spark_dl.config.fields import named_settings
from spark_dl.config.parallel import Parallel
from spark_dl.config.strategies import Strategy
from spark_dl.gather import RowRanks
from spark_dl.generators import generators_kept
from spark_dl.nn.moe import moe_layers
from spark_dl.optimization import Optimization, trained_by
from spark_dl.parallel.exchange.bucket_choice import BucketSize
from spark_dl.parallel.exchange.exchange import average_whole, build_exchange
from spark_dl.parallel.exchange_clock import ExchangeClock, build_clock
from spark_dl.parallel.loss import Count, Inside, noting_counts, unused_message
from spark_dl.parallel.modules import check_same_model, module_state_kept, synchronize_batchnorm
from spark_dl.parallel.trainable import NoteBucket, Scaler, Trainable, add_gradients, build_optimization
from spark_dl.spec import Batch, ModelSpec

if TYPE_CHECKING:
    from spark_dl.config import Config
    from spark_dl.world import World


AllReduce = Literal["backend", "naive", "reduce_broadcast", "tree", "ring", "halving_doubling"]
Compression = Literal["none", "fp16", "bf16", "powersgd", "threshold", "topk"]
_ERROR_FEEDBACK = ("powersgd", "threshold", "topk")
_OF_COMPRESSION: Mapping[str, tuple[str, ...]] = {
    "compression_start_step": _ERROR_FEEDBACK,
    "powersgd_rank": ("powersgd",),
    "threshold": ("threshold",),
    "topk_ratio": ("topk",),
}
"""Settings that only some compressions use."""


@named_settings
@dataclass(frozen=True, kw_only=True)
class DDP(Parallel):
    """PyTorch's DistributedDataParallel: all-reduce averages the gradients in buckets during the backward pass.

    Example:
        >>> spark_dl.Config(parallel=spark_dl.DDP(compression="bf16"))
    """

    strategy: ClassVar[str] = "ddp"
    has_master_weights: ClassVar[bool] = True
    bucket_mib: float | Literal["auto"] = 25.0
    """Size of one all-reduce's flat gradient buffer, in MiB. At the start of a run, `auto` measures the time at which
    gradients are ready and the duration of all-reduces. It then chooses the size that gives the shortest step. `auto`
    is not supported with `compression`."""
    find_unused_parameters: bool = False
    """For models with parameters that some steps do not use."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same way."""
    sync_batchnorm: bool = False
    """Normalize by the mean and variance of the rows of all ranks in a micro-batch, not of the rank's rows alone. With
    one micro-batch per step (`train.accumulation_steps`), these are the rows of the global batch."""
    all_reduce: AllReduce = "backend"
    """All-reduce that sums gradients: the backend's (Gloo, NCCL), or an algorithm of
    `spark_dl.parallel.exchange.collectives`."""
    compression: Compression = "none"
    """Form in which gradients are sent. All except fp16 and bf16 keep the part that was not sent and add it to the next
    step's gradient (error feedback)."""
    compression_start_step: int = 2
    """With powersgd, threshold and topk: number of steps at the start of a run in which the ranks send whole
    gradients."""
    powersgd_rank: int = 1
    """Rank of PowerSGD's low-rank products."""
    threshold: float = 0.001
    """Value for `compression: threshold`. For each element with a larger absolute value, a rank sends this value with
    the element's sign. Each rank compares the value with the gradient of the mean loss over its own rows, so the
    same value suits any number of ranks."""
    topk_ratio: float = 0.01
    """Fraction of each bucket's elements that `topk` sends: those with the largest absolute values. In (0, 1]."""

    def __post_init__(self) -> None:
        if self.bucket_mib != "auto":
            check_number(self, "bucket_mib", 0, above=True)
        elif self.compression != "none":
            raise SettingError(
                "parallel.bucket_mib",
                f"expected a size in MiB with parallel.compression={self.compression!r}, found "
                "'auto', which measures all-reduces of whole gradients; set a size, or parallel.compression to none",
            )
        check_bool(self, "find_unused_parameters", "static_graph", "sync_batchnorm")
        check_choices(self)
        check_number(self, "powersgd_rank", 1, whole=True)
        check_number(self, "compression_start_step", 0, whole=True)
        check_number(self, "threshold", 0, above=True)
        check_number(self, "topk_ratio", 0, above=True)
        check(self.topk_ratio <= 1, "parallel.topk_ratio", "a number <= 1", self.topk_ratio)
        self._check_compression()

    def _check_compression(self) -> None:
        for name, choices in _OF_COMPRESSION.items():
            if self.compression not in choices and getattr(self, name) != getattr(type(self), name):
                raise SettingError(
                    f"parallel.{name}",
                    f"only supported with parallel.compression={' or '.join(choices)}, found "
                    f"{self.compression!r}; remove it, or choose one of these",
                )
        if self.compression != "none" and self.all_reduce != "backend":
            raise SettingError(
                "parallel.all_reduce",
                f"expected 'backend' with parallel.compression={self.compression!r}, which does "
                f"not send whole gradients, found {self.all_reduce!r}",
            )
        if self.compression in _ERROR_FEEDBACK and self.find_unused_parameters:
            raise SettingError(
                "parallel.find_unused_parameters",
                f"not supported with parallel.compression={self.compression!r}: what "
                "it sends for a parameter that no rank used in that step would be lost; set it to false, or use fp16 "
                "or bf16",
            )


def parallelize(spec: ModelSpec, world: World, config: Config) -> Trainable:
    """Builds a copy of the model on every rank. Gradients are averaged in buckets while backward runs. Collective.

    Raises ValueError on every rank if the backend cannot sum the dtype of `parallel.compression`.
    """
    settings = config.parallel
    assert isinstance(settings, DDP)
    clock = build_clock(world)
    spec, model = build_model(spec, world, config, sync_batchnorm=settings.sync_batchnorm, clock=clock)
    optimization = build_optimization(spec, model, config, world.world_size)
    return average_gradients(spec, model, optimization, world, config, settings=settings, clock=clock)


def build_model(
    spec: ModelSpec, world: World, config: Config, *, sync_batchnorm: bool, clock: ExchangeClock | None
) -> tuple[ModelSpec, nn.Module]:
    """Builds the model on the rank's device, with synchronized BatchNorm if set. Returns the spec to use, too.

    Collective. Raises ValueError if it differs from that of rank 0.
    """
    model = spec.build_to_train()
    check_same_model(model, world)
    if sync_batchnorm:
        spec, model = synchronize_batchnorm(spec, model, config, world.device, clock)
    return spec, model.to(world.device)


def average_gradients(
    spec: ModelSpec, model: nn.Module, optimization: Optimization, world: World, config: Config, *,
    settings: DDP, clock: ExchangeClock | None,
) -> Trainable:  # fmt: skip
    """Returns a model that is trained by DDP, the same on all ranks. Collective. Raises as `parallelize` does."""
    bucket_size = BucketSize(settings)
    exchange = build_exchange(model, world, settings, timeout_s=config.launch.collective_timeout_s)
    is_final = False  # the layout of DDP's buckets
    wrapped: DistributedDataParallel | None = None
    note: NoteBucket | None = None
    scaler = Scaler(optimization.optimizer, config, world.device)

    def backward(micro_batches: Sequence[Batch], count: Count) -> Tensor:
        # DDP divides the sum over the ranks by their number, but the mean must be over the true rows.
        factor = world.world_size / count
        with _unused_named(model):
            return add_gradients(
                spec, model, micro_batches, config,
                device=world.device, scale=lambda losses: scaler.scale(losses * factor), call=wrapped,
                before_last=wrapped.no_sync if wrapped else contextlib.nullcontext, clock=clock,
            )  # fmt: skip

    def forward_backward(micro_batches: Sequence[Batch], count: Count) -> Tensor:
        nonlocal is_final, wrapped
        if wrapped is None:
            # Only the last micro-batch, as only its backward pass exchanges gradients. Torch's static graph also fails
            # if its first backward pass exchanges nothing.
            trial = functools.partial(_run_without_trace, model, lambda: backward(micro_batches[-1:], count))
            size_mib = bucket_size.choose(model, trial, world)
            wrapped = _wrap(model, size_mib, world, settings)
            if clock is not None:
                clock.watch_buffers(wrapped)
            if exchange is not None or note is not None:
                wrapped.register_comm_hook(None, lambda _, bucket: send(bucket))
            for _ in range(2 if settings.static_graph else 1):
                trial()
            is_final = True
        total = backward(micro_batches, count)
        scaler.unscale()
        return total

    def send(bucket: dist.GradBucket) -> Future[Tensor]:
        if is_final and note is not None:
            note(bucket)
        return average_whole(bucket) if exchange is None or not is_final else exchange.hook(bucket)

    def watch_buckets(watched: NoteBucket) -> None:
        nonlocal note
        note = watched

    def sync_weights() -> None:
        # DDP broadcasts rank 0's buffers before each forward pass, so they differ after it.
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)

    def close() -> None:
        # NOTE: DDP must be freed before the process group. Its reducer refers to the group, and releases it holding the
        # GIL. If that is the last reference, it waits for Gloo's threads, which may wait for the GIL to free a tensor
        # (pytorch/pytorch#56297), and the rank hangs.
        nonlocal wrapped
        wrapped = None
        if exchange is not None:
            exchange.close()

    return Trainable(
        modules=[model],
        optimizer=optimization.optimizer,
        optimization=optimization,
        forward_backward=forward_backward,
        clip_grad_norm=lambda norm: nn.utils.clip_grad_norm_(trained_by(optimization.optimizer), norm),
        step=scaler.step,
        skip_step=scaler.skip,
        extra_state={"bucket_size": bucket_size, **scaler.state},
        watch_buckets=watch_buckets,
        sync_weights=sync_weights,
        row_ranks=RowRanks(world.world_size),
        rank_state=exchange.rank_state if exchange else {},
        clock=clock,
        close=close,
    )


def _wrap(model: nn.Module, bucket_mib: float, world: World, settings: DDP) -> DistributedDataParallel:
    return DistributedDataParallel(
        Inside(model),
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        bucket_cap_mb=bucket_mib,
        find_unused_parameters=settings.find_unused_parameters,
        static_graph=settings.static_graph,
        gradient_as_bucket_view=True,
    )


@contextlib.contextmanager
def _unused_named(model: nn.Module) -> Iterator[None]:
    """Replaces DDP's error about parameters without a gradient, which has their numbers, by one with their names."""
    try:
        yield
    except RuntimeError as error:
        if "mark a variable ready only once" in str(error):
            raise ValueError(
                "a parameter got its gradient in several parts, as of a module that is called several times in "
                "checkpoint(..., use_reentrant=True); use use_reentrant=False, or set parallel.static_graph to true"
            ) from error
        match = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
        if "not used in producing loss" not in str(error) or match is None:
            raise
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        unused = [trained[int(number)] for number in match[1].split()]
        raise ValueError(unused_message(unused)) from error


def _run_without_trace(model: nn.Module, backward: Callable[[], object]) -> None:
    """Runs a backward pass and restores the state of modules, and generators.

    Before the first step, so that DDP's buckets are final.

    NOTE: after the first backward pass DDP rebuilds its buckets in the order in which gradients were ready. With three
    or more ranks the order of the sums in a ring depends on that layout. Without this pass, a resumed run, whose first
    pass is later, could differ from an uninterrupted one in the last bits. Compression keeps residuals by bucket, so it
    must not start earlier either. With a static graph DDP records the graph in the first pass and the order of the
    gradients in the second, so two passes are needed. Costs a step at the start of a run.
    """
    gpus = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with noting_counts(), module_state_kept(model), generators_kept(sorted(gpu for gpu in gpus if gpu is not None)):
        backward()
    for layer in moe_layers(model).values():
        layer.take_counts()  # only steps count
    model.zero_grad(set_to_none=True)


STRATEGY = Strategy(settings=DDP, parallelize=parallelize)
