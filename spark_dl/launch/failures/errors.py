"""The errors of ranks: what a driver raises, and what ranks raise for each other."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from spark_dl.launch.failures.shown_error import as_html, as_lines


class RankError(RuntimeError):
    """A rank failed, and the job was ended. The message has the reason, the traceback of the rank, and what to do.

    rank: the failed rank; None if it failed before the ranks were dealt.
    host, pid: host and process id of the rank.
    executor: Spark's id of its executor, or `host:port` where the executor does not know its id, as on YARN. device: of
    the rank, such as `cuda:0` or `cpu`. Each is empty if it is not known.
    reason: the root cause, without tracebacks.
    rank_traceback: the traceback on the rank; empty for a rank that was killed or that hangs.
    rank_output: the last lines that the rank has written, if they were not shown; else empty.
    step: optimizer step that the rank was in, from 1; None before the first one. phase: what it did there. Those of a
    killed or silent rank come from its last heartbeat.
    error: what the rank raised, as "Type: message"; empty for a rank that was killed or that hangs.
    is_retryable: whether another attempt can succeed. It cannot after an error of the code or of the data.
    earlier: reasons of the failures of earlier attempts, oldest first.
    stacks: after a hang, where each rank was, with the stacks of its threads.
    advice: how to go on from the last checkpoint, of a run that has a run folder.
    hosts: of the ranks of the attempt, as far as they are known; none over Spark Connect.
    rank and pid are None if only Spark reports the failure, for example of a killed rank over Spark Connect.
    """

    def __init__(
        self,
        reason: str,
        *,
        rank: int | None,
        host: str,
        pid: int | None,
        executor: str = "",
        device: str = "",
        rank_traceback: str = "",
        rank_output: str = "",
        step: int | None = None,
        phase: str = "",
        error: str = "",
        is_retryable: bool = True,
        earlier: tuple[str, ...] = (),
        stacks: str = "",
        hosts: frozenset[str] = frozenset(),
        advice: str = "",
    ):
        text = reason
        for number, failure in enumerate(earlier, 1):
            text += f"\nAttempt {number}: {failure}"
        if rank_traceback:
            text += f"\n\nTraceback on the rank:\n{rank_traceback}"
        if rank_output:
            text += f"\n\nLast output of the rank:\n{rank_output}"
        if stacks:
            text += f"\n\nWhat the ranks did:\n{stacks}"
        if advice:
            text += f"\n\n{advice}"
        super().__init__(text)
        self.rank, self.host, self.pid, self.executor, self.device = rank, host, pid, executor, device
        self.reason, self.rank_traceback, self.rank_output = reason, rank_traceback, rank_output
        self.step, self.phase, self.error, self.is_retryable = step, phase, error, is_retryable
        self.earlier, self.stacks, self.hosts, self.advice = earlier, stacks, hosts, advice

    @property
    def is_preemption(self) -> bool:
        """Whether the rank was ended by SIGTERM, as on a host that is taken away, and not by an error."""
        return self.error == "ended by SIGTERM"

    def after(self, earlier: Sequence[RankError], why_last: str) -> RankError:
        """Returns this error as that of the last of several attempts. why_last: why there is no other one."""
        attempts = f"{len(earlier) + 1} attempt{'s' if earlier else ''}"
        reason = f"{self.reason} (after {attempts}; {why_last})"
        return self._changed(reason, earlier=tuple(error.reason for error in earlier))

    def advised(self, advice: str) -> RankError:
        """Returns this error with what to do about it, as the last part of its message."""
        return self._changed(self.reason, advice=advice) if advice else self

    def _changed(self, reason: str, **changes: Any) -> RankError:
        about = {name: getattr(self, name) for name in _ABOUT_RANK}
        return RankError(reason, **{**about, **changes}).with_traceback(self.__traceback__)

    def __reduce__(self) -> Any:
        return _rank_error, (self.reason, {name: getattr(self, name) for name in _ABOUT_RANK})

    def _render_traceback_(self) -> list[str]:
        """Called by IPython, which shows the lines instead of a traceback."""
        try:
            return as_lines(self)
        except Exception:  # IPython, of any version, is asked for its cells; the message must be shown in any case
            return traceback.format_exception(self)

    def _repr_html_(self) -> str:
        """Called by notebooks for an error that is the value of a cell."""
        return as_html(self)


_ABOUT_RANK = (
    "rank", "host", "pid", "executor", "device", "rank_traceback", "rank_output", "step", "phase", "error",
    "is_retryable", "earlier", "stacks", "hosts", "advice",
)  # fmt: skip


def _rank_error(reason: str, about: Mapping[str, Any]) -> RankError:
    return RankError(reason, **about)


class OtherRankError(RuntimeError):
    """Raised on a rank that stops because of a problem on another rank. The message names the problem."""


class ScriptError(RuntimeError):
    """A program ended with another exit code than 0."""
