"""The time between two log lines on every rank, split into data, compute, communication and wait; and profiles.

A rank measures, with a few calls of a clock per step, how long it waited for its loader, and how long it was blocked
in exchanges with other ranks. The rest of its time is computation. These numbers travel with the sum of losses, which
is reduced over the ranks for each log line, so they cost no message.

A blocked rank either waits for a slower rank or for the network. In each step, the rank that comes last to the
exchange waits for nobody: it is blocked for the shortest time, and only by the communication. So in each step the
shortest time of all ranks is communication, and what another rank is blocked for longer is wait. No clocks of ranks
are compared.

A profile of one rank's steps is made by `torch.profiler`, as a trace that Perfetto and TensorBoard open.
"""

from __future__ import annotations

import gzip
import json
import logging
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from spark_dl import storage
from spark_dl.rundir.metrics import MetricsLog
from spark_dl.spec import Run
from spark_dl.storage.owner import temporary_prefix
from spark_dl.world import World

if TYPE_CHECKING:
    from spark_dl.parallel.exchange_clock import StepClock
    from spark_dl.training.state import RunState

Times = npt.NDArray[np.float64]
"""[ranks, 2 + groups of steps]: seconds waited for data, seconds of all steps, and seconds blocked in each group."""
_MOST_VALUES = 4096
"""Largest number of values for groups of steps that travel with a log line. With more ranks, steps share a value."""

_log = logging.getLogger("spark_dl")

WAIT_FOR_DATA = "wait for data"
"""The span in a trace in which a rank waits for its loader."""
_WARMUP_STEPS = 1
"""Steps before the first one during which the profiler runs and records nothing, as its start is slow."""


