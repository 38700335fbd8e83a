"""Datasets that others wrote, as they are: plain Parquet files and folders, hive partitions, Petastorm datasets.

Only footers are read to open one, and the first row for the shape of its cells. Files must have the same columns.
Timestamps, decimals, strings and the like become numbers when they are read, as `data.encode` says.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from spark_dl import storage
from spark_dl.checks import suggestion
from spark_dl.config import Data
from spark_dl.data import cells, parquet, petastorm, schema
from spark_dl.data.filters import NULL_PARTITION
from spark_dl.data.manifest import MANIFEST, ShardSet, is_own_shard
from spark_dl.data.petastorm_columns import is_text_or_time, petastorm_column
from spark_dl.data.ragged import Array
from spark_dl.data.schema import Column
from spark_dl.data.source import HAS_DOT, SourceColumn, arrow_source_column, check_batch_names, check_names
from spark_dl.data.unischema import Field
from spark_dl.data.unischema_reader import read_unischema
from spark_dl.data.writer import Shard

_log = logging.getLogger("spark_dl")
_READERS = 16


@dataclass(frozen=True)
class _File:
    name: str
    bytes: int
    row_groups: tuple[int, ...]
    schema: pa.Schema
    sizes: Mapping[str, tuple[tuple[int, int], ...]]
    """Values and stored bytes in each row group of the leaf columns whose cells vary, by their paths."""


def open_parquet(url: str, names: Sequence[str], *, data: Data | None = None, like: Sequence[Column] = ()) -> ShardSet:
    """A Parquet file, a folder of them, or a Petastorm dataset, with these of its columns. Called on the driver.

    Columns become numbers as `data.encode` says; a vocabulary is given with it, or is that of `like`, the columns of
    another dataset. Rows cannot be dropped or filled here: nulls are an error of the loader, as are NaN
    and Inf unless data.nonfinite allows them.

    Raises ValueError for a path without Parquet files, a file that is not one, files whose columns differ, a column
    that is missing or cannot become a tensor, and Petastorm metadata that names anything but a schema.
    """
    data = data or Data()
    for key in ("nulls", "nonfinite"):
        if (policy := getattr(data, key)) in ("drop", "fill"):
            raise ValueError(
                f"data.{key}: found {policy!r} for a dataset that is read as it is, of which no row can be dropped or "
                "filled; write it with Spark first (write_shards, jobs/prepare.py)"
            )
    check_names("encode", data.encode, names)
    url = storage.absolute(url)
    try:
        root, paths = _list_files(url)
    except OSError as error:
        raise ValueError(f"cannot read the dataset {url}: {error}; check its owner and mode") from error
    with ThreadPoolExecutor(_READERS) as readers:
        listed = list(readers.map(lambda path: _read_footer(url, root, names, *path), paths))
    base = url if root else storage.dirname(url)
    fields = _petastorm_fields(base, listed if root else ())
    files = [f for f in listed if sum(f.row_groups)]
    if not files:
        raise ValueError(f"the dataset {url} has no rows")
    partitions = {f.name: petastorm.hive_partitions(f.name) for f in files} if root else {files[0].name: {}}
    words = schema.words_of(like)
    settings = {n: {**({"values": list(words[n])} if n in words else {}), **data.encode.get(n, {})} for n in names}
    columns = tuple(_column(name, base, files, partitions, fields, settings[name]) for name in names)
    check_batch_names(names, [c.name for c in columns if c.is_ragged])
    schema.check_like(columns, like)
    _check_same_columns(url, files, [c.name for c in columns if c.codec != "partition"])
    shards = tuple(_shard(file, columns, partitions[file.name]) for file in files)
    return ShardSet(base, columns, shards)


def _shard(file: _File, columns: Sequence[Column], partition: Mapping[str, str]) -> Shard:
    elements = {c.name: _elements(c.name, file, unit=_unit(c)) for c in columns if c.is_ragged}
    return Shard(file.name, file.row_groups, file.bytes, partition=tuple(partition.items()), elements=elements)


def _list_files(url: str) -> tuple[bool, list[tuple[str, int]]]:
    """Whether the URL is a folder, and (path, bytes) of its data files, by name; hidden ones are passed by."""
    filesystem, path = storage.resolve(url)
    info = storage.info(url)
    if info.type == fs.FileType.NotFound:
        raise ValueError(f"no dataset at {url}: found nothing (a path without a scheme is one on the local disk)")
    if info.type == fs.FileType.File:
        return False, [(posixpath.basename(path), info.size)]
    entries = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
    names = [entry.path[len(path.rstrip("/")) + 1 :] for entry in entries]
    _check_whole(url, names)
    found = []
    for relative, entry in zip(names, entries, strict=True):
        if entry.type == fs.FileType.File and not any(_is_hidden(part) for part in relative.split("/")):
            found.append((relative, entry.size))
    if not found:
        raise ValueError(f"no dataset at {url}: found a folder without a manifest and without data files")
    return True, sorted(found)


def _is_hidden(name: str) -> bool:
    """As Spark has it: `_day=5` is a partition."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


