"""What a rank sends to the driver: events, heartbeats and questions, in a thread of its own.

A rank that makes no progress for long also sends the stacks of its threads, so that the driver can say what each rank
did when one of them hung. A rank that has lost its connection to the driver ends: the driver takes it for killed, and
starts others in its place.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import AuthenticationError, connection
from typing import Any

from spark_dl.channel import CRASH, MAX_FRAME, MEETING_S, Address, connect
from spark_dl.launch.failures import rank_state
from spark_dl.launch.failures.rank_state import last_collective, progress
from spark_dl.launch.rank import sigterm
from spark_dl.launch.rank.tasks import RankTasks

_MAX_ANSWER = 1 << 28
"""Bytes of the messages of all ranks."""
_HEARTBEAT_S = 1.0
_REACH_S = 3.0
"""How long a rank tries to reach the driver before it uses Spark's `allGather`."""
_DECISIVE = ("called", "joined", "returned", "failed", "done")
"""Events that must not be lost: how far a rank has come, and how it ended."""
_LAST_S = 10.0
"""How long they wait until the driver has got enough of the events before them."""
_STACK_CHARACTERS = 8000


_own: list[connection.Connection] = []
"""Connections of this process whose end tells the driver that this process has ended."""


@contextlib.contextmanager
def _not_in_forks(conn: connection.Connection) -> Iterator[None]:
    """Closes a connection after the block, and in processes that are forked in it.

    They would hold it open for as long as they run, so that the driver would not see the end of this process.
    """
    _own.append(conn)
    try:
        with conn:
            yield
    finally:
        if conn in _own:  # and not in a fork that leaves the block
            _own.remove(conn)


