"""Datasets for tests that need no Spark."""

from spark_dl import Data
from spark_dl.data.shards import write_arrays


def write_dataset(url, columns, group_rows=64, shard_rows=256):
    """Arrays by name as a dataset of small row groups and shards."""
    return write_arrays(columns, url, Data(rows_per_row_group=group_rows, rows_per_shard=shard_rows))
