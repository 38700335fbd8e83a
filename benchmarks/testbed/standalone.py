"""Spark's standalone cluster manager on a testbed: a master on the driver's host, and a worker on each other host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.testbed.netns import Host
from benchmarks.testbed.testbed import Bed, kill, read_tail

_PORT, _UI_PORT = 7077, 8080
_POLL_S = 0.1
_DAEMON = {
    "SPARK_DAEMON_MEMORY": "256m",
    # These processes only start others, so a fast start matters more than speed.
    "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}

_WAIT = """
import json, sys, time, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy is reached from here
while True:
    try:
        if json.load(opener.open(sys.argv[1], timeout=5))["aliveworkers"] == int(sys.argv[2]):
            break
    except (OSError, ValueError):  # ValueError: an empty page, while the master starts
        pass
    time.sleep(0.2)
"""
"""Program on the master's host, which ends when this number of workers have registered."""


_HIDE = 'mkdir "$1" && mount --bind "$2" "$1" && mount -t tmpfs none "$0" && shift 2 && exec "$@"'
"""Program that runs a command with an empty folder $0, and Spark, of folder $2, in folder $1."""


def start_spark(
    bed: Bed,
    *,
    cores_per_worker: int = 1,
    memory_mib: int = 1024,
    timeout_s: float = 180.0,
    hidden: str | None = None,
) -> str:
    """Starts a Spark master on the driver's host and one worker on each other host. Returns the master's URL.

    hidden: a folder that is empty for the workers and their executors, such as the virtual environment of the driver.
        They have Spark itself, also if it is in this folder.

    They run until the bed is removed. Run the driver on its host with `bed.popen(bed.driver, ...)`. It needs only the
    URL. Raises RuntimeError, with the end of its log, if a daemon ends, or if not all workers have registered
    within `timeout_s`.
    """
    end = time.monotonic() + timeout_s
    master, url = bed.driver.name, f"spark://{bed.driver.name}:{_PORT}"
    arguments = ["--host", master, "--port", str(_PORT), "--webui-port", str(_UI_PORT)]
    daemons = [_start_daemon(bed, bed.driver, "master.Master", arguments)]
    _wait_for_workers(bed, 0, daemons, end)  # a worker without a master tries again only after about 10 s
    for host in bed.hosts:
        arguments = [
            "--host",
            host.name,
            "--cores",
            str(cores_per_worker),
            "--memory",
            f"{memory_mib}m",
            "--webui-port",
            "0",
        ]
        daemons.append(_start_daemon(bed, host, "worker.Worker", [*arguments, url], hidden))
    _wait_for_workers(bed, len(bed.hosts), daemons, end)
    return url


@dataclass(frozen=True)
class _Daemon:
    host: Host
    log: Path
    process: subprocess.Popen[Any]


def _start_daemon(bed: Bed, host: Host, name: str, arguments: list[str], hidden: str | None = None) -> _Daemon:
    import pyspark

    home = os.path.dirname(str(pyspark.__file__))
    folder = bed.folder / f"spark-{host.name}"
    folder.mkdir()
    enter: list[str] = []
    if hidden is not None:
        enter = ["unshare", "--mount", "sh", "-c", _HIDE, os.path.realpath(hidden), f"{folder}/home", home]
        home = f"{folder}/home"
    env = {**_DAEMON, "SPARK_HOME": home, "SPARK_LOCAL_DIRS": str(folder), "SPARK_WORKER_DIR": str(folder)}
    command = [*enter, f"{home}/bin/spark-class", f"org.apache.spark.deploy.{name}", *arguments]
    with open(folder / "log", "wb") as log:
        process = bed.popen(host, command, env=env, stdout=log, stderr=log, cwd=folder)
    return _Daemon(host, folder / "log", process)


def _wait_for_workers(bed: Bed, num_workers: int, daemons: Sequence[_Daemon], end: float) -> None:
    page = f"http://{bed.driver.name}:{_UI_PORT}/json/"
    waiting = bed.popen(bed.driver, [sys.executable, "-I", "-S", "-c", _WAIT, page, str(num_workers)])
    try:
        while waiting.poll() is None:
            for daemon in daemons:
                if (code := daemon.process.poll()) is not None:
                    raise RuntimeError(
                        f"the Spark daemon on {daemon.host.name} ended with exit code {code}: {read_tail(daemon.log)}"
                    )
            if time.monotonic() > end:
                raise RuntimeError(
                    f"the Spark master did not have {num_workers} workers in time; its log: {read_tail(daemons[0].log)}"
                )
            time.sleep(_POLL_S)
    finally:
        kill(waiting)
    if waiting.returncode:
        raise RuntimeError(
            f"the wait for the Spark master ended with exit code {waiting.returncode}; see the log above"
        )
