"""`open_dataset`: a dataset, or the rows of `run_on_dataframe`, for a training loop of the user's own on a rank."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any, get_args

from spark_dl.config import Config, Data, Launch, Loader, Train
from spark_dl.data.columns.batch import Batch
from spark_dl.data.dataset.manifest import MANIFEST, read_shards
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.build import build_loader
from spark_dl.data.load.iterable import RankDataset
from spark_dl.data.load.local import RankRows
from spark_dl.data.plan import Split
from spark_dl.inputs import as_source, is_ours, shards_of
from spark_dl.launch.rank.environment import find_place


def open_dataset(
    source: str | os.PathLike[str] | ShardSet | RankRows,
    data: Data | None = None,
    *,
    batch_size: int,
    shuffle: bool = True,
    drop_last: bool = False,
    seed: int = 0,
    split: Split = "all",
    validation_fraction: float = 0.0,
    loader: Loader | None = None,
    transform: Callable[[Batch], Any] | None = None,
    cur_shard: int | None = None,
    shard_count: int | None = None,
) -> RankDataset:
    """Opens a dataset for this rank: an iterable of its batches, with `len`, `set_epoch` and `state_dict`.

    Called on a rank: in `launch`, in `run_on_dataframe`, under torchrun, horovodrun, mpirun or srun, or alone in a
    process. The rank and the number of ranks come from the process group or from the environment of the launcher. All
    ranks must pass the same arguments.

    A batch has the columns by name, [batch_size, ...], and `weight`, [batch_size] float32: 1, or the value of
    `data.weight`, for a true row, 0 for padding. Every row is in exactly one batch of one rank in each epoch,
    unless `drop_last` is set.

    Args:
        source: the URL of a dataset, the result of `read_shards`, or the rows that `run_on_dataframe` passes to its
            function, which have their own settings (`data`, `loader`, `validation_fraction`).
        data: the columns of a batch; the default is all columns, if spark_dl wrote the dataset.
        batch_size: rows of each batch of this rank. The last batch is filled with rows whose `weight` is 0.
        drop_last: whether the last batch of an epoch is left out on all ranks if it is not full, as by torch's
            DataLoader.
        split: the rows to read, if `validation_fraction` is set: `all`, `train` or `validation`.
        loader: how rows are read. `num_streams` is lowered to the largest number that fits the ranks and the batch.
        transform: called with each batch; returns what is yielded, such as `lambda b: (b["features"], b["label"])`.
        cur_shard, shard_count: the rank and the number of ranks, in place of those that are found.

    Raises:
        ValueError: For a missing dataset or column, and for settings that do not fit the dataset.

    Example:
        >>> for batch in spark_dl.open_dataset("points", config.data, batch_size=32):
        ...     batch["features"], batch["label"], batch["weight"]
    """
    rank, num_ranks = find_place() if (cur_shard, shard_count) == (None, None) else _place(cur_shard, shard_count)
    _check_arguments(data, batch_size, drop_last, split, validation_fraction)
    if not isinstance(source, RankRows) and split != "all" and not validation_fraction:
        raise ValueError(f"open_dataset: split={split!r} needs validation_fraction")
    if isinstance(source, RankRows):
        if (data, loader, validation_fraction) != (None, None, 0.0):
            raise ValueError(
                "open_dataset: found rows of run_on_dataframe with data, loader or validation_fraction; pass these to "
                "run_on_dataframe"
            )
        if drop_last:
            raise ValueError(
                "open_dataset: drop_last: expected false for the rows of run_on_dataframe, of which ranks have "
                "different numbers; rows of weight 0 fill their batches"
            )
        shards = source.dataset
        config = source.config(batch_size, seed=seed)
    else:
        shards, data = _open(source, data)
        loader = loader or Loader()
        config = Config(
            data=data,
            loader=dataclasses.replace(loader, num_streams=_streams(loader.num_streams, batch_size, num_ranks)),
            train=Train(global_batch_size=batch_size * num_ranks, seed=seed, validation_fraction=validation_fraction),
            launch=Launch(num_ranks=num_ranks),
        )
        with contextlib.ExitStack() as until_done:
            shards = shards_of(shards, "", config, until_done, reuse="no")
    batches = build_loader(shards, config, rank=rank, world_size=num_ranks, split=split, shuffle=shuffle)
    return RankDataset(batches, shards, config, shuffle=shuffle, split=split, transform=transform, drop_last=drop_last)


def _place(cur_shard: Any, shard_count: Any) -> tuple[int, int]:
    numbers = [type(n) is int for n in (cur_shard, shard_count)]
    if not all(numbers) or not 0 <= cur_shard < shard_count:
        raise ValueError(
            f"open_dataset: expected cur_shard from 0 on and below shard_count, found cur_shard={cur_shard!r}, "
            f"shard_count={shard_count!r}"
        )
    return cur_shard, shard_count


def _check_arguments(data: Any, batch_size: Any, drop_last: Any, split: Any, validation_fraction: float) -> None:
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(f"open_dataset: batch_size: expected an integer >= 1, found {batch_size!r}")
    if not isinstance(drop_last, bool):
        raise ValueError(f"open_dataset: drop_last: expected true or false, found {drop_last!r}")
    if data is not None and not isinstance(data, Data):
        raise ValueError(f"open_dataset: data: expected a spark_dl.Data, found {type(data).__name__}")
    if split not in get_args(Split):
        raise ValueError(f"open_dataset: split: expected one of {list(get_args(Split))}, found {split!r}")
    if validation_fraction and split == "all":
        raise ValueError(
            f"open_dataset: validation_fraction={validation_fraction} has no effect with split='all'; set split to "
            "'train' or 'validation'"
        )


def _open(source: Any, data: Data | None) -> tuple[Any, Data]:
    """Returns a URL or a dataset, and its columns."""
    source = as_source(source)
    if hasattr(source, "sparkSession"):
        raise ValueError(
            "open_dataset: found a DataFrame, which exists on the driver only; expected the URL of a dataset; "
            "spark_dl.write_shards writes one, and spark_dl.run_on_dataframe streams the rows to the ranks"
        )
    if isinstance(source, str) and is_ours(source):
        source = read_shards(source)
    if data is None:
        if not isinstance(source, ShardSet):
            raise ValueError(
                f"open_dataset: {source} was not written by spark_dl (it has no {MANIFEST}); set the columns to read: "
                "data=spark_dl.Data(features=(...), label=...)"
            )
        data = Data(features=tuple(column.name for column in source.columns), label=None)
    return source, data


def _streams(most: int, batch_size: int, num_ranks: int) -> int:
    """Returns the largest number of streams that is a multiple of the ranks and divides the global batch.

    Of a global batch, so that the order of rows is the same for any number of ranks where the number allows it.
    """
    fitting = [n for n in range(num_ranks, max(most, num_ranks) + 1, num_ranks) if batch_size * num_ranks % n == 0]
    return max(fitting)
