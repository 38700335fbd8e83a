"""Runs a function on processes of their own, one per rank, with the environment of torchrun and real gloo between them.

The processes are spawned once and used again, as torch takes seconds to import; after a failure they are killed, and
the next call begins with new ones.
"""

import atexit
import multiprocessing as mp
import os
import socket
import time
import traceback
from multiprocessing.connection import wait

import torch.distributed as dist

_context = mp.get_context("spawn")
_pool = []  # (process, connection) of each rank


def run_ranks(fn, world_size, *args, timeout_s=60):
    """What `fn(*args)` returns on each rank, by rank. Raises RankFailed with the traceback of the first that failed."""
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
    for rank in range(world_size):
        _pool[rank][1].send((fn, rank, world_size, port, args))
    try:
        return _collect(world_size, timeout_s)
    except BaseException:
        kill_ranks()
        raise
    finally:
        del store


class RankFailed(Exception):  # noqa: N818 - what happened
    """A rank raised; the text is its traceback."""


def pool_pids():
    """The processes that outlive a test."""
    return {process.pid for process, _ in _pool}


@atexit.register
def kill_ranks():
    for process, connection in _pool:
        process.kill()
        process.join()
        connection.close()
    _pool.clear()


def _collect(world_size, timeout_s):
    found, end = {}, time.monotonic() + timeout_s
    while len(found) < world_size:
        waiting = {_pool[rank][1]: rank for rank in range(world_size) if rank not in found}
        ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        assert ready, f"ranks {sorted(waiting.values())} did not end within {timeout_s} s"
        for connection in ready:
            rank = waiting[connection]
            try:
                value, failure = connection.recv()
            except EOFError:
                raise RankFailed(f"rank {rank} died with exit code {_pool[rank][0].exitcode}") from None
            if failure is not None:
                raise RankFailed(f"rank {rank}:\n{failure}")
            found[rank] = value
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
            TORCHELASTIC_RESTART_COUNT="0", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1",
        )  # fmt: skip
        try:
            connection.send((fn(*args), None))
        except BaseException:
            connection.send((None, traceback.format_exc()))
