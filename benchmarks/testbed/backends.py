"""Measures the all-reduce of each backend side by side: Gloo, NCCL and MPI, without Spark and without a strategy.

One rank runs on each host of a testbed. `mpirun` starts the ranks of MPI, and `Bed.run_ranks` those of the others, with
torchrun's environment. This file is also the program of a rank:

    python -m benchmarks.testbed.backends '<settings as JSON>' result.json
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import socket
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import ROOT
from benchmarks.testbed.testbed import Bed
from benchmarks.testbed.timing import all_reduce_limit_s, median_of_slowest, time_exchanges
from spark_dl.gather import gather_json

BACKENDS = ("gloo", "nccl", "mpi")
_MPI_PYTHON = ".venv-peers/bin/python"
"""NOTE: not the environment of the tests: with mpi4py there, Lightning and others would start MPI in every process."""
_WARM_UPS = 2
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement, sent to the ranks as JSON."""

    backend: str
    mib: float
    """Size of the gradient, float32."""
    repeats: int = 3


def measure(
    bed: Bed, *, mib: float, repeats: int, rate_mbit: float | None, show: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Rows of the section `backends` of the report, one for each backend. Called where the bed was created.

    A backend that cannot run here, or that fails, has a row without figures, whose `note` is the reason.
    """
    num_hosts, rows = len(bed.hosts), []
    for backend in BACKENDS:
        row: dict[str, Any] = {"backend": backend, "hosts": num_hosts, "mib": mib, "note": _absent(backend, num_hosts)}
        if row["note"] is None:
            try:
                row |= _run(bed, Settings(backend, mib, repeats))
            except RuntimeError as error:
                row["note"] = f"failed: {str(error).splitlines()[-1]}"
                show(f"backend {backend}: failed: {error}")
            else:
                show(f"backend {backend}, {mib:g} MiB: {row['seconds']:.3f} s")
        if "seconds" in row and rate_mbit is not None:
            limit_s = all_reduce_limit_s(mib, num_hosts, rate_mbit)
            row |= {"limit_s": limit_s, "ratio_to_limit": limit_s / row["seconds"]}
        rows.append(row)
    return rows


def _absent(backend: str, num_hosts: int) -> str | None:
    """Returns why the backend cannot run on this machine, or None."""
    if backend == "nccl" and (num_gpus := torch.cuda.device_count()) < num_hosts:
        return f"not measured: NCCL needs one GPU for each rank, found {num_gpus} for {num_hosts} ranks"
    if backend == "mpi" and shutil.which("mpirun") is None:
        return "not measured: there is no mpirun; Debian or Ubuntu: apt install openmpi-bin"
    if backend == "mpi" and not Path(_MPI_PYTHON).is_file():
        return f"not measured: there is no {_MPI_PYTHON}; `make setup-peers` makes it"
    return None


def _run(bed: Bed, settings: Settings) -> dict[str, Any]:
    """Runs the ranks, and returns seconds and bytes. Raises RuntimeError if they fail."""
    path = bed.folder / f"backend-{settings.backend}.json"
    program = ["-m", __name__, json.dumps(dataclasses.asdict(settings)), str(path)]
    command = [sys.executable, *program]
    if settings.backend == "mpi":  # -m mpi4py ends all ranks if one raises
        command = _mpirun(bed, [str(Path(_MPI_PYTHON).absolute()), "-m", "mpi4py", *program])
        bed.run(bed.hosts[0], command, timeout_s=_TIMEOUT_S, env={"PYTHONPATH": str(ROOT)})
    elif settings.backend == "nccl":  # shared memory would not cross the links
        env = {"NCCL_SOCKET_IFNAME": bed.hosts[0].interface, "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
        bed.run_ranks(command, timeout_s=_TIMEOUT_S, env=env)
    else:
        bed.run_ranks(command, timeout_s=_TIMEOUT_S)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _mpirun(bed: Bed, command: list[str]) -> list[str]:
    """Returns Open MPI's command for one rank on each host of the bed. For the first host.

    Open MPI reaches other hosts with an agent such as ssh. Here the agent is a script that enters a host's namespaces.
    """
    agent = bed.folder / "mpi-agent.sh"
    agent.write_text(
        "#!/bin/sh\n"
        'host=$1; shift\n'
        f"exec ip netns exec {shlex.quote(bed.driver.bed)}.\"$host\" unshare --uts "
        "sh -c 'hostname \"$0\" && exec sh -c \"$1\"' \"$host\" \"$*\"\n"
    )  # fmt: skip
    agent.chmod(0o700)
    interface = bed.hosts[0].interface
    settings = {
        "plm_rsh_agent": str(agent),
        "pml": "ob1", "btl": "tcp,self",  # as between machines: no shared memory
        "btl_tcp_if_include": interface, "oob_tcp_if_include": interface,
        "mpi_yield_when_idle": "1",  # the hosts share the machine's cores
    }  # fmt: skip
    return [
        "env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "OMP_NUM_THREADS=1",
        "mpirun", "--host", ",".join(host.name for host in bed.hosts), "-np", str(len(bed.hosts)), "--bind-to", "none",
        *(word for name, value in settings.items() for word in ("--mca", name, value)), *command,
    ]  # fmt: skip


class _Ranks(Protocol):
    """The ranks of one backend. All methods are collective."""

    rank: int

    def barrier(self) -> None: ...

    def exchange(self) -> None:
        """Sums the gradient over the ranks, in place."""

    def gather(self, value: Any) -> list[Any]:
        """Returns each rank's value, by rank."""


class _Torch:
    """The default process group."""

    def __init__(self, settings: Settings):
        uses_gpu = settings.backend == "nccl"
        dist.init_process_group("cpu:gloo,cuda:nccl" if uses_gpu else settings.backend)
        self.rank = dist.get_rank()
        if uses_gpu:
            torch.cuda.set_device(self.rank)
        device = "cuda" if uses_gpu else "cpu"
        self._gradient = torch.randn(round(settings.mib * 2**18), device=device) * 1e-3

    def barrier(self) -> None:
        dist.barrier()

    def exchange(self) -> None:
        dist.all_reduce(self._gradient)
        if self._gradient.is_cuda:
            torch.cuda.synchronize()

    def gather(self, value: Any) -> list[Any]:
        return gather_json(value)


class _Mpi:
    """`MPI.COMM_WORLD`, with the buffers of NumPy."""

    def __init__(self, settings: Settings):
        from mpi4py import MPI

        self._in_place, self._world = MPI.IN_PLACE, MPI.COMM_WORLD
        self.rank = self._world.Get_rank()
        self._gradient = np.random.default_rng(self.rank).standard_normal(round(settings.mib * 2**18), np.float32)
        self._gradient *= 1e-3

    def barrier(self) -> None:
        self._world.Barrier()

    def exchange(self) -> None:
        self._world.Allreduce(self._in_place, self._gradient)

    def gather(self, value: Any) -> list[Any]:
        return list(self._world.allgather(value))


def _time(ranks: _Ranks, repeats: int) -> dict[str, Any]:
    """Returns the median seconds of the slowest rank, and the mean bytes that a rank sends. Collective."""
    for _ in range(_WARM_UPS):
        ranks.exchange()
    host = socket.gethostbyname(socket.gethostname())
    seconds, link = time_exchanges(ranks.exchange, ranks.barrier, host=host, repeats=repeats)
    everyones = ranks.gather([seconds, link.sent / repeats])
    return {
        "seconds": median_of_slowest([times for times, _ in everyones]),
        "bytes_per_rank": statistics.mean(sent for _, sent in everyones),
    }


def _main(settings: Settings, path: str) -> None:
    ranks = _Mpi(settings) if settings.backend == "mpi" else _Torch(settings)
    found = _time(ranks, settings.repeats)
    if ranks.rank == 0:
        Path(path).write_text(json.dumps(found))
    if settings.backend != "mpi":
        dist.destroy_process_group()


if __name__ == "__main__":
    _main(Settings(**json.loads(sys.argv[1])), sys.argv[2])
