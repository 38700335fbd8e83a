"""How ranks meet: from barrier tasks (or torchrun's environment) to a `World` with a store and a process group.

Rank 0 binds a listening socket to port 0 and publishes the port that it got, so no port is guessed. Before any
collective operation all ranks exchange what they are (versions, host, device); a disagreement is the same error on all.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# NOTE: before there is a process group. Its functions have the default group of the moment of the import as a default
# argument: where DDP imports it later, that group never goes, its threads and sockets stay, and at times one of these
# threads aborts the process when it ends.
import torch.distributed.nn.functional

from spark_dl._version import __version__
from spark_dl.config import Launch
from spark_dl.launch import first_failure, gpus
from spark_dl.world import World, interface_of, local_address

_MUST_AGREE = ("python", "torch", "spark_dl", "device_type")


@dataclass(frozen=True)
class Peer:
    """What a task tells the others about itself."""

    partition: int
    host: str
    address: str
    port: int
    device: str
    gpu: str
    """A name of the device that tells the GPUs of a host apart."""
    python: str
    torch: str
    spark_dl: str
    pid: int

    @property
    def device_type(self) -> str:
        return self.device.split(":")[0]


@contextlib.contextmanager
def join(launch: Launch, *, init_group: bool = True, report: Any = None) -> Iterator[World]:
    """Joins the other ranks, from inside a barrier task or under torchrun; leaves on success, aborts on an error.

    Collective: every rank of the job calls it. With `init_group` the default process group is made (NCCL on GPUs, else
    Gloo); without it, `torch.distributed.init_process_group()` can be called by the user's own code, as under torchrun.
    Raises RuntimeError if the ranks do not all come within `launch.start_timeout_s`, or do not fit together; under
    torchrun also with the error of a rank that failed, on all that lost it.
    """
    context = _barrier_context()
    with _restored_process(), contextlib.ExitStack() as cleanup:
        if context is None:
            world = _meet_by_env(launch, report)
        else:
            world = _meet_in_barrier(context, launch, report, cleanup)
            os.environ.update(_torchrun_env(world))
        world.report({"kind": "joined", "rank": world.rank})
        if launch.threads:
            torch.set_num_threads(launch.threads)
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)
        if init_group:
            _init_group(world, launch)
        try:
            yield world
        except BaseException as error:
            if context is None:
                first_failure.tell(world, error)
            _abort_group()
            if context is None:
                first_failure.raise_told(world, error)
            raise
        _leave(world, launch)


def _barrier_context() -> Any:
    if "pyspark" not in sys.modules:
        return None
    from pyspark import BarrierTaskContext, TaskContext

    return BarrierTaskContext.get() if isinstance(TaskContext.get(), BarrierTaskContext) else None


def _meet_in_barrier(context: Any, launch: Launch, report: Any, cleanup: contextlib.ExitStack) -> World:
    partition = context.partitionId()
    host = [info.address for info in context.getTaskInfos()][partition].rsplit(":", 1)[0].strip("[]")
    address = local_address(host)
    listener = None
    if partition == 0:  # the first task is always rank 0, so it can open the store before the ranks are dealt
        listener = cleanup.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
        listener.bind((address, 0))
        listener.listen(1024)
    own_gpus = gpus.gpus_of_task(launch.device, context.resources())
    device = gpus.first(own_gpus)
    me = Peer(
        partition=partition,
        host=host,
        address=address,
        port=listener.getsockname()[1] if listener else 0,
        device=str(device),
        gpu=gpus.name_on_host(device, os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()),
        python=platform.python_version(),
        torch=torch.__version__,
        spark_dl=__version__,
        pid=os.getpid(),
    )
    peers = [Peer(**json.loads(message)) for message in context.allGather(json.dumps(vars(me)))]
    check_peers(peers)
    ranks = deal_ranks(peers)
    rank = ranks.index(partition)
    by_partition = {p.partition: p for p in peers}
    local = [p for p in ranks if by_partition[p].host == host]
    store = _open_store(by_partition[0], rank, len(peers), launch, listener)
    return World(
        rank=rank,
        world_size=len(peers),
        local_rank=local.index(partition),
        local_world_size=len(local),
        host=host,
        device=torch.device(me.device),
        store=store,
        gpus=own_gpus,
        socket_interface=_socket_interface(),
        report=report or (lambda event: None),
    )


def _meet_by_env(launch: Launch, report: Any) -> World:
    """The world that torchrun describes in the environment; a single rank where there is none."""
    env = os.environ
    rank, world_size = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
    local_rank = int(env.get("LOCAL_RANK", 0))
    timeout = datetime.timedelta(seconds=launch.start_timeout_s)
    local_world_size = int(env.get("LOCAL_WORLD_SIZE", 1))
    own_gpus = gpus.gpus_of_local_rank(launch.device, local_rank, local_world_size)
    store: dist.Store
    if "MASTER_ADDR" not in env:
        if world_size > 1:
            raise RuntimeError("WORLD_SIZE is set, but MASTER_ADDR is not: start the ranks with torchrun")
        store = dist.HashStore()
    else:
        is_master = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        store = dist.TCPStore(address, port, world_size, is_master, timeout, wait_for_workers=False)
        # One process may join several times, one after another: each time by keys of its own.
        attempt = f"spark_dl/{env.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        store = dist.PrefixStore(f"{attempt}/{store.add(f'{attempt}/joins/{rank}', 1)}", store)
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        host=socket.gethostname(),
        device=gpus.first(own_gpus),
        store=store,
        gpus=own_gpus,
        socket_interface=_socket_interface(),
        report=report or (lambda event: None),
    )


def check_peers(peers: Sequence[Peer]) -> None:
    """All ranks must run the same versions and kind of device, and no two the same GPU. Raises RuntimeError if not."""
    for what in _MUST_AGREE:
        values = [getattr(p, what) for p in peers]
        if len(set(values)) > 1:
            table = ", ".join(f"task {p.partition} on {p.host}: {v}" for p, v in zip(peers, values, strict=True))
            raise RuntimeError(f"the ranks do not agree on {what}: {table}; install the same on all executors")
    used: dict[tuple[str, str], int] = {}
    for p in peers:
        if p.device_type == "cuda" and (other := used.setdefault((p.host, p.gpu), p.partition)) != p.partition:
            raise RuntimeError(
                f"tasks {other} and {p.partition} on {p.host} were both given {p.gpu}; set "
                "spark.task.resource.gpu.amount to 1, so that each rank has a GPU of its own"
            )


def deal_ranks(peers: Sequence[Peer]) -> list[int]:
    """The partition of each rank: ranks of one host lie together, hosts in the order of their first partition."""
    hosts: dict[str, list[int]] = {}
    for p in sorted(peers, key=lambda p: p.partition):
        hosts.setdefault(p.host, []).append(p.partition)
    return [partition for partitions in hosts.values() for partition in partitions]


def _open_store(first: Peer, rank: int, world_size: int, launch: Launch, listener: socket.socket | None) -> dist.Store:
    timeout = datetime.timedelta(seconds=launch.start_timeout_s)
    # The store takes over a copy of the bound socket, so it listens on this one address and port.
    descriptor = os.dup(listener.fileno()) if listener else None
    try:
        return dist.TCPStore(
            first.address, first.port, world_size, rank == 0, timeout, wait_for_workers=False,
            master_listen_fd=descriptor,
        )  # fmt: skip
    except Exception as error:
        raise RuntimeError(
            f"rank {rank} on {socket.gethostname()} cannot reach rank 0 at {first.address}:{first.port} within "
            f"{launch.start_timeout_s:g} s: {error}; executors must reach each other on any port"
        ) from error


def _init_group(world: World, launch: Launch) -> None:
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    if backend == "gloo" and "GLOO_SOCKET_IFNAME" not in os.environ and (interface := world.interface):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    timeout = datetime.timedelta(seconds=launch.collective_timeout_s)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("default_group", world.store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=timeout,
        device_id=world.device if backend == "nccl" else None,
    )
    # A rank that fails at once closes connections that others may still be making: they would fail first, by that.
    if world.store.add("connected", 1) == world.world_size:
        world.store.set("all_connected", "1")
    world.store.wait(["all_connected"], timeout)


def _leave(world: World, launch: Launch) -> None:
    """Rank 0 holds the store, so it goes last: the others say that they are done, and rank 0 waits for them."""
    if dist.is_initialized():
        dist.destroy_process_group()
    world.store.set(f"left/{world.rank}", "1")
    if world.rank == 0:
        others = [f"left/{r}" for r in range(1, world.world_size)]
        if others:
            world.store.wait(others, datetime.timedelta(seconds=launch.collective_timeout_s))


def _abort_group() -> None:
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":
        from torch.distributed.distributed_c10d import _abort_process_group

        _abort_process_group()
    else:
        dist.destroy_process_group()


@contextlib.contextmanager
def _restored_process() -> Iterator[None]:
    """Spark uses its Python workers again: what a rank sets in the process is put back."""
    env, threads = dict(os.environ), torch.get_num_threads()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(env)
        torch.set_num_threads(threads)


def _torchrun_env(world: World) -> dict[str, str]:
    """The variables that torchrun would set; `init_process_group()` then joins by the store that is already open."""
    store = world.store
    assert isinstance(store, dist.TCPStore)
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_world_size),
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _socket_interface() -> str:
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]


def interfaces_of_host(host: str) -> set[str]:
    """The network interfaces by which others reach this host: that with its address, and what GLOO_SOCKET_IFNAME names.

    Raises RuntimeError where none has the address.
    """
    address = local_address(host)
    name = interface_of(address)
    if name is None:
        raise RuntimeError(f"no network interface of {socket.gethostname()} has {host}'s address {address}")
    return {name, *filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))}
