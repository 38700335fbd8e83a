"""Events from the ranks to the driver: joined, progress, failed. The driver has a listener, each rank has a sender.

The ranks also meet here: each sends a message, and gets those of all ranks. Spark's `allGather` does the same, but its
JVM looks for the messages once a second. A rank can also ask the driver a question, and waits for the answer.

Connections are authenticated with the run's secret (HMAC challenge of `multiprocessing.connection`). Events are JSON,
never pickle. If a connection ends without a final event, the rank was killed. An idle rank sends a heartbeat each
second. Without heartbeats, the host is cut off or the process hangs.
Over Spark Connect executors cannot reach the driver. There is no listener, and the failure of a rank is read from
Spark's error.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from spark_dl.launch.rank.status import Status, now

_MAX_FRAME = 1 << 20
_MAX_ANSWER = 1 << 28
"""Bytes of the messages of all ranks."""
_AUTH_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 10.0
_HEARTBEAT_S = 1.0
_MEETING_S = 10.0
"""How long ranks wait for the others in the driver's listener, before all of them use Spark's `allGather`."""
_REACH_S = 3.0
"""How long a rank tries to reach the driver before it uses `allGather`."""
_LEAVE = b"null"
"""The answer to ranks that shall use `allGather`, as some ranks cannot reach the driver."""


@dataclass(frozen=True)
class Address:
    """The address of the driver's listener, and the secret for connections to it."""

    host: str
    port: int
    secret: bytes


class Listener:
    """Receives events on the driver. `events` has them as dicts, in order of arrival, each with its `task`."""

    def __init__(self, bind_host: str, public_host: str | None = None, *, num_ranks: int = 0):
        """Listens on a free port of `bind_host`. `public_host` is the host name for executors, by default the same.

        num_ranks: number of ranks that meet here.
        """
        self._meeting = _Meeting(num_ranks)
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._secret = os.urandom(32)
        family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.bind((bind_host, 0))
        self._socket.listen(1024)
        self.address = Address(public_host or bind_host, self._socket.getsockname()[1], self._secret)
        self._connections: set[connection.Connection] = set()
        self._asking: dict[int, connection.Connection] = {}
        """Connections of the tasks that wait for an answer."""
        self._heard: dict[int, float] = {}
        """Time of the last event or heartbeat of each task that has not ended."""
        self.places: dict[int, Status] = {}
        """Where each task was, by its last event or heartbeat."""
        self._thread = threading.Thread(target=self._accept, name="spark_dl listener", daemon=True)
        self._thread.start()

    def silence(self) -> dict[int, float]:
        """Returns the seconds since the last event or heartbeat, by task, of connected tasks that have not ended."""
        now = time.monotonic()
        return {task: now - at for task, at in list(self._heard.items())}

    def answer(self, task: int, value: Any) -> None:
        """Answers the question of a task, an event of the kind `ask`. value: JSON-serializable."""
        with contextlib.suppress(OSError):  # the rank has ended; its connection says so
            self._asking.pop(task).send_bytes(json.dumps(value).encode())

    def close(self) -> None:
        """Stops listening and closes all connections."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._meeting.close()
        for conn in list(self._connections):
            _shut(conn)
        self._thread.join(_AUTH_TIMEOUT_S)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            conn = connection.Connection(sock.detach())
            self._connections.add(conn)
            threading.Thread(target=self._serve, args=(conn,), name="spark_dl events", daemon=True).start()

    def _serve(self, conn: connection.Connection) -> None:
        task: int | None = None
        try:
            if not self._authenticate(conn):
                return
            while True:
                event = json.loads(conn.recv_bytes(_MAX_FRAME))
                kind, task = event["kind"], int(event["task"])
                self._heard[task] = time.monotonic()
                if (place := event.pop("at", None)) is not None:
                    self.places[task] = {"phase": str(place["phase"]), "step": place["step"]}
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
                self._heard.pop(task, None)
                self.events.put({"kind": "lost", "task": task, "time": time.time()})
        finally:
            self._connections.discard(conn)
            conn.close()

    def _authenticate(self, conn: connection.Connection) -> bool:
        """Authenticates a client in bounded time. The connection of a client that sends nothing is closed."""
        timer = threading.Timer(_AUTH_TIMEOUT_S, _shut, (conn,))
        timer.daemon = True
        timer.start()
        try:
            connection.deliver_challenge(conn, self._secret)  # type: ignore[attr-defined]
            connection.answer_challenge(conn, self._secret)  # type: ignore[attr-defined]
        except (OSError, EOFError, connection.AuthenticationError, AssertionError, ValueError):  # type: ignore[attr-defined]
            return False
        finally:
            timer.cancel()
        return True


class _Meeting:
    """Collects one message of each rank, and sends all of them to every rank."""

    def __init__(self, num_ranks: int):
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._messages: dict[int, str] = {}
        self._waiting: list[connection.Connection] = []
        self._answer: bytes | None = None
        self._timer: threading.Timer | None = None

    def add(self, task: int, message: str, conn: connection.Connection) -> None:
        with self._lock:
            self._messages[task] = message
            self._waiting.append(conn)
            if self._timer is None:
                self._timer = threading.Timer(_MEETING_S, self._give_up)
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


def _shut(conn: connection.Connection) -> None:
    """Shuts down a connection that another thread reads, so that the thread gets EOFError."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(conn.fileno())) as sock:
        sock.shutdown(socket.SHUT_RDWR)


