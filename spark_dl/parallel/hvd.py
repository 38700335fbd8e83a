"""Ring all-reduce by Horovod (Sergeev and Del Balso 2018, arXiv:1802.05799), in ranks that are already running.

`horovodrun` logs in to the hosts, starts the processes and gives each its rank in environment variables. Here Spark has
started the ranks. They set these variables themselves, and rank 0 runs Horovod's rendezvous server while they connect.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from spark_dl.config.checks import check_choices, check_number
from spark_dl.config.fields import named_settings
from spark_dl.config.parallel import Parallel
from spark_dl.config.strategies import Strategy
from spark_dl.gather import RowRanks
from spark_dl.optimization import trained_by
from spark_dl.parallel.exchange_clock import build_clock
from spark_dl.parallel.loss import Count
from spark_dl.parallel.modules import check_same_model
from spark_dl.parallel.trainable import Scaler, Trainable, add_gradients, build_optimizer
from spark_dl.spec import Batch, ModelSpec

if TYPE_CHECKING:
    from spark_dl.config import Config
    from spark_dl.world import World

Wait: TypeAlias = Callable[[Callable[[], object]], None]


@named_settings
@dataclass(frozen=True, kw_only=True)
class Horovod(Parallel):
    """Horovod: its all-reduce averages the gradients during the backward pass.

    Example:
        >>> spark_dl.Config(parallel=spark_dl.Horovod(compression="fp16"))
    """

    strategy: ClassVar[str] = "horovod"
    own_optimizer: ClassVar[bool] = True
    bucket_mib: float = 25.0
    """Size of Horovod's fusion buffer, in MiB."""
    compression: Literal["none", "fp16"] = "none"
    """Form in which gradients are sent."""

    def __post_init__(self) -> None:
        check_number(self, "bucket_mib", 0, above=True)
        check_choices(self)


def check_available(config: Config) -> None:
    """Raises ValueError without Horovod. Called on the driver before ranks start, and on every rank."""
    if importlib.util.find_spec("horovod") is None:
        raise ValueError(
            "parallel.strategy: horovod is not installed in this Python; build it for its torch with "
            "conf/build_horovod.sh (needs a C++ compiler; see docs/strategies.md) and install the wheel for the driver "
            "and the executors, or set parallel.strategy to ddp"
        )


def _settings(config: Config) -> Horovod:
    assert isinstance(config.parallel, Horovod)
    return config.parallel


def parallelize(spec: ModelSpec, world: World, config: Config) -> Trainable:
    """Builds a copy of the model on every rank. Horovod averages the gradients while backward runs. Collective.

    Raises ValueError as `check_available` does, and RuntimeError if Horovod was built for another torch.
    """
    check_available(config)
    hvd = _import()
    model = spec.build_to_train()
    check_same_model(model, world)
    model = model.to(world.device)
    plain = build_optimizer(model, config, world.world_size)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(hvd.shutdown)  # ends its thread, as Spark reuses the process
        wait = cleanup.enter_context(_bounded_waits(hvd, config.launch.collective_timeout_s))
        _connect(hvd, world, config, wait)
        optimizer = _distributed(hvd, plain, model, config)
        close = cleanup.pop_all().close
    scaler, clock = Scaler(optimizer, config, world.device), build_clock(world)
    is_first = True

    def broadcast_from_rank0(tensors: Mapping[str, Any]) -> None:
        # NOTE: not hvd.broadcast_optimizer_state, which unpickles data from rank 0. Plain numbers come from the
        # settings and the checkpoint, which all ranks have.
        state = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
        wait(lambda: hvd.broadcast_parameters(state, root_rank=0))

    def forward_backward(micro_batches: Sequence[Batch], count: Count) -> Tensor:
        nonlocal is_first
        if is_first:  # not earlier, as a checkpoint is loaded after `parallelize`
            broadcast_from_rank0({**model.state_dict(), **_state_of(optimizer)})
            is_first = False
        # Horovod divides the sum over the ranks by their number, but the mean must be over the true rows.
        factor = world.world_size / count
        total = add_gradients(
            spec, model, micro_batches, config, device=world.device,
            scale=lambda losses: scaler.scale(losses * factor),
        )  # fmt: skip
        with clock or contextlib.nullcontext():
            wait(optimizer.synchronize)
        scaler.unscale()
        return total

    def step() -> None:
        with optimizer.skip_synchronize():
            scaler.step()

    return Trainable(
        modules=[model],
        optimizer=optimizer,
        forward_backward=forward_backward,
        clip_grad_norm=lambda norm: nn.utils.clip_grad_norm_(trained_by(optimizer), norm),
        step=step,
        skip_step=scaler.skip,
        extra_state=scaler.state,
        row_ranks=RowRanks(world.world_size),
        clock=clock,
        sync_weights=lambda: broadcast_from_rank0(dict(model.named_buffers())),
        close=close,
    )


def _distributed(hvd: Any, plain: torch.optim.Optimizer, model: nn.Module, config: Config) -> Any:
    optimizer = hvd.DistributedOptimizer(
        plain,
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, _settings(config).compression),
        backward_passes_per_step=config.train.accumulation_steps,
    )
    # Horovod makes a new optimizer from the parameter groups alone. The state must be copied, as other arguments, such
    # as Adagrad's initial_accumulator_value, may have set it.
    optimizer.load_state_dict(plain.state_dict())
    return optimizer


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    states = optimizer.state_dict()["state"].items()
    return {f"optimizer.{i}.{name}": value for i, state in states for name, value in state.items()}


