"""Profiles of the steps of one rank, with `torch.profiler`, as traces that Perfetto and TensorBoard open."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from spark_dl import storage
from spark_dl.rundir.folder import PROFILE, TRACE
from spark_dl.spec import Run
from spark_dl.storage.owner import temporary_prefix
from spark_dl.world import World

_log = logging.getLogger("spark_dl")

_WARMUP_STEPS = 1
"""Steps before the first one during which the profiler runs and records nothing, as its start is slow."""


class StepProfile:
    """Records the steps of `track.profile_steps` on one rank, and writes one trace.

    In the trace, `step <n>` is a step, with its number in the run, and `wait for data` the time before it.
    """

    def __init__(self, run: Run, world: World, first_step: int):
        """first_step: number of steps that are done already."""
        assert run.config.track.profile_steps is not None
        self._first, self._last = run.config.track.profile_steps
        self._url = storage.within(run.run_dir, PROFILE, TRACE.format(world.rank))
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if world.device.type == "cuda" else [])]
        self._step = first_step
        self._profiler: Any = None

    def steps(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yields the batches of an epoch, and records what the caller does with them."""
        try:
            while True:
                if self._profiler is None and self._first - _WARMUP_STEPS <= self._step + 1 <= self._last:
                    self._start()
                with record_function("wait for data"):
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
            storage.write_bytes(self._url, path.read_bytes())


def build_profile(run: Run, world: World, first_step: int) -> StepProfile | None:
    """Returns the profile of a rank; None if the settings do not select it, or its steps are done already."""
    track = run.config.track
    if track.profile_steps is None or track.profile_steps[1] <= first_step:
        return None
    return StepProfile(run, world, first_step) if not track.profile_ranks or world.rank in track.profile_ranks else None