def _after_fork_in_child() -> None:
    if _own and faulthandler.is_enabled():
        faulthandler.enable(2)  # the stacks of the child go to its output, and are not those of the rank
    for conn in _own:
        conn.close()
    _own.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Sender:
    """Sends a rank's events to the driver in its own thread. Training never waits for the driver."""

    def __init__(
        self,
        address: Address | None,
        task: int,
        *,
        stall_s: float = math.inf,
        start_s: float = math.inf,
        lost_s: float = math.inf,
        on_lost: Callable[[str], None] = lambda why: None,
    ):
        """stall_s: without progress for so long, the stacks of this process are sent, once. start_s: before it joins.

        Args:
            lost_s: the connection is lost if the driver's host does not confirm what is sent for so long.
            on_lost: called in the sender's thread, with the error, when the connection is lost before `close`.
        """
        self._task, self._lost_s, self._on_lost = task, lost_s, on_lost
        self._stall_s, self._stall_when_joined_s = min(start_s, stall_s), stall_s
        self._beat_at = time.monotonic()
        """When the last heartbeat was sent."""
        self._stalled_since = 0.0
        """Beginning of the last phase whose stacks were sent."""
        self.is_connected = False
        """Whether this rank has ever been connected to the driver. Stays true if the connection is lost."""
        self._queue: queue.Queue[bytes | threading.Event | None] = queue.Queue(maxsize=1000)
        self._conn: connection.Connection | None = None
        self._tried = threading.Event()
        """Set when this rank is connected, or cannot reach the driver."""
        self._thread: threading.Thread | None = None
        if address is not None:
            self._thread = threading.Thread(target=self._work, args=(address,), name="spark_dl sender", daemon=True)
            self._thread.start()

    def send(self, event: Mapping[str, Any]) -> bool:
        """Queues an event. Drops it if it has more than 1 MiB or is not JSON-serializable, or if the queue is full.

        An event by which the driver decides waits some seconds for a place in the queue.
        Returns whether the event was queued.
        """
        return self._put(self._frame(event), _LAST_S if event.get("kind") in _DECISIVE else 0.0)

    def _put(self, item: bytes | threading.Event | None, wait_s: float) -> bool:
        """Queues an item, and waits for a place in the queue. Returns whether it was queued."""
        is_sending = self._thread is not None and self._thread.is_alive()
        with contextlib.suppress(queue.Full):
            if item is not None:
                self._queue.put(item, block=is_sending and wait_s > 0, timeout=wait_s)
                return True
        return False

    def _frame(self, event: Mapping[str, Any]) -> bytes | None:
        with contextlib.suppress(TypeError, ValueError):
            frame = json.dumps(
                {**event, "at": rank_state.place_now(), "task": self._task, "time": time.time()}
            ).encode()
            return frame if len(frame) <= MAX_FRAME else None
        return None

    def joined(self) -> None:
        """Notes that this rank has joined the others: `start_s` is over."""
        self._stall_s = self._stall_when_joined_s
        rank_state.enter(rank_state.STARTING)

    def flush(self, timeout_s: float = 2.0) -> None:
        """Waits until all queued events are sent, so that they reach the driver even if this process is killed.

        Waits at most `timeout_s`, for example if the driver cannot be reached.
        """
        if self._thread is not None:
            is_sent, end = threading.Event(), time.monotonic() + timeout_s
            if self._put(is_sent, timeout_s):
                is_sent.wait(max(0.0, end - time.monotonic()))

    def exchange(self, message: str, timeout_s: float) -> list[str] | None:
        """Sends a message to the driver, and returns those of all ranks, by task. Collective.

        Returns None if the driver cannot be reached by all ranks. Raises RuntimeError if it does not answer in time.
        """
        if not self.reaches_driver():
            return None
        timeout_s += MEETING_S  # the driver ends the job before, and names who has not come
        limit = f"the driver did not answer within {timeout_s:g} s"
        answer: list[str] | None = self.ask({"kind": "meet", "message": message}, timeout_s, limit)
        return answer

    def reaches_driver(self) -> bool:
        """Whether this rank is connected to the driver. Waits some seconds for the connection."""
        return self._thread is not None and self._tried.wait(_REACH_S) and self._conn is not None

    def ask(self, event: Mapping[str, Any], timeout_s: float, limit: str) -> Any:
        """Sends an event, and returns the driver's answer. Only one thread of a rank asks, and only if it is connected.

        Args:
            limit: the message of the RuntimeError if the driver does not answer in time. Also raises RuntimeError if
                the driver has gone, and ValueError for an event of more than 1 MiB.
        """
        assert self._conn is not None
        if (frame := self._frame(event)) is None:
            raise ValueError(f"expected a question of at most {MAX_FRAME >> 20} MiB of JSON, found {event!r:.200}")
        try:
            self._queue.put(frame, timeout=timeout_s)
            if not self._conn.poll(timeout_s):
                raise RuntimeError(limit)
            return json.loads(self._conn.recv_bytes(_MAX_ANSWER))
        except queue.Full:
            raise RuntimeError(limit) from None
        except (OSError, EOFError) as error:
            raise RuntimeError("the driver has closed its connection while a rank waited for its answer") from error

    def close(self, timeout_s: float = 2.0) -> None:
        """Sends the queued events and ends the thread. Waits at most `timeout_s`.

        From now on a lost connection is not told: the process may have a task of another job.
        """
        self._on_lost = lambda why: None
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _next(self) -> bytes | threading.Event | None:
        """Returns the next item of the queue, or a heartbeat if one is due."""
        with contextlib.suppress(queue.Empty):
            return self._queue.get(timeout=max(0.0, self._beat_at + _HEARTBEAT_S - time.monotonic()))
        self._beat_at = time.monotonic()
        beat = {
            "kind": "alive",
            "at": rank_state.place_now(),
            "memory": rank_state.memory_now(),
            "progress": progress(),
            "task": self._task,
        }
        return json.dumps(beat).encode()

    def _stacks_if_stalled(self) -> bytes | None:
        """Returns the stacks once a stall, and an empty text after its end, as they do not hold any more."""
        since = rank_state.since()
        if self._stalled_since not in (0.0, since):
            self._stalled_since = 0.0
            return self._frame({"kind": "stack", "stack": "", "collective": None})
        if time.monotonic() - since < self._stall_s or since == self._stalled_since:
            return None
        self._stalled_since = since
        try:
            text = stacks()
        except Exception as error:  # the frames belong to threads that run; an error here must not end the connection
            text = f"  no stacks: {error!r}\n"
        return self._frame({"kind": "stack", "stack": text, "collective": last_collective()})

    def _work(self, address: Address) -> None:
        try:
            conn = connect(address, lost_s=self._lost_s)
        except (OSError, EOFError, AuthenticationError):
            return  # the driver cannot be reached; Spark still returns results and errors
        else:
            self._conn, self.is_connected = conn, True
        finally:
            self._tried.set()
        try:
            with _not_in_forks(conn):
                while (item := self._next()) is not None:
                    if (stacks := self._stacks_if_stalled()) is not None:  # not after the final event
                        conn.send_bytes(stacks)
                    if isinstance(item, threading.Event):
                        item.set()
                    else:
                        conn.send_bytes(item)
        except OSError as error:
            self._on_lost(str(error))


