"""The error of ranks: a rank's failure as data, which the driver can read, and the `RankError` that users see."""

from __future__ import annotations

import base64
import contextlib
import datetime
import html
import json
import linecache
import pickle
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_dl.launch.failures import rank_state
from spark_dl.launch.failures.rank_state import last_collective

if TYPE_CHECKING:
    from spark_dl.world import World

_PACKAGE = Path(__file__).parents[2]
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
"""Escape sequences of terminals: colors, and also titles, links and the clipboard."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, other ends of lines, what changes the direction of text, and what UTF-8 does not have."""
_FRAME = re.compile(r'^  File "(.+?)", line (\d+), in (.+)\n((?:    .*\n)*)', re.MULTILINE)

_RED = "color:#e5534b"
_PRE = (
    "white-space:pre-wrap;overflow-wrap:anywhere;margin:.4em 0;padding:0;border:0;background:none;color:inherit;"
    "font-family:monospace;font-size:12px;line-height:1.4"
)

_FOLDED = "of spark_dl ...\n"

_ABOUT_RANK = (
    "rank", "host", "pid", "executor", "device", "rank_traceback", "rank_output", "step", "phase", "error",
    "is_retryable", "earlier", "stacks", "hosts", "advice",
)  # fmt: skip

_OUTPUT_CHARACTERS = 4000
"""How much of the end of a rank's output is in its error."""
_ERROR_CHARACTERS = 4000
_OF_CODE_OR_DATA = (
    ValueError, TypeError, LookupError, AttributeError, NameError, ImportError, ArithmeticError, AssertionError,
    NotImplementedError, RecursionError, SyntaxError, pickle.PickleError, SystemExit,
)  # fmt: skip

_WAIT_S = 2.0
"""How long a rank waits for the error of another rank, and then for all other ranks to leave."""
_FIRST = "failed/first"


def as_lines(error: RankError) -> list[str]:
    """Returns the text that IPython shows for an error that was raised. In its mode Verbose, this is IPython's own."""
    shell = _shell()
    renderer: Any = getattr(shell, "InteractiveTB", None)
    if getattr(renderer, "mode", "") == "Verbose":
        lines: list[str] = renderer.structured_traceback(type(error), error, error.__traceback__, tb_offset=1)
        return lines
    name = type(error).__name__
    if shell is not None and str(getattr(shell, "colors", "")).lower() != "nocolor":
        name = f"\x1b[31m{name}\x1b[0m"
    parts = [f"{name}: {harmless(error.reason)}"]
    if error.rank_traceback:
        parts.append(f"Traceback on the rank:\n{fold(harmless(error.rank_traceback))}")
    if error.rank_output:
        parts.append(f"Last output of the rank:\n{harmless(error.rank_output)}")
    if error.stacks:
        parts.append(f"What the ranks did:\n{fold(harmless(error.stacks))}")
    if called := _called_from(error):
        parts.append(f"Called on the driver:\n{called}")
    other = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if other is not None:
        parts.append(f"Raised while this error was handled: {harmless(f'{type(other).__name__}: {other}')}")
    if error.advice:
        parts.append(harmless(error.advice))
    text = "\n\n".join(part.rstrip() for part in parts)
    if _FOLDED in text:
        text += "\n\nTo see all frames, run `%xmode Verbose`, then `%tb`."
    return text.split("\n")


def as_html(error: RankError) -> str:
    """Returns the page of an error, with what is long folded."""
    head, _, rest = harmless(error.reason).partition("\n")
    name = f'<b style="{_RED}">{type(error).__name__}</b>'
    parts = [f'<div style="overflow-wrap:anywhere">{name}: {html.escape(head)}</div>']
    if rest:
        parts.append(_pre(rest))
    if error.rank_traceback:
        whole = harmless(error.rank_traceback)
        short = fold(whole)
        parts.append(f"<div>Traceback on the rank:</div>{_pre(short)}")
        if _FOLDED in short:
            parts.append(_details("All frames on the rank", whole))
    if error.rank_output:
        parts.append(_details("Last output of the rank", harmless(error.rank_output)))
    if error.stacks:
        parts.append(_details("What the ranks did", harmless(error.stacks)))
    if called := _called_from(error):
        parts.append(_details("Called on the driver", called))
    if error.advice:
        parts.append(f'<div style="overflow-wrap:anywhere">{html.escape(harmless(error.advice))}</div>')
    return f'<div style="border-left:3px solid #e5534b;padding-left:.8em;font-size:13px">{"".join(parts)}</div>'


