"""`data.sampling_weight`: sums of the weights of each row group, which the driver reads before the ranks start."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from spark_dl.config import Config
from spark_dl.data.columns.ragged import Array
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.plan import Draws, Segment, rows_held_out
from spark_dl.data.read.rows import Rows

_READERS = 8


def weigh_groups(shards: ShardSet, config: Config) -> ShardSet:
    """Returns the dataset with the sums of the weights of its training rows; unchanged without `data.sampling_weight`.

    Called on the driver. Reads one column of the dataset.

    Raises:
        ValueError: For weights that are no numbers, are negative, NaN or Inf, with the file and the row group, and if
            no row has a weight above 0.
    """
    name, train = config.data.sampling_weight, config.train
    if name is None:
        return shards
    columns = shards.select([name])
    if columns[0].shape != () or np.dtype(columns[0].dtype).kind not in "iufb":
        raise ValueError(
            f"data.sampling_weight: expected one number per row in column {name!r}, found {columns[0].dtype} of shape "
            f"{columns[0].shape}"
        )
    rows = Rows(
        shards, columns, train.validation_fraction, train.seed, "train", fold=train.validation_fold,
        nonfinite="allow", fill=config.data.fill,
    )  # fmt: skip

    def weigh(number: int) -> float:
        out: Array = np.empty(int(rows.group_rows[number]), dtype=columns[0].dtype)
        if len(out):
            rows.read_into([Segment(number, 0, len(out))], [out])
        weights = out.astype(np.float64)
        bad = ~(np.isfinite(weights) & (weights >= 0))
        if bad.any():
            shard, group, _ = shards.shards.place_of(number)
            raise ValueError(
                f"data.sampling_weight: expected finite weights >= 0 in column {name!r}, found {out[bad][0]} in row "
                f"group {group} of {shards.shards.name_of(shard)} in {shards.url}"
            )
        return float(np.cumsum(weights)[-1]) if len(weights) else 0.0

    with ThreadPoolExecutor(_READERS, thread_name_prefix="spark_dl weights") as readers:
        sums = np.array(list(readers.map(weigh, range(len(rows.group_rows)))), dtype=np.float64)
    if not sums.sum() > 0:
        raise ValueError(f"data.sampling_weight: expected weights above 0 in column {name!r}, found none")
    return dataclasses.replace(shards, group_weights=sums)


def draws_of(shards: ShardSet, config: Config) -> Draws | None:
    """Returns the draws of the training rows; None without `data.sampling_weight`. Called on a worker.

    Raises ValueError if the driver has not summed the weights.
    """
    if config.data.sampling_weight is None:
        return None
    if shards.group_weights is None:
        raise ValueError(
            "data.sampling_weight: the weights have not been summed; it needs spark_dl.train, which does so before the "
            "ranks start"
        )
    train = config.train
    held_out = int(rows_held_out(shards.group_rows, train.validation_fraction, train.validation_fold).sum())
    return Draws(shards.group_weights, config.loader.epoch_size or shards.rows - held_out, train.seed)