class Reporter:
    """What a rank has of the driver: a call reports an event. Does not block and does not raise."""

    def __init__(
        self,
        sender: Sender,
        me: dict[str, Any],
        secret: bytes = b"",
        tasks: RankTasks | None = None,
        executor: str = "",
        *,
        waits_for_rows: bool = False,
    ):
        """me: `host` and `pid`, and later `rank`, which every event has. secret: of the ranks' store.

        Args:
            tasks: those of the barrier job that are ranks.
            executor: of this rank, which its first events have.
            waits_for_rows: whether they first get the rows of a DataFrame.
        """
        self.waits_for_rows = waits_for_rows
        self._sender, self._me, self.secret, self.tasks = sender, me, secret, tasks
        self._place = {"executor": executor}

    def about(self) -> dict[str, Any]:
        """Returns what a failure of this rank names: `host`, `pid`, `executor`, and `rank` and `device` if known."""
        return {**self._me, **self._place}

    def __call__(self, event: Mapping[str, Any]) -> bool:
        """Returns whether the event was queued, and not dropped."""
        is_first = event["kind"] in ("started", "joined")
        is_queued = self._sender.send({**event, **(self.about() if is_first else self._me)})
        if event["kind"] == "joined":
            self._me["rank"], self._place["device"] = event["rank"], event["device"]
            self._sender.joined()
            self.flush()  # if the process is killed from now on, the driver knows its rank
        return is_queued

    def flush(self) -> None:
        """Waits until the driver has got all queued events, for at most 2 seconds."""
        self._sender.flush()

    def exchange(self, message: str, timeout_s: float) -> list[str] | None:
        """Returns the messages of all ranks, by task; None if not all ranks can reach the driver. Collective."""
        return self._sender.exchange(message, timeout_s)

    def ask(self, question: Mapping[str, Any], timeout_s: float, limit: str) -> Any:
        """Returns the driver's answer to a question. Not collective. Raises as `Sender.ask` does.

        Raises RuntimeError if this rank cannot reach the driver.
        """
        if not self._sender.reaches_driver():
            raise RuntimeError(
                f"host {self._me['host']} cannot reach the driver, which the ranks ask; open the ports of the driver "
                "(spark.driver.host, spark.driver.bindAddress) to the executors"
            )
        return self._sender.ask({**question, "kind": "ask", **self._me}, timeout_s, limit)


@contextlib.contextmanager
def crashes_reported(address: Address | None, task: int) -> Iterator[None]:
    """Sends the stacks to the driver if a signal such as SIGSEGV, SIGABRT or SIGTERM ends this process in the block.

    They go into a connection of their own, to which the handler of the signal writes, as nothing else runs any more.
    """
    with contextlib.ExitStack() as cleanup:
        with contextlib.suppress(OSError, EOFError, AuthenticationError):
            if address is not None:
                conn = connect(address)
                cleanup.enter_context(_not_in_forks(conn))
                conn.send_bytes(json.dumps({"kind": CRASH, "task": task}).encode())
                faulthandler.enable(conn.fileno())
                cleanup.callback(faulthandler.disable)
                cleanup.enter_context(sigterm.stacks_written(conn.fileno()))
        yield


def stacks() -> str:
    """Returns the stacks of the threads of this process, the main thread first, the innermost frames last."""
    frames, main = sys._current_frames(), threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    this_thread = threading.get_ident()
    blocks = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        if ident != this_thread:
            frame = "".join(traceback.format_stack(frames[ident]))
            blocks.append(f"Thread {names.get(ident, ident)}:\n{frame[-_STACK_CHARACTERS:]}")
    return "".join(blocks)[:_STACK_CHARACTERS]
