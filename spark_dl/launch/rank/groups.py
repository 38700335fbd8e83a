"""Groups of ranks: disjoint parts of the ranks of a job, each with a store and a process group of its own.

A group works on one piece of work after another. Each piece has its own keys in the job's store and its own process
group, so that a piece that fails on one rank leaves nothing behind for the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from spark_dl.config import Launch
from spark_dl.launch.failures.errors import OtherRankError
from spark_dl.launch.rank.environment import place_env, restored_process
from spark_dl.launch.rank.rendezvous import abort_group, create_group
from spark_dl.world import World

_FAILED = "failed"
_LOOK_S = 0.5
"""Interval in which a rank on a GPU looks whether another rank of its group has failed."""


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

    hosts: host of each rank of the job. Ranks of a host are consecutive.
    """
    first = world.rank - world.rank % num_ranks
    own = tuple(hosts[first : first + num_ranks])
    rank = world.rank - first
    place = dataclasses.replace(
        world, rank=rank, world_size=num_ranks, local_rank=own[:rank].count(world.host),
        local_world_size=own.count(world.host),
    )  # fmt: skip
    return Group(first // num_ranks, place, own)


@contextlib.contextmanager
def joined(group: Group, name: str, launch: Launch, *, has_group: bool) -> Iterator[World]:
    """Joins the other ranks of the group for one piece of work. Leaves on success, and aborts on an error.

    Collective in the group. The process is restored after the block: environment, torch's settings, generators.
    name: unique in the job. has_group: whether the ranks form a process group.
    Raises OtherRankError instead of an error in the block that follows from the failure of another rank on a GPU.
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
