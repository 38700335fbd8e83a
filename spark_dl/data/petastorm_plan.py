"""The steps of an epoch with Petastorm's readers, where ranks have different numbers of rows. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class PetastormPlan:
    """The number of steps of an epoch, and the rows of each step."""

    rank_rows: tuple[int, ...]
    """Rows of each rank."""
    global_batch_size: int
    every_row: bool
    """Whether the epoch ends when the last rank has no rows left; otherwise with the first rank."""

    def rank_batch(self, rank: int) -> int:
        """Returns the rows of a rank in a global batch."""
        ranks = len(self.rank_rows)
        return (rank + 1) * self.global_batch_size // ranks - rank * self.global_batch_size // ranks

    @cached_property
    def steps(self) -> int:
        """Number of steps of an epoch, the same for all ranks."""
        steps = [-(-rows // self.rank_batch(rank)) for rank, rows in enumerate(self.rank_rows)]
        return max(steps) if self.every_row else min(steps)

    @cached_property
    def rows(self) -> int:
        """Rows used in an epoch, over all ranks."""
        return self.rows_before(self.steps)

    @property
    def left_out(self) -> int:
        """Rows that are not used in an epoch."""
        return sum(self.rank_rows) - self.rows

    def batch_rows(self, step: int, epoch: int = 0) -> int:
        """Returns the true rows of global batch `step`, over all ranks."""
        return self.rows_before(step + 1) - self.rows_before(step)

    def rows_before(self, step: int, epoch: int = 0) -> int:
        """Returns the true rows of the global batches before `step`, over all ranks."""
        return sum(min(rows, step * self.rank_batch(rank)) for rank, rows in enumerate(self.rank_rows))
