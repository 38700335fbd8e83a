"""The section `launch`: how the barrier job starts, and its time limits."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from spark_dl.config.checks import check, check_bool, check_choices, check_number
from spark_dl.config.fields import named_settings, of_caller

Device = Literal["auto", "cpu", "cuda"]
RankOutput = Literal["all", "rank0", "none"]
_LONGEST_WAIT_S = 7 * 24 * 3600
"""Longest accepted time limit, a week. Much longer ones overflow the timers of gloo and of sockets."""


@named_settings
@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the barrier job starts, and its time limits.

    Example:
        >>> spark_dl.Launch(num_ranks=4, min_ranks=2, max_restarts=5)
    """

    MAY_CHANGE: ClassVar[bool] = True
    num_ranks: int = 1
    """Number of ranks. Each rank is a barrier task with one process on one device."""
    min_ranks: int | None = None
    """If the cluster has fewer slots than `num_ranks`, `train` and `evaluate` start as many ranks as there are slots,
    but at least `min_ranks`. When slots become free, training stops at the next checkpoint and restarts with more
    ranks. Null: exactly `num_ranks`. The order of rows does not depend on the number of ranks."""
    device: Device = "auto"
    """`auto` uses the GPU that Spark gives the task, else the CPU. With `cuda`, a missing GPU is an error; with a local
    master, where Spark gives no GPUs, ranks take them by their number."""
    gpus_per_rank: float | Literal["auto"] = "auto"
    """Number of GPUs that Spark assigns to each rank: a whole number, or a number below 1 for ranks that share a GPU.
    With 0.5, two ranks share one. `auto` uses `spark.task.resource.gpu.amount`. If that is not set and executors have
    GPUs, `auto` is 1, and with `dp_single_process` all GPUs of an executor. An amount that differs from that of the
    session needs Spark 4, and standalone, YARN or Kubernetes."""
    start_timeout_s: float = 120.0
    """Maximum wait, in seconds, for all ranks to start, and then for all ranks to connect. With `shards.storage: local`
    and `run_on_dataframe`, the wait for the start begins when the DataFrame has been computed, and the wait for the
    connection has no limit, as the ranks first get their rows."""
    collective_timeout_s: float = 300.0
    """Maximum duration, in seconds, of one collective operation, maximum wait for the storage to give the next rows,
    and maximum time without a heartbeat from a rank to the driver. A rank that the driver's host does not answer for
    most of this time ends itself. With `tree_reduce` and `shuffle_reduce`, the maximum duration of a step."""
    threads: int = 0
    """Number of CPU threads of each rank; 0 uses the number that Spark sets (`spark.task.cpus`)."""
    output: RankOutput = "all"
    """Which ranks' standard output and standard error the driver shows, each line prefixed by its rank."""
    log_dir: str = of_caller("")
    """Folder for the output of each rank, `rank-<n>.log`. Over Spark Connect, where ranks cannot reach the driver, the
    driver reads it from there while the ranks run, so all hosts need access to the folder; without it, the driver shows
    the last 64 KiB of each rank at the end. Training runs over Connect use the folder `logs` of a local `run_dir`."""
    max_restarts: int | Literal["auto"] = "auto"
    """How often ranks that have failed are started again: after a killed rank, a lost executor, a lost connection or an
    error of the system, but not after an error of the code or of the data, and not after the same error twice in the
    same step. A training continues from its last checkpoint. `auto` is 3 for `train`, `evaluate`, and `launch` with a
    `run_dir`, and 0 for `launch` without one and `run_on_dataframe`, which would begin from the start."""
    restart_wait_s: float = 1.0
    """Wait, in seconds, before the ranks are started again. It doubles with each restart, up to a minute. Up to 25 %
    more is added at random, so that drivers that fail together do not start again together."""
    exclude_host_after: int | None = 2
    """Number of failures of ranks on one host after which the next attempts leave the host out, if the other hosts have
    slots for `num_ranks`, or for `min_ranks`. Null: never. Not over Spark Connect, and not with rows that are streamed
    to the ranks (`shards.storage: local`, `run_on_dataframe`)."""
    preemption_grace_s: float = 25.0
    """How long a rank of a training goes on after SIGTERM, in seconds, so that all ranks can save a checkpoint at the
    next log line (`train.log_every`). It then ends in any case. 0 ends it at once. Kubernetes kills a process 30 s
    after SIGTERM."""
    allow_plaintext: bool = of_caller(False)
    """Whether ranks may send gradients to each other unencrypted although Spark encrypts what it sends
    (`spark.network.crypto.enabled`, `spark.ssl.enabled`). Set it if the network itself is private."""
    independent_ranks: bool = False
    """Whether the ranks of `launch` may train without a process group, each a model of its own. The default is an error
    at the first optimizer step, because a rank that trains without a process group is almost always a silent bug."""

    def __post_init__(self) -> None:
        check_number(self, "num_ranks", 1, whole=True)
        if self.min_ranks is not None:
            check_number(self, "min_ranks", 1, whole=True)
            few = self.min_ranks <= self.num_ranks
            check(few, "launch.min_ranks", f"at most launch.num_ranks ({self.num_ranks})", self.min_ranks)
        if self.exclude_host_after is not None:
            check_number(self, "exclude_host_after", 1, whole=True)
        check_number(self, "threads", 0, whole=True)
        if self.max_restarts != "auto":
            check_number(self, "max_restarts", 0, whole=True)
        for name in ("start_timeout_s", "collective_timeout_s", "restart_wait_s", "preemption_grace_s"):
            check_number(self, name, 0, above=name.endswith("timeout_s"))
            value = getattr(self, name)
            check(value <= _LONGEST_WAIT_S, f"launch.{name}", f"at most {_LONGEST_WAIT_S} s, a week", value)
        check(
            isinstance(self.log_dir, str) and "://" not in self.log_dir,
            "launch.log_dir", "the path of a folder that all hosts can access", self.log_dir,
        )  # fmt: skip
        if self.gpus_per_rank != "auto":
            check_number(self, "gpus_per_rank", 0)
            is_amount = self.gpus_per_rank <= 1 or self.gpus_per_rank % 1 == 0
            check(is_amount, "launch.gpus_per_rank", "a whole number, or a number below 1", self.gpus_per_rank)
            has_gpu = self.gpus_per_rank > 0 or self.device != "cuda"
            check(has_gpu, "launch.gpus_per_rank", "more than 0 with launch.device=cuda", self.gpus_per_rank)
        check_bool(self, "independent_ranks")
        check_bool(self, "allow_plaintext")
        check_choices(self)
