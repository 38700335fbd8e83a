"""The settings of a run: frozen dataclasses that check themselves on construction, on the driver, before any Spark job.

YAML files and dotted command-line overrides (`--train.lr=0.1`) become a `Config` through jsonargparse.
"""

import dataclasses
import datetime
import difflib
import importlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

LrScaling = Literal["none", "linear", "sqrt"]
Precision = Literal["float32", "bf16", "fp16"]
Interval = Literal["step", "epoch"]
Mode = Literal["min", "max"]
Device = Literal["auto", "cpu", "cuda"]
Ragged = Literal["pad", "offsets"]
Reader = Literal["spark_dl", "petastorm"]
Nulls = Literal["error", "drop", "fill"]
Nonfinite = Literal["error", "drop", "fill", "allow"]

ENCODINGS: Mapping[str, frozenset[str]] = {
    "number": frozenset(),
    "timestamp": frozenset({"unit"}),
    "duration": frozenset({"unit"}),
    "decimal": frozenset(),
    "float": frozenset(),
    "vocabulary": frozenset({"min_count", "max_size", "values", "unknown"}),
    "hash": frozenset({"buckets"}),
    "bytes": frozenset(),
    "image": frozenset(),
}
"""What a column can be stored as (`as` in `data.encode`), and the further settings of each."""
Storage = Literal["shared", "local"]
FILTER_OPS = ("==", "!=", "<", "<=", ">", ">=", "in", "not in")
Conditions = tuple[tuple[tuple[str, str, Any], ...], ...]
"""`data.filters` in full: a row passes if all [column, op, value] of any of these hold."""


def _check(ok: bool, key: str, expected: str, found: Any) -> None:
    if not ok:
        raise ValueError(f"{key}: expected {expected}, found {found!r}")


def _check_number(section: Any, name: str, low: float, *, above: bool = False, whole: bool = False) -> None:
    value, key = getattr(section, name), f"{type(section).__name__.lower()}.{name}"
    kind = "a whole number" if whole else "a finite number"
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    fits = number and math.isfinite(value) and (value > low if above else value >= low)
    _check(fits, key, f"{kind} {'>' if above else '>='} {low:g}", value)


def _check_choices(section: Any) -> None:
    """Every field whose type is a `Literal` holds one of its values."""
    for name, hint in get_type_hints(type(section)).items():
        choices = get_args(hint)
        if getattr(hint, "__origin__", None) is Literal:
            key = f"{type(section).__name__.lower()}.{name}"
            _check(getattr(section, name) in choices, key, f"one of {list(choices)}", getattr(section, name))


