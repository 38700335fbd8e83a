"""Settings of different sections that exclude each other, in one table, and numbers that must be consistent.

The checks within one section are in its `__post_init__`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_dl.config.checks import SettingError, suggestion

if TYPE_CHECKING:
    from spark_dl.config.config import Config

ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
"""Optimizers of `torch.optim` that update each element of the weights independently, so that servers can split the
weights into blocks. LBFGS, Adafactor and Muon use whole matrices or all weights."""

ABSOLUTE = ("OneCycleLR", "CyclicLR")
"""Schedulers whose rates do not depend on that of the optimizer."""


@dataclass(frozen=True)
class Conflict:
    """A row of the table."""

    key: str
    """Setting that the error names."""
    excluded: Callable[[Config], bool]
    """Whether a configuration has the conflict."""
    message: str
    """What was expected and found, why, and what to change. A format string with the configuration as `c`."""


def _local(c: Config) -> bool:
    return c.shards.storage == "local"


def _error_feedback(c: Config) -> bool:
    return getattr(c.parallel, "compression", "none") in ("powersgd", "threshold", "topk")


def _metrics(c: Config) -> list[Mapping[str, Any]]:
    return list(c.train.metrics.values())


def _shares_gpus(c: Config) -> bool:
    return c.launch.gpus_per_rank != "auto" and 0 < c.launch.gpus_per_rank < 1


def _own_all_reduce(c: Config) -> bool:
    return getattr(c.parallel, "all_reduce", "backend") != "backend"


def _served(c: Config) -> bool:
    return c.parallel.servers > 0


def _exchanges_in_micro_batches(c: Config) -> bool:
    """Whether ranks need equally many micro-batches: they exchange something in each, or plan it."""
    parallel = c.parallel
    is_set = any(getattr(parallel, name, False) for name in ("sync_batchnorm", "static_graph"))
    is_above_1 = any(getattr(parallel, name, 1) > 1 for name in ("pipeline", "experts"))
    counts = parallel.own_optimizer or parallel.planned  # such as Horovod, which counts backward passes
    return counts or is_set or is_above_1 or getattr(parallel, "zero_stage", 0) > 1


def _replaces_weights(c: Config) -> bool:
    return c.parallel.by_spark or _served(c)


def without_average(is_excluded: Callable[[Config], bool], expected: str) -> tuple[Conflict, ...]:
    """Returns conflicts with the averages of the weights. expected: what, and why"""

    def of(name: str) -> Conflict:
        return Conflict(
            f"train.{name}", lambda c: is_excluded(c) and getattr(c.train, name) is not None,
            f"{expected}, found {{c.train.{name}}}; use ddp",
        )  # fmt: skip

    return of("ema_decay"), of("swa_start")


CONFLICTS = (
    Conflict("data.sampling_weight", lambda c: c.data.sampling_weight is not None and bool(c.loader.proportions),
             "expected null with several datasets, whose rows are drawn by loader.proportions, found "
             "{c.data.sampling_weight!r}"),
    Conflict("data.sampling_weight", lambda c: c.data.sampling_weight is not None and c.sequences is not None,
             "expected null with sequences, whose samples overlap, found {c.data.sampling_weight!r}"),
    Conflict("data.sampling_weight", lambda c: c.data.sampling_weight is not None and _local(c),
             "expected null with shards.storage 'local', whose ranks know the weights of their own rows only, found "
             "{c.data.sampling_weight!r}; use 'shared'"),
    # several datasets
    Conflict("train.validation_fraction", lambda c: bool(c.loader.proportions and c.train.validation_fraction),
             "not supported with loader.proportions; pass the validation rows as a separate dataset"),
    Conflict("shards.storage", lambda c: bool(c.loader.proportions) and _local(c),
             "expected 'shared' with loader.proportions, found 'local'; write datasets and pass their URLs"),
    # lengths
    Conflict("train.accumulation_steps",
             lambda c: c.loader.max_tokens is not None and c.train.accumulation_steps > 1,
             "expected 1 with loader.max_tokens, which says how many micro-batches a rank needs in each step, found "
             "{c.train.accumulation_steps}; remove one of them"),
    Conflict("loader.max_tokens", lambda c: c.loader.max_tokens is not None and _exchanges_in_micro_batches(c),
             "expected null where all ranks need equally many micro-batches: with horovod and auto, a mesh with "
             "pipeline, experts or zero_stage 2 and 3, and sync_batchnorm or static_graph of ddp, found "
             "{c.loader.max_tokens}; use train.accumulation_steps"),
    # local storage
    Conflict("data.filters", lambda c: _local(c) and bool(c.data.filters),
             "not supported with shards.storage=local, which takes a DataFrame; filter the DataFrame: df.filter(...)"),
    Conflict("shards.store", lambda c: _local(c) and c.shards.store is not None,
             "not supported with shards.storage=local, which keeps rows on the local disks of the ranks; set "
             "shards.storage to shared, or remove shards.store"),
    # sequences
    Conflict("train.validation_fraction", lambda c: c.sequences is not None and bool(c.train.validation_fraction),
             "not supported with sequences, because a row could be in training and validation samples; pass the "
             "validation rows as a separate dataset"),
    Conflict("shards.storage", lambda c: c.sequences is not None and _local(c),
             "expected 'shared' with sequences, found 'local', which does not keep the order of rows"),
    Conflict("data.filters", lambda c: c.sequences is not None and bool(c.data.filters),
             "not supported with sequences, because a sample must not skip rows; filter the DataFrame "
             "before it is written"),
    Conflict("data.weight", lambda c: c.sequences is not None and c.data.weight is not None,
             "not supported with sequences, whose samples have several rows; return weighted losses from spec.loss"),
    # labels
    Conflict("train.metrics", lambda c: c.data.label is None and not all("label" in m for m in _metrics(c)),
             "need data.label, which is null; set data.label, or set `label` of each metric to one of data.labels"),
    # strategies
    Conflict("launch.num_ranks", lambda c: c.parallel.one_rank and c.launch.num_ranks != 1,
             "expected 1 with parallel.strategy={c.parallel.strategy!r}, found {c.launch.num_ranks}"),
    Conflict("launch.min_ranks", lambda c: c.launch.min_ranks is not None and _local(c),
             "expected null with shards.storage='local', found {c.launch.min_ranks}: each host has rows of its own"),
    Conflict("launch.min_ranks", lambda c: c.launch.min_ranks is not None and c.parallel.planned,
             "expected null with parallel.strategy={c.parallel.strategy!r}, found {c.launch.min_ranks}: the mesh is "
             "planned for one number of ranks"),
    Conflict("launch.gpus_per_rank", lambda c: c.parallel.by_spark and c.launch.gpus_per_rank != "auto",
             "expected 'auto' with parallel.strategy={c.parallel.strategy!r}, whose tasks get the GPUs of the "
             "session, found {c.launch.gpus_per_rank}; set spark.task.resource.gpu.amount"),
    Conflict("parallel.all_reduce", lambda c: _shares_gpus(c) and _own_all_reduce(c),
             "expected 'backend' with launch.gpus_per_rank below 1, as ranks that share a GPU use "
             "Gloo, which sends no messages between GPUs, found {c.parallel.all_reduce!r}"),
    Conflict("parallel.compression", lambda c: _shares_gpus(c) and _error_feedback(c),
             "expected none, fp16 or bf16 with launch.gpus_per_rank below 1, as ranks that share a "
             "GPU use Gloo, found {c.parallel.compression!r}"),
    Conflict("train.compile", lambda c: c.train.compile and (_replaces_weights(c) or c.parallel.all_gpus),
             "not supported with parallel.strategy={c.parallel.strategy!r}, which copies or replaces the weights of "
             "the model; set it to false, or use ddp, horovod, local_sgd or single"),
    Conflict("train.activation_checkpointing", lambda c: bool(c.train.activation_checkpointing) and c.parallel.by_spark,
             "expected none with parallel.strategy={c.parallel.strategy!r}, which compares exchanges, found "
             "{c.train.activation_checkpointing}; use ddp"),
    Conflict("train.precision", lambda c: c.train.precision == "bf16" and not c.parallel.takes_bf16,
             "expected float32 or bf16-mixed with another strategy than ddp, single, and mesh with zero_stage 3 and "
             "without a pipeline, tensor and expert ranks, found bf16"),
    Conflict("train.stochastic_rounding",
             lambda c: c.train.stochastic_rounding and not c.parallel.has_master_weights,
             "expected false with another strategy than ddp and single: the shards of a mesh are float32"),
    Conflict("train.offload_optimizer", lambda c: c.train.offload_optimizer and not c.parallel.has_master_weights,
             "expected false with another strategy than ddp and single; zero_stage 1 of mesh divides the state among "
             "the ranks"),
    Conflict("train.deterministic", lambda c: c.train.deterministic and c.parallel.by_spark,
             "expected false with parallel.strategy={c.parallel.strategy!r}, which compares exchanges; use ddp"),
    Conflict("train.random_by", lambda c: c.train.random_by == "row" and c.train.compile,
             "expected 'rank' with train.compile, whose kernels draw numbers of their own, found 'row'"),
    Conflict("train.random_by", lambda c: c.train.random_by == "row" and c.parallel.all_gpus,
             "expected 'rank' with parallel.strategy={c.parallel.strategy!r}, which splits batches inside the forward "
             "pass, found 'row'"),
    Conflict("train.channels_last", lambda c: c.train.channels_last and _replaces_weights(c),
             "not supported with parallel.strategy={c.parallel.strategy!r}, which replaces the weights of the model; "
             "set it to false, or use ddp, horovod, local_sgd or single"),
    Conflict("shards.storage", lambda c: c.parallel.by_spark and _local(c),
             "expected 'shared' with parallel.strategy={c.parallel.strategy!r}, found 'local': the next task "
             "of a rank can run on another executor, which does not have its rows"),
    Conflict("loader.ragged", lambda c: c.parallel.all_gpus and c.loader.ragged == "offsets",
             "expected 'pad' with parallel.strategy={c.parallel.strategy!r}, which splits columns by rows, found "
             "'offsets'"),
    Conflict("train.precision", lambda c: _error_feedback(c) and c.train.precision == "fp16-mixed",
             "expected bf16-mixed or float32 with parallel.compression 'powersgd', 'threshold' or 'topk', because "
             "error feedback needs a constant loss scale, found fp16-mixed"),
    Conflict("train.optimizer", lambda c: _served(c) and not {*c.train.optimizers} <= {*ELEMENTWISE},
             f"expected one of {', '.join(ELEMENTWISE)} with parallel.strategy={{c.parallel.strategy!r}}, whose "
             "servers split the weights into blocks, found {c.train.optimizers}"),
    Conflict("train.param_groups", lambda c: _served(c) and bool(c.train.param_groups),
             "expected none with parallel.strategy={c.parallel.strategy!r}, whose servers have blocks of the weights "
             "and not parameters with names; use ddp"),
    Conflict("train.param_groups", lambda c: c.parallel.own_optimizer and len(c.train.optimizers) > 1,
             "expected one optimizer with parallel.strategy={c.parallel.strategy!r}, which builds a new one of its "
             "class, found {c.train.optimizers}; use ddp"),
    Conflict("train.clip_grad_norm", lambda c: c.parallel.servers > 1 and c.train.clip_grad_norm is not None,
             "expected null with parallel.num_servers above 1, because no server has the whole gradient, found "
             "{c.train.clip_grad_norm}"),
    Conflict("train.precision", lambda c: _served(c) and c.train.precision == "fp16-mixed",
             "expected float32 or bf16-mixed with parallel.strategy={c.parallel.strategy!r}, where ranks would use "
             "different loss scales, found fp16-mixed"),
    Conflict("shards.storage", lambda c: _served(c) and _local(c),
             "expected 'shared' with parallel.strategy={c.parallel.strategy!r}, found 'local', which would also send "
             "rows to the servers, and they do not train"),
    Conflict("train.lr_scaling", lambda c: c.train.lr_scaling != "none" and c.train.scheduler in ABSOLUTE,
             "has no effect with OneCycleLR and CyclicLR, whose rates are absolute; set it to none, and max_lr in "
             "train.scheduler_args"),
    *without_average(_served, "expected null with parallel.strategy={c.parallel.strategy!r}, whose ranks have no "
                     "common step"),
    Conflict("checkpoint.weights", lambda c: c.checkpoint.weights == "trainable" and _served(c),
             "expected 'all' with parallel.strategy={c.parallel.strategy!r}, whose servers have blocks of the weights; "
             "use ddp"),
    Conflict("checkpoint.weights",
             lambda c: c.checkpoint.weights == "trainable" and c.train.init_from is not None,
             "expected 'all' with train.init_from, as the frozen weights are then not those of spec.build; load them "
             "in spec.build instead"),
    # NaN, Inf and replicas
    Conflict("train.on_nonfinite", lambda c: _served(c) and c.train.on_nonfinite != "raise",
             "expected 'raise' with parallel.strategy={c.parallel.strategy!r}, where other servers may have applied "
             "their part of a gradient already, found {c.train.on_nonfinite!r}"),
    Conflict("train.on_nonfinite", lambda c: _error_feedback(c) and c.train.on_nonfinite == "skip",
             "expected raise or rollback with parallel.compression 'powersgd', 'threshold' or 'topk', whose error "
             "feedback keeps a part of the gradient for later steps, found {c.train.on_nonfinite!r}"),
    Conflict("train.check_replicas_every", lambda c: _replaces_weights(c) and c.train.check_replicas_every > 0,
             "expected 0 with parallel.strategy={c.parallel.strategy!r}, whose ranks get the weights anew in each "
             "step, found {c.train.check_replicas_every}"),
    Conflict("track.profile_steps", lambda c: (c.parallel.by_spark or _served(c)) and c.track.profile_steps is not None,
             "expected null with parallel.strategy={c.parallel.strategy!r}, whose ranks do not take the steps of a "
             "run one by one, found {c.track.profile_steps}"),
)  # fmt: skip


def check_conflicts(config: Config) -> None:
    """Raises ValueError for the first conflict in the table, and for inconsistent numbers."""
    for conflict in (*CONFLICTS, *config.parallel.excludes):
        if conflict.excluded(config):
            raise SettingError(conflict.key, conflict.message.format(c=config))
    _check_metrics(config)
    _check_streams(config)
    size = config.loader.epoch_size
    if size is not None and not config.loader.proportions and config.data.sampling_weight is None:
        raise SettingError(
            "loader.epoch_size",
            "expected null without loader.proportions and data.sampling_weight, as one dataset has an epoch of its "
            f"own, found {size}",
        )
    _check_ranks(config)


def _check_metrics(config: Config) -> None:
    for name, args in config.train.metrics.items():
        if (label := args.get("label")) is not None and label not in config.data.columns:
            raise SettingError(
                f"train.metrics.{name}.label",
                f"no column {label!r} is read{suggestion(label, list(config.data.columns))}; add it to data.labels",
            )


def _check_streams(config: Config) -> None:
    batch, streams, ranks = config.train.global_batch_size, config.loader.num_streams, config.data_size
    if batch % streams:
        near = max(streams, round(batch / streams) * streams)
        raise SettingError(
            "train.global_batch_size",
            f"expected a multiple of loader.num_streams={streams}, found {batch}; the nearest is {near}",
        )
    if streams < ranks:
        raise SettingError(
            "loader.num_streams",
            f"expected at least {_ranks(config)}, found {streams}: each rank reads whole "
            f"streams; {ranks * -(-16 // ranks)} works, if train.global_batch_size is a multiple of it",
        )
    if config.shards.storage == "local" and streams % ranks:
        raise SettingError(
            "loader.num_streams",
            f"expected a multiple of {_ranks(config)} with shards.storage='local', found "
            f"{streams}: all ranks have the same number of streams; "
            f"{-(-streams // ranks) * ranks} works, if train.global_batch_size is a multiple of it",
        )


def _ranks(config: Config) -> str:
    ranks, data = config.launch.num_ranks, config.data_size
    return f"launch.num_ranks={ranks}" if ranks == data else f"{data}, the number of data ranks,"


def _check_ranks(config: Config) -> None:
    trainers = config.num_trainers
    if trainers < 1:
        raise SettingError(
            "parallel.num_servers",
            f"expected fewer than launch.num_ranks={config.launch.num_ranks}, because at "
            f"least one rank must train, found {config.parallel.servers}",
        )
    server_k = getattr(config.parallel, "server_k", 0)
    if server_k > trainers and getattr(config.parallel, "server_mode", "") in ("k_sync", "k_async"):
        raise SettingError(
            "parallel.server_k", f"expected at most {trainers}, the number of ranks that train, found {server_k}"
        )
    if any(rank >= trainers for rank in config.faults.straggler_ranks):
        raise SettingError(
            "faults.straggler_ranks",
            f"expected ranks below {trainers}, the number of ranks that train "
            f"with launch.num_ranks={config.launch.num_ranks}, found {list(config.faults.straggler_ranks)}",
        )
    if any(rank >= config.launch.num_ranks for rank in config.track.profile_ranks):
        raise SettingError(
            "track.profile_ranks",
            f"expected ranks below launch.num_ranks={config.launch.num_ranks}, found "
            f"{list(config.track.profile_ranks)}",
        )
    batch, streams = config.train.global_batch_size, config.loader.num_streams
    least = batch // streams * (streams // config.data_size)
    _check_micro_batches(config, {least, batch // streams * -(-streams // config.data_size)})
    if config.train.accumulation_steps > least:
        raise SettingError(
            "train.accumulation_steps",
            f"expected at most {least}, the smallest number of rows that a rank has "
            f"in a global batch of {batch} on {config.data_size} ranks, found {config.train.accumulation_steps}",
        )


def _check_micro_batches(config: Config, rows: Collection[int]) -> None:
    """Raises ValueError if the micro-batches of a pipeline would differ in size. # rows: of a pipeline in a step"""
    found = config.train.accumulation_steps
    if getattr(config.parallel, "pipeline", 1) == 1 or not any(number % found for number in rows):
        return
    works = [n for n in range(1, min(rows) + 1) if not any(number % n for number in rows)]
    raise SettingError(
        "train.accumulation_steps",
        "expected micro-batches with the same number of rows in a pipeline, found "
        f"{found} for {' or '.join(map(str, sorted(rows)))} rows of a pipeline in a step; expected one of "
        f"{', '.join(map(str, works))}, or another train.global_batch_size",
    )
