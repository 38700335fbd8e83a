"""Training over a network: right results, also where a link is slow or fails for a while, and one error for each fault.

All jobs run in one session, one after another: each shows as well that the session has survived what went before.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from benchmarks.testbed import testbed
from benchmarks.testbed.standalone import start_spark
from spark_dl.rundir import checkpoint
from tests.builders import sockets
from tests.builders.datasets import write_dataset
from tests.builders.models import blobs
from tests.builders.reference import reference
from tests.hosts.conftest import REPOSITORY, state_of, wait_until
from tests.hosts.train_job import TIMEOUT_S, config
from tests.spark.conftest import FAST_JVM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RATE_MBIT = 200
START_S = 240
FOR_EVER = 100_000
GROUP_ROWS = 40


@pytest.fixture(scope="module")
def driver(possible):
    """Four hosts with Spark, and a driver that waits for jobs."""
    with testbed.hosts(4, rate_mbit=RATE_MBIT) as bed:
        master = start_spark(bed)
        with open(bed.folder / "out", "wb") as out, open(bed.folder / "err", "wb") as err:
            process = bed.popen(
                bed.driver, [sys.executable, "-m", "tests.hosts.train_job", master], cwd=REPOSITORY,
                env={"JAVA_TOOL_OPTIONS": FAST_JVM}, stdin=subprocess.PIPE, stdout=out, stderr=err,
            )  # fmt: skip
        yield Driver(bed, process)
        process.stdin.close()
        assert process.wait(60) == 0
        wait_until(lambda: {len(bed.processes(host)) for host in (bed.driver, *bed.hosts)} == {1})  # Spark's daemons


class Driver:
    def __init__(self, bed, process):
        self.bed, self.process = bed, process
        self.num_jobs = 0

    def start(self, **job):
        """Starts a job; returns a function that waits for its end, for so many seconds, and says how it was."""
        number, self.num_jobs = self.num_jobs, self.num_jobs + 1
        assert len(self._answers()) == number, "the driver is still at the job of an earlier test"
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        self.process.stdin.flush()

        def end(timeout_s):
            wait_until(lambda: self.is_alive() and len(self._answers()) > number, self._errors, timeout_s)
            return json.loads(self._answers()[number])

        return end

    def is_alive(self):
        assert self.process.poll() is None, self._errors()
        return True

    def _answers(self):
        return (self.bed.folder / "out").read_text().splitlines()

    def _errors(self):
        return testbed.read_tail(self.bed.folder / "err")


class Job:
    """A training over `num_ranks` of the hosts."""

    def __init__(self, driver, folder, num_ranks, epochs, **settings):
        self.driver, self.bed = driver, driver.bed
        settings = {"num_ranks": num_ranks, "epochs": epochs, **settings}
        self.columns, self.config = blobs(480), config(**settings)
        self.shards = write_dataset(str(folder / "data"), self.columns, group_rows=GROUP_ROWS)
        self.run_dir = str(folder / "run")
        self.end = driver.start(dataset=str(folder / "data"), run_dir=self.run_dir, **settings)

    def wait_for_step(self, step):
        def reached():
            saved = self.driver.is_alive() and checkpoint.latest(self.run_dir)
            return saved and saved.step >= step

        wait_until(reached, timeout_s=START_S)

    def ranks(self):
        """The hosts where ranks are at work, with their process ids."""
        signed = [(host, pathlib.Path(f"{self.run_dir}.{host.name}")) for host in self.bed.hosts]
        found = [(host, int(path.read_text())) for host, path in signed if path.exists()]
        assert len(found) == self.config.launch.num_ranks
        return found

    def assert_same_as_one_process(self):
        group_rows = tuple(n for s in self.shards.shards for n in s.row_groups)
        _, expected = reference(self.columns, self.config, group_rows)
        trained = checkpoint.load(checkpoint.find(self.run_dir), "model.pt")["0"]
        for name, weights in expected.items():
            torch.testing.assert_close(trained[name], weights, rtol=1e-5, atol=1e-6)


@pytest.fixture
def start(driver, tmp_path):
    """Starts a job of so many ranks and epochs; afterwards the network is as before."""
    yield lambda num_ranks, epochs: Job(driver, tmp_path, num_ranks, epochs)
    for host in driver.bed.hosts:
        driver.bed.restore(host)
        driver.bed.set_rate(host, RATE_MBIT)
        driver.bed.thaw(host)


class Attacked:
    """A training over three of the hosts, while a program on the fourth one tries all ports of the Python processes."""

    def __init__(self, job):
        self.job, self.bed = job, job.bed
        job.wait_for_step(5)
        ranks = job.ranks()
        (free,) = {*self.bed.hosts} - {host for host, _ in ranks}
        self.of_driver = self._ports(self.bed.driver)
        self.of_ranks = {host.address: self._ports(host, pid) for host, pid in ranks}
        outer = [[at, port] for at, port in self.of_driver if at != "127.0.0.1"]
        outer += [list(each) for ports in self.of_ranks.values() for each in ports]
        self.tries, self.outside = self._try(free, outer)
        self.elsewhere = []
        for host, _ in ranks:  # on the loopback interface of the same host
            inner = [["127.0.0.1", port] for _, port in self.of_ranks[host.address]]
            self.elsewhere += self._try(host, inner)[0]
        self.routes = [self.bed.run(host, ["ip", "route"], timeout_s=20).split() for host, _ in ranks]
        self.step = checkpoint.latest(job.run_dir).step
        self.end = job.end(START_S)
        self.left = {each for host, pid in ranks for each in self._ports(host, pid)}

    def _ports(self, host, pid=None):
        """Where the Python processes of a host, or one of them, listen."""
        found = sockets.listening(self.bed.processes(host))
        return {(at, port) for owner, at, port in found if sockets.is_python(owner) and pid in (None, owner)}

    def _try(self, host, ports):
        asked = json.dumps({"ports": ports, "anywhere": ["192.0.2.1", 80]})
        command = [sys.executable, "-m", "tests.hosts.rogue", asked]
        found = json.loads(self.bed.run(host, command, timeout_s=120, env={"PYTHONPATH": str(REPOSITORY)}))
        return found["tries"], found["outside"]

    def ends(self, address, port):
        """How the tries at a port ended, and all that was said there."""
        found = [(end, said) for at, number, _, end, said in self.tries if (at, number) == (address, port)]
        return {end for end, _ in found}, [said for end, said in found if end == "closed" and "Errno" not in said]


@pytest.fixture(scope="module", params=["ddp"])
def attacked(request, driver, tmp_path_factory):
    job = Job(driver, tmp_path_factory.mktemp(request.param), 3, 60, strategy=request.param, straggler_s=0.03)
    found = Attacked(job)
    assert found.step < 600, "the run had ended before the attack"
    return found


def ports_by_end(attacked):
    """The ports of the ranks of which nobody hears, and those that answer with a question and close."""
    ports = [each for found in attacked.of_ranks.values() for each in found]
    silent = [each for each in ports if attacked.ends(*each)[0] == {"dropped"}]
    return silent, [each for each in ports if each not in silent]


def is_question(said):
    """Whether this is the question for a proof, 32 random bytes, and at most that the answer was wrong."""
    return said[:4] == "\0\0\0\x20" and len(said) >= 36 and said[36:] in ("", "\0\0\0\x05wrong")


def test_S05_the_store_listens_on_one_address_and_closes_what_a_third_host_sends(attacked):
    assert {at for ports in attacked.of_ranks.values() for at, _ in ports} == attacked.of_ranks.keys()
    assert all(at == address for address, ports in attacked.of_ranks.items() for at, _ in ports)
    (store,) = ports_by_end(attacked)[1]
    ends, said = attacked.ends(*store)
    assert ends == {"closed"}
    assert all(is_question(each) for each in said if each)
    assert {end for *_, end, _ in attacked.elsewhere} == {"refused"}
    assert attacked.left == set()


def test_S07_nothing_is_heard_at_the_ports_of_gloo_when_the_ranks_have_connected(attacked):
    silent, _ = ports_by_end(attacked)
    assert sorted(at for at, _ in silent) == sorted(attacked.of_ranks), "one port of each rank"


def test_S17_the_listener_of_the_driver_closes_what_a_third_host_sends(attacked):
    assert {at for at, _ in attacked.of_driver} <= {attacked.bed.driver.address, "127.0.0.1"}
    (listener,) = [each for each in attacked.of_driver if each[0] != "127.0.0.1"]
    ends, said = attacked.ends(*listener)
    assert ends == {"closed"}
    assert all(is_question(each) for each in said if each)


def test_S20_a_training_needs_no_route_to_the_internet(attacked):
    assert all(words[0] == "10.0.0.0/24" and "default" not in words for words in attacked.routes)
    assert "unreachable" in attacked.outside
    assert attacked.end["steps"] == 600
    attacked.job.assert_same_as_one_process()


@pytest.mark.long
@pytest.mark.parametrize("attacked", ["parameter_server"], indirect=True)
def test_S18_a_parameter_server_has_no_port_when_its_trainers_have_connected(attacked):
    silent, others = ports_by_end(attacked)
    assert (len(silent), len(others)) == (3, 1), "Gloo's of each rank, and the store"
    assert attacked.end["steps"] == 600
    attacked.job.assert_same_as_one_process()


@pytest.mark.parametrize("num_ranks", [4, 3])
def test_the_weights_are_those_of_one_process(start, num_ranks):
    job = start(num_ranks, 3)
    assert job.end(START_S)["steps"] == 30
    assert len(job.ranks()) == num_ranks
    job.assert_same_as_one_process()


@pytest.mark.long
def test_F21_a_slow_host_and_a_link_that_fails_for_a_while_change_nothing_but_the_time(start):
    job = start(3, 60)
    job.wait_for_step(10)
    (slow, _), (cut, _), _ = job.ranks()
    job.bed.set_rate(slow, 10)
    job.bed.cut(cut)
    time.sleep(TIMEOUT_S / 4)
    assert checkpoint.latest(job.run_dir).step < 300, "the faults came too late to mean anything"
    job.bed.restore(cut)
    assert job.end(START_S)["steps"] == 600
    job.assert_same_as_one_process()


def assert_one_error(job, host, pid, what, bound_s):
    faulted_at = time.time()
    end = job.end(bound_s + 60)
    assert (end["host"], end["pid"]) == (host.address, pid), end  # Spark calls hosts by their addresses
    name = rf"rank {end['rank']} on {re.escape(host.address)} \(pid {pid}, executor \d+\)"
    assert re.match(f"{name} {what}", end["error"]), end
    assert end["time"] - faulted_at < bound_s


def test_F05_a_link_that_is_cut_is_one_error_that_names_the_host(start):
    job = start(3, FOR_EVER)
    job.wait_for_step(10)
    host, pid = job.ranks()[1]
    job.bed.cut(host)
    assert_one_error(job, host, pid, "sent no heartbeat for", TIMEOUT_S + 15)
    # It cannot know what the driver does, so it ends: by the connection to the driver, or after an error of its own.
    wait_until(lambda: state_of(pid) == "Z", lambda: "the rank on the isolated host lives on", TIMEOUT_S + 30)


@pytest.mark.parametrize("what", ["the rank", pytest.param("all of the host", marks=pytest.mark.long)])
def test_what_is_frozen_is_one_error_that_names_the_host(start, what):
    job = start(3, FOR_EVER)
    job.wait_for_step(10)
    host, pid = job.ranks()[0]
    if what == "the rank":
        os.kill(pid, signal.SIGSTOP)
    else:
        job.bed.freeze(host)
    assert_one_error(job, host, pid, "sent no heartbeat for", TIMEOUT_S + 15)


def test_a_killed_rank_is_one_error_that_names_the_host(start):
    job = start(3, FOR_EVER)
    job.wait_for_step(10)
    host, pid = job.ranks()[2]
    os.kill(pid, signal.SIGKILL)
    assert_one_error(job, host, pid, "was killed", 10)


def test_after_all_that_the_session_trains_as_before(start):
    job = start(3, 3)
    assert job.end(START_S)["steps"] == 30
    job.assert_same_as_one_process()
