"""Rendezvous: from barrier tasks (or torchrun's environment) to a `World` with a store and a process group.

The tasks exchange one message each, through the driver's listener, or with Spark's `allGather` if the driver cannot be
reached. Task 0 listens on a free port, which the operating system selects, and publishes it. Before any collective
operation all ranks exchange versions, host and GPU. A disagreement raises the same error on all ranks.

A job's ranks can also be dealt into groups, each with a store and a process group of its own. A group works on one
piece of work after another. Each piece has its own keys in the job's store and its own process group, so that a piece
that fails on one rank leaves nothing behind for the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional

from spark_dl.channel import Address, listen_at
from spark_dl.config import Launch
from spark_dl.launch.failures import errors
from spark_dl.launch.failures.errors import OtherRankError
from spark_dl.launch.rank import gpus
from spark_dl.launch.rank.environment import place_env, restored_process, torchrun_env
from spark_dl.launch.rank.peers import (
    TaskRecord,
    backend_of,
    check_peers,
    child_env,
    deal_ranks,
    describe,
    from_json,
    sharing,
)
from spark_dl.launch.rank.ports import closed_when_connected
from spark_dl.launch.rank.sender import Reporter
from spark_dl.launch.rank.store import RankStore, StoreServer
from spark_dl.launch.rank.tasks import RankTasks, all_gather, choose
from spark_dl.world import World, interface_of, local_address, no_driver

_log = logging.getLogger("spark_dl")

_FAILED = "failed"
_LOOK_S = 0.5
"""Interval in which a rank on a GPU looks whether another rank of its group has failed."""


@contextlib.contextmanager
def join(
    launch: Launch, *, init_group: bool = True, use_gpu: bool = True, for_script: bool = False, report: Any = None
) -> Iterator[World]:
    """Joins the other ranks, in a barrier task or under torchrun. Leaves on success, and aborts on an error.

    Collective: every rank of the job calls it.

    Args:
        init_group: creates the default process group (`World.backend`). Without it, the user's code can call
            `torch.distributed.init_process_group()`, as under torchrun.
        for_script: the ranks start programs, which can use a TCPStore alone; anybody who reaches its port can use it.
        use_gpu: makes the rank's GPU the current device. It then takes some of the GPU's memory for this process.

    Raises:
        RuntimeError: If not all ranks join within `launch.start_timeout_s`, or as `check_peers` does. Under torchrun,
            ranks that fail as a consequence raise the error of the rank that failed first.
    """
    context = _barrier_context()
    with restored_process(), closed_when_connected(), contextlib.ExitStack() as cleanup:
        if context is None:
            world = _meet_by_env(launch, report)
        else:
            world = _meet_in_barrier(context, launch, report, cleanup, for_script=for_script)
        world.report({"kind": "joined", "rank": world.rank, "device": str(world.device)})
        if launch.threads:
            torch.set_num_threads(launch.threads)
        if world.device.type == "cuda" and use_gpu:
            torch.cuda.set_device(world.device)
        if init_group:
            create_group(world, launch)
        try:
            yield world
        except BaseException as error:
            if context is None:
                errors.publish(world, error)
            abort_group()
            if context is None:
                errors.raise_published(world, error)
            raise
        _leave(world, launch)


def _barrier_context() -> Any:
    if "pyspark" not in sys.modules:
        return None
    from pyspark import BarrierTaskContext, TaskContext

    return BarrierTaskContext.get() if isinstance(TaskContext.get(), BarrierTaskContext) else None


def _meet_in_barrier(
    context: Any, launch: Launch, report: Any, cleanup: contextlib.ExitStack, *, for_script: bool
) -> World:
    tasks = _tasks(context, report, launch)
    assert tasks.own is not None
    partition, task_hosts = tasks.own, tasks.hosts
    host = task_hosts[partition]
    address = local_address(host)
    listener = None
    if partition == 0:  # opens the port of the store before the ranks are dealt
        listener = cleanup.enter_context(listen_at(address))
    addresses = gpus.addresses_of(context.resources())
    by_number = launch.device == "cuda" or (launch.device == "auto" and launch.gpus_per_rank != "auto")
    if by_number and not addresses:  # a local master; the driver allows it there alone
        local_tasks = [task for task, other in enumerate(task_hosts) if other == host]
        place = local_tasks.index(partition), len(local_tasks)
        own_gpus = gpus.gpus_of_local_rank(launch.device, *place, launch.gpus_per_rank)
    else:
        own_gpus = gpus.gpus_of_task(launch.device, context.resources())
    port = listener.getsockname()[1] if listener else 0
    me = describe(partition, host, tasks.executors[partition], own_gpus, addresses, address=address, port=port)
    messages = _exchange(context, report, me.to_json(), launch)
    peers = [from_json(message) for message in messages]
    check_peers(peers, launch)
    ranks = deal_ranks(peers)
    rank, by_partition = ranks.index(partition), {p.partition: p for p in peers}
    local = [by_partition[p] for p in ranks if by_partition[p].place == me.place]
    places = list(dict.fromkeys(by_partition[p].place for p in ranks))
    first = by_partition[0]
    if for_script or backend_of(peers) == "nccl" or not isinstance(report, Reporter):
        store = _open_tcp_store(first, rank, len(peers), launch, listener)
    else:
        store = _open_store(first, report.secret, launch, listener, cleanup)
    world = World(
        rank=rank,
        world_size=len(peers),
        local_rank=local.index(me),
        local_world_size=len(local),
        host=host,
        device=torch.device(me.device),
        store=store,
        gpus=own_gpus,
        backend=backend_of(peers),
        child_env=child_env(me, local),
        holds_store=partition == 0,
        socket_interface=socket_interface(),
        report=report or no_driver,
    )
    _say_shared(peers, rank, ranks)
    run_id = hashlib.sha256("".join(messages).encode()).hexdigest()[:16]  # the same on all ranks
    os.environ.update(torchrun_env(world, group_rank=places.index(me.place), num_groups=len(places), run_id=run_id))
    return world


def _tasks(context: Any, report: Any, launch: Launch) -> RankTasks:
    if isinstance(report, Reporter) and report.tasks is not None:
        return report.tasks
    return choose([info.address for info in context.getTaskInfos()], context.partitionId(), launch.num_ranks, ())


def _say_shared(peers: Sequence[TaskRecord], rank: int, ranks: Sequence[int]) -> None:
    """Says once, on rank 0, which ranks share a GPU."""
    shared = [f"{ranks.index(a.partition)} and {ranks.index(b.partition)}" for a, b, _ in sharing(peers)]
    if shared and rank == 0:
        _log.warning(
            "ranks %s share a GPU; Gloo sends their gradients, as NCCL takes one rank on a GPU; for a GPU for each "
            "rank, set launch.gpus_per_rank to 1", ", ".join(shared),
        )  # fmt: skip


def _exchange(context: Any, report: Any, message: str, launch: Launch) -> list[str]:
    """Returns the messages of all tasks. Collective. Through the driver's listener if all tasks can reach it."""
    if isinstance(report, Reporter):
        answers = report.exchange(message, launch.start_timeout_s)
        if answers is not None:
            return answers
        if report.tasks is not None and report.tasks.num_tasks > launch.num_ranks:  # the others do not call it
            raise RuntimeError(
                "not all ranks have reached the driver's port within launch.start_timeout_s, so no host can be left "
                "out: open the port, or raise the limit if a rank starts slowly"
            )
    waits_for_rows = isinstance(report, Reporter) and report.waits_for_rows  # which may take any time
    return all_gather(context, message, None if waits_for_rows else launch.start_timeout_s)


