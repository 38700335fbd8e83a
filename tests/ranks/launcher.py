"""Runs a function on processes of their own, one per rank, with the environment of torchrun and real gloo between them.

The processes are forks of a server that has imported torch, which takes seconds, and nothing else; they are used again,
but for those of a failure, which are killed.
"""

import atexit
import multiprocessing as mp
import os
import socket
import time
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import wait

import torch.distributed as dist

_context = mp.get_context("forkserver")
# An optimizer imports _dynamo, and metrics torchmetrics, which takes seconds on each rank.
_context.set_forkserver_preload(
    ["spark_dl.worker", "torch._dynamo", "pyarrow.parquet", "torchmetrics", "tests.ranks.freeze"]
)
_pool = []  # (process, connection) of each rank
_ROOT_CAUSE_WAIT_S = 3.0  # a rank that fails may be heard of later than one that has lost it


def run_ranks(fn, world_size, *args, timeout_s=60, wait_s=_ROOT_CAUSE_WAIT_S):
    """What `fn(*args)` returns on each rank, by rank. Raises RankFailed with the tracebacks of those that failed.

    wait_s: how long the other ranks are waited for when one has failed.
    """
    while len(_pool) < world_size:
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        _pool.append((process, ours))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        # The store is held here, as torchrun's agent does, so that no rank must outlive the others.
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
    _pool.append(_pool.pop(0))  # a process has another rank each time, as Spark's Python workers can
    for rank in range(world_size):
        _pool[rank][1].send((fn, rank, world_size, port, args))
    try:
        return _collect(world_size, timeout_s, wait_s)
    except BaseException:
        kill_ranks()
        raise
    finally:
        del store


class RankFailed(Exception):  # noqa: N818 - what happened
    """Ranks raised; the text is their tracebacks."""


def pool_pids():
    """The processes that outlive a test: the ranks, and the server of which they are forks."""
    return {process.pid for process, _ in _pool} | {forkserver._forkserver._forkserver_pid}


@atexit.register
def kill_ranks():
    for process, connection in _pool:
        process.kill()
        process.join()
        connection.close()
    _pool.clear()


def _collect(world_size, timeout_s, wait_s):
    found, failures, end = {}, [], time.monotonic() + timeout_s
    while len(found) < world_size:
        waiting = {_pool[rank][1]: rank for rank in range(world_size) if rank not in found}
        ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting[connection]
            try:
                found[rank], failure = connection.recv()
            except EOFError:
                _pool[rank][0].join(_ROOT_CAUSE_WAIT_S)
                found[rank], failure = None, f"died with exit code {_pool[rank][0].exitcode}"
            if failure is not None:
                if not failures:
                    end = min(end, time.monotonic() + wait_s)
                failures.append(f"rank {rank}:\n{failure}")
    if failures:
        raise RankFailed("\n".join(failures))
    assert len(found) == world_size, f"ranks {sorted(waiting.values())} did not end within {timeout_s} s"
    return [found[rank] for rank in range(world_size)]


def _serve(connection):
    while True:
        try:
            fn, rank, world_size, port, args = connection.recv()
        except EOFError:
            return
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0", GLOO_SOCKET_IFNAME="lo",
        )  # fmt: skip
        try:
            connection.send((fn(*args), None))
        except BaseException:
            connection.send((None, traceback.format_exc()))
