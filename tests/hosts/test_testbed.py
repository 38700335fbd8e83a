"""The testbed itself: what it promises of names, rates, counters, faults, and of its own end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.testbed import reap, testbed
from benchmarks.testbed.standalone import start_spark
from tests.hosts.conftest import REPOSITORY, parts, state_of, wait_until

PYTHON = [sys.executable, "-I", "-S", "-c"]
ECHO = """
import socket, sys
with socket.create_server(("0.0.0.0", 5001)) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            received = 0
            while data := connection.recv(1 << 20):
                received += len(data)
            connection.sendall(str(received).encode())
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5001), timeout=float(sys.argv[3]))
start = time.perf_counter()
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
assert connection.recv(100) == sys.argv[2].encode()
print(time.perf_counter() - start)
"""


@contextlib.contextmanager
def server(bed, host):
    process = bed.popen(host, [*PYTHON, ECHO], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    yield
    testbed.kill(process)
    process.stdout.close()


def send(bed, sender, receiver, num_bytes, timeout_s=30):
    """Seconds until `num_bytes` have arrived."""
    return float(bed.run(sender, [*PYTHON, SEND, receiver.name, str(num_bytes), str(timeout_s)], timeout_s=60))


def test_hosts_have_names_and_addresses_of_their_own(hosts):
    look = """
import json, socket, sys
names = sys.argv[1:]
interfaces = [name for _, name in socket.if_nameindex()]
print(json.dumps([socket.gethostname(), [socket.gethostbyname(name) for name in names], interfaces]))
"""
    with hosts(2) as bed:
        everyone = (bed.driver, *bed.hosts)
        assert [host.name for host in everyone] == ["driver", "host0", "host1"]
        names = [host.name for host in everyone]
        for host in everyone:
            found = json.loads(bed.run(host, [*PYTHON, look, *names], timeout_s=20))
            assert found == [host.name, [h.address for h in everyone], ["lo", host.interface]]


def test_what_a_process_is_given_and_what_it_returns(hosts):
    with hosts(1) as bed:
        (host,) = bed.hosts
        process = bed.popen(host, ["sleep", "60"])
        wait_until(lambda: bed.processes(host) == [process.pid])
        assert bed.processes(bed.driver) == []
        assert (
            bed.run(host, ["sh", "-c", "echo $SPARK_LOCAL_IP $A"], env={"A": "b c"}, timeout_s=10) == "10.0.0.2 b c\n"
        )
        with pytest.raises(RuntimeError, match=r"^on host0, sh -c .* ended with exit code 3: what went wrong$"):
            bed.run(host, ["sh", "-c", "echo what went wrong >&2; exit 3"], timeout_s=10)
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"^on host0, .* did not end within 0.5 s: half way$"):
            bed.run(host, ["sh", "-c", "echo half way >&2; sleep 60 & wait"], timeout_s=0.5)
        assert time.monotonic() - start < 40
        assert bed.processes(host) == [process.pid]


@pytest.mark.slow
@pytest.mark.parametrize("rate_mbit", [20, 500])
def test_a_transfer_takes_what_the_rate_says_in_either_direction_and_is_counted(hosts, rate_mbit):
    num_bytes = rate_mbit * 1_000_000 // 8  # one second
    with hosts(2, rate_mbit=rate_mbit) as bed, server(bed, bed.hosts[0]):
        first, second = bed.hosts
        before = bed.counters()
        taken = send(bed, second, first, num_bytes)
        moved = {name: counters - before[name] for name, counters in bed.counters().items()}
        assert 0.95 < taken < 2.5  # never faster; on a busy machine slower
        assert num_bytes < moved["host1"].tx_bytes < 1.05 * num_bytes
        assert num_bytes < moved["host0"].rx_bytes < 1.05 * num_bytes
        assert moved["host0"].tx_bytes < 0.05 * num_bytes
        assert moved["driver"].tx_bytes < 1000
        bed.set_rate(first, rate_mbit / 2)  # now the receiver's end is the limit
        assert 1.9 < send(bed, second, first, num_bytes) < 4


def test_without_a_rate_there_is_no_limit(hosts):
    with hosts(2) as bed, server(bed, bed.hosts[0]):
        assert send(bed, bed.hosts[1], bed.hosts[0], 25_000_000) < 2  # 100 Mbit/s, on any machine


@pytest.mark.parametrize("is_given", [False, True])
def test_the_congestion_control_is_not_the_machine_s(hosts, is_given):
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    options = {"congestion_control": known[-1], "mtu": 1500} if is_given else {}
    ask = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5001), timeout=10)
print(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())
"""
    with hosts(1, **options) as bed, server(bed, bed.hosts[0]):
        found = bed.run(bed.driver, [*PYTHON, ask, bed.hosts[0].name], timeout_s=20)
        assert found.strip() == options.get("congestion_control", "reno")


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "restore"), [("cut", "restore"), ("unplug", "plug")])
def test_a_host_that_is_cut_off_reaches_nobody_until_it_is_restored(hosts, cut, restore):
    with hosts(3) as bed:
        first, second, third = bed.hosts
        with server(bed, first):
            getattr(bed, cut)(second)
            with pytest.raises(RuntimeError, match=r"(?s)^on host1, .*timed out"):
                send(bed, second, first, 10, timeout_s=2)
            send(bed, third, first, 10)
            getattr(bed, restore)(second)
            send(bed, second, first, 10)


