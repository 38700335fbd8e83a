"""The store of the ranks: keys and values in the process of one rank, which the ranks of the run alone can use.

torch's TCPStore lets every process that reaches its port list, read, set and delete all keys. Here, both sides of a
connection prove that they know the run's secret, which Spark has sent to the ranks. Messages are JSON, never pickle.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from typing import Any

import torch.distributed as dist

from spark_dl.channel import Address, Server, connect

_MAX_MESSAGE = 1 << 28
_LAST_ANSWERS_S = 2.0
_GRACE_S = 5.0
"""How much longer than the server a client waits for its answer."""

_alive: set[RankStore] = set()
"""torch keeps the C++ half of a store alone, which calls the methods of this one."""


class StoreServer:
    """Serves the store on a bound socket, with a thread for each connection. In the process of one rank."""

    def __init__(self, listener: socket.socket, secret: bytes):
        self._values: dict[str, bytes] = {}
        self._changed, self._is_closed = threading.Condition(), False
        self._num_asked = 0
        """Requests whose answers have not been sent."""
        self._server = Server(listener, secret, self._serve, "spark_dl store")

    def close(self) -> None:
        """Closes the port and all connections. Clients that wait get an error."""
        self._server.stop()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            # The last rank to leave has told so, and waits for the answer.
            self._changed.wait_for(lambda: self._num_asked == 0, _LAST_ANSWERS_S)
        self._server.close()

    def _serve(self, conn: connection.Connection) -> None:
        while True:
            request = json.loads(conn.recv_bytes(_MAX_MESSAGE))
            with self._changed:
                self._num_asked += 1
            try:
                conn.send_bytes(json.dumps(self._answer(request)).encode())
            finally:
                with self._changed:
                    self._num_asked -= 1
                    self._changed.notify_all()

    def _answer(self, request: Mapping[str, Any]) -> Any:
        """Returns the answer to a request, which names a method and has its arguments."""
        method: Callable[..., Any] = _METHODS[request["method"]]
        with self._changed:
            answer = method(self, *request["arguments"])
            self._changed.notify_all()
        return answer

    def _set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        self._values.update(zip(keys, map(base64.b64decode, values), strict=True))

    def _append(self, key: str, value: str) -> None:
        self._values[key] = self._values.get(key, b"") + base64.b64decode(value)

    def _wait(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        """Returns the keys that are still missing after so many seconds."""
        self._changed.wait_for(lambda: self._is_closed or all(key in self._values for key in keys), timeout_s)
        missing = [key for key in keys if key not in self._values]
        if missing and self._is_closed:
            raise ConnectionAbortedError("the store is closed")  # the client gets the end of the connection
        return missing

    def _get(self, keys: Sequence[str]) -> list[str]:
        return [_text(self._values[key]) for key in keys]

    def _add(self, key: str, number: int) -> int:
        total = int(self._values.get(key, b"0")) + number
        self._values[key] = str(total).encode()
        return total

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        """As TCPStore: a missing key is set if the expected value is empty. Returns the value, or the expected one."""
        before = self._values.get(key)
        if before is None and expected:
            return expected
        if before is None or before == base64.b64decode(expected):
            self._values[key] = base64.b64decode(desired)
        return _text(self._values[key])

    def _delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _count(self) -> int:
        return len(self._values)


_METHODS: Mapping[str, Callable[..., Any]] = {
    "set": StoreServer._set, "append": StoreServer._append, "wait": StoreServer._wait, "get": StoreServer._get,
    "add": StoreServer._add, "compare_set": StoreServer._compare_set, "delete": StoreServer._delete,
    "count": StoreServer._count,
}  # fmt: skip


def _text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


class RankStore(dist.Store):
    """A client of `StoreServer`, for torch and for spark_dl. Threads can use it at the same time.

    torch calls the methods by these names, some of which are those of its C++ class.
    Raises dist.DistStoreError if keys are missing after the timeout, dist.DistNetworkError if the server has gone.
    """

    def __init__(self, address: Address, timeout: datetime.timedelta):
        super().__init__()
        _alive.add(self)
        self.set_timeout(timeout)
        self._address = address
        self.host, self.port = address.host, address.port
        self._idle: list[connection.Connection] = []
        """Connections that no thread uses. A thread that waits keeps its own."""
        with self._connection():
            pass

    def close(self) -> None:
        """Closes the connections that are not in use."""
        _alive.discard(self)
        while self._idle:
            self._idle.pop().close()

    def _limit_s(self) -> float:
        limit: datetime.timedelta = self.timeout  # type: ignore[attr-defined]
        return limit.total_seconds()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[connection.Connection]:
        try:
            conn = self._idle.pop()
        except IndexError:
            conn = connect(self._address)
        try:
            yield conn
        except BaseException:
            conn.close()
            raise
        self._idle.append(conn)

    def _ask(self, method: str, *arguments: Any, timeout_s: float = 0.0) -> Any:
        try:
            with self._connection() as conn:
                conn.send_bytes(json.dumps({"method": method, "arguments": arguments}).encode())
                if not conn.poll(timeout_s + self._limit_s() + _GRACE_S):
                    raise dist.DistNetworkError("the rank that holds the store does not answer")
                return json.loads(conn.recv_bytes(_MAX_MESSAGE))
        except (OSError, EOFError) as error:
            raise dist.DistNetworkError(f"the rank that holds the store has ended: {error!r}") from error

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], [_text(value)])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask("set", list(keys), [_text(value) for value in values])

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key, _text(value))

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        limit_s = self._limit_s() if timeout is None else timeout.total_seconds()
        if missing := self._ask("wait", list(keys), limit_s, timeout_s=limit_s):
            raise dist.DistStoreError(
                f"wait timeout after {limit_s:g} s: {len(missing)} of {len(keys)} keys are missing, {missing[0]} first"
            )

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [base64.b64decode(value) for value in self._ask("get", list(keys))]

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return base64.b64decode(self._ask("compare_set", key, _text(expected), _text(desired)))

    def check(self, keys: Sequence[str]) -> bool:
        return not self._ask("wait", list(keys), 0.0)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    deleteKey = delete_key  # noqa: N815

    def num_keys(self) -> int:
        return int(self._ask("count"))

    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> RankStore:
        return self
