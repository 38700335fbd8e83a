"""Rendezvous: from barrier tasks (or torchrun's environment) to a `World` with a store and a process group.

The tasks exchange one message each, through the driver's listener, or with Spark's `allGather` if the driver cannot be
reached. Rank 0 listens on a free port, which the operating system selects, and publishes it. Before any collective
operation all ranks exchange versions, host and device. A disagreement raises the same error on all ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
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

# NOTE: must be imported before there is a process group. Its functions have the default group at import time as a
# default argument. If DDP imports it later, that group is never freed: its threads and sockets stay, and sometimes one
# of the threads aborts the process at exit.
import torch.distributed.nn.functional

from spark_dl._version import __version__
from spark_dl.config import Launch
from spark_dl.launch import first_failure, gpus
from spark_dl.launch.rank.environment import restored_process, torchrun_env
from spark_dl.launch.watch import Reporter
from spark_dl.world import World, interface_of, local_address

_MUST_AGREE = ("python", "torch", "spark_dl", "device_type")


@dataclass(frozen=True)
class Peer:
    """Data about a task, which all tasks exchange."""

    partition: int
    host: str
    address: str
    port: int
    device: str
    gpu: str
    """Name of the device, unique among the GPUs of its host."""
    python: str
    torch: str
    spark_dl: str
    pid: int

    @property
    def device_type(self) -> str:
        return self.device.split(":")[0]


@contextlib.contextmanager
def join(launch: Launch, *, init_group: bool = True, report: Any = None) -> Iterator[World]:
    """Joins the other ranks, in a barrier task or under torchrun. Leaves on success, and aborts on an error.

    Collective: every rank of the job calls it.
    init_group: creates the default process group (NCCL on GPUs, else Gloo). Without it, the user's code can call
        `torch.distributed.init_process_group()`, as under torchrun.
    Raises RuntimeError if not all ranks join within `launch.start_timeout_s`, or as `check_peers` does.
    Under torchrun, ranks that fail as a consequence raise the error of the rank that failed first.
    """
    context = _barrier_context()
    with restored_process(), contextlib.ExitStack() as cleanup:
        world = _meet_by_env(launch, report) if context is None else _meet_in_barrier(context, launch, report, cleanup)
        world.report({"kind": "joined", "rank": world.rank})
        if launch.threads:
            torch.set_num_threads(launch.threads)
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)
        if init_group:
            create_group(world, launch)
        try:
            yield world
        except BaseException as error:
            if context is None:
                first_failure.publish(world, error)
            abort_group()
            if context is None:
                first_failure.raise_published(world, error)
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
    if partition == 0:  # always rank 0, so it can open the port of the store before the ranks are dealt
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
    messages = _exchange(context, report, json.dumps(vars(me)), launch)
    peers = [Peer(**json.loads(message)) for message in messages]
    check_peers(peers)
    ranks = deal_ranks(peers)
    rank = ranks.index(partition)
    by_partition = {p.partition: p for p in peers}
    local = [p for p in ranks if by_partition[p].host == host]
    hosts = list(dict.fromkeys(by_partition[p].host for p in ranks))
    store = _open_store(by_partition[0], rank, len(peers), launch, listener)
    world = World(
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
    run_id = hashlib.sha256("".join(messages).encode()).hexdigest()[:16]  # the same on all ranks
    os.environ.update(torchrun_env(world, group_rank=hosts.index(host), num_groups=len(hosts), run_id=run_id))
    return world


def _exchange(context: Any, report: Any, message: str, launch: Launch) -> list[str]:
    """Returns the messages of all tasks. Collective. Through the driver's listener if all tasks can reach it."""
    if isinstance(report, Reporter):
        found = report.exchange(message, launch.start_timeout_s)
        if found is not None:
            return found
    gathered: list[str] = context.allGather(message)
    return gathered


