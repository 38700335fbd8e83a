"""A link that loses, delays and reorders frames changes the time of a training, and nothing else."""

import contextlib
import json
import subprocess
import sys

import pytest

from benchmarks.testbed import netns, testbed
from benchmarks.testbed.reap import run_tool
from spark_dl.rundir import checkpoint
from tests.builders.datasets import write_dataset
from tests.builders.models import blobs, same_bits
from tests.hosts.conftest import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LOSS, DELAY_S = 0.01, 0.02
BEYOND = "beyond"
"""The interface of the switch behind the relay."""


@contextlib.contextmanager
def bad_link(host):
    """The frames of a host pass a relay in the switch. Yields a dict that has the counts of frames after the block."""
    switch = ["ip", "-n", host.switch]
    netns.disconnect(host)
    run_tool([*switch, "link", "add", "relay", "mtu", str(testbed.MTU), "type", "veth", "peer", "name", BEYOND,
              "mtu", str(testbed.MTU)])  # fmt: skip
    for name in ("relay", BEYOND):
        run_tool([*switch, "link", "set", "dev", name, "addrgenmode", "none"])
        run_tool([*switch, "link", "set", "dev", name, "promisc", "on", "up"])
    run_tool([*switch, "link", "set", "dev", host.name, "promisc", "on"])
    run_tool([*switch, "link", "set", "dev", BEYOND, "master", "switch"])
    command = [sys.executable, "-m", "tests.hosts.relay", host.name, "relay", str(LOSS), str(DELAY_S)]
    counts = {}
    with subprocess.Popen(
        ["ip", "netns", "exec", host.switch, *command], cwd=REPOSITORY, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as relay:  # fmt: skip
        try:
            assert relay.stdout.readline() == "ready\n"
            yield counts
        finally:
            out, _ = relay.communicate("\n", timeout=20)
    counts.update(json.loads(out))


@pytest.mark.long
def test_F21_loss_reordering_and_jitter_change_no_weights_and_are_no_hang(hosts, tmp_path):
    shards = write_dataset(str(tmp_path / "data"), blobs(480), group_rows=40)
    found = {}
    with hosts(2) as bed:
        for name in ("good", "bad"):
            command = [sys.executable, "-m", "tests.hosts.rank_job", shards.url, str(tmp_path / name)]
            with bad_link(bed.hosts[1]) if name == "bad" else contextlib.nullcontext() as counts:
                out = bed.run_ranks(command, timeout_s=120, env={"PYTHONPATH": str(REPOSITORY)})
            assert [json.loads(lines.splitlines()[-1]) for lines in out] == [30, 30]
            found[name] = checkpoint.load(checkpoint.find(str(tmp_path / name)), "model.pt")["0"]
    assert same_bits(found["good"], found["bad"])
    assert counts["passed"] > 500
    assert counts["lost"] >= 3
    assert counts["overtaken"] > 50