_NOT_WHOLE = {
    "_temporary": "a Spark job is writing there or was killed; wait for its end, or write the dataset again",
    ".spark-staging-": "a Spark job is writing there or was killed; wait for its end, or write the dataset again",
    "_delta_log": "it is a Delta table, whose log says which files count; read it with Spark",
    ".hoodie": "it is a Hudi table, whose timeline says which files count; read it with Spark",
}
"""Folders with which the data files beside them are not the dataset, by the start of their names."""


def _check_whole(url: str, names: Sequence[str]) -> None:
    """Raises ValueError for a folder whose files, by these names, are not all of a dataset or more than it."""
    listed = set(names)
    folders = [posixpath.dirname(name) for name in names if posixpath.basename(name) == MANIFEST]
    if datasets := sorted(f for f in folders if f and not any(_is_hidden(part) for part in f.split("/"))):
        raise ValueError(
            f"{url} is not one dataset: it holds the datasets {datasets[:9]}, each with its manifest; name one of "
            "them, or mix several with data.proportions"
        )
    for name in names:
        for start, why in _NOT_WHOLE.items():
            if name.split("/")[0].startswith(start):
                raise ValueError(
                    f"{url} cannot be read as plain Parquet files: found {name.split('/')[0]} in it; {why}"
                )
        folder, file = posixpath.split(name)
        if is_own_shard(file) and posixpath.join(folder, MANIFEST) not in listed:
            raise ValueError(
                f"{storage.join(url, name)} is a shard of a spark_dl dataset without its manifest {MANIFEST}: its "
                "writer was killed or is still running, so that rows may be missing or there twice; wait for its end, "
                "or write the dataset again"
            )
    if any(re.match(r"(.*/)?part-\d{5}-", name) for name in names) and "_SUCCESS" not in names:
        _log.warning(
            "%s has no _SUCCESS, which Spark writes last: if the job that wrote it did not end well, files are missing",
            url,
        )


def _read_footer(url: str, is_folder: bool, names: Sequence[str], name: str, size: int) -> _File:
    path = storage.join(url, name) if is_folder else url
    try:
        with storage.open_input(path) as source:
            footer = parquet.open_file(source)
            rows = tuple(footer.metadata.row_group(i).num_rows for i in range(footer.metadata.num_row_groups))
            return _File(name, size, rows, footer.schema_arrow, _sizes(footer, names))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} ({size} bytes) is not a Parquet file that can be read: {error}; take out what is no data, or "
            "write the dataset again"
        ) from error


def _sizes(footer: pq.ParquetFile, names: Sequence[str]) -> Mapping[str, tuple[tuple[int, int], ...]]:
    """Of lists and bytes among some columns."""
    metadata, leaves = footer.metadata, [footer.schema.column(i) for i in range(len(footer.schema))]
    varying = [
        (i, leaf.path)
        for i, leaf in enumerate(leaves)
        if (leaf.max_repetition_level or leaf.physical_type.endswith("BYTE_ARRAY"))
        and any(_is_of(name, leaf.path) for name in names)
    ]
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)] if varying else []
    chunks = {path: [group.column(i) for group in groups] for i, path in varying}
    return {path: tuple((c.num_values, c.total_uncompressed_size) for c in found) for path, found in chunks.items()}


def _is_of(name: str, path: str) -> bool:
    """Whether a leaf of Parquet is of the column of this name."""
    return path == name or path.startswith(f"{name}.")


def _petastorm_fields(url: str, files: Sequence[_File]) -> Mapping[str, Field]:
    """The fields of Petastorm's schema, if there is one; of a folder, `files` must be those that it lists."""
    metadata = petastorm.read_metadata(url)
    if files and (row_groups := petastorm.read_row_groups(url, metadata)) is not None:
        _check_listed(url, files, row_groups)
    pickled = metadata.get(petastorm.UNISCHEMA_KEY)
    return {f.name: f for f in read_unischema(pickled).fields} if pickled else {}


