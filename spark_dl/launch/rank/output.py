"""Standard output and standard error of a rank, on their way to the driver.

The file descriptors of the process are replaced by pipes, so that the output of libraries and child processes is read,
too. A thread reads the pipes, passes everything on to the executor's own log, and sends whole lines to the driver. A
driver that ranks cannot reach reads them from the files of `launch.log_dir`, or gets the last lines at the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from spark_dl.storage import local_files

Event = Mapping[str, Any]

_STREAMS = {1: "stdout", 2: "stderr"}
_READ_BYTES = 1 << 16
_LINE_BYTES = 1 << 16
"""A longer line is cut into several, which end and begin with `...`."""
_KEPT_BYTES = 1 << 16
"""How much of the end of the output is kept in memory."""
_PIPE_BYTES = 1 << 20
_LINES_WITHOUT_FILE = 1000
_DRAIN_S = 1.0
_TOGETHER_S = 0.02
"""How long output is collected before it is read: fewer events, and a crash's own words do not wake this thread while
faulthandler walks the stacks of all threads, which it does without stopping them: a stack that moves ends its walk."""


class Output:
    """Reads what this process and its children write, while it is open. Called on a rank.

    Args:
        send: sends an event to the driver; returns False if the event was dropped.
        log_file: returns the path of a file for the output as well, as soon as it is known; None until then.
        has_log: whether the output also goes where it would go without this object, the executor's log.
    """

    def __init__(
        self,
        send: Callable[[Event], bool],
        log_file: Callable[[], Path | None] = lambda: None,
        *,
        has_log: bool = True,
    ):
        self._send, self._log_file, self._has_log = send, log_file, has_log
        self._file: Any = None
        self._not_written: list[bytes] = []
        """Lines for the file, until its path is known."""
        self._rest = {"stdout": b"", "stderr": b""}
        self._kept: list[tuple[str, bytes]] = []
        self._kept_bytes = 0
        self._dropped = 0
        self._lock = threading.Lock()
        self._saved = {fd: os.dup(fd) for fd in _STREAMS}
        self._pipes: dict[int, int] = {}
        self._wake = os.pipe()
        _flush()
        for fd in _STREAMS:
            read, write = os.pipe()
            os.set_blocking(read, False)
            with contextlib.suppress(OSError):  # a thread that holds the GIL must not wait for the reader, so soon
                fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            os.dup2(write, fd)
            os.close(write)
            self._pipes[read] = fd
        self._open_pipes = set(self._pipes)
        self._thread = threading.Thread(target=self._work, name="spark_dl output", daemon=True)
        self._thread.start()

    def tail(self) -> list[tuple[str, str]]:
        """Returns the last lines, each with its stream, `stdout` or `stderr`, in the order in which they were read."""
        with self._lock:
            return [(stream, line.decode(errors="replace")) for stream, line in self._kept]

    def close(self) -> None:
        """Restores the file descriptors, and sends what was written. Children may go on writing, which is lost."""
        _flush()
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)
        os.write(self._wake[1], b"x")
        self._thread.join(_DRAIN_S)
        if self._thread.is_alive():  # a full log of the executor blocks it, and it still uses its descriptors
            return
        for fd in (*self._saved.values(), *self._pipes, *self._wake):
            os.close(fd)
        if self._file is not None:
            self._file.close()

    def _work(self) -> None:
        is_open = True
        while is_open:
            ready, _, _ = select.select([*self._open_pipes, self._wake[0]], [], [])
            is_open = self._wake[0] not in ready and not select.select([self._wake[0]], [], [], _TOGETHER_S)[0]
            for pipe in list(self._open_pipes):
                self._drain(pipe)
        for stream, rest in self._rest.items():
            if rest:
                self._pass_on(stream, [rest])

    def _drain(self, pipe: int) -> None:
        """Reads what a pipe has."""
        fd = self._pipes[pipe]
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(pipe, _READ_BYTES):
                if self._has_log:
                    with contextlib.suppress(OSError):  # the log is closed or full
                        os.write(self._saved[fd], chunk)
                *lines, rest = (self._rest[_STREAMS[fd]] + chunk).split(b"\n")
                while len(rest) > _LINE_BYTES:
                    ends = (end for end in range(_LINE_BYTES, _LINE_BYTES - 4, -1) if rest[end] & 0xC0 != 0x80)
                    end = next(ends, _LINE_BYTES)  # between two characters
                    lines.append(rest[:end] + b" ...")
                    rest = b"... " + rest[end:]
                self._rest[_STREAMS[fd]] = rest
                if lines:
                    self._pass_on(_STREAMS[fd], lines)
            self._open_pipes.discard(pipe)  # its end: all writers have closed it

    def _pass_on(self, stream: str, lines: list[bytes]) -> None:
        # What a progress bar has overwritten in its line is not of interest.
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        with self._lock:
            for line in shown:
                self._kept.append((stream, line))
                self._kept_bytes += len(line)
            while self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= len(self._kept.pop(0)[1])
        self._write(stream, shown)
        texts = [line.decode(errors="replace") for line in shown]
        if self._dropped:
            texts.insert(0, f"... {self._dropped} lines were dropped: the driver reads them too slowly")
        is_sent = self._send({"kind": "output", "stream": stream, "lines": texts})
        self._dropped = 0 if is_sent else self._dropped + len(lines)

    def _write(self, stream: str, lines: list[bytes]) -> None:
        """Writes lines to the file. Without it, the driver gets the output, or its end, all the same."""
        self._not_written += [b"%s: %s\n" % (stream.encode(), line) for line in lines]
        path = self._log_file()
        if path is None:
            del self._not_written[:-_LINES_WITHOUT_FILE]
            return
        with contextlib.suppress(OSError):
            if self._file is None:
                local_files.make_folder(str(path.parent))
                self._file = local_files.append(str(path), buffering=0)  # closed by `close`
            self._file.write(b"".join(self._not_written))
        self._not_written.clear()


@contextlib.contextmanager
def line_buffered() -> Iterator[None]:
    """Makes Python write each line of the standard streams at once, as in a terminal, in the block."""
    streams = [s for s in (sys.stdout, sys.stderr) if hasattr(s, "reconfigure")]
    before = [s.line_buffering for s in streams]
    for stream in streams:
        stream.reconfigure(line_buffering=True)
    try:
        yield
    finally:
        for stream, is_buffered in zip(streams, before, strict=True):
            stream.reconfigure(line_buffering=is_buffered)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
