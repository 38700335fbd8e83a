"""Events from ranks to the driver: in order, only from those who know the secret, and never the end of the listener."""

import concurrent.futures
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from multiprocessing.connection import Connection

import pytest

from spark_dl import Launch
from spark_dl.channel import Address, connect
from spark_dl.launch import barrier, watch
from spark_dl.launch.failures import rank_state
from spark_dl.launch.rank import sender as sender_module
from spark_dl.launch.rank.sender import Reporter, Sender
from spark_dl.launch.watch import Listener

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

WAIT_S = 5.0
TOO_LARGE = (1 << 20) + 1


@pytest.fixture
def listener():
    before = set(threading.enumerate())
    listener = Listener("127.0.0.1")
    yield listener
    listener.close()
    wait_until(lambda: set(threading.enumerate()) <= before)


def wait_until(true):
    end = time.monotonic() + WAIT_S
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    assert true()


def take(listener, count):
    return [listener.events.get(timeout=WAIT_S) for _ in range(count)]


def assert_alive(listener):
    """A rank that comes now is heard, and nothing came before it."""
    sender = Sender(listener.address, 99)
    sender.send({"kind": "done"})
    sender.close()
    (event,) = take(listener, 1)
    assert (event["kind"], event["task"]) == ("done", 99)


def run_as_rank(listener, code):
    """Runs a program that connects to the listener, in a process. Returns its exit code."""
    address = listener.address
    command = [sys.executable, "-c", code, address.host, str(address.port), address.secret.hex()]
    return subprocess.run(command, timeout=60).returncode


def test_events_arrive_in_order_with_their_task(listener):
    senders = [Sender(listener.address, task) for task in range(3)]
    for number in range(100):
        for sender in senders:
            sender.send({"kind": "step", "number": number})
    for sender in senders:
        sender.send({"kind": "done"})
        sender.close()
    events = take(listener, 3 * 101)
    for task in range(3):
        own = [e for e in events if e["task"] == task]
        assert [e.get("number") for e in own] == [*range(100), None]
        assert own[-1]["kind"] == "done"
        assert all(abs(e["time"] - time.time()) < 60 for e in own)


@pytest.mark.parametrize("last", ["done", "failed"])
def test_a_rank_that_says_how_it_ended_is_not_lost(listener, last):
    sender = Sender(listener.address, 1)
    sender.send({"kind": "started"})
    sender.send({"kind": last})
    sender.close()
    assert [e["kind"] for e in take(listener, 2)] == ["started", last]
    with pytest.raises(queue.Empty):
        listener.events.get(timeout=0.2)


def test_a_rank_whose_connection_ends_without_a_word_is_lost(listener):
    with connect(listener.address) as connection:
        connection.send_bytes(json.dumps({"kind": "started", "task": 5}).encode())
        assert take(listener, 1)[0]["kind"] == "started"
    (event,) = take(listener, 1)
    assert (event["kind"], event["task"]) == ("lost", 5)


@pytest.mark.slow
def test_what_a_rank_has_flushed_is_known_though_it_is_killed_at_once(listener):
    code = (
        "import os, signal, sys\n"
        "from spark_dl.launch.rank.sender import Sender\n"
        "from spark_dl.channel import Address\n"
        "sender = Sender(Address(sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])), 5)\n"
        "sender.send({'kind': 'joined', 'rank': 3})\n"
        "sender.flush(30.0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run_as_rank(listener, code) == -signal.SIGKILL
    joined, lost = take(listener, 2)
    assert (joined["kind"], joined["rank"], lost["kind"]) == ("joined", 3, "lost")


def test_a_rank_with_nothing_to_say_is_not_silent_until_it_is_done(listener, monkeypatch):
    monkeypatch.setattr(sender_module, "_HEARTBEAT_S", 0.05)
    sender = Sender(listener.address, 2)
    sender.send({"kind": "started"})
    take(listener, 1)
    for _ in range(10):
        time.sleep(0.1)
        assert listener.silence()[2] < 0.5
    assert listener.events.empty()  # heartbeats are not events
    sender.send({"kind": "done"})
    sender.close()
    take(listener, 1)
    assert listener.silence() == {}


def test_a_rank_that_stands_still_is_silent_and_not_lost(listener):
    with connect(listener.address) as connection:
        connection.send_bytes(json.dumps({"kind": "started", "task": 5}).encode())
        take(listener, 1)
        time.sleep(0.5)
        assert 0.5 <= listener.silence()[5] < 2
        assert listener.events.empty()
    assert take(listener, 1)[0]["kind"] == "lost"
    assert listener.silence() == {}


def test_a_rank_that_talks_nonsense_is_lost(listener):
    with connect(listener.address) as connection:
        for frame in (b'{"kind": "started", "task": 5}', b"{"):
            connection.send_bytes(frame)
        assert [e["kind"] for e in take(listener, 2)] == ["started", "lost"]


@pytest.mark.parametrize("answer", [b'{"kind": "failed", "task": 0}', b"wrong answer", b"#WELCOME#"])
def test_S17_without_the_answer_to_the_challenge_nothing_gets_in(listener, answer):
    with socket.create_connection((listener.address.host, listener.address.port)) as sock:
        stranger = Connection(sock.detach())
    with contextlib.suppress(OSError):
        for frame in (answer, *[b'{"kind": "failed", "task": 0}'] * 3):
            stranger.send_bytes(frame)
    assert_alive(listener)
    assert listener.events.empty()
    stranger.close()


@pytest.mark.parametrize("secret", [b"", b"x" * 32])
def test_S17_a_wrong_secret_gets_nothing_in(listener, secret):
    sender = Sender(Address(listener.address.host, listener.address.port, secret), 1)
    sender.send({"kind": "failed"})
    sender.close()
    assert_alive(listener)
    assert listener.events.empty()


def test_every_listener_has_a_secret_of_its_own(listener):
    other = Listener("127.0.0.1")
    other.close()
    assert len(listener.address.secret) >= 32
    assert listener.address.secret != other.address.secret


@pytest.mark.parametrize(
    "content", [b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"", b"\0\0\0\x04ABCD", b"\x7f\xff\xff\xff"]
)
def test_S17_garbage_from_a_stranger_does_no_harm(listener, content):
    with socket.create_connection((listener.address.host, listener.address.port)) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(content)
            stranger.shutdown(socket.SHUT_WR)
        assert_alive(listener)
    assert listener.events.empty()


def test_a_stranger_that_says_nothing_keeps_no_one_waiting(listener):
    with socket.create_connection((listener.address.host, listener.address.port)):
        start = time.monotonic()
        assert_alive(listener)
        assert time.monotonic() - start < 3


@pytest.mark.parametrize("frame", [
    b"", b"{", b"\xff\xfe", b"[]", b"3", b'"text"', b"{}", b'{"kind": "started"}', b'{"kind": "", "task": []}',
    b"\x80\x04K\x01.", b"x" * TOO_LARGE,
], ids=lambda frame: repr(frame[:20]))  # fmt: skip
def test_a_frame_that_is_no_event_does_no_harm(listener, frame):
    with connect(listener.address) as connection, contextlib.suppress(OSError):
        connection.send_bytes(frame)
    assert_alive(listener)
    assert listener.events.empty()


def test_S17_a_frame_is_refused_by_its_length_before_it_is_read(listener):
    with connect(listener.address) as connection:
        connection._send(b"\x7f\xff\xff\xff")  # announces 2 GiB
        with pytest.raises((EOFError, OSError)):
            connection.recv_bytes()
    assert_alive(listener)


def test_close_ends_all_threads_and_connections():
    before = set(threading.enumerate())
    listener = Listener("127.0.0.1")
    senders = [Sender(listener.address, task) for task in range(4)]
    for sender in senders:
        sender.send({"kind": "started"})
    take(listener, 4)
    with socket.create_connection((listener.address.host, listener.address.port)):
        start = time.monotonic()
        listener.close()
        listener.close()
        wait_until(lambda: not [t for t in threading.enumerate() if t.name == "spark_dl events"])
        assert time.monotonic() - start < 3
        for sender in senders:
            sender.close()
        wait_until(lambda: set(threading.enumerate()) <= before)
    with pytest.raises(OSError, match=r"."):
        socket.create_connection((listener.address.host, listener.address.port), timeout=1)


def test_a_sender_without_a_driver_does_nothing():
    sender = Sender(None, 0)
    sender.send({"kind": "started"})
    sender.flush()
    sender.close()


def test_a_sender_never_waits_for_a_driver_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    sender = Sender(Address("127.0.0.1", port, b"secret"), 0)
    start = time.monotonic()
    for number in range(5000):
        sender.send({"kind": "step", "number": number})
    sender.flush(timeout_s=0.1)
    sender.close(timeout_s=0.1)
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("event", [{"kind": "x", "big": "a" * (1 << 21)}, {"kind": "x", "odd": {1, 2}}])
def test_an_event_that_cannot_be_sent_does_not_lose_the_rank(event):
    listener = Listener("127.0.0.1")
    try:
        sender = Sender(listener.address, 3)
        sender.send(event)
        sender.send({"kind": "done"})
        sender.close()
        assert listener.events.get(timeout=5)["kind"] == "done"
        time.sleep(0.2)
        assert listener.events.empty()
    finally:
        listener.close()


@pytest.mark.parametrize("last", ["done", "failed"])
def test_the_last_event_of_a_rank_waits_where_others_are_dropped(listener, last):
    """The sender is held up, as by a rank that writes a great deal and holds the GIL."""
    sender, held = Sender(listener.address, 3), threading.Event()
    assert sender.reaches_driver()
    held.wait = lambda: time.sleep(1.0)
    held.set = held.wait
    assert sender._put(held, 0.0)
    time.sleep(0.2)
    taken = 0
    while sender.send({"kind": "output", "number": taken}):
        taken += 1
    assert taken == 1000
    sender.send({"kind": last})
    sender.close()
    events = take(listener, taken + 1)
    assert [event["kind"] for event in events] == ["output"] * taken + [last]


def test_a_question_that_finds_no_place_in_the_queue_in_time_is_an_error(listener):
    sender, held = Sender(listener.address, 3), threading.Event()
    assert sender.reaches_driver()
    over = threading.Event()
    held.set = lambda: over.wait(WAIT_S)
    assert sender._put(held, 0.0)
    wait_until(lambda: sender._queue.empty())
    while sender.send({"kind": "output"}):
        pass
    with pytest.raises(RuntimeError, match="^nobody answers$"):
        sender.ask({"kind": "ask"}, 0.2, "nobody answers")
    over.set()
    sender.close()


def meet(senders, timeout_s=WAIT_S):
    """What each of these ranks gets when it sends its own name."""
    with concurrent.futures.ThreadPoolExecutor(len(senders)) as pool:
        return list(pool.map(lambda s: s.exchange(f"rank of task {s._task}", timeout_s), senders))


@pytest.fixture
def meeting():
    """A listener where three ranks meet, and a function that makes the senders of some tasks."""
    before = set(threading.enumerate())
    listener, senders = Listener("127.0.0.1", num_ranks=3), []

    def connect(*tasks, address=None):
        senders.extend(Sender(address or listener.address, task) for task in tasks)
        return senders[-len(tasks) :]

    yield listener, connect
    for sender in senders:
        sender.close()
    listener.close()
    wait_until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_ranks_get_the_messages_of_all_by_task(meeting, order):
    _, connect = meeting
    assert meet(connect(*order)) == [["rank of task 0", "rank of task 1", "rank of task 2"]] * 3


def test_ranks_that_cannot_all_reach_the_driver_meet_elsewhere_and_so_do_those_that_come_later(meeting, monkeypatch):
    listener, connect = meeting
    monkeypatch.setattr(watch, "MEETING_S", 0.2)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = Address("127.0.0.1", closed.getsockname()[1], listener.address.secret)
        assert meet([*connect(0, 1), *connect(2, address=nobody)]) == [None] * 3
    assert meet(connect(2)) == [None]


def test_ranks_that_can_meet_nowhere_else_wait_longer(monkeypatch):
    """A host is left out, so that the ranks that are not needed have to hear of it here."""
    monkeypatch.setattr(watch, "MEETING_S", 0.1)
    listener = Listener("127.0.0.1", num_ranks=2, meeting_s=WAIT_S)
    first, late = Sender(listener.address, 0), Sender(listener.address, 1)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(first.exchange, "rank of task 0", WAIT_S)
        time.sleep(0.5)
        assert not waiting.done()
        assert pool.submit(late.exchange, "rank of task 1", WAIT_S).result(WAIT_S) == waiting.result(WAIT_S)
    first.close()
    late.close()
    listener.close()
    assert waiting.result() == ["rank of task 0", "rank of task 1"]


def test_without_an_address_ranks_meet_elsewhere():
    assert Sender(None, 0).exchange("here", WAIT_S) is None


def test_a_driver_that_ends_while_ranks_meet_is_an_error_on_them(meeting):
    listener, connect = meeting
    senders = connect(0, 1)
    timer = threading.Timer(0.3, listener.close)
    timer.start()
    with pytest.raises(RuntimeError, match="the driver has closed its connection while a rank waited for its answer"):
        meet(senders)
    timer.join()


def test_a_driver_that_does_not_answer_is_an_error_in_bounded_time(meeting, monkeypatch):
    monkeypatch.setattr(sender_module, "MEETING_S", 0.1)
    _, connect = meeting
    with pytest.raises(RuntimeError, match=r"the driver did not answer within 0.3 s"):
        meet(connect(0), timeout_s=0.2)


def test_a_rank_asks_and_gets_its_own_answer_in_any_order(listener):
    senders = {task: Sender(listener.address, task) for task in range(3)}
    reporters = {task: Reporter(sender, {"host": "here", "pid": task}) for task, sender in senders.items()}
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        answers = {task: pool.submit(r.ask, {"what": "next"}, WAIT_S, "late") for task, r in reporters.items()}
        events = {event["task"]: event for event in take(listener, 3)}
        assert {(e["kind"], e["what"], e["host"]) for e in events.values()} == {("ask", "next", "here")}
        for task in (2, 0, 1):
            listener.answer(task, {"for": events[task]["pid"]})
        assert {task: answer.result(WAIT_S) for task, answer in answers.items()} == {n: {"for": n} for n in range(3)}
    for sender in senders.values():
        sender.send({"kind": "done"})
        sender.close()


def test_a_question_without_an_answer_ends_in_bounded_time_and_one_without_a_driver_at_once(listener):
    sender = Sender(listener.address, 0)
    reporter = Reporter(sender, {"host": "here", "pid": 1})
    with pytest.raises(RuntimeError, match="no answer in time"):
        reporter.ask({"what": "next"}, 0.1, "no answer in time")
    with pytest.raises(ValueError, match="expected a question of at most 1 MiB of JSON"):
        reporter.ask({"what": "a" * TOO_LARGE}, WAIT_S, "late")
    sender.close()
    listener.answer(0, "a rank that has gone gets none")
    with pytest.raises(RuntimeError, match="host here cannot reach the driver, which the ranks ask; open the ports"):
        Reporter(Sender(None, 0), {"host": "here", "pid": 1}).ask({"what": "next"}, WAIT_S, "late")


def test_a_rank_without_progress_sends_its_stacks_once(listener, monkeypatch):
    monkeypatch.setattr(sender_module, "_HEARTBEAT_S", 0.05)
    rank_state.reset()
    sender = Sender(listener.address, 1, stall_s=0.3)
    for step in (4, 5):
        rank_state.enter(rank_state.TRAINING, step)
        if step > 4:  # those of the step before do not hold any more
            event = listener.events.get(timeout=WAIT_S)
            assert (event["kind"], event["stack"]) == ("stack", "")
        event = listener.events.get(timeout=WAIT_S)
        assert event["kind"] == "stack"
        assert "Thread MainThread:" in event["stack"].splitlines()[0]
        assert "test_a_rank_without_progress_sends_its_stacks_once" in event["stack"]
        assert "spark_dl sender" not in event["stack"]
        assert listener.places[1] == {"phase": "training", "step": step}
        with pytest.raises(queue.Empty):
            listener.events.get(timeout=0.6)
    sender.close()


def test_a_rank_that_has_not_joined_sends_its_stacks_earlier(listener, monkeypatch):
    monkeypatch.setattr(sender_module, "_HEARTBEAT_S", 0.05)
    rank_state.reset()
    sender = Sender(listener.address, 1, stall_s=60, start_s=0.2)
    assert "Thread MainThread:" in listener.events.get(timeout=WAIT_S)["stack"]
    sender.joined()
    assert listener.events.get(timeout=WAIT_S)["stack"] == ""
    with pytest.raises(queue.Empty):
        listener.events.get(timeout=0.6)
    sender.close()


def test_the_final_event_of_a_rank_comes_after_its_stacks(listener):
    rank_state.reset()
    sender = Sender(listener.address, 1, stall_s=0.2)
    sender.send({"kind": "started"})
    sender.flush()
    time.sleep(0.4)  # less than a heartbeat
    sender.send({"kind": "failed"})
    sender.close()
    assert [event["kind"] for event in take(listener, 3)] == ["started", "stack", "failed"]
    with pytest.raises(queue.Empty):  # such as "lost"
        listener.events.get(timeout=0.3)


ROW = "a row of a customer: {}"


def hold(row, entered, end):
    kept = {"row": row}
    entered.set()
    end.wait(60)
    return kept


def test_S19_the_stacks_of_a_rank_name_its_functions_and_have_no_rows():
    entered, end = threading.Event(), threading.Event()
    row = ROW.format(12345)
    thread = threading.Thread(target=hold, args=(row, entered, end), daemon=True)
    thread.start()
    assert entered.wait(10)
    found = sender_module.stacks()
    end.set()
    thread.join(10)
    assert "in hold" in found
    assert "entered.set()" in found or "end.wait(60)" in found
    assert row not in found
    assert "12345" not in found


@pytest.mark.slow
def test_S19_the_stacks_of_a_crash_have_no_rows(listener):
    code = (
        "import os, signal, sys, threading\n"
        "from spark_dl.launch.rank.sender import crashes_reported\n"
        "from spark_dl.channel import Address\n"
        "def hold(row):\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "with crashes_reported(Address(sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])), 5):\n"
        "    hold('a row of customer ' + str(12300 + 45))\n"
    )
    assert run_as_rank(listener, code) == -signal.SIGSEGV
    (event,) = take(listener, 1)
    assert "in hold" in event["text"]
    assert "12345" not in event["text"]


