"""The section `launch`: how the barrier job starts, and its time limits."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from spark_dl.config.checks import check, check_choices, check_number

Device = Literal["auto", "cpu", "cuda"]
_LONGEST_WAIT_S = 7 * 24 * 3600
"""Longest accepted time limit, a week. Much longer ones overflow the timers of gloo and of sockets."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the barrier job starts, and its time limits."""

    MAY_CHANGE: ClassVar[bool] = True
    num_ranks: int = 1
    """Number of ranks. Each rank is a barrier task with one process on one device."""
    device: Device = "auto"
    """`auto` uses the GPU that Spark gives the task, else the CPU."""
    start_timeout_s: float = 120.0
    """Maximum wait, in seconds, for all ranks to start and connect. With `shards.storage: local`
    and `run_on_dataframe`, the wait begins when the DataFrame has been computed."""
    collective_timeout_s: float = 300.0
    """Maximum duration, in seconds, of one collective operation, and maximum time without a heartbeat from a rank to
    the driver. With `tree_reduce` and `shuffle_reduce`, the maximum duration of a step."""
    threads: int = 0
    """Number of CPU threads of each rank; 0 uses the number that Spark sets (`spark.task.cpus`)."""

    def __post_init__(self) -> None:
        check_number(self, "num_ranks", 1, whole=True)
        check_number(self, "threads", 0, whole=True)
        for name in ("start_timeout_s", "collective_timeout_s"):
            check_number(self, name, 0, above=True)
            value = getattr(self, name)
            check(value <= _LONGEST_WAIT_S, f"launch.{name}", f"at most {_LONGEST_WAIT_S} s, a week", value)
        check_choices(self)