class Sender:
    """Sends a rank's events to the driver in its own thread. Training never waits for the driver."""

    def __init__(self, address: Address | None, task: int):
        self._task = task
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

        Returns whether the event was queued.
        """
        with contextlib.suppress(queue.Full):
            if (frame := self._frame(event)) is not None:
                self._queue.put_nowait(frame)
                return True
        return False

    def _frame(self, event: Mapping[str, Any]) -> bytes | None:
        with contextlib.suppress(TypeError, ValueError):
            frame = json.dumps({**event, "at": now(), "task": self._task, "time": time.time()}).encode()
            return frame if len(frame) <= _MAX_FRAME else None
        return None

    def flush(self, timeout_s: float = 2.0) -> None:
        """Waits until all queued events are sent, so that they reach the driver even if this process is killed.

        Waits at most `timeout_s`, for example if the driver cannot be reached.
        """
        if self._thread is not None:
            is_sent = threading.Event()
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(is_sent)
                is_sent.wait(timeout_s)

    def exchange(self, message: str, timeout_s: float) -> list[str] | None:
        """Sends a message to the driver, and returns those of all ranks, by task. Collective.

        Returns None if the driver cannot be reached by all ranks. Raises RuntimeError if it does not answer in time.
        """
        if not self.reaches_driver():
            return None
        limit = f"the driver did not answer within {timeout_s:g} s (launch.start_timeout_s)"
        answer: list[str] | None = self.ask({"kind": "meet", "message": message}, timeout_s, limit)
        return answer

    def reaches_driver(self) -> bool:
        """Whether this rank is connected to the driver. Waits some seconds for the connection."""
        return self._thread is not None and self._tried.wait(_REACH_S) and self._conn is not None

    def ask(self, event: Mapping[str, Any], timeout_s: float, limit: str) -> Any:
        """Sends an event, and returns the driver's answer. Only one thread of a rank asks, and only if it is connected.

        limit: the message of the RuntimeError if the driver does not answer in time. Also raises RuntimeError if the
        driver has gone, and ValueError for an event of more than 1 MiB.
        """
        assert self._conn is not None
        if (frame := self._frame(event)) is None:
            raise ValueError(f"expected a question of at most {_MAX_FRAME >> 20} MiB of JSON, found {event!r:.200}")
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
        """Sends the queued events and ends the thread. Waits at most `timeout_s`."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _next(self) -> bytes | threading.Event | None:
        try:
            return self._queue.get(timeout=_HEARTBEAT_S)
        except queue.Empty:
            return json.dumps({"kind": "alive", "at": now(), "task": self._task}).encode()

    def _work(self, address: Address) -> None:
        try:
            with _connect(address) as conn:
                self._conn, self.is_connected = conn, True
                self._tried.set()
                while (item := self._next()) is not None:
                    if isinstance(item, threading.Event):
                        item.set()
                    else:
                        conn.send_bytes(item)
        except (OSError, EOFError, connection.AuthenticationError):  # type: ignore[attr-defined]
            return  # the driver cannot be reached; Spark still returns results and errors
        finally:
            self._tried.set()


class Reporter:
    """What a rank has of the driver: a call reports an event. Does not block and does not raise."""

    def __init__(self, sender: Sender, me: dict[str, Any]):
        """me: `host` and `pid`, and later `rank`, which every event has."""
        self._sender, self._me = sender, me

    def __call__(self, event: Mapping[str, Any]) -> bool:
        """Returns whether the event was queued, and not dropped."""
        is_queued = self._sender.send({**event, **self._me})
        if event["kind"] == "joined":
            self._me["rank"] = event["rank"]
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
def _connect(address: Address) -> Iterator[connection.Connection]:
    sock = socket.create_connection((address.host, address.port), timeout=_CONNECT_TIMEOUT_S)
    sock.settimeout(None)
    with connection.Connection(sock.detach()) as conn:
        connection.answer_challenge(conn, address.secret)  # type: ignore[attr-defined]
        connection.deliver_challenge(conn, address.secret)  # type: ignore[attr-defined]
        yield conn