def test_a_short_queue_loses_frames_and_a_transfer_still_arrives(hosts):
    with hosts(2, rate_mbit=50) as bed:
        first, second = bed.hosts
        with server(bed, first):
            assert send(bed, second, first, 200_000) < 1
            bed.set_rate(second, 50, queue_frames=1)
            send(bed, second, first, 200_000)
            lost = json.loads(reap.run_tool(["tc", "-n", second.namespace, "-s", "-j", "qdisc", "show"]))
            assert sum(qdisc["drops"] for qdisc in lost) > 0


def test_a_host_has_shared_memory_of_its_own(hosts):
    leave = "import pathlib; pathlib.Path('/dev/shm/spark_dl-test').touch()"
    with hosts(1) as bed:
        bed.run(bed.hosts[0], [*PYTHON, leave], timeout_s=20)
        assert not Path("/dev/shm/spark_dl-test").exists()


def test_a_frozen_host_goes_on_when_it_is_thawed(hosts):
    count = "import time\nfor i in range(1000):\n    print(i, flush=True); time.sleep(0.01)"
    with hosts(1) as bed:
        process = bed.popen(bed.hosts[0], [*PYTHON, count], stdout=subprocess.PIPE)
        process.stdout.readline()
        bed.freeze(bed.hosts[0])
        wait_until(lambda: state_of(process.pid) == "T")
        bed.thaw(bed.hosts[0])
        wait_until(lambda: state_of(process.pid) in "RS")
        process.stdout.readline()


RING = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["RANK"] == sys.argv[1]:
    print("a word before", file=sys.stderr)
    os.kill(os.getpid(), 9)