def _meet_by_env(launch: Launch, report: Any) -> World:
    """Returns the world in torchrun's environment variables; a world of one rank without them."""
    env = os.environ
    rank, world_size = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
    local_rank = int(env.get("LOCAL_RANK", 0))
    timeout = datetime.timedelta(seconds=launch.start_timeout_s)
    local_world_size = int(env.get("LOCAL_WORLD_SIZE", 1))
    own_gpus = gpus.gpus_of_local_rank(launch.device, local_rank, local_world_size, launch.gpus_per_rank)
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
    host = socket.gethostname()
    peers = _exchange_by_store(store, describe(rank, host, f"{host}:{os.getpid()}", own_gpus, ()), world_size, timeout)
    check_peers(peers, launch)
    _say_shared(peers, rank, range(world_size))
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        host=host,
        device=gpus.first(own_gpus),
        store=store,
        gpus=own_gpus,
        backend=backend_of(peers),
        holds_store=rank == 0,
        socket_interface=socket_interface(),
        report=report or no_driver,
    )


def _exchange_by_store(
    store: dist.Store, me: TaskRecord, world_size: int, timeout: datetime.timedelta
) -> list[TaskRecord]:
    """Returns the peers of all ranks. Collective."""
    keys = [f"peer/{rank}" for rank in range(world_size)]
    store.set(keys[me.partition], me.to_json())
    store.wait(keys, timeout)
    return [from_json(message.decode()) for message in store.multi_get(keys)]


