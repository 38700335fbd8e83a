"""Datasets for tests that need no Spark."""

import json

from spark_dl import storage
from spark_dl.data import shards
from spark_dl.data.schema import Column


def write_dataset(url, columns, group_rows=64, shard_rows=256):
    """Writes arrays by name as a committed dataset and returns its ShardSet; arrays of one axis become scalars."""
    schema = tuple(Column(n, str(a.dtype), a.shape[1:], a.ndim > 1) for n, a in columns.items())
    storage.make_folder(url)
    writer = shards._Writer(url, "part-test", schema, group_rows, shard_rows)
    writer.append(list(columns.values()))
    found = shards.ShardSet(storage.absolute(url), schema, tuple(writer.close()))
    storage.write_bytes(storage.join(url, shards.MANIFEST), json.dumps(shards._manifest(found)).encode())
    return found
