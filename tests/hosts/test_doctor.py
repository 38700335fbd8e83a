"""The doctor on hosts of which two cannot reach each other, and of which one has a slow link."""

import contextlib
import json
import queue
import subprocess
import sys
import threading

import pytest

from benchmarks.testbed.reap import run_tool
from benchmarks.testbed.standalone import start_spark
from tests.hosts.conftest import REPOSITORY
from tests.spark.conftest import FAST_JVM

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(240)]
RATE_MBIT, SLOW_MBIT = 400, 40


@contextlib.contextmanager
def cut_between(one, other):
    """The frames of a host to another one are lost, as they go to an address that no host has."""
    at = ["dev", one.interface]
    run_tool(["ip", "-n", one.namespace, "neigh", "replace", other.address, "lladdr", "02:00:00:00:99:99", *at,
              "nud", "permanent"])  # fmt: skip
    try:
        yield
    finally:
        run_tool(["ip", "-n", one.namespace, "neigh", "del", other.address, *at])


@contextlib.contextmanager
def doctor(bed, folder):
    """Yields a function that returns the findings that are not `ok`, by level, check, words and change."""
    with open(folder / "stderr", "wb") as err:
        driver = bed.popen(
            bed.driver, [sys.executable, "-m", "tests.hosts.doctor_job", start_spark(bed)], cwd=REPOSITORY, stderr=err,
            env={"JAVA_TOOL_OPTIONS": FAST_JVM}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    lines = queue.Queue()
    threading.Thread(target=lambda: [lines.put(line) for line in driver.stdout], daemon=True).start()

    def look():
        driver.stdin.write("\n")
        driver.stdin.flush()
        found = json.loads(lines.get(timeout=60))
        return [each for each in found["findings"] if each["check"].startswith("connection")], found

    yield look
    driver.stdin.close()
    assert driver.wait(30) == 0


def test_B38_two_hosts_that_cannot_reach_each_other_and_a_slow_one_are_named_and_healthy_ones_are_not(hosts, tmp_path):
    with hosts(3, rate_mbit=RATE_MBIT) as bed, doctor(bed, tmp_path) as look:
        ((healthy,), _) = look()
        assert (healthy["level"], healthy["change"]) == ("ok", "")

        with cut_between(bed.hosts[0], bed.hosts[1]):
            (*cut, rates), found = look()
        pairs = {each["found"].partition(": ")[0] for each in cut}
        assert {each["level"] for each in cut} == {"error"}
        assert pairs == {
            f"{a.address} ({a.address}) cannot connect to {b.address} ({b.address})"
            for a, b in (bed.hosts[:2], bed.hosts[1::-1])
        }
        assert all("allow connections between executors" in each["change"] for each in cut)
        assert rates["level"] == "ok", "the other pairs are as fast as before"
        assert found["seconds"] < 12

        slow = bed.hosts[2]
        bed.set_rate(slow, SLOW_MBIT)
        ((rates,), _) = look()
        assert rates["level"] == "warning"
        assert {frozenset(pair.split()[:3:2]) for pair in rates["found"].partition("slow: ")[2].split(", ")} == {
            frozenset((slow.address, other.address)) for other in bed.hosts[:2]
        }
        assert rates["change"].startswith("look at the network of these hosts")

        bed.set_rate(slow, RATE_MBIT)
        ((healed,), found) = look()
        assert healed["level"] == "ok"
        assert found["seconds"] < 10
