"""Petastorm datasets, read without Petastorm, and pickles that must be refused."""

import posixpath

import pyarrow as pa
import pyarrow.parquet as pq

from spark_dl.data.petastorm.codecs import decode
from spark_dl.data.petastorm.metadata import UNISCHEMA_KEY, hive_partitions
from spark_dl.data.petastorm.unischema import read_unischema


class Reduced:
    """Pickles as a call."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def read_dataset(root):
    """The Unischema and the rows of a folder, as dicts in the order of `id`."""
    unischema = read_unischema(pq.read_schema(root / "_common_metadata").metadata[UNISCHEMA_KEY])
    rows = []
    for path in sorted(root.rglob("*.parquet")):
        table = pq.ParquetFile(path).read()
        partitions = hive_partitions(posixpath.relpath(path, root))
        columns = {}
        for field in unischema.fields:
            in_file = field.name in table.column_names
            stored = table.column(field.name) if in_file else pa.array([partitions[field.name]] * len(table))
            columns[field.name] = decode(field, stored)
        rows += [{name: c[i] for name, c in columns.items()} for i in range(len(table))]
    return unischema, sorted(rows, key=lambda r: int(r["id"]))