def _check_bool(section: Any, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _check(isinstance(value, bool), f"{type(section).__name__.lower()}.{name}", "true or false", value)


def _check_encoding(key: str, settings: Any) -> None:
    """One entry of `data.encode`. Whether it fits the column's type is checked when the type is known."""
    _check(isinstance(settings, Mapping), key, "a mapping such as {as: hash, buckets: 1000}", settings)
    chosen = settings.get("as")
    _check(chosen is None or chosen in list(ENCODINGS), f"{key}.as", f"one of {list(ENCODINGS)}", chosen)
    known = ["as", "ragged", *(ENCODINGS[chosen] if chosen else ())]
    for name in settings:
        near = suggestion(str(name), known)
        _check(name in known, f"{key}.{name}", f"settings of as: {chosen}{near}", settings[name])
    _check(isinstance(settings.get("ragged", False), bool), f"{key}.ragged", "true or false", settings.get("ragged"))
    units = ["D", "s", "ms", "us", "ns"]
    _check(settings.get("unit", "us") in units, f"{key}.unit", f"one of {units}", settings.get("unit"))
    unknown = settings.get("unknown", "zero")
    _check(unknown in ("zero", "error"), f"{key}.unknown", "zero or error", unknown)
    _check(chosen != "hash" or "buckets" in settings, f"{key}.buckets", "the number of buckets", None)
    for name in ("buckets", "min_count", "max_size"):
        value = settings.get(name, 1)
        _check(type(value) is int and 1 <= value < 2**63, f"{key}.{name}", "a whole number >= 1", value)
    words = settings.get("values", ["word"])
    is_list = isinstance(words, Sequence) and not isinstance(words, str) and all(isinstance(w, str) for w in words)
    _check(is_list and 0 < len(words) == len({*words}), f"{key}.values", "a list of different words", words)


def _full_filters(filters: Any) -> Conditions:
    """`data.filters` as alternatives of conditions; one list of conditions is one alternative. Dates become texts."""
    form = "[column, op, value] (all must hold), or lists of such lists (any)"
    _check(_is_list(filters) and all(_is_list(f) and f for f in filters), "data.filters", f"a list of {form}", filters)
    alternatives = [filters] if filters and isinstance(filters[0][0], str) else filters
    for alternative in alternatives:
        for found in alternative:
            is_condition = _is_list(found) and len(found) == 3 and isinstance(found[0], str)
            _check(is_condition, "data.filters", f"a list of {form}", found)
    return tuple(tuple(_full_condition(*c) for c in alternative) for alternative in alternatives)


def _full_condition(column: str, op: Any, value: Any) -> tuple[str, str, Any]:
    key = f"data.filters: {column} {op}"
    _check(op in FILTER_OPS, f"data.filters: {column}", f"an operator of {list(FILTER_OPS)}", op)
    several = op in ("in", "not in")
    _check(not several or (_is_list(value) and bool(value)), key, "a list of values", value)
    values = [v.isoformat() if isinstance(v, datetime.date) else v for v in (value if several else [value])]
    for v in values:
        fits = isinstance(v, str | int) or (isinstance(v, float) and math.isfinite(v))
        _check(fits, key, "finite numbers, true, false, texts or dates (a null never passes)", v)
    return column, op, tuple(values) if several else values[0]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


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
    buckets: 1000}, text: {as: bytes}, photo: {as: image}, price: {as: float}, when: {as: timestamp, unit: ms}, clicks:
    {ragged: true}}`."""
    nulls: Nulls = "error"
    """What becomes of rows with a null, also inside an array: an error, or they are dropped, or filled from `fill`."""
    nonfinite: Nonfinite = "error"
    """What becomes of rows with NaN or Inf: as for nulls, or they are stored as they are (`allow`)."""
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
    num_streams: int = 16
    """Canonical streams of the plan: at least the number of ranks, best a multiple of it; divides the global batch."""
    shuffle: bool = True
    """Whether each epoch has an order of its own."""
    shuffle_window_rows: int = 65536
    """Rows that are shuffled together, shared out among the streams."""
    memory_mib: int = 512
    """Memory of each rank's loader, in MiB: open windows, reading ahead, batches that are ready. Where the shuffle
    window needs more than a quarter of it, the window is smaller; a row group for each stream is held in any case."""
    reader_threads: int = 2
    """Threads of each rank that read and decode."""
    prefetch_batches: int = 4
    """Batches that each rank has ready."""
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
        _check(is_list, "data.features", "a list of column names", self.features)
        object.__setattr__(self, "features", tuple(self.features))
        _check(len(self.features) > 0, "data.features", "at least one column name", self.features)
        for name in self.columns:
            _check(isinstance(name, str) and name != "", "data.features and data.label", "column names", name)
        _check(len(set(self.columns)) == len(self.columns), "data.features", "each column once", self.columns)
        _check_number(self, "validation_fraction", 0)
        _check(self.validation_fraction < 1, "data.validation_fraction", "a number < 1", self.validation_fraction)
        for name in ("rows_per_row_group", "rows_per_shard"):
            _check_number(self, name, 0, whole=True)
        for name in ("num_streams", "shuffle_window_rows", "memory_mib", "reader_threads", "prefetch_batches"):
            _check_number(self, name, 1, whole=True)
        _check_bool(self, "shuffle")
        _check_choices(self)
        _check(isinstance(self.encode, Mapping), "data.encode", "a mapping of columns to settings", self.encode)
        for name, settings in self.encode.items():
            _check_encoding(f"data.encode.{name}", settings)
        object.__setattr__(self, "filters", _full_filters(self.filters))
        _check(isinstance(self.fill, Mapping), "data.fill", "a mapping of columns to values", self.fill)
        for name, value in self.fill.items():
            fits = isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
            _check(fits, f"data.fill.{name}", "a finite number, true, false or a text", value)
        _check(
            isinstance(self.proportions, Mapping), "data.proportions", "a mapping of names to numbers", self.proportions
        )
        for name, share in self.proportions.items():
            is_number = isinstance(share, (int, float)) and not isinstance(share, bool) and math.isfinite(share)
            _check(is_number and share > 0, f"data.proportions.{name}", "a finite number > 0", share)
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
        _check_number(self, "cache_mib", 0, whole=True)
        is_path = self.cache_dir is None or (isinstance(self.cache_dir, str) and self.cache_dir.startswith("/"))
        _check(is_path, "data.cache_dir", "an absolute path on the local disk", self.cache_dir)
        is_url = self.store is None or (isinstance(self.store, str) and self.store != "")
        _check(is_url, "data.store", "a folder or URL", self.store)
        _check_number(self, "store_ttl_days", 0)
        _check(not self.cache_mib or bool(self.cache_dir), "data.cache_dir", "a folder for data.cache_mib", None)

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
        _check_number(self, "sequence_length", 0, whole=True)
        _check_number(self, "sequence_stride", 1, whole=True)
        for name in ("sequence_order", "sequence_group"):
            value = getattr(self, name)
            _check(value is None or (isinstance(value, str) and value != ""), f"data.{name}", "a column name", value)
        if self.sequence_max_gap is not None:
            _check_number(self, "sequence_max_gap", 0)
            _check(bool(self.sequence_order), "data.sequence_order", "a column for data.sequence_max_gap", None)
        if not self.sequence_length:
            for name in ("sequence_order", "sequence_group"):
                value = getattr(self, name)
                _check(value is None, f"data.{name}", "nothing without data.sequence_length", value)
            return
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
            _check_number(self, name, 1, whole=True)
        for name in ("warmup_steps", "seed"):
            _check_number(self, name, 0, whole=True)
        if self.max_steps is not None:
            _check_number(self, "max_steps", 1, whole=True)
        if self.clip_grad_norm is not None:
            _check_number(self, "clip_grad_norm", 0, above=True)
        _check_number(self, "lr", 0, above=True)
        _check_number(self, "early_stop_min_delta", 0)
        _check_choices(self)
        _check_class("train.optimizer", "torch.optim", "Optimizer", self.optimizer)
        for name in ("optimizer_args", "scheduler_args", "metrics"):
            value = getattr(self, name)
            _check(isinstance(value, Mapping), f"train.{name}", "a mapping of names to values", value)
        if self.scheduler is not None:
            _check_class("train.scheduler", "torch.optim.lr_scheduler", "LRScheduler", self.scheduler)
            plateau = self.scheduler == "ReduceLROnPlateau" and self.scheduler_interval == "step"
            _check(not plateau, "train.scheduler_interval", "epoch for ReduceLROnPlateau", self.scheduler_interval)
        for name, args in self.metrics.items():
            is_metric = isinstance(args, Mapping) and isinstance(args.get("class"), str)
            _check(is_metric, f"train.metrics.{name}", "{class: <torchmetrics class>, <its arguments>}", args)
            _check(name != "loss", "train.metrics", "another name than 'loss', which is always reported", name)
        known = ["loss", *self.metrics]
        if self.early_stop_metric is not None:
            _check(
                self.early_stop_metric in known, "train.early_stop_metric", f"one of {known}", self.early_stop_metric
            )


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How the ranks share the work of a step."""

    strategy: str = "ddp"
    """Name of the strategy; see `spark_dl.parallel`."""
    bucket_mib: float = 25.0
    """Size of the flat gradient buffers of one all-reduce, in MiB."""
    find_unused_parameters: bool = False
    """For models of which a step may not use all parameters."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same way."""

    def __post_init__(self) -> None:
        _check(isinstance(self.strategy, str), "parallel.strategy", "the name of a strategy", self.strategy)
        _check_number(self, "bucket_mib", 0, above=True)
        _check_bool(self, "find_unused_parameters", "static_graph")


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
    """Longest wait, in seconds, of one collective operation."""
    threads: int = 0
    """CPU threads of each rank; 0 leaves them as Spark set them (`spark.task.cpus`)."""

    def __post_init__(self) -> None:
        _check_number(self, "num_ranks", 1, whole=True)
        _check_number(self, "threads", 0, whole=True)
        for name in ("start_timeout_s", "collective_timeout_s"):
            _check_number(self, name, 0, above=True)
        _check_choices(self)


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
        _check_number(self, "every_steps", 0, whole=True)
        _check_number(self, "every_epochs", 1, whole=True)
        _check_number(self, "keep", 1, whole=True)


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

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars, as they are written to `config.yaml` and to checkpoints."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain


def _check_class(key: str, module: str, base: str, name: Any) -> None:
    """`name` is a public class of `module` that derives from its class `base`."""
    classes = vars(importlib.import_module(module))
    known = [n for n, c in classes.items() if isinstance(c, type) and issubclass(c, classes[base])]
    known = [n for n in known if n != base and not n.startswith("_")]
    if name not in known:
        raise ValueError(f"{key}: no class {name!r} in {module}{suggestion(str(name), known)}")


def suggestion(name: str, known: Sequence[str]) -> str:
    """The end of an error message for an unknown name: the nearest known one, or all of them when none is near."""
    by_lower = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else f"; known are {', '.join(sorted(known))}"


def config_keys() -> list[str]:
    """All dotted keys, such as `train.lr`."""
    sections = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    return [f"{s}.{f.name}" for s, cls in sections.items() for f in dataclasses.fields(cls)]  # type: ignore[arg-type]


def build_config(sections: Mapping[str, Any]) -> Config:
    """A `Config` from plain nested dicts, such as those of a YAML file; keys that are missing keep their defaults."""
    known = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    built: dict[str, Any] = {}
    for name, values in sections.items():
        if name not in known:
            raise ValueError(f"unknown config key {name!r}{suggestion(str(name), list(known))}")
        _check(isinstance(values, Mapping), name, "a mapping of keys to values", values)
        for key in values:
            if f"{name}.{key}" not in config_keys():
                raise ValueError(f"unknown config key '{name}.{key}'{suggestion(f'{name}.{key}', config_keys())}")
        built[name] = known[name](**values)  # type: ignore[operator, misc]
    return Config(**built)


def load_config(path: str | Path | None = None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """Reads a YAML file and applies dotted overrides, `["train.lr=0.1"]` or `{"train.lr": 0.1}`.

    Raises ValueError for an unknown key, naming the nearest one, and for a value that does not fit.
    """
    import jsonargparse

    pairs = overrides.items() if isinstance(overrides, Mapping) else [o.partition("=")[::2] for o in overrides]
    args = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in pairs]
    parser = jsonargparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Config, None)
    try:
        parsed = parser.parse_args(args if path is None else [f"--config={path}", *args]).as_dict()
    except jsonargparse.ArgumentError as error:
        raise ValueError(explain_parse_error(str(error), config_keys())) from None
    return build_config({name: section for name, section in parsed.items() if name != "config"})


def explain_parse_error(message: str, known: Sequence[str]) -> str:
    """The message of jsonargparse in one line, and, where it is about an unknown key, with the nearest known key."""
    group = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message)
    other = re.search(r"(?:[Uu]nrecognized arguments: --|Option ')([\w.]+)", message)
    key = ".".join(group.groups()) if group else other.group(1) if other else None
    if key is None:
        return re.sub(r"\s+", " ", message.replace('Parser key "', '"')).strip()
    nearest = suggestion(key, known)
    if key.count(".") == 0 and "mean" not in nearest:
        nearest = suggestion(key, sorted({k.split(".")[0] for k in known}))
    return f"unknown config key {key!r}{nearest}"