def test_a_rank_with_progress_sends_none(listener, monkeypatch):
    monkeypatch.setattr(sender_module, "_HEARTBEAT_S", 0.05)
    sender = Sender(listener.address, 1, stall_s=0.5)
    for step in range(20):
        rank_state.enter(rank_state.TRAINING, step)
        time.sleep(0.05)
    assert listener.events.empty()
    sender.close()
    rank_state.reset()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("crash", "words"), [
    ("os.kill(os.getpid(), signal.SIGSEGV)", "Fatal Python error: Segmentation fault"),
    pytest.param("os.abort()", "Fatal Python error: Aborted", marks=pytest.mark.slow),
    pytest.param("os.kill(os.getpid(), signal.SIGTERM)", "most recent call first", marks=pytest.mark.slow),
    pytest.param("os.kill(os.getpid(), signal.SIGKILL)", None, marks=pytest.mark.slow),
    pytest.param("None", None, marks=pytest.mark.slow),
])  # fmt: skip
def test_F30_the_stacks_of_a_crash_reach_the_driver(listener, crash, words):
    code = (
        "import os, signal, sys\n"
        "from spark_dl.launch.rank.sender import crashes_reported\n"
        "from spark_dl.channel import Address\n"
        "def in_native_code():\n"
        f"    {crash}\n"
        "with crashes_reported(Address(sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])), 5):\n"
        "    in_native_code()\n"
    )
    address = listener.address
    command = [sys.executable, "-c", code, address.host, str(address.port), address.secret.hex()]
    done = subprocess.run(command, timeout=60, capture_output=True)
    if words is None:
        with pytest.raises(queue.Empty):
            listener.events.get(timeout=0.3)
        return
    assert done.returncode < 0
    event = listener.events.get(timeout=WAIT_S)
    assert (event["kind"], event["task"]) == ("crash", 5)
    assert words in event["text"]
    assert "in in_native_code" in event["text"]


