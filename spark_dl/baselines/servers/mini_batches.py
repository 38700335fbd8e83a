"""Reads the rows of a trainer's mini-batches, which are mostly consecutive steps of its part."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from spark_dl.baselines.servers.roles import Roles
from spark_dl.data.load.build import BatchLoader, build_train_loader
from spark_dl.data.load.row_names import name_rows
from spark_dl.spec import Batch, Run


class MiniBatches:
    """The mini-batches of a trainer. Only one loader is open at a time, to limit memory."""

    def __init__(self, run: Run, roles: Roles, *, pin: bool):
        self._roles = roles
        self._build = functools.partial(build_train_loader, run.train, run.spec, run.config, pin=pin)
        self._loader: BatchLoader
        self._part: tuple[int, int] | None = None  # part and number of parts of the loader
        self._steps: Any = None  # a generator
        self._at: tuple[int, int] | None = None  # epoch and step of the last mini-batch
        self._last: Sequence[Batch] = ()

    def loader_of(self, rank: int) -> BatchLoader:
        """Returns a loader for its plan and columns, not to be read. A server gets the last trainer's."""
        trainers = self._roles.trainers
        return self._build(rank=min(rank, trainers[-1]), world_size=len(trainers))

    def read(self, epoch: int, num_parts: int, part: int, step: int) -> Sequence[Batch]:
        """Returns the micro-batches of a mini-batch. The last one is kept, for a second call."""
        if self._part != (part, num_parts):
            self.close()
            self._loader, self._part = self._build(rank=part, world_size=num_parts), (part, num_parts)
        if self._at != (epoch, step):
            if self._steps is None or self._at != (epoch, step - 1):
                self._stop_reading()
                self._steps = self._loader.epoch(epoch, step)
            self._last, self._at = next(self._steps).micro_batches, (epoch, step)
        return self._last

    def name_rows(self, epoch: int, step: int) -> str:
        """Names the rows of the mini-batch that was read last, for messages."""
        return name_rows(self._loader, epoch, step)

    def close(self) -> None:
        """Stops reading ahead."""
        self._stop_reading()
        self._part = self._at = None

    def _stop_reading(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None
