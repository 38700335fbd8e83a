"""The files of datasets that others wrote: which of a folder count, and what their footers tell."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from spark_dl import storage
from spark_dl.data import parquet
from spark_dl.data.manifest import MANIFEST, is_own_shard


@dataclass(frozen=True)
class File:
    name: str
    bytes: int
    row_groups: tuple[int, ...]
    schema: pa.Schema
    sizes: Mapping[str, tuple[tuple[int, int], ...]]
    """Values and stored bytes in each row group of the leaf columns whose cells vary, by their paths."""
    nulls: Mapping[str, tuple[int, ...]]
    """Nulls in each row group, as far as the footer tells, of columns that are no lists or vectors, by their names."""


def list_files(url: str, *, require_success: bool = True) -> tuple[bool, list[tuple[str, int]]]:
    """Whether the URL is a folder, and (path, bytes) of its data files, by name; hidden ones are passed by.

    Raises ValueError where there are none, and for a folder that is not whole; with `require_success` also for what
    Spark wrote without `_SUCCESS`.
    """
    filesystem, path = storage.resolve(url)
    info = storage.info(url)
    if info.type == fs.FileType.NotFound:
        raise ValueError(f"no dataset at {url}: found nothing (a path without a scheme is one on the local disk)")
    if info.type == fs.FileType.File:
        return False, [(posixpath.basename(path), info.size)]
    entries = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
    names = [entry.path[len(path.rstrip("/")) + 1 :] for entry in entries]
    _check_whole(url, names)
    if require_success:
        _check_success(url, names)
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
    "_spark_metadata": "a streaming query wrote it, and its log says which files count; read it with Spark",
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


def _check_success(url: str, names: Sequence[str]) -> None:
    """Raises ValueError for files that Spark wrote, by these names, whose job has not said that it ended well."""
    of_spark = next((name for name in sorted(names) if re.match(r"(.*/)?part-\d{5}-", name)), None)
    if of_spark is None:
        return
    top = url
    while "=" in storage.name(top):  # a partition of a dataset, which has the file at its top
        top = storage.dirname(top)
    if "_SUCCESS" not in names and (top == url or not storage.exists(storage.join(top, "_SUCCESS"))):
        raise ValueError(
            f"{url} may not be whole: found {of_spark}, which Spark wrote, and no _SUCCESS, which it writes last: its "
            "job was killed or is still running, or writes none; write the dataset again, or, if it is whole, put an "
            "empty file _SUCCESS there or set data.require_success to false"
        )


def read_footer(url: str, is_folder: bool, names: Sequence[str], name: str, size: int) -> File:
    path = storage.join(url, name) if is_folder else url
    try:
        with storage.open_input(path) as source:
            footer = parquet.open_file(source)
            rows = tuple(footer.metadata.row_group(i).num_rows for i in range(footer.metadata.num_row_groups))
            return File(name, size, rows, footer.schema_arrow, _sizes(footer, names), _nulls(footer, names))
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
        and any(is_of(name, leaf.path) for name in names)
    ]
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)] if varying else []
    chunks = {path: [group.column(i) for group in groups] for i, path in varying}
    return {path: tuple((c.num_values, c.total_uncompressed_size) for c in found) for path, found in chunks.items()}


def _nulls(footer: pq.ParquetFile, names: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    metadata, found = footer.metadata, {}
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    for i in range(len(footer.schema)):
        leaf = footer.schema.column(i)
        if leaf.path in names and not leaf.max_repetition_level and leaf.max_definition_level:
            statistics = [group.column(i).statistics for group in groups]
            found[leaf.path] = tuple((s.null_count or 0) if s and s.has_null_count else 0 for s in statistics)
    return found


def is_of(name: str, path: str) -> bool:
    """Whether a leaf of Parquet is of the column of this name."""
    return path == name or path.startswith(f"{name}.")


def elements_of(name: str, file: File, *, unit: int | None) -> tuple[int, ...]:
    """The elements of a column in each row group: its values, nulls and empty lists among them, or bytes by a unit.

    Bytes are what they take in the file without Parquet's compression, but with its dictionaries and a codec's own:
    less than they have where there are such.
    """
    sizes = next((sizes for path, sizes in file.sizes.items() if is_of(name, path)), ())
    return tuple(num_values if unit is None else num_bytes // unit for num_values, num_bytes in sizes)


def names_below(fields: Any, prefix: str = "") -> list[str]:
    """The paths of columns and of the fields of structs."""
    found = []
    for field in fields:
        found.append(f"{prefix}{field.name}")
        if pa.types.is_struct(field.type):
            found += names_below(field.type, f"{prefix}{field.name}.")
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
