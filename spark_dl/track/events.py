"""Passes the events of a run on to a tracker, in a thread of its own, so that training never waits for a server.

And makes parameters and metrics of settings and events.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_POSITION = ("kind", "epoch", "step", "steps", "seconds", "time", "task", "rank", "host", "pid")
"""Fields of an event that are no metrics."""

_log = logging.getLogger("spark_dl")

Event = Mapping[str, Any]

INTERVAL_S = 5.0
"""Seconds between two calls."""
_LONGEST_PAUSE_S = 60.0
"""Longest time between two calls while they fail."""
CLOSE_S = 30.0
"""How long the end of a run waits for the last calls."""
_MAX_EVENTS = 100_000
"""Events that are kept while the calls fail. Then the oldest ones are dropped."""
_AT_ONCE = 500


def metrics_of(event: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of an event of a run, by name: of a `step`, a `validation`, an `epoch`, or `test` rows.

    Of a metric with a list of numbers, each number is a metric, `validation/recall/0` ...
    """
    if event["kind"] == "step":
        numbers = _numbers({name: value for name, value in event.items() if name not in _POSITION}, "train")
        load = {name: layer["max_over_mean"] for name, layer in event.get("expert_load", {}).items()}
        return {**numbers, **_numbers(load, "expert_load")}
    if event["kind"] in ("validation", "epoch"):
        loss = {"epoch_loss": event["train_loss"]} if event["kind"] == "epoch" else {}
        return {**_numbers(loss, "train"), **_numbers(event["metrics"], "validation")}
    if event["kind"] == "test":
        return _numbers(event["metrics"], "test")
    return {}


def _numbers(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if is_number(value):
            numbers[f"{prefix}/{name}"] = float(value)
        elif prefix in ("validation", "test") and isinstance(value, list) and all(map(is_number, value)):
            numbers |= {f"{prefix}/{name}/{i}": float(number) for i, number in enumerate(value)}
    return numbers


def is_number(value: Any) -> bool:
    """Whether this is a number, also NaN. True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns nested settings as strings by dotted keys, such as `train.lr`. Values that are no mappings are JSON."""
    flat: dict[str, str] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return flat


def as_key(name: str, longest: int) -> str:
    """Returns a name with the characters that MLflow accepts, and its last ones if it is too long."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII).strip("/ ")[-longest:]


def as_value(value: str, longest: int) -> str:
    """Returns a string, shortened to `longest` characters."""
    return value if len(value) <= longest else f"{value[: longest - 3]}..."


def name_of(function: Any) -> str:
    """Returns the name of a function or a class, of the function in a partial, or of the class of another object."""
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__qualname__", None) or type(inner).__name__)


class Background:
    """Collects events, and passes them on every few seconds.

    Args:
        name: what the events are written to, for messages.
        write: called with events in their order. If it raises, they are kept, and passed on again later.
        end: called once with the argument of `close`, after all events.
    """

    def __init__(self, name: str, write: Callable[[Sequence[Event]], None], end: Callable[[str], None]):
        self._name, self._write, self._end = name, write, end
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._taken: list[Event] = []
        """Events that are being written."""
        self._dropped, self._failures = 0, 0
        self._is_failing = False
        self._status: str | None = None
        self._wake, self._is_done, self._has_ended = threading.Event(), threading.Event(), threading.Event()
        self._is_done.set()
        threading.Thread(target=self._work, name=f"spark_dl {name}", daemon=True).start()

    def put(self, event: Event) -> None:
        """Adds an event. Does not block."""
        with self._lock:
            self._events.append(event)
            self._is_done.clear()
            self._drop_oldest()

    def drain(self, timeout_s: float = CLOSE_S) -> bool:
        """Passes all events on now. Returns False if that fails or is not done within the time limit."""
        end, failures = time.monotonic() + timeout_s, self._failures
        self._wake.set()
        while not self._is_done.wait(0.05):
            if self._failures > failures or time.monotonic() >= end:
                return False
        return True

    def close(self, status: str, timeout_s: float = CLOSE_S) -> None:
        """Passes on the last events, calls `end`, and ends the thread. Logs a warning for what is left over."""
        self._status = status
        self._wake.set()
        if not self._has_ended.wait(timeout_s):
            _log.warning("%s: no answer within %g s at the end of the run", self._name, timeout_s)
        if left := len(self._events) + len(self._taken) + self._dropped:
            _log.warning("%s: %d event(s) of the run were not written; metrics.jsonl has them", self._name, left)

    def _work(self) -> None:
        pause = INTERVAL_S
        while self._status is None:
            self._wake.wait(pause)
            self._wake.clear()
            pause = INTERVAL_S if self._pass_on() else min(2 * pause, _LONGEST_PAUSE_S)
        if self._pass_on():
            self._try(lambda: self._end(str(self._status)))
        self._has_ended.set()

    def _pass_on(self) -> bool:
        """Passes all events on. Returns False if that failed."""
        while True:
            with self._lock:
                self._taken = [self._events.popleft() for _ in range(min(_AT_ONCE, len(self._events)))]
                if not self._taken:
                    self._is_done.set()
                    return True
            is_written = self._try(lambda: self._write(self._taken))
            with self._lock:
                if not is_written:
                    self._events.extendleft(reversed(self._taken))
                    self._drop_oldest()
                self._taken = []
            if not is_written:
                return False

    def _drop_oldest(self) -> None:
        while len(self._events) > _MAX_EVENTS:
            self._events.popleft()
            self._dropped += 1

    def _try(self, call: Callable[[], None]) -> bool:
        """Calls a function. Logs a warning if it fails and the call before did not. Returns False if it fails."""
        try:
            call()
        except Exception as error:  # of a server, a network or a disk: training continues
            if not self._is_failing:
                _log.warning("%s: %s; training continues, and the metrics are sent later", self._name, error)
            self._is_failing, self._failures = True, self._failures + 1
            return False
        if self._is_failing:
            _log.info("%s: works again", self._name)
        self._is_failing = False
        return True