FORKS = """
import os, signal, sys, time
from spark_dl.launch.rank.sender import Sender, crashes_reported
from spark_dl.channel import Address

address = Address(sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3]))
sender = Sender(address, 5)
sender.send({"kind": "started"})
sender.flush(30.0)
with crashes_reported(address, 5):
    for end in ("crash", "leave", "stay"):
        if not (child := os.fork()):
            if end == "stay":
                time.sleep(600)
            if end == "leave":
                sys.exit(7)
            os.kill(os.getpid(), signal.SIGSEGV)
        if end != "stay":
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_end_of_a_rank_is_noticed_though_its_forks_live_on_and_theirs_is_not_taken_for_it(listener):
    address = listener.address
    command = [sys.executable, "-c", FORKS, address.host, str(address.port), address.secret.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as rank:
        crashed, left, child = (int(rank.stdout.readline()) for _ in range(3))
        start = time.monotonic()
        try:
            started, lost = take(listener, 2)
            assert time.monotonic() - start < 3
        finally:
            os.kill(child, signal.SIGKILL)
        assert "Fatal Python error: Segmentation fault" in rank.stderr.read()
    assert (crashed, left) == (-signal.SIGSEGV, 7)
    assert (started["kind"], lost["kind"]) == ("started", "lost")


def test_F10_a_rank_that_ends_as_planned_says_so_in_place_of_its_stacks(listener):
    code = (
        "import sys\n"
        "from spark_dl.launch.rank import sigterm\n"
        "from spark_dl.launch.rank.sender import crashes_reported\n"
        "from spark_dl.channel import Address\n"
        "with crashes_reported(Address(sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])), 5):\n"
        "    sigterm.end(print)\n"
    )
    assert run_as_rank(listener, code) == -signal.SIGTERM
    (event,) = take(listener, 1)
    assert (event["kind"], event["task"], event["text"]) == ("crash", 5, rank_state.PLANNED)


def test_F05_a_sender_tells_that_the_driver_is_lost_and_not_that_it_was_closed(listener):
    told = queue.Queue()
    closed, lost = (Sender(listener.address, task, on_lost=told.put) for task in (0, 1))
    for sender in (closed, lost):
        sender.send({"kind": "started"})
        assert sender.reaches_driver()
    take(listener, 2)
    closed.send({"kind": "done"})
    closed.close()
    listener.close()
    assert told.get(timeout=WAIT_S)  # at its next heartbeat
    assert told.empty()
    Sender(None, 2, on_lost=told.put).close()
    assert told.empty()


RANK_THAT_LOSES = """
import sys, time
from spark_dl.launch.rank.sender import Sender
from spark_dl.launch.rank.task import _end_process
from spark_dl.channel import Address
address = Address(sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3]))
sender = Sender(address, 5, on_lost=_end_process)
sender.send({"kind": "started"})
time.sleep(60)
"""


@pytest.mark.slow
def test_F05_a_rank_whose_driver_is_gone_ends_itself_with_the_reason(listener):
    address = listener.address
    command = [sys.executable, "-c", RANK_THAT_LOSES, address.host, str(address.port), address.secret.hex()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as rank:
        try:
            assert listener.events.get(timeout=60)["kind"] == "started"
            listener.close()
            _, err = rank.communicate(timeout=30)
        finally:
            rank.kill()
    assert rank.returncode == -signal.SIGKILL
    assert "this rank ends, as it has lost the driver: " in err


FULL = """
import logging, os, resource, sys, threading
from spark_dl.launch.watch import Listener

