"""Events from the ranks to the driver: joined, progress, failed. The driver has a listener, each rank has a sender
(`rank/sender.py`).

The ranks also meet here: each sends a message, and gets those of all ranks. Spark's `allGather` does the same, but its
JVM looks for the messages once a second. A rank can also ask the driver a question, and waits for the answer.

Connections are authenticated with the run's secret (`spark_dl.channel`). Events are JSON, never pickle. If a connection
ends without a final event, the rank was killed. An idle rank sends a heartbeat each second. Without heartbeats, the
host is cut off or the process hangs. Over Spark Connect executors cannot reach the driver. There is no listener, and
the failure of a rank is read from Spark's error.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Mapping
from multiprocessing import connection
from typing import Any

from spark_dl.channel import CRASH, MAX_FRAME, MEETING_S, Address, Server, listen_at
from spark_dl.launch.failures.rank_state import RankMemory, RankProgress, Status
from spark_dl.world import local_address

_CRASH_WAIT_S = 1.0
"""How long a lost connection waits for what the process has written about its end."""
_LEAVE = b"null"
"""The answer to ranks that shall use `allGather`, as some ranks cannot reach the driver."""

Known = Mapping[int, Mapping[str, Any]]
"""The reports of each task about itself."""


class Listener:
    """Receives events on the driver. `events` has them as dicts, in order of arrival, each with its `task`."""

    def __init__(
        self, bind_host: str, public_host: str | None = None, *, num_ranks: int = 0, meeting_s: float | None = None
    ):  # fmt: skip
        """Listens on a free port of `bind_host`. `public_host` is the host name for executors, by default the same.

        Args:
            num_ranks: number of ranks that meet here.
            meeting_s: how long the first one waits for the others.
        """
        self._meeting = _Meeting(num_ranks, meeting_s)
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        listener = listen_at(local_address(bind_host))
        self.address = Address(public_host or bind_host, listener.getsockname()[1], os.urandom(32))
        self._asking: dict[int, connection.Connection] = {}
        """Connections of the tasks that wait for an answer."""
        self._heard: dict[int, float] = {}
        """Time of the last event or heartbeat of each task that has not ended."""
        self.places: dict[int, Status] = {}
        """Where each task was, by its last event or heartbeat."""
        self.progress: dict[int, RankProgress] = {}
        """How far each task had come in its collective operations, by its last heartbeat."""
        self._crashes: dict[int, threading.Event] = {}
        """By task: set when the connection for what the handler of a signal writes has ended."""
        self.memories: dict[int, RankMemory] = {}
        """The memory of each task, by its last heartbeat."""
        self._server = Server(listener, self.address.secret, self._serve, "spark_dl events")

    def silence(self) -> dict[int, float]:
        """Returns the seconds since the last event or heartbeat, by task, of connected tasks that have not ended."""
        now = time.monotonic()
        return {task: now - at for task, at in list(self._heard.items())}

    def seen(self, task: int) -> dict[str, Any]:
        """Returns what the heartbeats of a task have told, and the seconds since the last one if it has not ended."""
        told: dict[str, Any] = {**self.places.get(task, {}), "progress": self.progress.get(task)}
        silence = self.silence()
        return {**told, "silent_s": silence[task]} if task in silence else told

    @property
    def met(self) -> frozenset[int]:
        """The tasks that have come to meet the others here."""
        return self._meeting.tasks

    def answer(self, task: int, value: Any) -> None:
        """Answers the question of a task, an event of the kind `ask`. value: JSON-serializable."""
        with contextlib.suppress(OSError):  # the rank has ended; its connection says so
            self._asking.pop(task).send_bytes(json.dumps(value).encode())

    def close(self) -> None:
        """Stops listening and closes all connections."""
        self._meeting.close()
        self._server.close()

    def _serve(self, conn: connection.Connection) -> None:
        task: int | None = None
        try:
            while True:
                event = json.loads(conn.recv_bytes(MAX_FRAME))
                if event["kind"] == CRASH:
                    self._take_crash(conn, int(event["task"]))
                    return
                kind, task = event["kind"], int(event["task"])
                self._heard[task] = time.monotonic()
                if (place := event.pop("at", None)) is not None:
                    self.places[task] = {"phase": str(place["phase"]), "step": place["step"]}
                if (used := event.pop("memory", None)) is not None:
                    self.memories[task] = used
                if kind == "alive" and (progress := event.get("progress")) is not None:
                    self.progress[task] = {"number": int(progress["number"])}
                if kind == "meet":
                    self._meeting.add(task, event["message"], conn)
                elif kind != "alive":
                    if kind == "ask":
                        self._asking[task] = conn
                    self.events.put(event)
                if kind in ("done", "failed"):
                    del self._heard[task]
                    task = None
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            if task is not None:
                if (crash := self._crashes.get(task)) is not None:  # ends with the process, and says why it ended
                    crash.wait(_CRASH_WAIT_S)
                self._heard.pop(task, None)
                self.events.put({"kind": "lost", "task": task, "time": time.time()})

    def _take_crash(self, conn: connection.Connection, task: int) -> None:
        """Waits for what the handler of a signal writes before the process of a task ends."""
        text, ended = b"", threading.Event()
        self._crashes[task] = ended
        try:
            while part := os.read(conn.fileno(), MAX_FRAME):
                text = (text + part)[:MAX_FRAME]
        finally:
            if text:
                self.events.put({"kind": CRASH, "task": task, "text": text.decode(errors="replace")})
            ended.set()


def listen(spark: Any, num_ranks: int, *, meeting_s: float | None = None) -> Listener:
    """Returns a listener on the bind address of Spark's driver, with the driver's host name for executors.

    Args:
        meeting_s: how long the ranks wait for each other, if they cannot meet elsewhere.
    """
    conf = spark.sparkContext.getConf()
    public = conf.get("spark.driver.host").strip("[]")  # Spark writes IPv6 addresses in brackets
    bound = (conf.get("spark.driver.bindAddress") or public).strip("[]")
    return Listener(bound, public, num_ranks=num_ranks, meeting_s=meeting_s)


def with_heartbeats(known: Known, listener: Listener | None) -> dict[int, dict[str, Any]]:
    """Returns the reports of the tasks, with what their heartbeats have told. listener: None over Spark Connect."""
    return {task: {**who, **(listener.seen(task) if listener else {})} for task, who in known.items()}


class _Meeting:
    """Collects one message of each rank, and sends all of them to every rank."""

    def __init__(self, num_ranks: int, limit_s: float | None):
        self._num_ranks, self._limit_s = num_ranks, limit_s
        self._lock = threading.Lock()
        self._messages: dict[int, str] = {}
        self._waiting: list[connection.Connection] = []
        self._answer: bytes | None = None
        self._timer: threading.Timer | None = None

    @property
    def tasks(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._messages)

    def add(self, task: int, message: str, conn: connection.Connection) -> None:
        with self._lock:
            self._messages[task] = message
            self._waiting.append(conn)
            if self._timer is None:
                self._timer = threading.Timer(MEETING_S if self._limit_s is None else self._limit_s, self._give_up)
                self._timer.name, self._timer.daemon = "spark_dl meeting", True
                self._timer.start()
            if self._answer is None and len(self._messages) == self._num_ranks:
                self._answer = json.dumps([self._messages[t] for t in sorted(self._messages)]).encode()
                self._timer.cancel()
            self._send_answer()

    def _give_up(self) -> None:
        """Sends all ranks away, also those that come later, so that none waits here while another one cannot come."""
        with self._lock:
            self._answer = self._answer or _LEAVE
            self._send_answer()

    def _send_answer(self) -> None:
        while self._answer is not None and self._waiting:
            with contextlib.suppress(OSError):  # the rank has ended; its connection says so
                self._waiting.pop().send_bytes(self._answer)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
