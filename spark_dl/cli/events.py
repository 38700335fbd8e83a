"""Events of a run on the driver: who gets them, and what the driver logs about them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from spark_dl.track.slow_ranks import SlowRanks
from spark_dl.track.values import name_of

if TYPE_CHECKING:
    from spark_dl.launch.failures.errors import RankError

OnEvent: TypeAlias = Callable[[Mapping[str, Any]], None]
EVENTS = ("joined", "restart", "step", "epoch", "checkpoint", "checkpoint_failed", "skip", "rollback", "straggler")
"""Values of `kind` in the events for `on_event`, which are dicts. `joined`: a rank has joined, with `rank`, `host`,
`executor`, `pid` and `device`; not over Spark Connect. `restart`: the ranks are started again, with `restarts`, the
number of the `attempt` that has failed, and the `reason` (in one line), `error`, `rank` and `step` of the failure.
`straggler`: the other ranks wait for `rank`, with its times and those of the others. All but `joined` and
`straggler` are lines of `metrics.jsonl`, that of `restart` without `error`. `skip` and `rollback` say which
`bad_step` was left out, and `what` was not finite on which `bad_rank`, with its `bad_rows` in that step
(`train.on_nonfinite`). `checkpoint_failed` has the `reason` (`checkpoint.on_error`)."""

_log = logging.getLogger("spark_dl")
_LONG_CALL_S = 10.0
"""A call of a function of the user that takes longer is said in the log."""


def restart_event(error: RankError, restarts: int, generation: int) -> dict[str, Any]:
    """Returns the event of a restart after the failure of the attempt `generation`. restarts: number of them so far."""
    return {
        "kind": "restart", "restarts": restarts, "attempt": generation, "reason": " ".join(error.reason.split()),
        "error": error.reason, "rank": error.rank, "step": error.step, "time": time.time(),
    }  # fmt: skip


def as_functions(on_event: Any) -> list[OnEvent]:
    """Returns the functions of `on_event`, which say once if they take long. Raises ValueError for anything else."""
    functions = list(on_event) if isinstance(on_event, Sequence) else [on_event]
    for function in functions:
        if not callable(function):
            raise ValueError(f"on_event: expected a function or a list of functions, found {function!r}")
    return [_timed(function) for function in functions]


def _timed(function: OnEvent) -> OnEvent:
    """Returns a function that logs one warning if a call takes long: until it returns, the driver sees no failure."""
    is_said = False

    def call(event: Mapping[str, Any]) -> None:
        nonlocal is_said
        start = time.monotonic()
        function(event)
        seconds = time.monotonic() - start
        if seconds > _LONG_CALL_S and not is_said:
            is_said = True
            _log.warning(
                "on_event: a call of %s took %.0f s for an event %r; until it returns, the driver does not see the "
                "failures of ranks and shows no progress; do long work in a thread",
                name_of(function), seconds, event.get("kind"),
            )  # fmt: skip

    return call


class RunEvents:
    """Shows the events of one attempt, logs the unusual ones, and passes them on to the user's functions."""

    def __init__(self, show: OnEvent, functions: Sequence[OnEvent]):
        self._show, self._functions = show, functions
        self._slow_ranks, self._hosts = SlowRanks(), dict[int, str]()

    def put(self, event: Mapping[str, Any]) -> None:
        """Takes an event of the ranks."""
        kind = event["kind"]
        self._show(event)
        if kind not in EVENTS:
            return
        if kind == "joined":
            self._hosts[event["rank"]] = str(event["host"])
        if kind in _WARNINGS:
            _log.warning(_WARNINGS[kind].format(**event))
        self._pass_on(event)
        for slow in self._slow_ranks.put(event) if kind == "step" else []:
            host = self._hosts.get(slow.straggler.rank, "")
            _log.warning("%s", slow.describe(host))
            self._pass_on({**slow.to_event(host), "time": time.time()})

    def _pass_on(self, event: Mapping[str, Any]) -> None:
        for function in self._functions:
            function(event)


_WARNINGS = {
    "checkpoint_failed": "checkpoint.on_error: the checkpoint of step {step} was not written, and training goes on: "
    "{reason}",
    "skip": "train.on_nonfinite: step {bad_step} is left out, because {what} is not finite (NaN or Inf) on rank "
    "{bad_rank}; its rows in that step: {bad_rows}; steps in a row: {in_a_row}",
    "rollback": "train.on_nonfinite: the run goes back to step {step} ({url}), and leaves out step {bad_step}, because "
    "{what} is not finite (NaN or Inf) on rank {bad_rank}; its rows in that step: {bad_rows}",
}