def _open_store(
    first: TaskRecord, secret: bytes, launch: Launch, listener: socket.socket | None, cleanup: contextlib.ExitStack
) -> dist.Store:
    """Returns the store that the ranks of this run alone can use. It ends with `cleanup`."""
    if listener:
        cleanup.callback(StoreServer(listener, secret).close)
    try:
        timeout = datetime.timedelta(seconds=launch.start_timeout_s)
        store = RankStore(Address(first.address, first.port, secret), timeout)
    except (OSError, EOFError, AuthenticationError) as error:
        raise _unreachable(first, launch, error) from error
    cleanup.callback(store.close)
    return store


def _unreachable(first: TaskRecord, launch: Launch, error: Exception) -> RuntimeError:
    if isinstance(error, EOFError):  # the port was open
        return OtherRankError(
            f"task 0 at {first.address}:{first.port} has closed the connection of a rank on {socket.gethostname()}; "
            "it has probably failed"
        )
    return RuntimeError(
        f"a rank on {socket.gethostname()} cannot reach task 0 at {first.address}:{first.port} within "
        f"{launch.start_timeout_s:g} s: {error}; executors must reach each other on any port"
    )


def _open_tcp_store(
    first: TaskRecord, rank: int, world_size: int, launch: Launch, listener: socket.socket | None
) -> dist.Store:
    """Returns torch's own store.

    NOTE: NCCL's threads use the store until the process group has ended. They would need Python for another store.
    """
    timeout = datetime.timedelta(seconds=launch.start_timeout_s)
    # The store gets a duplicate of the bound socket, so it listens on exactly this address and port.
    descriptor = os.dup(listener.fileno()) if listener else None
    try:
        return dist.TCPStore(
            first.address, first.port, world_size, listener is not None, timeout, wait_for_workers=False,
            master_listen_fd=descriptor,
        )  # fmt: skip
    except Exception as error:
        raise _unreachable(first, launch, error) from error


def create_group(world: World, launch: Launch) -> None:
    """Creates the default process group, with the backend of the world. Collective."""
    backend = world.backend
    if backend == "gloo" and "GLOO_SOCKET_IFNAME" not in os.environ and (interface := world.interface):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    timeout = datetime.timedelta(seconds=launch.collective_timeout_s)
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default_group", world.store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=timeout,
            device_id=world.device if backend == "nccl" else None,
        )
    except RuntimeError as error:
        if transport := os.environ.get("GLOO_DEVICE_TRANSPORT") if "gloo device" in str(error) else None:
            raise RuntimeError(
                f"GLOO_DEVICE_TRANSPORT: found {transport}, which this build of torch does not have ({error}); use a "
                "build with it, or unset it, and encrypt the network interface (docs/clusters.md, Network)"
            ) from error
        raise
    # Wait until all ranks have connected. Otherwise the early failure of one rank breaks connections of other ranks
    # while they connect, and their errors come first.
    if world.store.add("connected", 1) == world.world_size:
        world.store.set("all_connected", "1")
    world.store.wait(["all_connected"], timeout)