logging.basicConfig(format="LOG %(message)s")
listener = Listener("127.0.0.1")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
files = []
try:
    while True:
        files.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    print(listener.address.port, listener.address.secret.hex(), flush=True)
sys.stdin.readline()
assert listener.events.empty()
for file in files:
    os.close(file)
print(listener.events.get(timeout=10)["kind"], flush=True)
listener.close()
print(sum(thread.name == "spark_dl events listener" for thread in threading.enumerate()))
"""


def test_a_rank_is_let_in_when_the_driver_has_files_again():
    command, pipe = [sys.executable, "-c", FULL], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as driver:
        port, secret = driver.stdout.readline().split()
        with socket.create_connection(("127.0.0.1", int(port))):  # for the file that `accept` has reserved already
            time.sleep(0.2)
            sender = Sender(Address("127.0.0.1", int(port), bytes.fromhex(secret)), 7)
            sender.send({"kind": "done"})
            time.sleep(0.5)
            assert not sender.is_connected
            found, log = driver.communicate("go on\n", timeout=60)
        sender.close()
    assert (driver.returncode, found.split()) == (0, ["done", "0"]), log
    (warning,) = [line for line in log.splitlines() if line.startswith("LOG ")]
    assert "cannot take a connection: [Errno 24] Too many open files; trying again" in warning


def test_a_rank_that_is_silent_ends_a_job_whose_other_ranks_do_not_notice(listener, monkeypatch):
    """Such as one whose process stands still outside of a collective, so that nobody waits for it."""
    monkeypatch.setattr(barrier, "SILENCE_S", 0.3)
    monkeypatch.setattr(sender_module, "_HEARTBEAT_S", 0.05)
    sender = Sender(listener.address, 0)
    sender.send({"kind": "joined", "rank": 0, "host": "host-0", "device": "cpu"})
    job = types.SimpleNamespace(error=None, computes_first=True)
    launch = Launch(num_ranks=2, collective_timeout_s=0.5)
    waiting = barrier._Watch(job, launch, None, None, listener, None, WAIT_S)
    with connect(listener.address) as silent:
        event = {"kind": "joined", "task": 1, "rank": 1, "host": "host-1", "device": "cpu"}
        silent.send_bytes(json.dumps(event).encode())
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 on host-1 .* sent no heartbeat for 1 s"):
            waiting.run(listener.events)
    assert time.monotonic() - start < WAIT_S
    sender.close()