def _check_listed(url: str, files: Sequence[_File], listed: Mapping[str, int]) -> None:
    """Raises ValueError unless the files of a folder are those that Petastorm lists, as Petastorm itself asks."""
    found = {f.name: len(f.row_groups) for f in files if sum(f.row_groups) or f.name in listed}
    for name in sorted({*found, *listed}):
        if found.get(name) != listed.get(name):
            there = f"{found[name]} row groups" if name in found else "nothing"
            expected = f"{listed[name]} row groups" if name in listed else "no such file"
            raise ValueError(
                f"the dataset {url} is not whole: found {there} at {name!r:.200}, expected {expected}, as its "
                f"{petastorm.COMMON_METADATA} says; bring the files back as they were, or write Petastorm's metadata "
                "again (petastorm-generate-metadata.py)"
            )


def _column(
    name: str,
    url: str,
    files: Sequence[_File],
    partitions: Mapping[str, Mapping[str, str]],
    fields: Mapping[str, Field],
    settings: Mapping[str, Any],
) -> Column:
    is_partition = all(name in partition for partition in partitions.values())
    arrow = type_at(files[0].schema, name)
    if name in fields and name in files[0].schema.names and not is_text_or_time(fields[name]):
        column = petastorm_column(fields[name], settings)
        mean = _mean_size(name, files, unit=_unit(column)) if column.is_ragged else None
        return dataclasses.replace(column, mean_size=mean)
    if arrow is not None:
        return _arrow_column(arrow_source_column(name, arrow, settings), url, files)
    if is_partition and settings:
        return _text_partition(name, settings)
    if is_partition:
        _check_whole_numbers(name, {partition[name] for partition in partitions.values()})
        return Column(name, "int64", (), "partition")
    known = [*_names_below(files[0].schema), *next(iter(partitions.values()))]
    if name in known:
        raise ValueError(f"column {name!r}: {HAS_DOT}")
    raise ValueError(f"no column {name!r} in the dataset {url}{suggestion(name, known)} (data.features, data.label)")


def _check_whole_numbers(name: str, values: Collection[str]) -> None:
    if NULL_PARTITION in values:
        raise ValueError(
            f"column {name!r} is a partition that is null in some rows (the folder {name}={NULL_PARTITION}); give them "
            "a whole number, or filter them out, in Spark"
        )
    if not all(re.fullmatch(r"-?[0-9]+", v) and -(2**63) <= int(v) < 2**63 for v in values):
        raise ValueError(
            f"column {name!r} is a partition with values such as {sorted(values)[:3]}; only whole numbers of 64 bits "
            f"become tensors as they are; say with data.encode how these do: {{{name}: {{as: hash, buckets: 1000}}}}, "
            f"or {{{name}: {{as: vocabulary, values: [...]}}}}"
        )


def _text_partition(name: str, settings: Mapping[str, Any]) -> Column:
    source = arrow_source_column(name, pa.string(), settings)
    if source.encoding.kind not in ("vocabulary", "hash"):
        found = source.encoding.kind
        raise ValueError(f"data.encode.{name}.as: expected vocabulary or hash for a partition, found {found!r}")
    _check_words(source)
    return Column(name, source.dtype, (), "partition", source.encoding)


def partition_cells(column: Column, value: str, rows: int) -> Array:
    """A partition's value, which all rows of its files have. # (rows,)"""
    if column.encoding.kind == "number":
        return np.full(rows, int(value))
    cell = schema.decode(column, pa.array([None if value == NULL_PARTITION else value], pa.string()))
    assert isinstance(cell, np.ndarray)
    return np.full(rows, cell[0])


def _names_below(fields: Any, prefix: str = "") -> list[str]:
    """The paths of columns and of the fields of structs."""
    found = []
    for field in fields:
        found.append(f"{prefix}{field.name}")
        if pa.types.is_struct(field.type):
            found += _names_below(field.type, f"{prefix}{field.name}.")
    return found


def type_at(arrow: pa.Schema, name: str) -> pa.DataType | None:
    """The type of a column, or of a field of a struct by its path."""
    if (count := arrow.names.count(name)) > 1:
        raise ValueError(f"column {name!r} is there {count} times in one file; write it again with names that differ")
    if count:
        return arrow.field(name).type
    found: Any = arrow
    for part in name.split("."):
        fields = {f.name: f.type for f in found} if found is arrow or pa.types.is_struct(found) else {}
        if part not in fields:
            return None
        found = fields[part]
    return found


