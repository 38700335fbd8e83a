"""Writes arrays in memory as a dataset, without Spark."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping

import numpy as np

from spark_dl import storage
from spark_dl.config import Data, Shards
from spark_dl.data.columns import schema, source
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.policies import first_nonfinite_row, rules_of
from spark_dl.data.columns.ragged import Array, Ragged
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.manifest import commit, delete_replaced, prepare_folder
from spark_dl.data.dataset.records import ShardSet, ShardTable
from spark_dl.data.write.writer import ShardWriter, rows_per_file


def write_arrays(
    columns: Mapping[str, Array | Ragged],
    url: str | os.PathLike[str],
    data: Data | None = None,
    *,
    shards: Shards | None = None,
) -> ShardSet:
    """Writes arrays in memory as a dataset, without Spark. # each (rows, *cell); one axis makes a scalar column

    No row is dropped or filled. Raises ValueError for a folder that is in use, column names that batches reserve,
    arrays of unequal length, without rows or of an unsupported dtype, and NaN and Inf unless `data.nonfinite` is
    `allow`.
    """
    data = data or Data()
    url = storage.absolute(url)
    if data.nonfinite in ("drop", "fill"):
        raise ValueError(f"data.nonfinite: expected error or allow for arrays, found {data.nonfinite!r}")
    _check_arrays(columns)
    written = []
    for name, array in columns.items():
        values = array.own_values if isinstance(array, Ragged) else array
        codec = "list" if isinstance(array, Ragged) else "ndarray" if values.ndim > 1 else "scalar"
        mean = values.size / max(1, len(array)) if isinstance(array, Ragged) else None
        shape = schema.cell_shape(codec, array, Encoding())
        if data.nonfinite == "error" and (row := first_nonfinite_row(array)) is not None:
            raise ValueError(
                f"column {name!r}: found NaN or Inf, first in row {row}, expected none; set data.nonfinite to allow, "
                "or change the array"
            )
        written.append(Column(name, str(values.dtype), shape, codec, mean_size=mean))
    source.check_batch_names([*columns], [c.name for c in written if c.is_ragged], data.weight)
    old, token = prepare_folder(url, overwrite=False), uuid.uuid4().hex[:8]
    writer = ShardWriter(url, f"part-{token}", tuple(written), *rows_per_file(written, shards or Shards()))
    writer.append(list(columns.values()))
    shard_set = commit(ShardSet(url, writer.columns, ShardTable.of(writer.close()), rules=rules_of(data)))
    delete_replaced(url, old, shard_set, token)
    return shard_set


def _check_arrays(columns: Mapping[str, Array | Ragged]) -> None:
    """Raises ValueError for arrays that cannot be stored as the columns of one dataset."""
    for name, array in columns.items():
        if type(name) is not str or not name:
            raise ValueError(f"found the column name {name!r}, expected a non-empty string")
        values = array.values if isinstance(array, Ragged) else array
        if not isinstance(values, np.ndarray) or values.ndim == 0:
            found = (
                "an array without an axis" if isinstance(values, (np.ndarray, np.generic)) else type(values).__name__
            )
            raise ValueError(f"column {name!r}: found {found}, expected a NumPy array with an axis of rows, or Ragged")
        dtype = values.dtype
        is_real = dtype.kind in "biuf" and dtype.itemsize <= 8
        may_be_complex = values.ndim > 1 and not isinstance(array, Ragged)
        if not dtype.isnative or not (is_real or (may_be_complex and dtype in (np.complex64, np.complex128))):
            complex_too = (
                "" if dtype.kind != "c" else ", or complex numbers of up to 128 bits in arrays of two or more axes"
            )
            raise ValueError(
                f"column {name!r}: found the dtype {dtype.str if dtype.kind in 'biufc' else dtype}, expected booleans, "
                f"integers or floats of up to 64 bits in this machine's byte order{complex_too}; convert it with astype"
            )
    lengths = {name: len(array) for name, array in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"found arrays of unequal length: {lengths}; expected the same number of rows in each")
    if not any(lengths.values()):
        raise ValueError(f"found no rows in the columns {list(columns)}, expected at least one column with one row")
