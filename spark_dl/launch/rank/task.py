"""The task of one rank: what Spark runs in the Python worker. Calls the function, and returns its result as a row."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from spark_dl.channel import Address
from spark_dl.config import Launch
from spark_dl.launch.code import payload
from spark_dl.launch.failures import rank_state
from spark_dl.launch.failures.errors import describe, failed_in_task
from spark_dl.launch.rank.children import ended_with_rank, outliving_env
from spark_dl.launch.rank.environment import RESTARTS, applied, is_clean
from spark_dl.launch.rank.output import Output, line_buffered
from spark_dl.launch.rank.peers import check_versions, versions
from spark_dl.launch.rank.sender import Reporter, Sender, crashes_reported
from spark_dl.launch.rank.tasks import choose, own_executor

ROOT_CAUSE_WAIT_S = 2.0
"""How long to wait for the root cause after a failure that is only a consequence."""
_ABORTED_BY_DRIVER_WAIT_S = 20.0
_STALL = 0.8
"""Part of `launch.collective_timeout_s` after which a rank without progress sends its stacks, before others fail, and
after which a rank that the driver's host does not answer ends."""
_START_STALL = 0.5
"""Part of `launch.start_timeout_s` after which a rank that has not joined the others sends its stacks."""
_LAST_LINE_S = 0.5
"""For the last line of a rank that ends itself to reach the executor's log."""
SCHEMA = "rank int, result binary, refused string, output string"


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks."""

    number: int = 0
    """Number of failed attempts before it."""
    left_out: frozenset[str] = frozenset()
    """Hosts that keep failing. They get no rank, if the other hosts have slots enough."""


@dataclass(frozen=True)
class RankResult:
    """The return value of a function under `run_barrier`: its result, and its rank from the rendezvous."""

    rank: int
    result: Any
    refused: str = ""
    """Why all ranks refused the input; empty if they did not. `run_barrier` raises it."""


@dataclass(frozen=True)
class TaskInput:
    """The input of a task of a job with a source. The task must consume all batches."""

    batches: Iterator[pa.RecordBatch]
    task: int
    """Index of the task: the partition of the source."""
    folder: str
    """A local folder of Spark on this host. Spark deletes it when the executor ends."""
    outliving_env: Mapping[str, str] | None = None
    """Environment for the process that deletes the rows when the rank has been killed; None for that of the rank."""


def rank_task(
    packed: bytes,
    address: Address | None,
    launch: Launch,
    *,
    env: Mapping[str, str],
    run_env: Mapping[str, str],
    has_source: bool,
    has_log: bool,
    secret: bytes,
    result_limit_bytes: int | None,
    attempt: Attempt,
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Returns the function that Spark runs as the task of one rank. Called on the driver.

    Args:
        packed: the call, of `payload.pack_call`.
        address: that of the driver's listener.
        env: environment variables of the user.
        run_env: those of the run.
        attempt: with the hosts whose tasks are not ranks.
        has_source: whether the input of the task are rows for the function.
        secret: of the store that the ranks share.
        result_limit_bytes: of the result of a rank.
        has_log: whether this process writes to the log of an executor, and not to the terminal of the driver.
    """
    driver = versions()

    def run_rank(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        rank_state.reset()
        executors = [info.address for info in context.getTaskInfos()]
        tasks = choose(executors, context.partitionId(), launch.num_ranks, attempt.left_out)
        if (task := tasks.own) is None:
            _consume(batches)
            return
        me: dict[str, Any] = {"host": tasks.hosts[task], "pid": os.getpid()}
        limit_s, start_s = _STALL * launch.collective_timeout_s, _START_STALL * launch.start_timeout_s
        sender = Sender(address, task, stall_s=limit_s, start_s=start_s, lost_s=limit_s, on_lost=_end_process)
        report = Reporter(sender, me, secret, tasks, own_executor(tasks.executors[task]), waits_for_rows=has_source)
        report({"kind": "started"})
        output = _open_output(report, me, launch, has_log=has_log)
        try:
            with (
                _reported_exit(sender, output, report),
                crashes_reported(address, task),
                ended_with_rank(),
                applied({**env, **run_env, RESTARTS: str(attempt.number)}),
            ):
                check_versions(driver, versions(), me["host"])
                tasks.check(launch.num_ranks)
                rows = {"rows": _task_input(batches, task)} if has_source else {}
                fn, args, kwargs = payload.unpack_call(packed)
                report({"kind": "called"})
                done: RankResult = fn(*args, report=report, **kwargs, **rows)
                result = payload.pack_result(done.result, result_limit_bytes)
        except BaseException as error:
            last_lines = _close_output(output)
            is_shown = sender.is_connected or bool(launch.log_dir)
            failure = describe(error, {**report.about(), "task": task}, last_lines, is_shown=is_shown)
            _end_with(failure, sender)
            raise failed_in_task(failure) from error
        last_lines = _close_output(output)
        sender.send({"kind": "done"})
        sender.close()
        # The driver has the output already, if this rank could reach it, or a file.
        is_wanted = not sender.is_connected and not launch.log_dir and _is_wanted(launch, done.rank)
        # Libraries keep what they have read from variables: a worker that had some is not used again.
        if not has_source and is_clean() and not env:
            _consume(batches)
        yield _as_batch(done, result, last_lines if is_wanted else [])

    return run_rank


def _consume(batches: Iterator[pa.RecordBatch]) -> None:
    """Reads the input of a task to its end, so that Spark uses this Python worker, which has imported torch, again.

    It ends a worker whose input was not read. That is used for a worker in which a function has left something.
    """
    for _ in batches:
        pass


def _task_input(batches: Iterator[pa.RecordBatch], task: int) -> TaskInput:
    folders = local_folders()  # with several disks, the tasks are spread over them
    return TaskInput(batches, task, folders[task % len(folders)], outliving_env())


def _as_batch(done: RankResult, result: bytes, lines: list[tuple[str, str]]) -> pa.RecordBatch:
    """Returns the row of a rank, with the columns of `SCHEMA`."""
    return pa.RecordBatch.from_pydict(
        {
            "rank": pa.array([done.rank], pa.int32()),
            "result": pa.array([result], pa.binary()),
            "refused": pa.array([done.refused], pa.string()),
            "output": pa.array([json.dumps(lines)], pa.string()),
        }
    )


def _end_with(failure: Mapping[str, Any], sender: Sender) -> None:
    """Reports a failure to the driver, and waits for the driver to end this process.

    The driver cancels the job, which kills this process without an error in Spark's log. If the driver does not, it
    cannot reach this host any more, and the process ends itself. Returns only if the driver was never reached.
    """
    sender.send({"kind": "failed", **failure})
    sender.close()
    if sender.is_connected:
        time.sleep(_ABORTED_BY_DRIVER_WAIT_S)
        _end_process(f"it did not end the failed rank within {_ABORTED_BY_DRIVER_WAIT_S:g} s")
    elif failure["is_secondary"]:
        time.sleep(ROOT_CAUSE_WAIT_S)  # let the root cause reach Spark first


def _end_process(why: str) -> None:
    """Ends this process, which has lost the driver: other ranks may be at work in its place already."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"spark_dl: this rank ends, as it has lost the driver: {why}\n")
        sys.stderr.flush()
    time.sleep(_LAST_LINE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_wanted(launch: Launch, rank: int | None) -> bool:
    """Whether the output of a rank goes to the driver. A task that has no rank yet passes."""
    return launch.output == "all" or (launch.output == "rank0" and not rank)


def _open_output(report: Reporter, me: Mapping[str, Any], launch: Launch, *, has_log: bool) -> Output | None:
    """Starts to read the output of this process. `me` has its `rank` as soon as it is known."""
    if launch.output == "none" and has_log and not launch.log_dir:
        return None

    def send(event: Mapping[str, Any]) -> bool:
        return report(event) if _is_wanted(launch, me.get("rank")) else True

    def log_file() -> Path | None:
        return Path(launch.log_dir, f"rank-{me['rank']}.log") if launch.log_dir and "rank" in me else None

    return Output(send, log_file, has_log=has_log)


def _close_output(output: Output | None) -> list[tuple[str, str]]:
    if output is None:
        return []
    output.close()
    return output.tail()


@contextlib.contextmanager
def _reported_exit(sender: Sender, output: Output | None, report: Reporter) -> Iterator[None]:
    """Makes `os._exit` in the block a failure with its exit code, which nobody else would know."""
    exit_process, pid = os._exit, os.getpid()

    def report_and_exit(code: int) -> None:
        if os.getpid() == pid:  # not in a child
            _close_output(output)
            error = f"the function ended with exit code {code} (os._exit)"
            stack = "".join(traceback.format_stack())
            about = {**rank_state.place_now(), **report.about()}
            _end_with({**about, "error": error, "traceback": stack, "is_secondary": False}, sender)
        exit_process(code)

    os._exit = report_and_exit  # type: ignore[assignment]
    try:
        with line_buffered():
            yield
    finally:
        os._exit = exit_process


def local_folders() -> list[str]:
    """Returns the local folders of Spark on this host, at least one."""
    folders = [f for f in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if f and os.path.isdir(f)]
    return folders or [tempfile.gettempdir()]