class StepTimer:
    """Times of the steps since the last log line, of this rank, or of all ranks on a driver that trains for them."""

    def __init__(self, ranks: int | slice, num_ranks: int, *, log_every: int, clock: StepClock | None):
        """ranks: this rank, or `slice(None)` for all.

        Args:
            clock: None if the strategy does not measure exchanges. Then only the wait for data is known.
        """
        self._ranks, self._clock, self._every = ranks, clock, log_every
        # The same number for every line of a run, so that the sum of losses is always added in the same order.
        self._groups = num_groups(num_ranks, log_every) if clock is not None else 0
        self._values = np.zeros(1 + num_ranks * (2 + self._groups))
        self._times: Times = self._values[1:].reshape(num_ranks, 2 + self._groups)
        self.reset()

    def reset(self, at: float | None = None) -> None:
        """Begins a new interval. at: its start on `time.perf_counter`, by default now."""
        self._start = time.perf_counter() if at is None else at
        self.data_s = 0.0
        self.rows = 0
        self._steps = 0
        self._times[:] = 0.0

    def timed(self, batches: Any) -> Any:
        """Yields from an iterator, and adds the time spent waiting for it to `data_s`."""
        iterator = iter(batches)
        try:
            while True:
                start = time.perf_counter()
                try:
                    item = next(iterator)
                except StopIteration:
                    return
                self.data_s += time.perf_counter() - start
                yield item
        finally:
            iterator.close()

    def end_step(self) -> None:
        """Counts the exchanges of a step."""
        if self._clock is not None:
            data_s, blocked_s = self._clock.take_step()
            self._times[self._ranks, 0] += data_s
            self._times[self._ranks, 2 + self._steps * self._groups // self._every] += blocked_s
        self._steps += 1

    def with_losses(self, losses: Tensor, *, must_end: bool = False) -> Tensor:
        """Returns a vector whose sum over the ranks has the sum of losses, the number of ranks that must end, and then
        the times of all ranks.

        Args:
            losses: float64 scalar.
            must_end: whether this rank must end. Called once for each interval.
        """
        self._times[self._ranks, 0] += self.data_s
        self._times[self._ranks, 1] = self.seconds_until(time.perf_counter())
        self._values[0] = must_end
        return torch.cat([losses.reshape(1), torch.from_numpy(self._values).to(losses.device)])

    def times_of(self, values: Tensor) -> Times:
        """Returns the times in a reduced vector of `with_losses`."""
        times: Times = values[2:].numpy(force=True).reshape(self._times.shape)
        return times

    def seconds_until(self, now: float) -> float:
        """Returns the duration of the interval until `now` on `time.perf_counter`."""
        return now - self._start


class StepLog:
    """The steps of one rank since the last log line, and the lines about them."""

    def __init__(self, log: MetricsLog, timer: StepTimer, state: RunState, *, total_steps: int, device: torch.device):
        """total_steps: number of steps of the run, which every line has."""
        self._log, self._timer, self._state, self._total_steps = log, timer, state, total_steps
        self.losses = torch.zeros((), dtype=torch.float64, device=device)
        """Sum of this rank's losses."""
        self.rows = 0
        """True rows of these steps, on all ranks."""
        self.lr = 0.0
        """Learning rate of the last step."""

    def add(self, loss: Tensor | float, rows: int) -> None:
        """Counts a step, and its rows in the progress. loss: sum over this rank's rows. rows: of all ranks."""
        progress = self._state.progress
        self.losses += loss
        progress.rows += rows
        progress.epoch_rows += rows
        self.rows += rows
        self._timer.rows += rows

    def forget(self) -> None:
        """Forgets the steps since the last line."""
        self.losses.zero_()
        self.rows = 0

    def write(self, kind: str, **values: Any) -> None:
        """Writes a line with the position of the run."""
        progress = self._state.progress
        self._log.write(kind, epoch=progress.epoch, step=progress.global_step, steps=self._total_steps, **values)

    def write_steps(self, total: float, times: Times | None = None, **more: Any) -> None:
        """Writes the line of these steps, and begins the next interval.

        Args:
            total: the sum of their losses on all ranks.
            times: those of all ranks.
            more: further values.
        """
        timer, rows, now = self._timer, self.rows, time.perf_counter()
        seconds = timer.seconds_until(now)
        self._state.progress.loss_sum += total
        self.forget()
        if times is not None and self._log.writes:
            more |= split_times(times, seconds)
        rate, data_s = timer.rows / max(seconds, 1e-9), timer.data_s if times is None else float(times[0, 0])
        self.write("step", loss=total / rows, lr=self.lr, rows_per_s=rate, data_s=data_s, seconds=seconds, **more)
        timer.reset(now)


def num_groups(num_ranks: int, log_every: int) -> int:
    """Returns how many values a rank sends for the steps of an interval; neighboring steps may share one."""
    return min(log_every, max(1, _MOST_VALUES // num_ranks))


def split_times(times: Times, seconds: float) -> dict[str, Any]:
    """Returns the fields of a log line: `ranks`, with the seconds of each rank in lists, and `communication_s`.

    The parts of a rank add up to `seconds`, or to more if the rank began the interval earlier than the one that logs.
    Without groups of steps, only `data_s` is known.

    Args:
        times: of all ranks. # [ranks, 2 + groups]
        seconds: duration of the interval on the rank that logs, with the reduction of the losses at its end.
    """
    data_s, steps_s, blocked = times[:, 0], times[:, 1], times[:, 2:]
    if not blocked.shape[1]:
        return {"ranks": {"data_s": _rounded(data_s)}}
    if len(times) == 1:  # there is no other rank to reduce the losses with
        steps_s = np.array([seconds])
    last = np.maximum(seconds - steps_s, 0.0)  # in the reduction of the losses, which is an exchange, too
    blocked = np.column_stack([blocked, last])
    communication = blocked.min(axis=0)
    wait_s = (blocked - communication).sum(axis=1)
    compute_s = np.maximum(steps_s - data_s - times[:, 2:].sum(axis=1), 0.0)
    ranks = {"data_s": _rounded(data_s), "compute_s": _rounded(compute_s), "wait_s": _rounded(wait_s)}
    return {"ranks": ranks, "communication_s": round(float(communication.sum()), 6)}


def _rounded(values: Times) -> list[float]:
    """Microseconds are enough, and short in a file."""
    return [round(value, 6) for value in values.tolist()]


class StepProfile:
    """Records the steps of `track.profile_steps` on one rank, and writes one trace.

    In the trace, `step <n>` is a step, with its number in the run, and `wait for data` the time before it. A summary is
    written beside it (`profile_summary.summary_of`).
    """

    def __init__(self, run: Run, world: World, first_step: int):
        """first_step: number of steps that are done already."""
        assert run.config.track.profile_steps is not None
        self._first, self._last = run.config.track.profile_steps
        from spark_dl.rundir.run_folder import PROFILE, PROFILE_SUMMARY, TRACE

        self._url = storage.within(run.run_dir, PROFILE, TRACE.format(world.rank))
        self._summary_url = storage.within(run.run_dir, PROFILE, PROFILE_SUMMARY.format(world.rank))
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if world.device.type == "cuda" else [])]
        self._step = first_step
        self._profiler: Any = None

    def steps(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yields the batches of an epoch, and records what the caller does with them."""
        try:
            while True:
                if self._profiler is None and self._first - _WARMUP_STEPS <= self._step + 1 <= self._last:
                    self._start()
                with record_function(WAIT_FOR_DATA):
                    batch = next(batches, None)
                if batch is None:
                    return
                self._step += 1
                with record_function(f"step {self._step}"):
                    yield batch
                if self._step == self._last:
                    self.close()
                elif self._profiler is not None:
                    self._profiler.step()
        finally:
            batches.close()

    def close(self) -> None:
        """Ends the profile, and writes what has been recorded. Does nothing without a profile.

        An error is only a warning, as training can continue without the trace.
        """
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            try:
                profiler.stop()
            except Exception as error:
                _log.warning("track.profile_steps: cannot write the profile %s: %s", self._url, error)

    def _start(self) -> None:
        start = self._step + 1

        def action(step: int) -> ProfilerAction:
            """step: steps since the start of the profiler."""
            return ProfilerAction.WARMUP if start + step < self._first else ProfilerAction.RECORD

        self._profiler = profile(activities=self._activities, schedule=action, on_trace_ready=self._write)
        self._profiler.start()

    def _write(self, profiler: Any) -> None:
        with tempfile.TemporaryDirectory(prefix=temporary_prefix()) as folder:
            path = Path(folder) / storage.name(self._url)
            profiler.export_chrome_trace(str(path))
            content = path.read_bytes()
        storage.write_bytes(self._url, content)
        from spark_dl.training.profile_summary import summary_of  # which most runs need not load

        summary = summary_of(json.loads(gzip.decompress(content))["traceEvents"], WAIT_FOR_DATA)
        storage.write_bytes(self._summary_url, json.dumps(summary).encode())


def build_profile(run: Run, world: World, first_step: int) -> StepProfile | None:
    """Returns the profile of a rank; None if the settings do not select it, or its steps are done already."""
    track = run.config.track
    if track.profile_steps is None or track.profile_steps[1] <= first_step:
        return None
    return StepProfile(run, world, first_step) if not track.profile_ranks or world.rank in track.profile_ranks else None
