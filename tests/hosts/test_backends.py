"""All-reduces of the backends alone, on hosts with their own network: bytes by the links' counters, or the reason."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.testbed import backends

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MIB, RATE_MBIT = 2.0, 400.0


@pytest.mark.long
def test_each_backend_has_its_figures_or_the_reason_why_not(hosts):
    with hosts(2, rate_mbit=RATE_MBIT) as bed:
        rows = backends.measure(bed, mib=MIB, repeats=3, rate_mbit=RATE_MBIT, show=print)
    assert [row["backend"] for row in rows] == list(backends.BACKENDS)
    gloo, nccl, mpi = rows
    assert_measured(gloo)
    if torch.cuda.device_count() < 2:
        assert "seconds" not in nccl
        assert nccl["note"].startswith("not measured: NCCL needs one GPU for each rank")
    if shutil.which("mpirun") and Path(".venv-peers/bin/python").is_file():
        assert_measured(mpi)
    elif shutil.which("mpirun"):
        assert mpi["note"] == "not measured: there is no .venv-peers/bin/python; `make setup-peers` makes it"
    else:
        assert "seconds" not in mpi
        assert mpi["note"] == "not measured: there is no mpirun; Debian or Ubuntu: apt install openmpi-bin"


def assert_measured(row):
    sent = row["bytes_per_rank"] / (MIB * 2**20)  # 2 N (P - 1) / P, and the headers of packets
    assert row["note"] is None
    assert 1 < sent < 1.03
    assert 0.2 < row["ratio_to_limit"] < 1.1


@pytest.mark.long
def test_a_backend_that_fails_has_the_reason_in_its_row(hosts, monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", ("gloo", "none"))
    with hosts(2) as bed:
        gloo, none = backends.measure(bed, mib=0.5, repeats=1, rate_mbit=None, show=print)
    assert "seconds" in gloo
    assert "ratio_to_limit" not in gloo
    assert "seconds" not in none
    assert re.fullmatch("failed: .*none.*", none["note"])
