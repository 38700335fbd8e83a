"""The steps of an epoch where each rank is dealt rows of its own, and not the same number of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class PetastormPlan:
    """How many steps all ranks take, and with how many rows."""

    rank_rows: tuple[int, ...]
    """Rows that each rank is dealt."""
    global_batch_size: int
    every_row: bool
    """Whether the ranks go on until the last one has no row left; else all stop with the first one."""

    def rank_batch(self, rank: int) -> int:
        """Rows of a global batch that a rank gives."""
        ranks = len(self.rank_rows)
        return (rank + 1) * self.global_batch_size // ranks - rank * self.global_batch_size // ranks

    @cached_property
    def steps(self) -> int:
        """Steps of an epoch, the same for all ranks."""
        steps = [-(-rows // self.rank_batch(rank)) for rank, rows in enumerate(self.rank_rows)]
        return max(steps) if self.every_row else min(steps)

    @cached_property
    def rows(self) -> int:
        """Rows that are used in an epoch, over all ranks."""
        return self.rows_before(self.steps)

    @property
    def left_out(self) -> int:
        """Rows of the dataset that no step of an epoch uses."""
        return sum(self.rank_rows) - self.rows

    def batch_rows(self, step: int) -> int:
        """True rows of global batch `step`, over all ranks."""
        return self.rows_before(step + 1) - self.rows_before(step)

    def rows_before(self, step: int) -> int:
        """True rows of an epoch's global batches before `step`, over all ranks."""
        return sum(min(rows, step * self.rank_batch(rank)) for rank, rows in enumerate(self.rank_rows))
