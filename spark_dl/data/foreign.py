"""Datasets that others wrote, as they are: plain Parquet files and folders, hive partitions, Petastorm datasets.

Only footers are read to open one, and one row group for the length of its lists. Files must have the same columns.
"""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from spark_dl import storage
from spark_dl.config import suggestion
from spark_dl.data import codecs, petastorm
from spark_dl.data.schema import Array, Column
from spark_dl.data.shards import ShardSet
from spark_dl.data.unischema import TIMES, Codec, Field
from spark_dl.data.unischema_reader import read_unischema
from spark_dl.data.writer import Shard

_READERS = 16


@dataclass(frozen=True)
class _File:
    name: str
    bytes: int
    row_groups: tuple[int, ...]
    schema: pa.Schema


def open_parquet(url: str, names: Sequence[str]) -> ShardSet:
    """A Parquet file, a folder of them, or a Petastorm dataset, with these of its columns. Called on the driver.

    Raises ValueError for a path without Parquet files, a file that is not one, files whose columns differ, a column
    that is missing or cannot become a tensor, and Petastorm metadata that names anything but a schema.
    """
    url = storage.absolute(url)
    root, paths = _list_files(url)
    with ThreadPoolExecutor(_READERS) as readers:
        files = [f for f in readers.map(lambda path: _read_footer(url, root, *path), paths) if sum(f.row_groups)]
    if not files:
        raise ValueError(f"the dataset {url} has no rows")
    base = url if root else storage.dirname(url)
    partitions = {f.name: petastorm.hive_partitions(f.name) for f in files} if root else {files[0].name: {}}
    fields = _petastorm_fields(base)
    columns = tuple(_column(name, base, files, partitions, fields) for name in names)
    _check_same_columns(files, [c.name for c in columns if c.codec != "partition"])
    shards = tuple(Shard(f.name, f.row_groups, f.bytes, partition=tuple(partitions[f.name].items())) for f in files)
    return ShardSet(base, columns, shards)


def _list_files(url: str) -> tuple[bool, list[tuple[str, int]]]:
    """Whether the URL is a folder, and (path, bytes) of its data files, by name; hidden ones are passed by."""
    filesystem, path = storage.resolve(url)
    info = storage.info(url)
    if info.type == fs.FileType.NotFound:
        raise ValueError(f"no dataset at {url}: found nothing")
    if info.type == fs.FileType.File:
        return False, [(posixpath.basename(path), info.size)]
    found = []
    for entry in filesystem.get_file_info(fs.FileSelector(path, recursive=True)):
        relative = entry.path[len(path.rstrip("/")) + 1 :]
        hidden = any(part.startswith(("_", ".")) for part in relative.split("/"))
        if entry.type == fs.FileType.File and not hidden:
            found.append((relative, entry.size))
    if not found:
        raise ValueError(f"no dataset at {url}: found a folder without a manifest and without data files")
    return True, sorted(found)


def _read_footer(url: str, is_folder: bool, name: str, size: int) -> _File:
    path = storage.join(url, name) if is_folder else url
    try:
        with storage.open_input(path) as source:
            footer = pq.ParquetFile(source)
            rows = tuple(footer.metadata.row_group(i).num_rows for i in range(footer.metadata.num_row_groups))
            return _File(name, size, rows, footer.schema_arrow)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} ({size} bytes) is not a Parquet file that can be read: {error}") from error


def _petastorm_fields(url: str) -> Mapping[str, Field]:
    path = storage.join(url, petastorm.COMMON_METADATA)
    if not storage.exists(path):
        return {}
    metadata = pq.read_schema(pa.BufferReader(storage.read_bytes(path))).metadata or {}
    pickled = metadata.get(petastorm.UNISCHEMA_KEY)
    return {f.name: f for f in read_unischema(pickled).fields} if pickled else {}