def _meet_by_env(launch: Launch, report: Any) -> World:
    """Returns the world in torchrun's environment variables; a world of one rank without them."""
    env = os.environ
    rank, world_size = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
    local_rank = int(env.get("LOCAL_RANK", 0))
    timeout = datetime.timedelta(seconds=launch.start_timeout_s)
    local_world_size = int(env.get("LOCAL_WORLD_SIZE", 1))
    own_gpus = gpus.gpus_of_local_rank(launch.device, local_rank, local_world_size)
    store: dist.Store
    if "MASTER_ADDR" not in env:
        if world_size > 1:
            raise RuntimeError("WORLD_SIZE is set, but MASTER_ADDR is not; start the ranks with torchrun")
        store = dist.HashStore()
    else:
        is_master = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        store = dist.TCPStore(address, port, world_size, is_master, timeout, wait_for_workers=False)
        # A process can join several times in sequence. Each time uses its own keys.
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
    """Raises RuntimeError if versions or device types of the ranks differ, or if two ranks have the same GPU."""
    for what in _MUST_AGREE:
        values = [getattr(p, what) for p in peers]
        if len(set(values)) > 1:
            table = ", ".join(f"task {p.partition} on {p.host}: {v}" for p, v in zip(peers, values, strict=True))
            same = "set launch.device, or use executors with equal devices" if what == "device_type" else (
                f"install the same version of {what} on all executors"
            )  # fmt: skip
            raise RuntimeError(f"the ranks do not agree on {what}: {table}; {same}")
    used: dict[tuple[str, str], int] = {}
    for p in peers:
        if p.device_type == "cuda" and (other := used.setdefault((p.host, p.gpu), p.partition)) != p.partition:
            raise RuntimeError(
                f"tasks {other} and {p.partition} on {p.host} were both given {p.gpu}; set "
                "spark.task.resource.gpu.amount to 1, so that each rank has its own GPU"
            )


def deal_ranks(peers: Sequence[Peer]) -> list[int]:
    """Returns the partition of each rank. Ranks of one host are consecutive; hosts are ordered by first partition."""
    hosts: dict[str, list[int]] = {}
    for p in sorted(peers, key=lambda p: p.partition):
        hosts.setdefault(p.host, []).append(p.partition)
    return [partition for partitions in hosts.values() for partition in partitions]


def _open_store(first: Peer, rank: int, world_size: int, launch: Launch, listener: socket.socket | None) -> dist.Store:
    timeout = datetime.timedelta(seconds=launch.start_timeout_s)
    # The store gets a duplicate of the bound socket, so it listens on exactly this address and port.
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


def create_group(world: World, launch: Launch) -> None:
    """Creates the default process group: NCCL on GPUs, else Gloo. Collective."""
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
    # Wait until all ranks have connected. Otherwise the early failure of one rank breaks connections of other ranks
    # while they connect, and their errors come first.
    if world.store.add("connected", 1) == world.world_size:
        world.store.set("all_connected", "1")
    world.store.wait(["all_connected"], timeout)


def _leave(world: World, launch: Launch) -> None:
    """Leaves the process group. Rank 0 hosts the store, so it waits until all other ranks have left."""
    if dist.is_initialized():
        dist.destroy_process_group()
    world.store.set(f"left/{world.rank}", "1")
    if world.rank == 0:
        keys = [f"left/{r}" for r in range(1, world.world_size)]
        if keys:
            world.store.wait(keys, datetime.timedelta(seconds=launch.collective_timeout_s))


def abort_group() -> None:
    """Ends the default process group without waiting for other ranks. Not collective."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":
        from torch.distributed.distributed_c10d import _abort_process_group

        _abort_process_group()
    else:
        dist.destroy_process_group()


def _socket_interface() -> str:
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]


def interfaces_of_host(host: str) -> set[str]:
    """Returns this host's network interfaces for other ranks: the one with its address, and GLOO_SOCKET_IFNAME.

    Raises RuntimeError if no interface has the address.
    """
    address = local_address(host)
    name = interface_of(address)
    if name is None:
        raise RuntimeError(f"no network interface of {socket.gethostname()} has {host}'s address {address}")
    return {name, *filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))}
