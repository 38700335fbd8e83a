"""The rows of the mini-batches that a trainer is given: mostly one after another, of its own part."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from spark_dl.baselines.servers.roles import Roles
from spark_dl.data.load.build import BatchLoader, build_train_loader
from spark_dl.spec import Batch, Run


class MiniBatches:
    """Reads them with one loader at a time, so that the memory is that of one."""

    def __init__(self, run: Run, roles: Roles, *, pin: bool):
        self._roles = roles
        self._build = functools.partial(build_train_loader, run.train, run.spec, run.config, pin=pin)
        self._loader: BatchLoader
        self._part: tuple[int, int] | None = None  # and how many there are: of the loader
        self._steps: Any = None  # a generator
        self._at: tuple[int, int] | None = None  # epoch and step of the last mini-batch
        self._last: Sequence[Batch] = ()

    def loader_of(self, rank: int) -> BatchLoader:
        """A loader that is not read, for its plan and columns. A server has no part of its own."""
        trainers = self._roles.trainers
        return self._build(rank=min(rank, trainers[-1]), world_size=len(trainers))

    def read(self, epoch: int, num_parts: int, part: int, step: int) -> Sequence[Batch]:
        """The micro-batches of a mini-batch. One that is asked for again is there already."""
        if self._part != (part, num_parts):
            self.close()
            self._loader, self._part = self._build(rank=part, world_size=num_parts), (part, num_parts)
        if self._at != (epoch, step):
            if self._steps is None or self._at != (epoch, step - 1):
                self._stop_reading()
                self._steps = self._loader.epoch(epoch, step)
            self._last, self._at = next(self._steps).micro_batches, (epoch, step)
        return self._last

    def close(self) -> None:
        """Ends reading ahead."""
        self._stop_reading()
        self._part = self._at = None

    def _stop_reading(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None
