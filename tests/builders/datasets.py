"""Datasets for tests that need no Spark."""

import numpy as np

from spark_dl import Data, Shards
from spark_dl.data.write.arrays import write_arrays


def write_dataset(url, columns, group_rows=64, shard_rows=256, **data):
    """Arrays by name as a dataset of small row groups and shards."""
    return write_arrays(
        columns, url, Data(**data), shards=Shards(rows_per_row_group=group_rows, rows_per_shard=shard_rows)
    )


def global_batches(plan, epoch):
    """The numbers of the rows of every global batch, as the plan deals them, without the loader."""
    return ([row for rows in batch for row in rows] for batch in stream_batches(plan, epoch))


def stream_batches(plan, epoch):
    """The same, with the rows of each stream by themselves."""
    first_row = np.cumsum([0, *plan.group_rows])
    streams = []
    for stream in plan.streams(epoch):
        rows = []
        for window in stream.windows:
            ids = np.concatenate([first_row[s.row_group] + np.arange(s.start, s.stop) for s in window.segments])
            rows.extend(ids[window.order()])
        streams.append(rows)
    for step in range(plan.steps):
        part = slice(step * plan.stream_batch, (step + 1) * plan.stream_batch)
        yield [rows[part] for rows in streams]
