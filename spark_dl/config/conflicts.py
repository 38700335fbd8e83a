"""What excludes what across sections: ONE table, and the numbers of several sections that must fit each other.

What a single section can check by itself is checked there, when it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spark_dl.config.config import Config

ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
"""Optimizers of `torch.optim` that treat each element of the weights by itself, so that servers can share them by
blocks. Not LBFGS, Adafactor and Muon, which look at whole matrices or all weights."""


@dataclass(frozen=True)
class Conflict:
    """One line of the table."""

    key: str
    """Setting that the error names."""
    excluded: Callable[[Config], bool]
    """Whether a configuration has it."""
    message: str
    """What was expected and found, why, and what to change; `{c.data.label}` and the like are filled in."""


def _local(c: Config) -> bool:
    return c.shards.storage == "local"


def _petastorm(c: Config) -> bool:
    return c.loader.reader == "petastorm"


def _error_feedback(c: Config) -> bool:
    return getattr(c.parallel, "compression", "none") in ("powersgd", "threshold", "topk")


def _served(c: Config) -> bool:
    return c.parallel.servers > 0


CONFLICTS = (
    # several datasets
    Conflict("train.validation_fraction", lambda c: bool(c.loader.proportions and c.train.validation_fraction),
             "not supported with loader.proportions; pass the validation rows as a dataset of their own"),
    Conflict("shards.storage", lambda c: bool(c.loader.proportions) and _local(c),
             "expected 'shared' with loader.proportions, found 'local'; write datasets and pass their URLs"),
    Conflict("loader.reader", lambda c: bool(c.loader.proportions) and _petastorm(c),
             "expected 'spark_dl' with loader.proportions, found 'petastorm'"),
    # the reader of Petastorm
    Conflict("train.validation_fraction", lambda c: _petastorm(c) and bool(c.train.validation_fraction),
             "not supported with loader.reader=petastorm, which reads whole row groups; pass the validation rows as a "
             "dataset of their own"),
    Conflict("data.filters", lambda c: _petastorm(c) and bool(c.data.filters),
             "not supported with loader.reader=petastorm, which reads whole row groups"),
    Conflict("shards.storage", lambda c: _petastorm(c) and _local(c),
             "expected 'shared' with loader.reader=petastorm, which deals row groups by itself, found 'local'"),
    Conflict("shards.cache_dir", lambda c: _petastorm(c) and c.shards.cache_dir is not None,
             "not supported with loader.reader=petastorm, which reads the files where they are"),
    # local storage
    Conflict("data.filters", lambda c: _local(c) and bool(c.data.filters),
             "not supported with shards.storage=local, which is for a DataFrame; filter that: df.filter(...)"),
    Conflict("shards.store", lambda c: _local(c) and c.shards.store is not None,
             "not supported with shards.storage=local, which keeps the rows on the ranks' own disks; set "
             "shards.storage to shared, or leave the store out"),
    # sequences
    Conflict("train.validation_fraction", lambda c: c.sequences is not None and bool(c.train.validation_fraction),
             "not supported with sequences, as a row of several samples would train and validate; pass the validation "
             "rows as a dataset of their own"),
    Conflict("shards.storage", lambda c: c.sequences is not None and _local(c),
             "expected 'shared' with sequences, found 'local', which deals rows without their order"),
    Conflict("data.filters", lambda c: c.sequences is not None and bool(c.data.filters),
             "not supported with sequences, as rows that are left out would join their neighbours; write the rows to "
             "read as a dataset"),
    Conflict("loader.reader", lambda c: c.sequences is not None and _petastorm(c),
             "expected 'spark_dl' with sequences, found 'petastorm'"),
    # labels
    Conflict("train.metrics", lambda c: bool(c.train.metrics) and c.data.label is None,
             "compare with data.label, which is null; name the column, or leave the metrics out: the loss is always "
             "reported"),
    # strategies
    Conflict("launch.num_ranks", lambda c: c.parallel.one_rank and c.launch.num_ranks != 1,
             "expected 1 with parallel.strategy={c.parallel.strategy!r}, found {c.launch.num_ranks}"),
    Conflict("shards.storage", lambda c: c.parallel.by_spark and _local(c),
             "expected 'shared' with parallel.strategy={c.parallel.strategy!r}, found 'local': any executor may have "
             "the next task of a rank, and only one has its rows on its disk"),
    Conflict("loader.reader", lambda c: c.parallel.by_spark and _petastorm(c),
             "expected 'spark_dl' with parallel.strategy={c.parallel.strategy!r}, found 'petastorm': the next task of "
             "a rank may open its rows again, and Petastorm's order does not repeat"),
    Conflict("loader.ragged", lambda c: c.parallel.strategy == "dp_single_process" and c.loader.ragged == "offsets",
             "expected 'pad' with parallel.strategy='dp_single_process', which splits columns by rows, not 'offsets'"),
    Conflict("train.precision", lambda c: _error_feedback(c) and c.train.precision == "fp16",
             "expected bf16 or float32 with a parallel.compression that adds what a step left out, under another loss "
             "scale, found fp16"),
    Conflict("train.optimizer", lambda c: _served(c) and c.train.optimizer not in ELEMENTWISE,
             f"expected one of {', '.join(ELEMENTWISE)} with parallel.strategy={{c.parallel.strategy!r}}, whose "
             "servers share the weights by blocks, found {c.train.optimizer!r}"),
    Conflict("train.clip_grad_norm", lambda c: c.parallel.servers > 1 and c.train.clip_grad_norm is not None,
             "expected null with several parallel.num_servers, none of which sees the whole gradient, found "
             "{c.train.clip_grad_norm}"),
    Conflict("train.precision", lambda c: _served(c) and c.train.precision == "fp16",
             "expected float32 or bf16 with parallel.strategy={c.parallel.strategy!r}, where each rank would scale the "
             "losses by itself, found fp16"),
    Conflict("shards.storage", lambda c: _served(c) and _local(c),
             "expected 'shared' with parallel.strategy={c.parallel.strategy!r}, found 'local', which deals rows to the "
             "servers' hosts, too"),
    Conflict("loader.reader", lambda c: _served(c) and _petastorm(c),
             "expected 'spark_dl' with parallel.strategy={c.parallel.strategy!r}, where ranks take over parts of "
             "others, found 'petastorm'"),
)  # fmt: skip


def check_conflicts(config: Config) -> None:
    """Raises ValueError for the first line of the table that holds, and for numbers that do not fit each other."""
    for conflict in (*CONFLICTS, *config.parallel.excludes):
        if conflict.excluded(config):
            raise ValueError(f"{conflict.key}: {conflict.message.format(c=config)}")
    _check_streams(config)
    _check_ranks(config)


def _check_streams(config: Config) -> None:
    batch, streams, ranks = config.train.global_batch_size, config.loader.num_streams, config.launch.num_ranks
    if batch % streams:
        near = max(streams, round(batch / streams) * streams)
        raise ValueError(
            f"train.global_batch_size: expected a multiple of loader.num_streams={streams}, found {batch}; "
            f"the nearest is {near}"
        )
    if streams < ranks:
        raise ValueError(
            f"loader.num_streams: expected at least launch.num_ranks={ranks}, found {streams}: each rank reads whole "
            f"streams; {ranks * -(-16 // ranks)} would do, with a train.global_batch_size that it divides"
        )
    if config.shards.storage == "local" and streams % ranks:
        raise ValueError(
            f"loader.num_streams: expected a multiple of launch.num_ranks={ranks} with shards.storage='local', found "
            f"{streams}: the ranks have equal rows, and equal streams to read them by; "
            f"{-(-streams // ranks) * ranks} would do, with a train.global_batch_size that it divides"
        )


def _check_ranks(config: Config) -> None:
    trainers = config.num_trainers
    if trainers < 1:
        raise ValueError(
            f"parallel.num_servers: expected fewer than launch.num_ranks={config.launch.num_ranks}, so that some "
            f"ranks train, found {config.parallel.servers}"
        )
    server_k = getattr(config.parallel, "server_k", 0)
    if server_k > trainers and getattr(config.parallel, "server_mode", "") in ("k_sync", "k_async"):
        raise ValueError(
            f"parallel.server_k: expected at most {trainers}, the ranks that train, each of which gives one gradient, "
            f"found {server_k}"
        )
    if any(rank >= trainers for rank in config.faults.straggler_ranks):
        raise ValueError(
            f"faults.straggler_ranks: expected ranks below {trainers}, the number of those that compute gradients "
            f"with launch.num_ranks={config.launch.num_ranks}, found {list(config.faults.straggler_ranks)}"
        )
    batch, streams = config.train.global_batch_size, config.loader.num_streams
    least = batch // streams * (streams // trainers)
    if config.train.accumulation_steps > least:
        raise ValueError(
            f"train.accumulation_steps: expected at most {least}, the rows that the rank with the fewest has of a "
            f"global batch of {batch} on {trainers} ranks, found {config.train.accumulation_steps}"
        )