def _column(
    name: str,
    url: str,
    files: Sequence[_File],
    partitions: Mapping[str, Mapping[str, str]],
    fields: Mapping[str, Field],
) -> Column:
    if name in files[0].schema.names:
        arrow = files[0].schema.field(name).type
        return _petastorm_column(fields[name]) if name in fields else _arrow_column(name, arrow, url, files[0])
    if all(name in partition for partition in partitions.values()):
        values = {partition[name] for partition in partitions.values()}
        if not all(v.lstrip("-").isdigit() for v in values):
            raise ValueError(
                f"column {name!r} is a partition with values such as {sorted(values)[:3]}; only whole numbers become "
                "tensors"
            )
        return Column(name, "int64", (), "partition")
    known = [*files[0].schema.names, *next(iter(partitions.values()))]
    raise ValueError(f"no column {name!r} in the dataset {url}{suggestion(name, known)} (data.features, data.label)")


def _petastorm_column(field: Field) -> Column:
    shape = field.fixed_shape
    is_number = field.dtype not in ("str", "bytes", "decimal", "object", *TIMES)
    if shape is None or not is_number:
        raise ValueError(
            f"column {field.name!r} has dtype {field.dtype}, shape {field.shape} and codec {field.codec}, which do not "
            "make a tensor of one shape"
        )
    kind = field.codec.kind if field.codec else "scalar"  # without a codec Petastorm reads what Parquet holds
    image_format = f".{field.codec.image_format}" if field.codec and field.codec.image_format else ""
    return Column(field.name, field.dtype, shape, f"petastorm.{kind}{image_format}")


def decode(column: Column, stored: pa.ChunkedArray) -> Array:
    """A stored column of a Petastorm dataset as an array. # (rows, *shape)

    Raises ValueError for a null, and for a cell that is not of the column's dtype and shape, with its row.
    """
    kind, _, image_format = column.codec.removeprefix("petastorm.").partition(".")
    spark_type = "LongType" if kind == "scalar" else None  # which one it is does not matter for reading
    codec = Codec(kind, image_format or None, spark_type=spark_type)  # type: ignore[arg-type]
    cells = codecs.decode(Field(column.name, column.dtype, column.shape, codec), stored)
    assert isinstance(cells, np.ndarray)
    return cells


def _arrow_column(name: str, arrow: pa.DataType, url: str, file: _File) -> Column:
    inner, depth = arrow, 0
    while pa.types.is_list(inner) or pa.types.is_large_list(inner) or pa.types.is_fixed_size_list(inner):
        inner, depth = inner.value_type, depth + 1
    if not (pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)):
        raise ValueError(
            f"column {name!r} has Parquet type {arrow}, which cannot become a tensor; read it with Spark and convert it"
        )
    dtype = str(inner.to_pandas_dtype()().dtype) if not pa.types.is_boolean(inner) else "bool"
    if not depth:
        return Column(name, dtype)
    return Column(name, dtype, _list_shape(name, url, file, depth), "list")


def _list_shape(name: str, url: str, file: _File, depth: int) -> tuple[int, ...]:
    """The lengths of the first cell of a list column: all others must have the same."""
    path = storage.join(url, file.name)
    with storage.open_input(path) as source:
        batches = pq.ParquetFile(source).iter_batches(batch_size=1, columns=[name], use_threads=False)
        cell = next(iter(batches)).column(0)[0].as_py()
    shape = []
    for _ in range(depth):
        if not cell:
            raise ValueError(f"column {name!r}: the first cell of {path} is null or empty; a tensor needs one shape")
        shape.append(len(cell))
        cell = cell[0]
    return tuple(shape)


def _check_same_columns(files: Sequence[_File], names: Sequence[str]) -> None:
    for (first, other), name in itertools.product(itertools.pairwise(files), names):
        types: list[Any] = [f.schema.field(name).type if name in f.schema.names else None for f in (first, other)]
        if types[0] != types[1]:
            raise ValueError(
                f"column {name!r} has type {types[0]} in {first.name} and {types[1] or 'is missing'} in {other.name}; "
                "all files of a dataset must agree"
            )
