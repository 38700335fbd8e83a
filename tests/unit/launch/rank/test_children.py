"""Processes that a rank has started end with its process, whatever they have done to leave it."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

RANK = """
import os, subprocess, sys, time
from spark_dl.launch.rank.children import ended_with_rank
with ended_with_rank():
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    other = subprocess.Popen(["setsid", "sh", "-c", "sleep 601 & wait"])
    read, write = os.pipe()
    fork = os.fork()
    if not fork:
        os.setsid()
        os.write(write, b"%9d " % (os.fork() or os.getpid()))
        time.sleep(600)
    print(child.pid, other.pid, fork, *(os.read(read, 10).decode() for _ in range(2)), flush=True)
    if sys.argv[1] == "ends":
        sys.exit(0)
    time.sleep(600)
"""


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def sleepers(mark):
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="finds processes in /proc")
@pytest.mark.parametrize("end", ["ends", pytest.param("killed", marks=pytest.mark.slow)])
def test_a_child_with_a_session_of_its_own_ends_with_the_rank(end):
    rank = subprocess.Popen([sys.executable, "-c", RANK, end], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in rank.stdout.readline().split()]
    assert all(map(is_running, pids))
    if end == "killed":
        deadline, mark = time.monotonic() + 10, None
        while mark is None or not set(pids[:2]) <= set(sleepers(mark)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
            # A process that becomes another program, as setsid becomes sh, has no environment meanwhile.
            environ = pathlib.Path(f"/proc/{pids[0]}/environ").read_bytes().split(b"\0")
            mark = next((each for each in environ if each.startswith(b"SPARK_DL_RANK=")), None)
        assert rank.pid not in sleepers(mark)
        rank.send_signal(signal.SIGKILL)
    rank.wait(60)
    rank.stdout.close()
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))
    if end == "killed":
        assert sleepers(mark) == []


def test_a_rank_that_starts_no_process_has_no_watcher():
    code = (
        "import os\n"
        "from spark_dl.launch.rank.children import ended_with_rank\n"
        "from spark_dl.launch.rank.marked import MARK\n"
        "with ended_with_rank():\n"
        "    assert MARK in os.environ\n"
        "assert MARK not in os.environ\n"
        "found = [open(f'/proc/self/task/{t}/children').read() for t in os.listdir('/proc/self/task')]\n"
        "assert not ''.join(found).strip(), found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
