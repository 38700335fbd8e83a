"""Saves checkpoints in processes that are killed at each point in turn, and reads what is left.

Run as a program: `saves.py disk|ranks|s3 <run folder or URL> [<address of the S3 server>]`. Prints one JSON line.
"""

import contextlib
import ctypes
import datetime
import itertools
import json
import os
import signal
import sys

import torch
import torch.distributed as dist

from spark_dl import Checkpoint, Config, storage
from spark_dl.gather import StoreGather, gather_json
from spark_dl.rundir import checkpoint, saving
from tests.storage.kill_points.relay import Relay

CONFIG = Config(checkpoint=Checkpoint(keep=1))
MOST_POINTS = 400
STORE_TIMEOUT_S = 20


def save(run_dir, step, generation, rank=0, world_size=1, gather=gather_json):
    """Saves a state in which each tensor has the step."""
    found = saving.contents(
        rank, model={"w": torch.full((300,), float(step))}, training={"step": step}, of_rank={"step": step}
    )
    about = saving.About(world_size=world_size, generation=generation, step=step, config=CONFIG, columns=())
    saving.save(run_dir, found, about, gather=gather)


def loaded(run_dir):
    """The step of the checkpoint that a resume begins with. All its files are of this step."""
    saved = checkpoint.last_valid(run_dir)
    ranks = range(saved.manifest["world_size"])
    steps = {checkpoint.load(saved, f"rank-{rank:05d}.pt")["state"]["step"] for rank in ranks}
    steps |= {checkpoint.load(saved, "training.pt")["step"], *checkpoint.load(saved, "model.pt")["w"].tolist()}
    assert steps == {saved.step}, f"a mix of steps: {steps}"
    return saved.step


def forked(function, *arguments):
    """Calls a function in a fork of this process; the pid."""
    if pid := os.fork():
        return pid
    code = 1
    with contextlib.suppress(BaseException):
        function(*arguments)
        code = 0
    os._exit(code)


def ended(pid):
    """The exit code of a process; -9 for SIGKILL."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def arm(run_dir, at, after):
    ctypes.CDLL(None).kill_points_arm(f"{run_dir}/".encode(), ctypes.c_long(at), int(after))


def one_rank(run_dir, at, after):
    generation = checkpoint.start_generation(run_dir)
    save(run_dir, 1, generation)
    arm(run_dir, at, after)
    save(run_dir, 2, generation)


def of_two_ranks(run_dir, victim, at, after):
    """The victim is killed; the other rank gets no answer."""

    def work(rank):
        store = dist.FileStore(f"{run_dir}-store", 2)
        store.set_timeout(datetime.timedelta(seconds=STORE_TIMEOUT_S))
        gather = StoreGather(store, rank, 2, "saves")
        save(run_dir, 1, 1, rank, 2, gather)
        if rank == victim:
            arm(run_dir, at, after)
        save(run_dir, 2, 1, rank, 2, gather)

    checkpoint.start_generation(run_dir)
    return [forked(work, rank) for rank in range(2)]


def on_s3(url, relay, at, after):
    generation = checkpoint.start_generation(url)
    save(url, 1, generation)
    relay.arm(os.getpid(), at, after)
    save(url, 2, generation)
    relay.disarm()


def points(folder, kind, after, relay):
    """Yields the step that is loaded after a kill at each point, until the save ends before it."""
    for at in itertools.count(0, 3 if kind.startswith("ranks") else 1):
        assert at < MOST_POINTS
        run_dir = storage.join(folder, f"{kind}-{int(after)}-{at}")
        if kind == "s3":
            is_over = ended(forked(on_s3, run_dir, relay, at, after)) == 0
        elif kind == "disk":
            code = ended(forked(one_rank, run_dir, at, after))
            assert code in (0, -signal.SIGKILL), code
            is_over = code == 0
        else:
            victim = int(kind[-1])
            pids = of_two_ranks(run_dir, victim, at, after)
            code = ended(pids[victim])
            assert code in (0, -signal.SIGKILL), code
            is_over = code == 0
            if not is_over:  # the other one can only wait for it
                os.kill(pids[1 - victim], signal.SIGKILL)
            ended(pids[1 - victim])
        # In a fork, as a client of S3 does not work in forks that come after its first use.
        result = ended(forked(lambda run_dir=run_dir: sys.exit(check(run_dir))))
        yield result
        if is_over:
            return


def check(run_dir):
    """Writes the step that is loaded, and then saves as the next attempt does, to `RESULTS`."""
    step = loaded(run_dir)
    generation = checkpoint.start_generation(run_dir, after=checkpoint.newest_attempt(run_dir))
    save(run_dir, 3, generation)
    assert loaded(run_dir) == 3
    left = storage.list_names(checkpoint.folder(run_dir))
    assert left == [f"step-00000003.gen-{generation:04d}"], left
    os._exit(10 + step)


def main(kind, folder, address=None):
    relay = Relay(address) if address else None
    try:
        if relay:
            folder = folder.replace(address, relay.address)
        found = {}
        for after in (False, True):
            steps = [code - 10 for code in points(folder, kind, after, relay)]
            found["after" if after else "before"] = steps
        print(json.dumps(found))
    finally:
        if relay:
            relay.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
