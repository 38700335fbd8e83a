"""A Spark cluster on a testbed, and a driver that trains on it, while faults are done to its ranks and hosts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults import job as driver_job
from benchmarks.faults.draw import Fault
from benchmarks.faults.job import Job, read_events, to_line
from benchmarks.faults.killer import kill_executor, kill_process
from benchmarks.faults.leftovers import left_files, left_processes, shared_memory
from benchmarks.testbed import testbed
from benchmarks.testbed.netns import Host
from benchmarks.testbed.standalone import start_spark
from spark_dl.launch.rank.marked import command_of

BOUND_S = 240.0
"""A run that has not ended after so many seconds hangs."""
_RATE_MBIT = 1000.0
_LOSSY_MBIT, _LOSSY_FRAMES = 0.5, 1
_LEAVE_S = 10.0
"""How long a run may leave something."""
_POLL_S = 0.01
_START_S = 180.0
_DAEMONS = ("org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker")


@dataclass(frozen=True)
class End:
    """How a run has ended."""

    done: Sequence[Fault]
    """The faults that hit a running rank."""
    restarts: int
    leftovers: Sequence[str] = ()
    error: str | None = None
    is_late: bool = False


class Cluster:
    """Hosts with Spark, and a driver that waits for jobs. A context manager."""

    def __init__(self, num_hosts: int):
        self._num_hosts = num_hosts
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Cluster:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        self._bed = self._stack.enter_context(testbed.hosts(self._num_hosts, rate_mbit=_RATE_MBIT))
        master = start_spark(self._bed)
        self._out, self._err = self._bed.folder / "out", self._bed.folder / "err"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self._driver = self._bed.popen(
                self._bed.driver, [sys.executable, "-m", driver_job.__name__, master],
                env={"OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=out, stderr=err,
            )  # fmt: skip
        self._lines = 0
        end = time.monotonic() + _START_S
        while self._line() is None:
            if self._driver.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the driver on the testbed does not start: {testbed.read_tail(self._err)}")
            time.sleep(0.1)

    def restart(self) -> None:
        """Replaces the hosts, with all that runs on them."""
        self._stack.close()
        self._start()

    def close(self) -> list[str]:
        """Ends the driver. Returns what its session has left on the hosts, beside Spark's own daemons."""
        assert self._driver.stdin is not None
        self._driver.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._driver.wait(60)
        return sorted(_wait_until_empty(self._beside_daemons))

    def train(self, job: Job, faults: Sequence[Fault]) -> End:
        """Trains, and does the faults meanwhile."""
        if self._driver.poll() is not None:
            self.restart()
        before = self._left(job)
        assert self._driver.stdin is not None
        self._driver.stdin.write(to_line(job).encode())
        self._driver.stdin.flush()
        doing = _Doing(self._bed, job, faults)
        end, error = time.monotonic() + BOUND_S, None
        try:
            while (line := self._line()) is None and error is None:
                if time.monotonic() > end:
                    return End(doing.done, doing.restarts, is_late=True)
                if self._driver.poll() is not None:
                    error = f"the driver has ended with {self._driver.returncode}: {testbed.read_tail(self._err)}"
                doing.poll()
                time.sleep(_POLL_S)
        finally:
            doing.undo()
        left = _wait_until_empty(lambda: self._left(job) - before)
        return End(doing.done, doing.restarts, sorted(left), error or json.loads(line or "{}").get("error"))

    def _line(self) -> str | None:
        """Returns the next line of the driver's output, once it is there."""
        lines = self._out.read_text().splitlines(keepends=True)
        if len(lines) <= self._lines or not lines[self._lines].endswith("\n"):
            return None
        self._lines += 1
        return lines[self._lines - 1]

    def _left(self, job: Job) -> set[str]:
        """Returns what is on the hosts beside Spark's own processes and files."""
        by_host = {host.name: self._bed.processes(host) for host in (self._bed.driver, *self._bed.hosts)}
        return (
            left_processes(by_host, _ranks_of_failed_attempts(read_events(job.events)))
            | shared_memory(by_host)
            | left_files([self._bed.folder, Path(job.run_dir)])
        )

    def _beside_daemons(self) -> set[str]:
        processes = [(host, pid) for host in (self._bed.driver, *self._bed.hosts) for pid in self._bed.processes(host)]
        return {
            f"process on {host.name}: {pid} {command[:80]}" for host, pid in processes
            if (command := command_of(pid)) and not any(name in command for name in _DAEMONS)
        }  # fmt: skip