def _leave(world: World, launch: Launch) -> None:
    """Leaves the process group. The rank that holds the store waits until all other ranks have left.

    If the store has ended, its rank has failed, and says why. An error of this rank, which is done, would hide that.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    with contextlib.nullcontext() if world.holds_store else contextlib.suppress(dist.DistNetworkError):
        world.store.set(f"left/{world.rank}", "1")
    if world.holds_store:
        keys = [f"left/{r}" for r in range(world.world_size) if r != world.rank]
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


def socket_interface() -> str:
    """Returns the network interface of GLOO_SOCKET_IFNAME; empty if it is not set. Called on a rank."""
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


@dataclass(frozen=True)
class Group:
    """This rank's group."""

    number: int
    world: World
    """This rank's place in the group. Its store and its functions are those of the whole job."""
    hosts: tuple[str, ...]
    """Host of each rank of the group."""


def group_of(world: World, hosts: Sequence[str], num_ranks: int) -> Group:
    """Returns the group of a rank: consecutive ranks, `num_ranks` in each group. Pure.

    Args:
        hosts: host of each rank of the job. Ranks of a host are consecutive.
    """
    first = world.rank - world.rank % num_ranks
    hosts_of_group = tuple(hosts[first : first + num_ranks])
    rank = world.rank - first
    place = dataclasses.replace(
        world, rank=rank, world_size=num_ranks, local_rank=hosts_of_group[:rank].count(world.host),
        local_world_size=hosts_of_group.count(world.host),
    )  # fmt: skip
    return Group(first // num_ranks, place, hosts_of_group)


@contextlib.contextmanager
def joined(group: Group, name: str, launch: Launch, *, has_group: bool) -> Iterator[World]:
    """Joins the other ranks of the group for one piece of work. Leaves on success, and aborts on an error.

    Collective in the group. The process is restored after the block: environment, torch's settings, generators.

    Raises OtherRankError instead of an error in the block that follows from the failure of another rank on a GPU.

    Args:
        name: unique in the job.
        has_group: whether the ranks form a process group.
    """
    world = dataclasses.replace(group.world, store=dist.PrefixStore(name, group.world.store))
    different = list(dict.fromkeys(group.hosts))
    other_failed = threading.Event()
    with restored_process():
        os.environ.update(place_env(world, group_rank=different.index(world.host), num_groups=len(different)))
        try:
            if has_group:
                create_group(world, launch)
            with _aborted_with_others(world, name, launch, other_failed):
                yield world
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the store has ended, and the job with it
                world.store.set(_FAILED, "1")
            abort_group()
            if other_failed.is_set():
                raise OtherRankError(f"another rank of the group failed: {error}") from error
            raise
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def _aborted_with_others(world: World, name: str, launch: Launch, failed: threading.Event) -> Iterator[None]:
    """Aborts the process group when another rank of it fails in the block, and sets `failed`.

    NOTE: a rank that leaves Gloo closes its connections, which ends the waits of the others. With NCCL they wait for
    the time limit, and torch then ends their processes.
    """
    if not dist.is_initialized() or dist.get_backend() != "nccl" or world.world_size == 1:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        timeout = datetime.timedelta(seconds=launch.start_timeout_s)
        # A client of its own: a rank's client is busy while the rank waits for a key.
        client = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout)
        store = dist.PrefixStore(name, client)
        while not over.wait(_LOOK_S):
            if store.check([_FAILED]):
                failed.set()
                abort_group()
                return

    thread = threading.Thread(target=watch, name="spark_dl group", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