def _pre(text: str) -> str:
    return f'<pre style="{_PRE}">{html.escape(text.rstrip())}</pre>'


def _details(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>{_pre(text)}</details>"


def harmless(text: str) -> str:
    """Returns a text without escape sequences, and with other control characters written out, such as `\\r`."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], _SEQUENCE.sub("", text.replace("\r\n", "\n")))


def fold(text: str) -> str:
    """Returns a traceback in which frames of spark_dl are counted, and frames of cells have the cell and its source."""
    lines: list[str] = []
    num_folded, at = 0, 0

    def count_own() -> None:
        nonlocal num_folded
        if num_folded:
            lines.append(f"  ... {num_folded} {'frame' if num_folded == 1 else 'frames'} {_FOLDED}")
        num_folded = 0

    for frame in _FRAME.finditer(text):
        if frame.start() > at:
            count_own()
            lines.append(text[at : frame.start()])
        if _is_own(frame[1]):
            num_folded += 1
        else:
            count_own()
            lines.append(_of_cell(frame) or frame[0])
        at = frame.end()
    count_own()
    return "".join([*lines, text[at:]])


def _is_own(path: str) -> bool:
    """Whether a file on a rank is a module of this package."""
    _, separator, module = path.replace("\\", "/").rpartition("/spark_dl/")
    return bool(separator) and (_PACKAGE / module).is_file()


def _of_cell(frame: re.Match[str]) -> str | None:
    """Returns the frame of a cell of this notebook; None for another one. Only this process has the source of cells."""
    path, line, name, code = frame.groups()
    compiler: Any = getattr(_shell(), "compile", None)
    label = compiler.format_code_name(path) if hasattr(compiler, "format_code_name") else None
    if label is None:
        return None
    if not code and (source := linecache.getline(path, int(line)).strip()):
        code = f"    {source}\n"
    return f"  {' '.join(label)}, line {line}, in {name}\n{code}"


def _called_from(error: RankError) -> str:
    """Returns the frames of the driver, without those of IPython."""
    frames = traceback.extract_tb(error.__traceback__)
    shown = [frame for frame in frames if "/IPython/" not in frame.filename.replace("\\", "/")]
    return fold(harmless("".join(traceback.format_list(shown))))


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


class RankError(RuntimeError):
    """A rank failed, and the job was ended. The message has the reason, the traceback of the rank, and what to do.

    rank and pid are None if only Spark reports the failure, for example of a killed rank over Spark Connect.

    Args:
        rank: the failed rank; None if it failed before the ranks were dealt.
        host, pid: host and process id of the rank.
        executor: Spark's id of its executor, or `host:port` where the executor does not know its id, as on YARN.
        device: of the rank, such as `cuda:0` or `cpu`. Each is empty if it is not known.
        reason: the root cause, without tracebacks.
        rank_traceback: the traceback on the rank; empty for a rank that was killed or that hangs.
        rank_output: the last lines that the rank has written, if they were not shown; else empty.
        step: optimizer step that the rank was in, from 1; None before the first one.
        phase: what it did there. Those of a killed or silent rank come from its last heartbeat.
        error: what the rank raised, as "Type: message"; empty for a rank that was killed or that hangs.
        is_retryable: whether another attempt can succeed. It cannot after an error of the code or of the data.
        earlier: reasons of the failures of earlier attempts, oldest first.
        stacks: after a hang, where each rank was, with the stacks of its threads.
        advice: how to go on from the last checkpoint, of a run that has a run folder.
        hosts: of the ranks of the attempt, as far as they are known; none over Spark Connect.

    Example:
        >>> try:
        ...     spark_dl.launch(lambda: 1 / 0, num_ranks=2)
        ... except spark_dl.RankError as error:
        ...     print(error.rank, error.host, error.reason)
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

    def after(self, earlier: Sequence[RankError], why_last: str, *, again: bool = False) -> RankError:
        """Returns this error as that of the last of several attempts.

        Args:
            why_last: why there is no other one.
            again: whether the error would come again, whatever its class.
        """
        attempts = f"{len(earlier) + 1} attempt{'s' if earlier else ''}"
        reason = f"{self.reason} (after {attempts}; {why_last})"
        is_retryable = self.is_retryable and not again
        return self._changed(reason, earlier=tuple(error.reason for error in earlier), is_retryable=is_retryable)

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


def _rank_error(reason: str, about: Mapping[str, Any]) -> RankError:
    return RankError(reason, **about)


class OtherRankError(RuntimeError):
    """Raised on a rank that stops because of a problem on another rank. The message names the problem."""


class ScriptError(RuntimeError):
    """A program ended with another exit code than 0."""


def describe(
    error: BaseException,
    me: Mapping[str, Any],
    output: Sequence[tuple[str, str]] = (),
    *,
    is_shown: bool = True,
) -> dict[str, Any]:
    """Returns a failure as plain data. Called on a rank. `me` has its `task`, and what `Reporter.about` returns.

    Its texts can come from the data. Control characters are written out, so that a log shows them as they are.

    Args:
        output: the last lines of the rank, each with its stream.
        is_shown: whether the driver has got them already.
    """
    lines = harmless("\n".join(line for _, line in output)[-_OUTPUT_CHARACTERS:])
    about = {"error": _text_of(error), "is_retryable": is_retryable(error), "collective": last_collective()}
    description = {**rank_state.place_now(), **me, **about}
    if isinstance(error, ScriptError):
        # The program's own traceback is in its output, and says whether it failed because of another rank.
        return {
            **description,
            "error": harmless(str(error)),
            "output": lines,
            "is_secondary": _is_of_lost_connection(lines),
        }
    if isinstance(error, SystemExit):
        description["error"] = f"the function ended with exit code {error.code} (sys.exit)"
    frames = harmless("".join(traceback.format_exception(error))[-16000:])
    return {
        **description,
        "traceback": frames,
        "output": "" if is_shown else lines,
        "is_secondary": is_secondary(error),
    }


def _text_of(error: BaseException) -> str:
    try:
        return harmless(f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS] + _killed_worker(error))
    except Exception as second:  # in its `__str__`
        return f"{type(error).__name__} (its message cannot be printed: {type(second).__name__})"


