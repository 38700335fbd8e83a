"""Events reach a tracker in their order, although it is slow or fails, and training never waits for it."""

import logging
import threading
import time

import pytest

from spark_dl.track import events
from spark_dl.track.events import Background


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(events, "INTERVAL_S", 0.01)
    monkeypatch.setattr(events, "_LONGEST_PAUSE_S", 0.02)


class Written:
    """A tracker whose first calls fail, and whose calls wait while `gate` is closed."""

    def __init__(self, failures=0):
        self.failures, self.calls, self.events, self.ends = failures, 0, [], []
        self.gate = threading.Event()
        self.gate.set()

    def write(self, events):
        self.calls += 1
        assert self.gate.wait(20)
        if self.failures:
            self.failures -= 1
            raise OSError("server away")
        self.events += events

    def end(self, status):
        self.ends.append((status, len(self.events)))


def opened(written):
    return Background("Tracker", written.write, written.end)


def numbered(count):
    return [{"kind": "step", "step": i} for i in range(count)]


def test_events_are_written_in_their_order_and_then_the_end():
    written = Written()
    thread = opened(written)
    for event in numbered(1_200):
        thread.put(event)
    thread.close("FINISHED")
    assert written.events == numbered(1_200)
    assert written.ends == [("FINISHED", 1_200)]


def test_B34_what_fails_is_written_later_after_one_warning(caplog):
    written = Written(failures=4)
    thread = opened(written)
    with caplog.at_level(logging.INFO, "spark_dl"):
        for event in numbered(3):
            thread.put(event)
        wait_until(lambda: written.events)
        thread.close("FINISHED")
    assert written.events == numbered(3)
    assert [record.getMessage() for record in caplog.records] == [
        "Tracker: server away; training continues, and the metrics are sent later", "Tracker: works again",
    ]  # fmt: skip


def test_what_cannot_be_written_at_the_end_is_counted_and_the_end_is_left_out(caplog):
    written = Written(failures=10_000)
    thread = opened(written)
    for event in numbered(3):
        thread.put(event)
    thread.close("FINISHED")
    assert written.ends == []
    assert caplog.messages[-1] == "Tracker: 3 event(s) of the run were not written; metrics.jsonl has them"


def test_B34_neither_an_event_nor_the_end_waits_for_a_tracker_that_hangs(caplog):
    written = Written()
    written.gate.clear()
    thread = opened(written)
    start = time.monotonic()
    thread.put(numbered(1)[0])
    wait_until(lambda: written.calls)
    for event in numbered(10_000):
        thread.put(event)
    assert not thread.drain(0.1)
    thread.close("FINISHED", timeout_s=0.2)
    assert time.monotonic() - start < 5
    assert caplog.messages == [
        "Tracker: no answer within 0.2 s at the end of the run",
        "Tracker: 10001 event(s) of the run were not written; metrics.jsonl has them",
    ]  # fmt: skip
    written.gate.set()


def test_the_oldest_events_are_dropped_when_there_are_too_many(monkeypatch, caplog):
    monkeypatch.setattr(events, "_MAX_EVENTS", 5)
    written = Written(failures=2)
    written.gate.clear()
    thread = opened(written)
    thread.put({"kind": "step", "step": -1})
    wait_until(lambda: written.calls)
    for event in numbered(8):
        thread.put(event)
    written.gate.set()
    wait_until(lambda: written.events)
    thread.close("FINISHED")
    assert written.events == numbered(8)[3:]
    assert caplog.messages[-1] == "Tracker: 4 event(s) of the run were not written; metrics.jsonl has them"


def test_drain_waits_until_all_is_written_and_gives_up_at_a_failure():
    written = Written()
    thread = opened(written)
    for event in numbered(600):
        thread.put(event)
    assert thread.drain()
    assert len(written.events) == 600
    written.failures = 10_000
    thread.put(numbered(1)[0])
    assert not thread.drain()
    written.failures = 0
    thread.close("FAILED")
    assert written.ends == [("FAILED", 601)]


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
