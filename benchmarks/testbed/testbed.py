"""Virtual hosts on one machine, with links of a set rate.

    with testbed.hosts(4, rate_mbit=200) as bed:
        bed.run_ranks([sys.executable, "ring.py"], timeout_s=60)           # one rank per host, as torchrun starts them

    with testbed.hosts(4, rate_mbit=200) as bed:
        master = standalone.start_spark(bed)                               # one worker per host
        bed.run(bed.driver, [sys.executable, "job.py", "--master", master], timeout_s=300)
        before = bed.counters()                                            # bytes of each link

The driver has its own host, `bed.driver`, with a link of the same rate, as in a cluster. Hosts share the files and
cores of the machine, but not its shared memory. A bed is removed, with all processes on its hosts, when the `with`
block ends, or when the creator's process ends in any way, including SIGKILL. A small guard process does this. If the
guard is also killed, run `python -m benchmarks.testbed --reap`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks import ROOT
from benchmarks.testbed import netns, reap
from benchmarks.testbed.netns import Counters, Host

MAX_HOSTS = 16
MTU = 9000
"""Jumbo frames, as in data centers: headers are 0.7 % of a frame's bytes, and 4.4 % with an MTU of 1500."""
_GUARD_WAIT_S = 60.0
_STOP_WAIT_S = 10.0
_TAIL = 3000
_RANKS_PORT = 29500
_POLL_S = 0.02

# A UTS namespace gives the process the host's name. `ip netns exec` has given it a mount namespace.
_ENTER = 'hostname "$0" && mount -t tmpfs none /dev/shm && exec "$@"'


@contextlib.contextmanager
def hosts(
    num_hosts: int, *, rate_mbit: float | None = None, mtu: int = MTU, congestion_control: str = netns.RENO
) -> Iterator[Bed]:
    """Creates `num_hosts` hosts (at most 16) and a driver's host, with links of `rate_mbit` in each direction.

    Without a rate, links have no limit. `mtu` is the bytes of a frame. `congestion_control` is that of TCP; the
    machine's kernel must have it. Raises RuntimeError if a bed cannot be created; `unavailable()` returns the reason.
    """
    if not 1 <= num_hosts <= MAX_HOSTS:
        raise ValueError(f"num_hosts: expected 1 to {MAX_HOSTS}, found {num_hosts}")
    name = reap.bed_name()
    guard = reap.start_guard(name)
    made: list[Bed] = []
    try:
        names = ["driver", *(f"host{i}" for i in range(num_hosts))]
        driver, *others = netns.create(name, names, rate_mbit=rate_mbit, mtu=mtu, congestion_control=congestion_control)
        made.append(Bed(driver, tuple(others), mtu=mtu))
        yield made[0]
    finally:
        _remove(name, guard)
        for bed in made:
            bed._wait_for_processes()