def _killed_worker(error: BaseException) -> str:
    """Returns which worker process of PyTorch's DataLoader was killed, and the signal; empty for another error.

    PyTorch says so in the error, or in its cause, which comes first if the error was raised in the handler of SIGCHLD.
    """
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__
    for each in chain:
        if match := re.search(r"DataLoader worker \(pid (\d+)\) is killed by signal: ([^.\n]*[^.\s])", str(each)):
            names = [number.name for number in signal.Signals if signal.strsignal(number) == match[2]]
            why = "; it may have used too much memory: set num_workers to 0, or lower the batch"
            return f": a data worker, pid {match[1]}, was ended by {(*names, match[2])[0]}{why}"
    return ""


def is_retryable(error: BaseException) -> bool:
    """Whether another attempt can succeed: not after an error of the code or of the data.

    An attribute `is_retryable` of the exception decides, if it has one.
    """
    return bool(getattr(error, "is_retryable", not isinstance(error, _OF_CODE_OR_DATA)))


def is_secondary(error: BaseException) -> bool:
    """Whether an error is only a consequence of the failure or exit of another rank."""
    import torch.distributed as dist

    if isinstance(error, (OtherRankError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    cause = error.__cause__
    if isinstance(cause, RuntimeError) and is_secondary(cause):  # torch's pipelines wrap errors of a stage
        return True
    of_storage = isinstance(cause, OSError) and not isinstance(cause, ConnectionError)
    return not of_storage and _is_of_lost_connection(str(error))


def _is_of_lost_connection(text: str) -> bool:
    signs = (
        r"Connection closed by peer|Connection reset by peer|Broken pipe|gloo/transport|Connection refused|"
        r"Application timeout caused pair closure|"  # of Gloo, after another operation has timed out
        r"Horovod has been shut down"
    )
    return re.search(signs, text) is not None


class RankFailedError(Exception):
    """Raised in a task, so that Spark ends the job. A driver without a listener reads the failure from its message."""


def failed_in_task(failure: Mapping[str, Any]) -> RankFailedError:
    """Returns the exception that a task raises for a failure from `describe`."""
    encoded = base64.b64encode(json.dumps(failure).encode()).decode()
    return RankFailedError(f"{name_of(failure.get('rank'), failure['task'])} failed [spark_dl failure {encoded}]")


def failure_in(text: str) -> dict[str, Any] | None:
    match = re.search(r"\[spark_dl failure ([A-Za-z0-9+/=]+)\]", text)
    if match is None:
        return None
    failure: dict[str, Any] = json.loads(base64.b64decode(match.group(1)))
    return failure


def named(who: Mapping[str, Any], task: int) -> str:
    """Returns for example `rank 1 on host7 (pid 3117, executor 3, cuda:0)`, by what a task has reported."""
    executor, device = who.get("executor", ""), who.get("device", "")
    place = f"pid {who.get('pid')}"
    if executor.isdigit():  # and not an address, whose port says nothing
        place += f", executor {executor}"
    if device not in ("", "cpu"):
        place += f", {device}"
    return f"{name_of(who.get('rank'), task)} on {who.get('host', 'an unknown host')} ({place})"


def name_of(rank: int | None, task: int) -> str:
    return f"task {task} (which has no rank yet)" if rank is None else f"rank {rank}"


def publish(world: World, error: BaseException) -> None:
    """Writes an error to the store, unless it follows from another rank's. Called before the rank leaves the group."""
    if not is_secondary(error):
        content = json.dumps({"rank": world.rank, "host": world.host, "error": f"{type(error).__name__}: {error}"})
        _bounded(lambda: world.store.compare_set(_FIRST, "", content))


def raise_published(world: World, error: BaseException) -> None:
    """Raises RuntimeError with the first error of another rank, if `error` follows from it.

    Called after the rank has left the process group. First waits some seconds for all ranks to leave: the store can end
    with this rank, and torchrun ends all ranks when the first rank ends.
    """
    wait = datetime.timedelta(seconds=_WAIT_S)
    published: list[bytes] = []

    def listen() -> None:
        world.store.wait([_FIRST], wait)
        published.append(world.store.get(_FIRST))

    def leave() -> None:
        world.store.set(f"left/{world.rank}", "1")
        world.store.wait([f"left/{rank}" for rank in range(world.world_size)], wait)

    if is_secondary(error):
        _bounded(listen)
    _bounded(leave)
    if published:
        first = json.loads(published[0])
        raise RuntimeError(f"rank {first['rank']} on {first['host']} failed: {first['error']}") from error


def _bounded(call: Callable[[], object]) -> None:
    """Calls a function of the store with a time limit, as not all of them respect a timeout. Ignores errors."""

    def attempt() -> None:
        with contextlib.suppress(Exception):  # no error in the store, not all ranks have left, or the store has ended
            call()

    thread = threading.Thread(target=attempt, name="spark_dl first failure", daemon=True)
    thread.start()
    thread.join(_WAIT_S + 1.0)