def stored_column(table: pa.Table, name: str) -> pa.ChunkedArray:
    """A column of what was read, or a field of a struct by its path, for `schema.decode`."""
    if name in table.column_names:
        return table.column(name)
    first, *path = name.split(".")
    return pc.struct_field(table.column(first), path)


def _arrow_column(source: SourceColumn, url: str, files: Sequence[_File]) -> Column:
    _check_words(source)
    kind = source.encoding.kind
    codec = "vector" if source.kind == "vector" else "list" if source.kind == "array" else schema.codec_of(source)
    if codec == "scalar" and kind != "number":
        codec = "converted"
    unit = 1 if kind in ("bytes", "image") else None
    mean = _mean_size(source.name, files, unit=unit) if source.ragged or codec == "image" else None
    shape: tuple[int | None, ...] = (None,) if source.ragged else ()
    if codec in ("vector", "list", "image") and not (source.ragged and source.depth == 1):
        shape = _shape_of_first(source, codec, [storage.join(url, f.name) for f in files])
    return Column(source.name, source.dtype, shape, codec, source.encoding, mean)


def _check_words(source: SourceColumn) -> None:
    if source.encoding.kind == "vocabulary" and source.encoding.vocabulary is None:
        raise ValueError(
            f"data.encode.{source.name}.values: expected the words of the vocabulary, found none; they are counted "
            "only where Spark writes the shards (write_shards, jobs/prepare.py); or set as: hash"
        )


def _mean_size(name: str, files: Sequence[_File], *, unit: int | None) -> float:
    return sum(sum(_elements(name, file, unit=unit)) for file in files) / sum(sum(file.row_groups) for file in files)


def _elements(name: str, file: _File, *, unit: int | None) -> tuple[int, ...]:
    """The elements of a column in each row group: its values, nulls and empty lists among them, or bytes by a unit.

    Bytes are what they take in the file without Parquet's compression, but with its dictionaries and a codec's own:
    less than they have where there are such.
    """
    sizes = next((sizes for path, sizes in file.sizes.items() if _is_of(name, path)), ())
    return tuple(num_values if unit is None else num_bytes // unit for num_values, num_bytes in sizes)


def _unit(column: Column) -> int | None:
    """Bytes of an element, where the bytes of cells tell how many there are."""
    in_bytes = column.codec.startswith("petastorm.") or column.encoding.kind == "bytes"
    return np.dtype(column.dtype).itemsize if in_bytes else None


def _shape_of_first(source: SourceColumn, codec: str, paths: Sequence[str]) -> tuple[int | None, ...]:
    """The shape of the first cell: all others must have the same, in a ragged column but for the first axis.

    A cell without values does not know its inner shape, so in a ragged column the first one that has some gives it.
    """
    path, cell = next(_first_cells(source, paths), (paths[0], None))
    if cell is None:
        raise ValueError(f"column {source.name!r}: all cells of {path} are empty, and of all other files")
    try:
        shape = schema.cell_shape(codec, cells.read_cells(source, cell))
    except ValueError as error:
        raise ValueError(f"{error}; in the first row of {path}, which gives the shape of all") from error
    if 0 in shape:
        raise ValueError(f"column {source.name!r}: the first cell of {path} is empty; it gives the shape of all")
    return shape


def _first_cells(source: SourceColumn, paths: Sequence[str]) -> Iterator[tuple[str, pa.Array]]:
    """The first cell of each batch, and its file; of a ragged column the first that is not empty. # (1,)"""
    rows = 1024 if source.ragged else 1
    for path in paths:
        with storage.open_input(path) as file:
            for batch in parquet.open_file(file).iter_batches(rows, columns=[source.name], use_threads=False):
                stored = stored_column(pa.Table.from_batches([batch]), source.name)
                if source.ragged:
                    stored = stored.filter(pc.greater(pc.list_value_length(stored), 0))
                if len(stored):
                    yield path, stored.slice(0, 1).combine_chunks()


def _check_same_columns(url: str, files: Sequence[_File], names: Sequence[str]) -> None:
    """Columns are read by name: their order, and others beside them, may differ from file to file."""
    for (first, other), name in itertools.product(itertools.pairwise(files), names):
        types: list[Any] = [type_at(f.schema, name) for f in (first, other)]
        if types[0] != types[1]:
            raise ValueError(
                f"column {name!r} has type {types[0]} in {first.name} and {types[1] or 'is missing'} in {other.name} "
                f"of {url}; all files of a dataset must agree; read them with Spark and write them with one schema"
            )
