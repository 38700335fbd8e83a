"""What dead runs leave: processes and folders whose rank and watcher were killed. Linux."""

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from spark_dl.launch.rank.marked import MARK, command_of, marked
from spark_dl.storage.owner import Owner, start_time, this_process

_LOCK = Path(tempfile.gettempdir(), "spark_dl-test-reap.lock")


@contextlib.contextmanager
def only_reaper():
    """Tests that reap end what others have left for themselves to find: one after the other on this machine."""
    with open(_LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def dead_owner():
    """A process that was killed."""
    process, here = subprocess.Popen(["sleep", "600"]), this_process()
    owner = Owner(process.pid, start_time(process.pid), here.namespace, here.boot)
    process.kill()
    process.wait()
    return owner


@contextlib.contextmanager
def sleeping(owner):
    """A process in a session of its own, with the mark of a rank."""
    env = {**os.environ, MARK: f"{owner}-0123456789abcdef"}
    process = subprocess.Popen(["sleep", "600"], env=env, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def kill_watcher(rank):
    """Kills the process that waits for the end of a rank. A process that has just started may have no command yet."""
    end = time.monotonic() + 10
    while not (found := [pid for pid in _children(rank) if command_of(pid).endswith(f" {rank}")]):
        assert time.monotonic() < end, f"the rank {rank} has no watcher"
        time.sleep(0.05)
    for pid in found:
        os.kill(pid, 9)


def _children(process):
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            yield from map(int, listed.read_text().split())


_RANK = """
import os, subprocess, sys, tempfile, time
from spark_dl.launch.rank.children import ended_with_rank
from spark_dl.storage.owner import temporary_prefix
ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
with ended_with_rank():
    folder = tempfile.mkdtemp(prefix=temporary_prefix(), dir=sys.argv[1])
    open(f"{folder}/rows", "w").close()
    polite = subprocess.Popen(["sleep", "600"], start_new_session=True)  # returns when it is `sleep`
    stubborn = subprocess.Popen([sys.executable, "-c", ignore], start_new_session=True, stdout=subprocess.PIPE)
    stubborn.stdout.readline()
    print(polite.pid, stubborn.pid, folder, os.environ["SPARK_DL_RANK"], flush=True)
    time.sleep(600)
"""


class Rank:
    """The process of a rank, with a folder, and two processes that have left its session. One ignores SIGTERM."""

    def __init__(self, folder):
        command = [sys.executable, "-c", _RANK, str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        polite, stubborn, self.folder, self.mark = self.process.stdout.readline().split()
        self.pids = [int(polite), int(stubborn)]

    def kill(self):
        """Kills the watcher, then the rank. Their processes stay."""
        if self.process.poll() is None:
            kill_watcher(self.process.pid)
            self.process.kill()
            self.process.wait()

    def running(self):
        return sorted(pid for pid in marked(self.mark.__eq__) if pid in self.pids)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.process.stdout.close()
        for pid in self.running():
            os.kill(pid, 9)
