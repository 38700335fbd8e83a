"""The section `parallel`: what the settings of every strategy have in common. Each strategy's own are in its module."""

from dataclasses import dataclass
from typing import ClassVar

from spark_dl.config.conflicts import Conflict


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Settings of a strategy. A strategy derives a frozen dataclass of its own from this one.

    The class variables say what the strategy needs; the driver checks them before any Spark job.
    """

    SECTION: ClassVar[str] = "parallel"
    strategy: ClassVar[str] = ""
    """Name of the strategy in `parallel.strategy`."""
    has_group: ClassVar[bool] = True
    """Whether the ranks form a process group of torch."""
    one_rank: ClassVar[bool] = False
    """Whether it trains with one rank only."""
    by_spark: ClassVar[bool] = False
    """Whether Spark itself aggregates: the driver trains, with jobs of stateless tasks."""
    excludes: ClassVar[tuple[Conflict, ...]] = ()
    """Settings of other sections that the strategy does not support, beyond those in `conflicts.CONFLICTS`."""

    @property
    def servers(self) -> int:
        """Number of ranks that hold weights and do not train."""
        return 0
