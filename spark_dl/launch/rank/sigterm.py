"""What SIGTERM does to the process of a rank: it ends it, at once or, in a training, some seconds later.

Hosts that are taken away send SIGTERM to their processes, and kill what is left some time later. A training can save a
checkpoint in between.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from spark_dl.launch.failures.rank_state import PLANNED

_log = logging.getLogger("spark_dl")
_stacks_to: int | None = None
"""Descriptor of the file that gets the stacks of this process when SIGTERM ends it; None if nobody asks for them."""
_is_postponed = False
"""Whether this process goes on for a while after SIGTERM."""
_mask = threading.local()
"""Signals that a thread had blocked before it forks the process."""


class Notice:
    """Whether this process has got SIGTERM, and goes on for a while."""

    def __init__(self) -> None:
        self.received = False

    def take(self) -> None:
        """Notes a SIGTERM. The next one ends this process at once."""
        self.received = True
        _end_at_next()


@contextlib.contextmanager
def stacks_written(file: int) -> Iterator[None]:
    """Writes the stacks of all threads to a file, by its descriptor, when SIGTERM ends this process in the block."""
    global _stacks_to
    faulthandler.register(signal.SIGTERM, file, chain=True)
    _stacks_to = file
    try:
        yield
    finally:
        _stacks_to = None
        faulthandler.unregister(signal.SIGTERM)


@contextlib.contextmanager
def postponed(grace_s: float) -> Iterator[Notice]:
    """Lets this process go on after a first SIGTERM in the block, which the yielded notice then says.

    It is ended by SIGTERM `grace_s` later, if the block has not ended before, and by a second SIGTERM at once. Nothing
    changes with `grace_s` 0, outside the main thread, and in a program that handles SIGTERM, or other signals, itself.
    """
    notice = Notice()
    reader, writer = os.pipe()
    try:
        if grace_s and _take_over(notice, writer):
            with _watched(notice, reader, writer, grace_s):
                yield notice
        else:
            yield notice
    finally:
        os.close(reader)
        os.close(writer)


def end(report: Callable[[Mapping[str, Any]], Any]) -> NoReturn:
    """Ends this process by SIGTERM, after a checkpoint of all ranks.

    Args:
        report: of events to the driver, which first gets those that are queued.
    """
    getattr(report, "flush", lambda: None)()
    faulthandler.unregister(signal.SIGTERM)
    if _stacks_to is not None:
        os.write(_stacks_to, PLANNED.encode())
    signal.raise_signal(signal.SIGTERM)
    raise AssertionError("SIGTERM has not ended this process")


def _take_over(notice: Notice, writer: int) -> bool:
    """Lets SIGTERM do nothing but `Notice.take`. Returns whether this is possible.

    NOTE: Python calls the handler of a signal between two instructions of the main thread, which can be blocked in a
    collective operation for minutes. The number of the signal is written to the pipe at once.
    """
    global _is_postponed
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return False
    if _stacks_to is None:
        faulthandler.register(signal.SIGTERM, writer, chain=True)  # which keeps the default for `_end_at_next`
    _is_postponed = True
    signal.signal(signal.SIGTERM, lambda number, frame: notice.take())
    signal.siginterrupt(signal.SIGTERM, False)  # system calls of the step go on
    return True


@contextlib.contextmanager
def _watched(notice: Notice, reader: int, writer: int, grace_s: float) -> Iterator[None]:
    """Waits in a thread for SIGTERM in the block. Restores what SIGTERM does after it."""
    global _is_postponed
    over = threading.Event()
    args = (notice, reader, over, grace_s)
    thread = threading.Thread(target=_watch, args=args, name="spark_dl sigterm", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _end_at_next()
        signal.set_wakeup_fd(-1)
        _is_postponed = False
        over.set()
        os.write(writer, b"\0")
        thread.join()


def _watch(notice: Notice, reader: int, over: threading.Event, grace_s: float) -> None:
    while signal.SIGTERM not in os.read(reader, 64):
        if over.is_set():
            return
    if over.is_set():
        return
    notice.take()
    _log.warning(
        "this rank has got SIGTERM: it ends after a checkpoint at the next log line (train.log_every), or in %g s "
        "(launch.preemption_grace_s)", grace_s,
    )  # fmt: skip
    if not over.wait(grace_s):
        signal.raise_signal(signal.SIGTERM)


def _end_at_next() -> None:
    """Lets SIGTERM end this process at once again. Can be called in any thread.

    NOTE: `signal.signal` is for the main thread. faulthandler puts back the handler that was there before its own.
    """
    faulthandler.unregister(signal.SIGTERM)
    if _stacks_to is not None:
        faulthandler.register(signal.SIGTERM, _stacks_to, chain=True)


def _before_fork() -> None:
    """Lets a SIGTERM to the child wait until the child has forgotten what SIGTERM does to the rank."""
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _after_fork_in_child() -> None:
    """When a fork of the rank, such as a process of a pool, is terminated, it must not seem to be the rank."""
    global _is_postponed, _stacks_to
    if _is_postponed:
        _is_postponed = False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _stacks_to is not None:
        _stacks_to = None
        faulthandler.unregister(signal.SIGTERM)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
