"""Rows as Spark streams them into a rank."""

import numpy as np
import pyarrow as pa

from spark_dl import Shards
from spark_dl.data.columns.source import SourceColumn

SOURCE = (SourceColumn("features", "float32", "array", 1), SourceColumn("label", "int64", "scalar"))

SHARDS = Shards(rows_per_row_group=16, rows_per_shard=64)


def batches_of(rows, first=0, size=50, width=3):
    """Rows as Spark's Arrow batches, numbered from `first`."""
    for start in range(0, rows, size):
        label = np.arange(first + start, first + min(rows, start + size))
        features = np.repeat(label.astype(np.float32), width)
        lists = pa.ListArray.from_arrays(np.arange(len(label) + 1, dtype=np.int32) * width, features)
        yield pa.RecordBatch.from_arrays([lists, pa.array(label)], names=["features", "label"])