def unavailable() -> str | None:
    """Returns why a bed cannot be created on this machine, or None. Creates and removes a bed with one host."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "a testbed needs Linux and root"
    missing = [tool for tool in ("ip", "tc", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"a testbed needs {', '.join(missing)} (packages iproute2, util-linux, hostname)"
    try:
        with hosts(1, rate_mbit=10):
            return None
    except (RuntimeError, OSError) as error:
        return f"cannot create network namespaces with a token bucket: {error}"


def _remove(bed: str, guard: subprocess.Popen[bytes]) -> None:
    """Requests removal by the guard. If the guard fails, removes the bed here, so that the error is raised."""
    assert guard.stdin is not None
    guard.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        guard.wait(_GUARD_WAIT_S)
    if guard.returncode != 0:
        guard.kill()
        guard.wait()
        reap.remove(bed)


class Bed:
    """Running hosts, created by `hosts`. Used only in the process that created them."""

    def __init__(self, driver: Host, others: tuple[Host, ...], *, mtu: int):
        self.driver = driver
        """Host for the driver of a job, without Spark workers and ranks of `run_ranks`."""
        self.hosts = others
        self.folder = reap.bed_folder(driver.bed)
        """Folder for temporary files, deleted with the bed."""
        self._mtu = mtu
        self._processes: list[subprocess.Popen[Any]] = []
        self._num_runs = 0

    def popen(
        self, host: Host, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts a process on a host; `env` is added to the environment. Its pid is the command's, in a new session.

        It has the host's name, `/etc/hosts` and interface, and Spark's environment variables for them. Its temporary
        files are deleted with the bed. `options` are those of Popen. It starts in the folder of the repository.
        """
        variables = {
            "SPARK_LOCAL_IP": host.address, "SPARK_LOCAL_HOSTNAME": host.name, "PYSPARK_PYTHON": sys.executable,
            "TMPDIR": str(self.folder), "SPARK_LOCAL_DIRS": str(self.folder), **(env or {}),
        }  # fmt: skip
        enter = ["ip", "netns", "exec", host.namespace, "unshare", "--uts", "sh", "-c", _ENTER, host.name]
        process = subprocess.Popen(
            [*enter, "env", *(f"{key}={value}" for key, value in variables.items()), *command],
            **{"stdin": subprocess.DEVNULL, "cwd": ROOT, **options}, start_new_session=True,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def run(self, host: Host, command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> str:
        """Runs a command on a host and returns its standard output.

        Raises RuntimeError, with the end of its standard error, if it fails or takes longer than `timeout_s`.
        """
        out, err = subprocess.PIPE, subprocess.PIPE
        process = self.popen(host, command, env=env, stdout=out, stderr=err, text=True)
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            kill(process)
            _, stderr = process.communicate()
            raise RuntimeError(_failure(host, command, f"did not end within {timeout_s:g} s", stderr)) from None
        if process.returncode:
            raise RuntimeError(_failure(host, command, _ended(process.returncode), stderr))
        return str(stdout)

    def run_ranks(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        num_ranks: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Runs a command on every host (or the first `num_ranks`), with one rank each. Returns the outputs by rank.

        The environment is that of torchrun, with one thread for each rank. Raises RuntimeError, with the end of its
        standard error, for the first rank that fails, or for the ranks that take longer than `timeout_s`. All ranks are
        then killed.
        """
        hosts = self.hosts[:num_ranks]
        assert len(hosts) == (num_ranks or len(self.hosts)), f"{num_ranks} ranks on {len(self.hosts)} hosts"
        self._num_runs += 1
        files = [self.folder / f"run-{self._num_runs}-{host.name}" for host in hosts]
        common = {
            "WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(_RANKS_PORT),
            "GLOO_SOCKET_IFNAME": hosts[0].interface, **(env or {}),
        }  # fmt: skip
        ranks: list[subprocess.Popen[Any]] = []
        try:
            for rank, (host, file) in enumerate(zip(hosts, files, strict=True)):
                with open(f"{file}.out", "wb") as out, open(f"{file}.err", "wb") as err:
                    ranks.append(self.popen(host, command, env={**common, "RANK": str(rank)}, stdout=out, stderr=err))
            self._wait_for_ranks(ranks, command, files, timeout_s)
        finally:
            for process in ranks:
                kill(process)
        return [Path(f"{file}.out").read_text() for file in files]

    def _wait_for_ranks(
        self, ranks: list[subprocess.Popen[Any]], command: Sequence[str], files: list[Path], timeout_s: float
    ) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            codes = [process.poll() for process in ranks]
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                rank = min(
                    failed, key=lambda rank: codes[rank] or 0
                )  # a rank ended by a signal comes before ranks that noticed
                what, error = f"(rank {rank}) {_ended(codes[rank])}", read_tail(f"{files[rank]}.err")
                raise RuntimeError(_failure(self.hosts[rank], command, what, error))
            if all(code == 0 for code in codes):
                return
            time.sleep(_POLL_S)
        late = [rank for rank, process in enumerate(ranks) if process.poll() is None]
        names = ", ".join(f"{self.hosts[rank].name} (rank {rank})" for rank in late)
        error = read_tail(f"{files[late[0]]}.err") if late else ""
        raise RuntimeError(f"{' '.join(command)} did not end within {timeout_s:g} s on {names}: {error}")

    def counters(self) -> dict[str, Counters]:
        """Returns the bytes over each host's link so far, by host name, including the driver's."""
        return netns.read_counters((self.driver, *self.hosts))

    def processes(self, host: Host) -> list[int]:
        """Returns the ids of the processes on a host."""
        return reap.processes([host.namespace])

    def cut(self, host: Host) -> None:
        """Disconnects a host: frames are lost, and connections stay open."""
        netns.disconnect(host)

    def restore(self, host: Host) -> None:
        """Ends `cut`."""
        netns.connect(host)

    def unplug(self, host: Host) -> None:
        """Disconnects a host: its interface loses its carrier, and connections stay open."""
        netns.unplug(host)

    def plug(self, host: Host) -> None:
        """Ends `unplug`."""
        netns.plug(host)

    def set_rate(self, host: Host, rate_mbit: float, *, queue_frames: int | None = None) -> None:
        """Sets the rate of one host's link. queue_frames: length of its queues, of which a short one loses frames."""
        netns.set_rate(host, rate_mbit, mtu=self._mtu, queue_frames=queue_frames)

    def freeze(self, host: Host) -> None:
        """Stops all processes of a host (SIGSTOP), so that it no longer responds."""
        self._signal(host, signal.SIGSTOP)

    def thaw(self, host: Host) -> None:
        """Ends `freeze`."""
        self._signal(host, signal.SIGCONT)

    def _signal(self, host: Host, number: signal.Signals) -> None:
        for pid in self.processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _wait_for_processes(self) -> None:
        """Waits for the processes of a removed bed, which are dead."""
        for process in self._processes:
            process.wait(_STOP_WAIT_S)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    _close(pipe)


def kill(process: subprocess.Popen[Any]) -> None:
    """Ends a process that `popen` started, and the processes of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_STOP_WAIT_S)


def read_tail(path: str | Path) -> str:
    """Returns the end of a log, for an error."""
    return Path(path).read_text(errors="replace")[-_TAIL:].strip()


def _failure(host: Host, command: Sequence[str], what: str, stderr: str) -> str:
    return f"on {host.name}, {' '.join(command)} {what}: {stderr[-_TAIL:].strip()}"


def _ended(code: int | None) -> str:
    assert code
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _close(pipe: IO[Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # data that was not yet written to the dead process
        pipe.close()