def _wait_until_empty(left: Callable[[], set[str]]) -> set[str]:
    """Returns what is left after some time, or nothing as soon as nothing is left."""
    end = time.monotonic() + _LEAVE_S
    while (found := left()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def _ranks_of_failed_attempts(events: Sequence[Mapping[str, Any]]) -> set[int]:
    """Returns the process ids of the ranks of all attempts but the last one."""
    attempts: list[set[int]] = [set()]
    for event in events:
        if event["kind"] == "restart":
            attempts.append(set())
        elif event["kind"] == "joined":
            attempts[-1].add(event["pid"])
    return set().union(*attempts[:-1]) - attempts[-1]


class _Doing:
    """Does faults when their steps are reached, and ends them after their time."""

    def __init__(self, bed: testbed.Bed, job: Job, faults: Sequence[Fault]):
        self._bed, self._job, self._faults = bed, job, list(faults)
        self.done: list[Fault] = []
        self.restarts = 0
        self._at: float | None = None
        """When the next fault is due, once its step is reached."""
        self._undo: list[tuple[float, Callable[[], None]]] = []

    def poll(self) -> None:
        """Called often while the run goes on."""
        now = time.monotonic()
        for due, undo in [pair for pair in self._undo if pair[0] <= now]:
            self._undo.remove((due, undo))
            undo()
        events = read_events(self._job.events)
        starts = [i for i, event in enumerate(events) if event["kind"] == "restart"]
        self.restarts = len(starts)
        if not self._faults:
            return
        attempt = events[starts[-1] if starts else 0 :]
        ranks = {event["rank"]: event for event in attempt if event["kind"] == "joined"}
        step = max((event["step"] for event in attempt if event["kind"] == "step"), default=0)
        if len(ranks) < self._job.num_ranks or step < self._faults[0].step:
            self._at = None
            return
        self._at = self._at or now + self._faults[0].delay_s
        if now >= self._at:
            self._at, fault = None, self._faults.pop(0)
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # the rank of a run that has just ended
                undo = self._do(fault, ranks[fault.rank])
                self.done.append(fault)
                if fault.seconds is not None:
                    self._undo.append((time.monotonic() + fault.seconds, undo))

    def undo(self) -> None:
        """Ends all faults that have an end."""
        for _, undo in self._undo:
            undo()
        self._undo.clear()

    def _do(self, fault: Fault, rank: Mapping[str, Any]) -> Callable[[], None]:
        """Does a fault, and returns what ends it."""
        pid, host = rank["pid"], self._host(rank["host"])
        if fault.kind == "kill a rank":
            kill_process(pid)
        elif fault.kind == "kill an executor":
            kill_executor(pid)
        elif fault.kind == "stop a rank":
            os.kill(pid, signal.SIGSTOP)
            return lambda: _continue(pid)
        elif fault.kind == "unplug a host":
            self._bed.unplug(host)
            return lambda: self._bed.plug(host)
        else:
            assert fault.kind == "lose frames of a host"
            self._bed.set_rate(host, _LOSSY_MBIT, queue_frames=_LOSSY_FRAMES)
            return lambda: self._bed.set_rate(host, _RATE_MBIT)
        return lambda: None

    def _host(self, name: str) -> Host:
        return next(host for host in self._bed.hosts if name in (host.name, host.address))


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