total = torch.full((1 << 18,), float(os.environ["RANK"]))
dist.all_reduce(total)
dist.barrier()
dist.destroy_process_group()
print(total[0].item(), os.environ["RANK"])
"""


@pytest.mark.long
@pytest.mark.slow
def test_ranks_on_hosts_add_up_in_a_ring_at_the_rate_of_their_links(hosts):
    with hosts(4, rate_mbit=100) as bed:
        out = bed.run_ranks([sys.executable, "-c", RING, "none"], timeout_s=100)
        assert out == [f"6.0 {rank}\n" for rank in range(4)]
        for host in bed.hosts:  # 2 (P - 1) / P of the 1 MiB that each has, with headers and answers
            assert 1.5 < bed.counters()[host.name].tx_bytes / (1 << 20) < 1.6
        assert bed.run_ranks([sys.executable, "-c", RING, "none"], num_ranks=2, timeout_s=100) == ["1.0 0\n", "1.0 1\n"]


def test_a_killed_rank_is_one_error_that_names_its_host(hosts):
    with hosts(3) as bed:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?s)^on host1, .* \(rank 1\) was killed by SIGKILL: .*a word before"):
            bed.run_ranks([sys.executable, "-c", RING, "1"], timeout_s=100)
        assert time.monotonic() - start < 90
        assert [bed.processes(host) for host in bed.hosts] == [[], [], []]


def test_ranks_that_do_not_end_are_named_and_killed(hosts):
    late = "import os, time; time.sleep(60 * (os.environ['RANK'] == '1'))"
    with hosts(2) as bed:
        with pytest.raises(RuntimeError, match=r"did not end within 2 s on host1 \(rank 1\)"):
            bed.run_ranks([*PYTHON, late], timeout_s=2)
        assert bed.processes(bed.hosts[1]) == []


@pytest.mark.slow
def test_two_beds_at_once_do_not_meet(hosts):
    with hosts(2) as one, hosts(2) as other, server(one, one.hosts[0]):
        send(one, one.hosts[1], one.hosts[0], 10)
        with pytest.raises(RuntimeError, match="Connection refused"):
            send(other, other.hosts[1], other.hosts[0], 10, timeout_s=5)


def test_a_bed_is_removed_after_a_failure_with_all_that_runs_on_it(hosts):
    # A process that has left its parents and its session, and wants no signals.
    escape = "import os, signal, time; os.fork() and os._exit(0); os.setsid(); signal.signal(15, signal.SIG_IGN); "

    def fail():
        nonlocal pid
        with hosts(2) as bed:
            bed.run(bed.hosts[1], [*PYTHON, escape + "os.closerange(0, 3); time.sleep(600)"], timeout_s=20)
            (pid,) = bed.processes(bed.hosts[1])
            assert state_of(pid) in "DRS"  # alive
            raise ZeroDivisionError

    pid = 0
    with pytest.raises(ZeroDivisionError):
        fail()
    assert parts() == set()
    assert state_of(pid) == "Z"


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "message"), [
    ({"timeout_s": 0.1}, "the Spark master did not have 0 workers in time"),  # less than a JVM takes to start
    ({"memory_mib": 0}, "(?s)the Spark daemon on host0 ended with exit code 1: .*Memory is below 1MB"),
])  # fmt: skip
def test_spark_that_does_not_come_up_is_an_error_with_the_reason(hosts, settings, message):
    with hosts(1) as bed, pytest.raises(RuntimeError, match=message):
        start_spark(bed, **settings)


@pytest.mark.parametrize("num_hosts", [0, 17])
def test_there_are_1_to_16_hosts(hosts, num_hosts):
    with pytest.raises(ValueError, match=f"num_hosts: expected 1 to 16, found {num_hosts}"), hosts(num_hosts):
        pass


@pytest.mark.slow
def test_sixteen_hosts(hosts):
    with hosts(16, rate_mbit=1000) as bed, server(bed, bed.hosts[15]):
        send(bed, bed.hosts[0], bed.hosts[15], 1000)


MAKER = """
import subprocess, sys
from benchmarks.testbed import reap, testbed
with testbed.hosts(2, rate_mbit=100) as bed:
    processes = [bed.popen(host, ["sleep", "600"]) for host in bed.hosts]
    guard, = (p for p in open(f"/proc/self/task/{__import__('os').getpid()}/children").read().split()
              if int(p) not in [p.pid for p in processes])
    print(bed.driver.bed, guard, *(p.pid for p in processes), flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def maker():
    """A bed in a process of its own: that process, the bed's name, its guard, and the processes on its hosts."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    try:
        bed, *pids = process.stdout.readline().split()
        guard, *inside = map(int, pids)
        wait_until(lambda: set(inside) == set(reap.processes(path.name for path in reap.NAMESPACES.glob(f"{bed}.*"))))
        yield process, bed, guard, inside
    finally:
        process.communicate("")
    wait_until(lambda: not parts(bed))


@pytest.mark.slow
def test_a_maker_that_is_killed_leaves_nothing(hosts):
    with maker() as (process, bed, guard, inside):
        assert len(parts(bed)) == 8  # three hosts and a switch, the files of the hosts, the folder
        process.kill()
        process.wait()
        wait_until(lambda: not parts(bed) and {state_of(pid) for pid in (guard, *inside)} == {"Z"})


@pytest.mark.slow
def test_a_maker_whose_guard_is_killed_removes_its_bed_itself(hosts):
    with maker() as (process, bed, guard, _):
        os.kill(guard, signal.SIGKILL)
        process.communicate("")
        assert process.returncode == 0
        assert parts(bed) == set()


@pytest.mark.slow
def test_what_a_maker_and_its_guard_leave_that_are_both_killed_is_reaped_and_nothing_else(hosts):
    with maker() as (dead, left, guard, inside), maker() as (_, kept, _, at_work):
        os.kill(guard, signal.SIGKILL)
        dead.kill()
        dead.wait()
        assert len(parts(left)) == 8
        assert left in reap.leftovers()
        command = [sys.executable, "-m", "benchmarks.testbed", "--reap"]
        out = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True, timeout=60).stdout
        assert f"removed {left}\n" in out
        assert parts(left) == set()
        assert {state_of(pid) for pid in inside} == {"Z"}
        assert len(parts(kept)) == 8
        assert {state_of(pid) for pid in at_work} == {"S"}
        assert left not in reap.leftovers()


UNAVAILABLE = "import os, sys; from benchmarks.testbed import testbed; {}; print(testbed.unavailable())"


def reason(*command):
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_without_root_the_reason_is_given():
    code = UNAVAILABLE.format("os.geteuid() or os.setuid(65534)")
    assert reason(sys.executable, "-c", code) == "a testbed needs Linux and root\n"


@pytest.mark.slow
def test_without_the_right_to_make_networks_the_reason_is_given_and_nothing_left(hosts):
    code = UNAVAILABLE.format("print(os.getpid(), flush=True)")
    confined = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"]
    pid, found = reason(*confined, sys.executable, "-c", code).split("\n", 1)
    assert found.startswith("cannot create network namespaces with a token bucket: ip -batch - failed: ")
    assert "Operation not permitted" in found
    assert parts(f"spark_dl-{pid}-") == set()
