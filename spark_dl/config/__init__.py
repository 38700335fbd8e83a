"""The settings of a run: frozen dataclasses that check themselves when they are made, on the driver, before any job."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from spark_dl.config.checks import (
    check,
    check_bool,
    check_choices,
    check_class,
    check_encoding,
    check_number,
    full_filters,
)

LrScaling = Literal["none", "linear", "sqrt"]
Precision = Literal["float32", "bf16", "fp16"]
Interval = Literal["step", "epoch"]
Mode = Literal["min", "max"]
Device = Literal["auto", "cpu", "cuda"]
Ragged = Literal["pad", "offsets"]
Reader = Literal["spark_dl", "petastorm"]
Nulls = Literal["error", "drop", "fill"]
Nonfinite = Literal["error", "drop", "fill", "allow"]
Strategy = Literal[
    "ddp", "horovod", "local_sgd", "single", "data_parallel", "tree_reduce", "shuffle_reduce", "parameter_server"
]
AllReduce = Literal["backend", "naive", "reduce_broadcast", "tree", "ring", "halving_doubling"]
Compression = Literal["none", "fp16", "bf16", "powersgd", "threshold", "topk"]
ServerMode = Literal["sync", "k_sync", "k_batch_sync", "async", "k_async", "k_batch_async"]
Straggler = Literal["none", "constant", "exponential", "shifted"]
Storage = Literal["shared", "local"]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which columns are read, how they are stored as shards, and in which order they are dealt."""

    features: tuple[str, ...] = ("features",)
    """Columns that the model is called with, in this order."""
    label: str | None = "label"
    """Column that the loss is called with; null for a loss that reads the whole batch."""
    validation_fraction: float = 0.0
    """Part of the training rows, drawn at random, that validates instead. In [0, 1)."""
    rows_per_row_group: int = 0
    """Rows of each row group of the shards; 0 chooses about 4 MiB."""
    rows_per_shard: int = 0
    """Rows of each file, rounded up to whole row groups; 0 chooses about 64 MiB."""
    encode: dict[str, dict[str, Any]] = field(default_factory=dict)
    """How columns become numbers, where there is a choice: `{city: {as: vocabulary, min_count: 2}, name: {as: hash,
    buckets: 1000}, text: {as: bytes}, photo: {as: image, resize: [224, 224]}, price: {as: float}, when: {as: timestamp,
    unit: ms}, clicks: {ragged: true}}`."""
    nulls: Nulls = "error"
    """What becomes of rows with a null, also inside an array: an error, or they are dropped, or filled from `fill`."""
    nonfinite: Nonfinite = "error"
    """What becomes of rows with NaN or Inf: as for nulls, or they are kept as they are (`allow`)."""
    fill: dict[str, Any] = field(default_factory=dict)
    """Values by column that stand for nulls, NaN and Inf where they are filled: `{age: 0, city: unknown}`."""
    ragged: Ragged = "pad"
    """How ragged columns come in batches: `pad`, filled with zeros up to the longest row, with `name_mask`; `offsets`,
    all values end to end, with `name_offsets`."""
    proportions: dict[str, float] = field(default_factory=dict)
    """Share of each dataset in every global batch, by name, where several are mixed."""
    filters: Sequence[Any] = ()
    """Rows of a dataset that are read: `[[age, ">", 30], [city, in, [Rome, Oslo]]]`, of which all must hold, or a list
    of such lists, of which any. Operators: == != < <= > >= in, not in. A null never passes. Times are ISO 8601."""
    require_success: bool = True
    """Whether a folder of Parquet that Spark wrote needs the file `_SUCCESS`, which Spark writes there last."""
    num_streams: int = 16
    """Canonical streams of the plan: at least the number of ranks, best a multiple of it; divides the global batch."""
    shuffle: bool = True
    """Whether each epoch has an order of its own."""
    shuffle_window_rows: int = 65536
    """Rows that are shuffled together, shared out among the streams."""
    memory_mib: int = 512
    """Memory of each rank's loader, in MiB: open windows, reading ahead, batches that are ready. Where the shuffle
    window needs more than a quarter of it, the window is smaller; a row group for each stream is held in any case.
    Datasets that are mixed have equal shares of it."""
    reader_threads: int = 2
    """Threads of each rank that read and decode: at most, where memory_mib has no room for a row group of each."""
    prefetch_batches: int = 4
    """Batches that each rank has ready: fewer where they need more than a quarter of memory_mib, but at least one.
    Small ones are made up to 16 at a time."""
    sequence_length: int = 0
    """Rows of each sample, which follow each other in the dataset; columns are then [rows, sequence_length, ...]. 0: a
    sample is one row."""
    sequence_stride: int = 1
    """Rows from the start of a sample to that of the next one."""
    sequence_order: str | None = None
    """Column by which the rows are in order, such as a time; going back is an error."""
    sequence_group: str | None = None
    """Column such as a device's number, which is the same in all rows of a sample."""
    sequence_max_gap: float | None = None
    """Largest step of `sequence_order` from a row of a sample to the next one."""
    reader: Reader = "spark_dl"
    """What reads the shards; `petastorm` is the package of that name, to compare with, where it is installed."""
    storage: Storage = "shared"
    """Where the rows of a DataFrame lie as shards: `shared` in the run's folder, which all executors reach; `local` on
    the disk of each rank's host, dealt round-robin, for the time of the run."""
    cache_dir: str | None = None
    """Folder of each host's local disk that keeps copies of remote shards, for all ranks of the host and later runs."""
    cache_mib: int = 0
    """MiB that the copies may take up; 0 keeps none."""
    store: str | None = None
    """Folder or URL where the shards of DataFrames are kept by content, for other runs and users to find."""
    store_ttl_days: float = 30.0
    """Days without use after which `jobs/prepare.py --clean` deletes shards from the store."""

    def __post_init__(self) -> None:
        is_list = isinstance(self.features, Sequence) and not isinstance(self.features, str)
        check(is_list, "data.features", "a list of column names", self.features)
        object.__setattr__(self, "features", tuple(self.features))
        check(len(self.features) > 0, "data.features", "at least one column name", self.features)
        for name in self.columns:
            check(isinstance(name, str) and name != "", "data.features and data.label", "column names", name)
        check(len(set(self.columns)) == len(self.columns), "data.features", "each column once", self.columns)
        check_number(self, "validation_fraction", 0)
        check(self.validation_fraction < 1, "data.validation_fraction", "a number < 1", self.validation_fraction)
        for name in ("rows_per_row_group", "rows_per_shard"):
            check_number(self, name, 0, whole=True)
        for name in ("num_streams", "shuffle_window_rows", "memory_mib", "reader_threads", "prefetch_batches"):
            check_number(self, name, 1, whole=True)
        check_bool(self, "shuffle", "require_success")
        check_choices(self)
        check(isinstance(self.encode, Mapping), "data.encode", "a mapping of columns to settings", self.encode)
        for name, settings in self.encode.items():
            check_encoding(f"data.encode.{name}", settings)
        object.__setattr__(self, "filters", full_filters(self.filters))
        check(isinstance(self.fill, Mapping), "data.fill", "a mapping of columns to values", self.fill)
        for name, value in self.fill.items():
            fits = isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
            check(fits, f"data.fill.{name}", "a finite number, true, false or a text", value)
        if self.fill and "fill" not in (self.nulls, self.nonfinite):
            raise ValueError(
                f"data.fill: found {dict(self.fill)} while neither data.nulls nor data.nonfinite is fill, so that "
                "nothing is filled; set one of them to fill, or leave it out"
            )
        check(
            isinstance(self.proportions, Mapping), "data.proportions", "a mapping of names to numbers", self.proportions
        )
        for name, share in self.proportions.items():
            is_number = isinstance(share, (int, float)) and not isinstance(share, bool) and math.isfinite(share)
            check(is_number and share > 0, f"data.proportions.{name}", "a finite number > 0", share)
        for name, given in (("validation_fraction", self.validation_fraction), ("storage", self.storage != "shared")):
            if self.proportions and given:
                raise ValueError(f"data.{name}: not with data.proportions; pass datasets, and one for validation")
        if self.reader == "petastorm" and self.proportions:
            raise ValueError("data.reader: not petastorm with data.proportions")
        if self.reader == "petastorm" and self.validation_fraction:
            raise ValueError(
                "data.validation_fraction: not with data.reader=petastorm, which reads whole row groups; pass the "
                "validation rows as a dataset of their own"
            )
        if self.reader == "petastorm" and self.filters:
            raise ValueError("data.filters: not with data.reader=petastorm, which reads whole row groups")
        if self.storage == "local" and self.filters:
            raise ValueError(
                "data.filters: not with data.storage=local, which is for a DataFrame; filter that: df.filter(...)"
            )
        if self.reader == "petastorm" and self.storage == "local":
            raise ValueError("data.storage: not local with data.reader=petastorm, which deals row groups by itself")
        self._check_sequences()
        check_number(self, "cache_mib", 0, whole=True)
        is_path = self.cache_dir is None or (isinstance(self.cache_dir, str) and self.cache_dir.startswith("/"))
        check(is_path, "data.cache_dir", "an absolute path on the local disk", self.cache_dir)
        is_url = self.store is None or (isinstance(self.store, str) and self.store != "")
        check(is_url, "data.store", "a folder or URL", self.store)
        check_number(self, "store_ttl_days", 0)
        check(not self.cache_mib or bool(self.cache_dir), "data.cache_dir", "a folder for data.cache_mib", None)
        check(not self.cache_dir or self.cache_mib > 0, "data.cache_mib", "MiB > 0 for data.cache_dir", self.cache_mib)
        if self.reader == "petastorm" and self.cache_dir:
            raise ValueError("data.cache_dir: not with data.reader=petastorm, which reads the files where they lie")
        if self.storage == "local" and self.store:
            raise ValueError(
                "data.store: not with data.storage=local, which keeps the rows on the ranks' own disks; set "
                "data.storage to shared, or leave the store out"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read: the features, then the label."""
        return (*self.features, *([self.label] if self.label is not None else []))

    @property
    def stored_columns(self) -> tuple[str, ...]:
        """The columns that a dataset needs: those that are read, and those that sequences are found by."""
        found_by = [name for name in (self.sequence_order, self.sequence_group) if name is not None]
        return tuple(dict.fromkeys((*self.columns, *found_by)))

    def _check_sequences(self) -> None:
        check_number(self, "sequence_length", 0, whole=True)
        check_number(self, "sequence_stride", 1, whole=True)
        for name in ("sequence_order", "sequence_group"):
            value = getattr(self, name)
            check(value is None or (isinstance(value, str) and value != ""), f"data.{name}", "a column name", value)
        if self.sequence_max_gap is not None:
            check_number(self, "sequence_max_gap", 0)
        if not self.sequence_length:
            for name in ("sequence_stride", "sequence_order", "sequence_group", "sequence_max_gap"):
                value, usual = getattr(self, name), getattr(type(self), name)
                check(value == usual, f"data.{name}", f"{usual} without data.sequence_length; leave it out", value)
            return
        if self.sequence_max_gap is not None:
            check(bool(self.sequence_order), "data.sequence_order", "a column for data.sequence_max_gap", None)
        if self.validation_fraction:
            raise ValueError(
                "data.validation_fraction: not with data.sequence_length, as a row of several samples would train "
                "and validate; pass the validation rows as a dataset of their own"
            )
        if self.storage == "local":
            raise ValueError("data.storage: not local with data.sequence_length, as rows are dealt without their order")
        if self.filters:
            raise ValueError(
                "data.filters: not with data.sequence_length, as rows that are left out would join their neighbours; "
                "write the rows that are to be read as a dataset"
            )
        if self.reader == "petastorm":
            raise ValueError(
                "data.reader: not petastorm with data.sequence_length, which its reader here does not know"
            )


@dataclass(frozen=True, kw_only=True)
class Train:
    """The optimization: what a single process would do with the same global batches."""

    global_batch_size: int = 64
    """Rows of one optimizer step, over all ranks and micro-batches; does not change with the number of ranks."""
    accumulation_steps: int = 1
    """Micro-batches that each rank cuts its part of a global batch into."""
    epochs: int = 1
    """Passes over the data."""
    max_steps: int | None = None
    """Optimizer steps after which training ends, in the middle of an epoch if need be."""
    optimizer: str = "SGD"
    """Name of a class of `torch.optim`."""
    lr: float = 0.01
    """Learning rate, used as written unless `lr_scaling` says otherwise."""
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer, such as `{momentum: 0.9, nesterov: true}`."""
    scheduler: str | None = None
    """Name of a class of `torch.optim.lr_scheduler`."""
    scheduler_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the scheduler."""
    scheduler_interval: Interval = "epoch"
    """When the scheduler steps. `ReduceLROnPlateau` reads the validation loss and needs `epoch`."""
    lr_scaling: LrScaling = "none"
    """Multiply the learning rate by the number of ranks (`linear`) or its square root (`sqrt`)."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to its value."""
    clip_grad_norm: float | None = None
    """Largest L2 norm of the reduced gradient."""
    precision: Precision = "float32"
    """Arithmetic of forward and backward; `bf16` and `fp16` use autocast, the weights stay float32."""
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Metrics by name: `{accuracy: {class: MulticlassAccuracy, num_classes: 10}}`, classes of torchmetrics."""
    early_stop_metric: str | None = None
    """`loss` or a name of `metrics`, of the validation rows, that must go on improving."""
    early_stop_mode: Mode = "min"
    """Whether less (`min`) or more (`max`) of it is better."""
    early_stop_patience: int = 3
    """Epochs without an improvement after which all ranks stop."""
    early_stop_min_delta: float = 0.0
    """Least change that counts as an improvement."""
    seed: int = 0
    """Seed of the weights, the order of rows and the random numbers of each rank."""
    log_every: int = 10
    """Steps between two lines of metrics; the loss is summed over the ranks only then."""

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "accumulation_steps", "epochs", "early_stop_patience", "log_every"):
            check_number(self, name, 1, whole=True)
        for name in ("warmup_steps", "seed"):
            check_number(self, name, 0, whole=True)
        if self.max_steps is not None:
            check_number(self, "max_steps", 1, whole=True)
        if self.clip_grad_norm is not None:
            check_number(self, "clip_grad_norm", 0, above=True)
        check_number(self, "lr", 0, above=True)
        check_number(self, "early_stop_min_delta", 0)
        check_choices(self)
        check_class("train.optimizer", "torch.optim", "Optimizer", self.optimizer)
        calls_back = self.optimizer == "LBFGS"  # its step computes the loss again and again
        check(not calls_back, "train.optimizer", "an optimizer that takes one gradient per step", self.optimizer)
        for name in ("optimizer_args", "scheduler_args", "metrics"):
            value = getattr(self, name)
            check(isinstance(value, Mapping), f"train.{name}", "a mapping of names to values", value)
        if self.scheduler is not None:
            check_class("train.scheduler", "torch.optim.lr_scheduler", "LRScheduler", self.scheduler)
            plateau = self.scheduler == "ReduceLROnPlateau" and self.scheduler_interval == "step"
            check(not plateau, "train.scheduler_interval", "epoch for ReduceLROnPlateau", self.scheduler_interval)
        for name, args in self.metrics.items():
            is_metric = isinstance(args, Mapping) and isinstance(args.get("class"), str)
            check(is_metric, f"train.metrics.{name}", "{class: <torchmetrics class>, <its arguments>}", args)
            check(name != "loss", "train.metrics", "another name than 'loss', which is always reported", name)
        known = ["loss", *self.metrics]
        if self.early_stop_metric is not None:
            check(self.early_stop_metric in known, "train.early_stop_metric", f"one of {known}", self.early_stop_metric)


_OF_STRATEGY: Mapping[str, tuple[str, ...]] = {
    "bucket_mib": ("ddp", "horovod"),
    "find_unused_parameters": ("ddp",),
    "static_graph": ("ddp",),
    "all_reduce": ("ddp",),
    "compression": ("ddp", "horovod"),
    "sync_batchnorm": ("ddp", "local_sgd"),
    "adasum": ("horovod",),
    "sync_every_steps": ("local_sgd",),
    "sync_start_step": ("local_sgd",),
    "tree_depth": ("tree_reduce",),
    "num_servers": ("parameter_server",),
    "server_mode": ("parameter_server",),
    "server_k": ("parameter_server",),
    "max_staleness": ("parameter_server",),
    "staleness_lr": ("parameter_server",),
}
"""Settings of `Parallel` that only some strategies know."""
_ONE_RANK = ("single", "data_parallel")
BY_SPARK = ("tree_reduce", "shuffle_reduce")
"""Strategies in which Spark itself aggregates: the driver trains, with jobs of stateless tasks."""
_ERROR_FEEDBACK = ("powersgd", "threshold", "topk")
_OF_COMPRESSION: Mapping[str, tuple[str, ...]] = {
    "compression_start_step": _ERROR_FEEDBACK,
    "powersgd_rank": ("powersgd",),
    "threshold": ("threshold",),
    "topk_ratio": ("topk",),
}
"""Settings of `Parallel` that only some compressions know."""
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
"""Optimizers of `torch.optim` that treat each element of the weights by itself, so that servers can share them by
blocks. Not LBFGS, Adafactor and Muon, which look at whole matrices or all weights."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How the ranks share the work of a step."""

    strategy: Strategy = "ddp"
    """`ddp`, `horovod`, `local_sgd`; `single` and `data_parallel` for one rank; `tree_reduce` and `shuffle_reduce`, by
    which Spark itself aggregates; `parameter_server`."""
    bucket_mib: float | Literal["auto"] = 25.0
    """Size of the flat gradient buffers of one all-reduce, in MiB. `auto` measures at the start of a run how gradients
    come and how long all-reduces take, and picks the size with the shortest step; not for `compression`."""
    find_unused_parameters: bool = False
    """For models of which a step may not use all parameters."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same way."""
    sync_batchnorm: bool = False
    """Normalize by the mean and variance of the global batch, not of each rank's part of it."""
    all_reduce: AllReduce = "backend"
    """How gradients are summed: by the backend (Gloo, NCCL), or by one of `spark_dl.parallel.exchange.collectives`."""
    compression: Compression = "none"
    """What gradients are sent as. All but fp16 and bf16 keep what they leave out and add it to the next step's gradient
    (error feedback)."""
    compression_start_step: int = 2
    """Steps at the start of a run that send whole gradients, with powersgd, threshold and topk."""
    powersgd_rank: int = 1
    """Rank of the matrices that PowerSGD sends."""
    threshold: float = 0.001
    """What `threshold` sends of each element whose size is above it: this, with the sign. In the unit of the gradient
    of the mean loss over a rank's rows, whatever the number of ranks."""
    topk_ratio: float = 0.01
    """Part of the elements of each bucket, the largest ones, that `topk` sends. In (0, 1]."""
    adasum: bool = False
    """Horovod's adaptive sum in place of the mean."""
    sync_every_steps: int = 8
    """Steps after which `local_sgd` averages the weights of the ranks."""
    sync_start_step: int = 0
    """Steps at the start of a run in which `local_sgd` averages the gradients instead (post-local SGD)."""
    tree_depth: int = 2
    """Levels of `treeReduce`."""
    num_servers: int = 1
    """How many of the ranks are parameter servers; the others train."""
    server_mode: ServerMode = "sync"
    """When the servers update the weights, as in Dutta et al. 2018."""
    server_k: int = 0
    """Gradients that the servers wait for in the modes with a K; 0 is as many as there are ranks that train."""
    max_staleness: int | None = None
    """Most updates that a gradient may be behind the weights that it is added to; an older one is computed anew."""
    staleness_lr: bool = False
    """Divide the learning rate of a gradient by one more than the updates that it is behind."""
    straggler: Straggler = "none"
    """Delay that is added to every gradient computation, to see what slow ranks do: its distribution."""
    straggler_s: float = 0.0
    """Mean of the delay, in seconds; `shifted` waits half of it, then an exponential time of that mean."""
    straggler_ranks: tuple[int, ...] = ()
    """Ranks that are delayed; none named: all."""

    def __post_init__(self) -> None:
        if self.bucket_mib != "auto":
            check_number(self, "bucket_mib", 0, above=True)
        elif self.strategy == "horovod":
            raise ValueError(
                "parallel.bucket_mib: expected a size in MiB with horovod, found 'auto', which ddp alone knows"
            )
        elif self.compression != "none":
            raise ValueError(
                f"parallel.bucket_mib: expected a size in MiB with parallel.compression={self.compression!r}, found "
                "'auto', which measures all-reduces of whole gradients; set a size, or parallel.compression to none"
            )
        check_bool(self, "find_unused_parameters", "static_graph", "sync_batchnorm", "adasum", "staleness_lr")
        check_choices(self)
        for name in ("powersgd_rank", "sync_every_steps", "tree_depth", "num_servers"):
            check_number(self, name, 1, whole=True)
        for name in ("compression_start_step", "sync_start_step", "server_k"):
            check_number(self, name, 0, whole=True)
        check_number(self, "threshold", 0, above=True)
        check_number(self, "topk_ratio", 0, above=True)
        check(self.topk_ratio <= 1, "parallel.topk_ratio", "a number <= 1", self.topk_ratio)
        if self.max_staleness is not None:
            check_number(self, "max_staleness", 0, whole=True)
        check_number(self, "straggler_s", 0)
        check(
            (self.straggler_s > 0) == (self.straggler != "none"),
            "parallel.straggler_s",
            f"a delay > 0 with a parallel.straggler, 0 without (it is {self.straggler})",
            self.straggler_s,
        )
        is_list = isinstance(self.straggler_ranks, Sequence) and not isinstance(self.straggler_ranks, str)
        ranks = self.straggler_ranks if is_list else [None]
        check(
            all(type(r) is int and r >= 0 for r in ranks),
            "parallel.straggler_ranks",
            "a list of ranks",
            self.straggler_ranks,
        )
        object.__setattr__(self, "straggler_ranks", tuple(ranks))
        for choice, known in (("strategy", _OF_STRATEGY), ("compression", _OF_COMPRESSION)):
            found = getattr(self, choice)
            for name, choices in known.items():
                if found not in choices and getattr(self, name) != getattr(type(self), name):
                    raise ValueError(
                        f"parallel.{name}: known to parallel.{choice} {' and '.join(choices)} alone, found {found!r}; "
                        "leave it out, or choose one of these"
                    )
        if self.straggler_ranks and self.straggler == "none":
            raise ValueError(
                f"parallel.straggler_ranks: expected none with parallel.straggler='none', which delays no rank, found "
                f"{list(self.straggler_ranks)}; choose a parallel.straggler, or leave it out"
            )
        self._check_server_mode()
        if self.compression != "none" and self.all_reduce != "backend":
            raise ValueError(
                "parallel.all_reduce: only the backend with parallel.compression, which sends other things"
            )
        if self.strategy == "horovod" and self.compression not in ("none", "fp16"):
            raise ValueError(f"parallel.compression: expected none or fp16 with horovod, found {self.compression!r}")
        if self.compression in _ERROR_FEEDBACK and self.find_unused_parameters:
            raise ValueError(
                f"parallel.find_unused_parameters: not with parallel.compression={self.compression!r}: what it sends "
                "for a parameter that no rank used in that step would be lost; set it to false, or use fp16 or bf16"
            )

    @property
    def has_group(self) -> bool:
        """Whether the ranks form a process group."""
        return self.strategy not in _ONE_RANK

    def _check_server_mode(self) -> None:
        if self.server_k and self.server_mode in ("sync", "async"):
            raise ValueError(
                f"parallel.server_k: known to the modes with a K alone, found {self.server_k} with "
                f"parallel.server_mode={self.server_mode!r}"
            )
        for name, given in (("max_staleness", self.max_staleness is not None), ("staleness_lr", self.staleness_lr)):
            if given and self.server_mode in ("sync", "k_sync", "k_batch_sync"):
                raise ValueError(
                    f"parallel.{name}: for the asynchronous modes; with parallel.server_mode={self.server_mode!r} no "
                    "gradient is ever behind the weights"
                )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the barrier job starts and how long anything may wait."""

    num_ranks: int = 1
    """Ranks: barrier tasks, each one process on one device."""
    device: Device = "auto"
    """`auto` uses the GPU that Spark gives the task, else the CPU."""
    start_timeout_s: float = 120.0
    """Longest wait, in seconds, for all ranks to start and meet, once a DataFrame that streams in is computed."""
    collective_timeout_s: float = 300.0
    """Longest wait, in seconds, of one collective operation, and longest silence of a rank towards the driver; where
    Spark aggregates, the longest step."""
    threads: int = 0
    """CPU threads of each rank; 0 leaves them as Spark set them (`spark.task.cpus`)."""

    def __post_init__(self) -> None:
        check_number(self, "num_ranks", 1, whole=True)
        check_number(self, "threads", 0, whole=True)
        for name in ("start_timeout_s", "collective_timeout_s"):
            check_number(self, name, 0, above=True)
        check_choices(self)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the state of training is saved."""

    every_steps: int = 0
    """Steps between two checkpoints; 0 saves only by epochs."""
    every_epochs: int = 1
    """Epochs between two checkpoints. The end of training is always saved."""
    keep: int = 2
    """Checkpoints that are kept: the newest ones."""

    def __post_init__(self) -> None:
        check_number(self, "every_steps", 0, whole=True)
        check_number(self, "every_epochs", 1, whole=True)
        check_number(self, "keep", 1, whole=True)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    parallel: Parallel = field(default_factory=Parallel)
    launch: Launch = field(default_factory=Launch)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    def __post_init__(self) -> None:
        batch, streams, ranks = self.train.global_batch_size, self.data.num_streams, self.launch.num_ranks
        if batch % streams:
            near = max(streams, round(batch / streams) * streams)
            raise ValueError(
                f"train.global_batch_size: expected a multiple of data.num_streams={streams}, found {batch}; "
                f"the nearest is {near}"
            )
        if streams < ranks:
            raise ValueError(
                f"data.num_streams: expected at least launch.num_ranks={ranks}, found {streams}: each rank reads whole "
                f"streams; {ranks * -(-16 // ranks)} would do, with a train.global_batch_size that it divides"
            )
        if self.data.storage == "local" and streams % ranks:
            raise ValueError(
                f"data.num_streams: expected a multiple of launch.num_ranks={ranks} with data.storage='local', found "
                f"{streams}: the ranks have equal rows, and equal streams to read them by; "
                f"{-(-streams // ranks) * ranks} would do, with a train.global_batch_size that it divides"
            )
        if self.train.metrics and self.data.label is None:
            raise ValueError(
                f"train.metrics: {', '.join(self.train.metrics)} compare with data.label, which is null; name the "
                "column, or leave the metrics out: the loss is always reported"
            )
        strategy = self.parallel.strategy
        if strategy in _ONE_RANK and ranks != 1:
            raise ValueError(f"launch.num_ranks: expected 1 with parallel.strategy={strategy!r}, found {ranks}")
        if strategy in BY_SPARK and self.data.storage == "local":
            raise ValueError(
                f"data.storage: expected 'shared' with parallel.strategy={strategy!r}, found 'local': any executor may "
                "have the next task of a rank, and only one has its rows on its disk"
            )
        if strategy in BY_SPARK and self.data.reader == "petastorm":
            raise ValueError(
                f"data.reader: expected 'spark_dl' with parallel.strategy={strategy!r}, found 'petastorm': the next "
                "task of a rank may open its rows anew, and Petastorm's order does not repeat"
            )
        if strategy == "data_parallel" and self.data.ragged == "offsets":
            raise ValueError(
                "data.ragged: not offsets with parallel.strategy='data_parallel', which splits columns by rows; use pad"
            )
        if self.parallel.compression in _ERROR_FEEDBACK and self.train.precision == "fp16":
            raise ValueError(
                f"train.precision: not fp16 with parallel.compression={self.parallel.compression!r}, which adds what a "
                "step left out under another loss scale; use bf16 or float32"
            )
        if strategy == "parameter_server":
            ranks -= self.parallel.num_servers
            self._check_servers(ranks)
        if any(rank >= ranks for rank in self.parallel.straggler_ranks):
            raise ValueError(
                f"parallel.straggler_ranks: expected ranks below {ranks}, the number of those that compute gradients "
                f"with launch.num_ranks={self.launch.num_ranks}, found {list(self.parallel.straggler_ranks)}"
            )
        least = batch // streams * (streams // ranks)
        if self.train.accumulation_steps > least:
            raise ValueError(
                f"train.accumulation_steps: expected at most {least}, the rows that the rank with the fewest has of a "
                f"global batch of {batch} on {ranks} ranks, found {self.train.accumulation_steps}"
            )

        try:
            self.to_dict()
        except TypeError as error:
            raise ValueError(f"the settings must be plain numbers, strings, lists and mappings: {error}") from None

    def _check_servers(self, trainers: int) -> None:
        """What parameter servers and `trainers`, the ranks that train, can do."""
        parallel, data, train = self.parallel, self.data, self.train
        if trainers < 1:
            raise ValueError(
                f"parallel.num_servers: expected fewer than launch.num_ranks={self.launch.num_ranks}, so that some "
                f"ranks train, found {parallel.num_servers}"
            )
        if parallel.server_mode in ("k_sync", "k_async") and parallel.server_k > trainers:
            raise ValueError(
                f"parallel.server_k: expected at most {trainers}, the ranks that train, each of which gives one "
                f"gradient with parallel.server_mode={parallel.server_mode!r}, found {parallel.server_k}"
            )
        refused = [
            ("train.optimizer", train.optimizer not in ELEMENTWISE, f"one of {', '.join(ELEMENTWISE)}, as servers "
             f"share the weights by blocks, found {train.optimizer}"),
            ("train.clip_grad_norm", train.clip_grad_norm is not None and parallel.num_servers > 1,
             "none with several parallel.num_servers, none of which sees the whole gradient"),
            ("train.precision", train.precision == "fp16", "float32 or bf16, as each rank would scale fp16's losses "
             "by itself"),
            ("data.storage", data.storage == "local", "shared, as local storage deals rows to the servers' hosts too"),
            ("data.reader", data.reader == "petastorm", "spark_dl, as ranks take over parts of others"),
        ]  # fmt: skip
        for key, is_refused, expected in refused:
            if is_refused:
                raise ValueError(f"{key}: with parallel.strategy='parameter_server' expected {expected}")

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars, as they are written to `config.yaml` and to checkpoints."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain
