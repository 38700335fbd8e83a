"""The failure of a rank as plain data, which the rank sends to the driver."""

from __future__ import annotations

import base64
import json
import pickle
import re
import signal
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from spark_dl.launch.failures import status
from spark_dl.launch.failures.collectives import last_collective
from spark_dl.launch.failures.errors import OtherRankError, ScriptError
from spark_dl.launch.failures.shown_error import harmless

_OUTPUT_CHARACTERS = 4000
"""How much of the end of a rank's output is in its error."""
_ERROR_CHARACTERS = 4000
_OF_CODE_OR_DATA = (
    ValueError, TypeError, LookupError, AttributeError, NameError, ImportError, ArithmeticError, AssertionError,
    NotImplementedError, RecursionError, SyntaxError, pickle.PickleError, SystemExit,
)  # fmt: skip


def describe(
    error: BaseException,
    me: Mapping[str, Any],
    output: Sequence[tuple[str, str]] = (),
    *,
    is_shown: bool = True,
) -> dict[str, Any]:
    """Returns a failure as plain data. Called on a rank. `me` has its `task`, and what `Reporter.about` returns.

    Its texts can come from the data. Control characters are written out, so that a log shows them as they are.

    output: the last lines of the rank, each with its stream. is_shown: whether the driver has got them already.
    """
    lines = harmless("\n".join(line for _, line in output)[-_OUTPUT_CHARACTERS:])
    about = {"error": _text_of(error), "is_retryable": is_retryable(error), "collective": last_collective()}
    found = {**status.now(), **me, **about}
    if isinstance(error, ScriptError):
        # The program's own traceback is in its output, and says whether it failed because of another rank.
        return {**found, "error": harmless(str(error)), "output": lines, "is_secondary": _is_of_lost_connection(lines)}
    if isinstance(error, SystemExit):
        found["error"] = f"the function ended with exit code {error.code} (sys.exit)"
    frames = harmless("".join(traceback.format_exception(error))[-16000:])
    return {
        **found,
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