def _import() -> Any:
    try:
        import horovod.torch
    except Exception as error:  # not only ImportError if it was built for another torch
        raise RuntimeError(
            f"parallel.strategy: horovod is installed, but cannot be imported with torch {torch.__version__}: {error}; "
            "build it again with conf/build_horovod.sh"
        ) from error
    return horovod.torch


def _connect(hvd: Any, world: World, config: Config, wait: Wait) -> None:
    """Starts Horovod on this rank and connects it to the other ranks. Collective."""
    slots = _slots(world)
    with contextlib.ExitStack() as until_connected:
        if world.rank == 0:
            server = until_connected.enter_context(_rendezvous_server(world.address, slots))
            world.store.set("horovod/rendezvous", f"{world.address}:{server.server_port}")
        address, port = world.store.get("horovod/rendezvous").decode().rsplit(":", 1)
        me = slots[world.rank]
        place = {
            "RANK": me.rank, "SIZE": me.size, "LOCAL_RANK": me.local_rank, "LOCAL_SIZE": me.local_size,
            "CROSS_RANK": me.cross_rank, "CROSS_SIZE": me.cross_size, "HOSTNAME": me.hostname,
            "GLOO_RENDEZVOUS_ADDR": address, "GLOO_RENDEZVOUS_PORT": port, "GLOO_IFACE": world.interface or "",
            "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo",
        }  # fmt: skip
        # NOTE: which gradients share a buffer depends on the millisecond in which they are ready. With three or more
        # ranks the order of the sums in a ring depends on the buffers, so two runs can differ in the last bits.
        limits = {
            "FUSION_THRESHOLD": round(_settings(config).bucket_mib * 2**20),
            "GLOO_TIMEOUT_SECONDS": math.ceil(config.launch.collective_timeout_s),
        }
        with _environment({**place, **limits}):
            hvd.init()
        wait(hvd.barrier)  # until then other ranks may use the server


def _slots(world: World) -> list[Any]:
    """Returns Horovod's description of each rank's place. Collective; on return all ranks have imported Horovod."""
    from horovod.runner.common.util import hosts

    world.store.set(f"horovod/local_rank/{world.rank}", str(world.local_rank))
    sizes: list[int] = []
    for rank in range(world.world_size):  # ranks of a host are consecutive, and start with local rank 0
        is_first = int(world.store.get(f"horovod/local_rank/{rank}")) == 0
        sizes = [*sizes, 1] if is_first else [*sizes[:-1], sizes[-1] + 1]
    hosts_of_ranks = [hosts.HostInfo(f"host-{i}", size) for i, size in enumerate(sizes)]
    slots: list[Any] = hosts.get_host_assignments(hosts_of_ranks, world.world_size)
    assert slots[world.rank].local_rank == world.local_rank
    return slots


@contextlib.contextmanager
def _rendezvous_server(address: str, slots: Sequence[Any]) -> Iterator[Any]:
    """Runs Horovod's server on one address and a free port. (Horovod's own start function binds all addresses.)"""
    from horovod.runner.http import http_server

    server = http_server.RendezvousHTTPServer((address, 0), http_server.RendezvousHandler, verbose=0)
    server.init(slots)
    thread = threading.Thread(
        target=server.serve_forever, args=(0.05,), name="spark_dl horovod rendezvous", daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def _bounded_waits(hvd: Any, limit_s: float) -> Iterator[Wait]:
    """Yields a function that calls a blocking function, and raises RuntimeError if that waits longer than `limit_s`.

    NOTE: Gloo's timeout is for messages, and Horovod's threads send messages even while a rank computes or sleeps.
    Horovod's check for absent ranks (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS) never finds one with Gloo, because its list
    of ranks is always empty (gloo_controller.cc of 0.28.1 reserves its memory and does not resize it).
    """
    begun: float | None = None
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(min(limit_s / 10, 1.0)):
            since = begun  # a copy, as the other thread may set it to None
            if since is not None and time.monotonic() - since > limit_s:
                hvd.shutdown()  # stops Horovod on all ranks; the wait then ends with an error
                return

    def wait(blocking: Callable[[], object]) -> None:
        nonlocal begun
        begun = start = time.monotonic()
        try:
            blocking()
        except Exception as error:
            if time.monotonic() - start < limit_s:
                raise
            raise RuntimeError(
                f"other ranks did not come within launch.collective_timeout_s={limit_s:g} s: one is stuck, or is slow"
            ) from error
        finally:
            begun = None

    thread = threading.Thread(target=watch, name="spark_dl horovod watch", daemon=True)
    thread.start()
    try:
        yield wait
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def _environment(values: Mapping[str, Any]) -> Iterator[None]:
    """Sets HOROVOD_* variables, which Horovod reads when it starts, and restores them on exit."""
    names = [f"HOROVOD_{name}" for name in values]
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update(zip(names, map(str, values.values()), strict=True))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]
        os.environ.update(before)


STRATEGY = Strategy(settings=Horovod, parallelize=parallelize, check=lambda spark, config: check_available(config))
