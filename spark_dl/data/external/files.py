"""The files of datasets that others wrote: which of a folder count, and what their footers tell."""

from __future__ import annotations

import contextlib
import itertools
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from spark_dl import storage
from spark_dl.data.dataset.folder import is_own_shard
from spark_dl.data.dataset.manifest import MANIFEST
from spark_dl.data.parquet import file as parquet_file


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
    above: set[str] = set()
    for folder in parents_of(url):
        with contextlib.suppress(OSError):  # who may read a partition need not be one who may list them all
            listed = storage.list_names(folder)
            _check_no_job(folder, listed)
            above.update(listed)
    if require_success and "_SUCCESS" not in above:
        _check_success(url, names)
    found = []
    for relative, entry in zip(names, entries, strict=True):
        if entry.type == fs.FileType.Directory or any(_is_hidden(part) for part in relative.split("/")):
            continue
        if entry.type != fs.FileType.File:
            raise ValueError(f"{storage.join(url, relative)} is neither a file nor a folder; take it out")
        found.append((relative, entry.size))
    if storage.is_local(url):
        _check_links(path, [relative for relative, _ in found])
    if not found:
        raise ValueError(f"no dataset at {url}: found a folder without a manifest and without data files")
    return True, sorted(found)


def parents_of(url: str) -> list[str]:
    """The folders that a folder such as `year=2024/month=5` is a partition of, up to that of the dataset; else none."""
    found = []
    while "=" in storage.name(url):
        url = storage.dirname(url)
        found.append(url)
    return found


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
            "them, or mix several with loader.proportions"
        )
    _check_no_job(url, names)
    for name in names:
        folder, file = posixpath.split(name)
        if is_own_shard(file) and posixpath.join(folder, MANIFEST) not in listed:
            raise ValueError(
                f"{storage.join(url, name)} is a shard of a spark_dl dataset without its manifest {MANIFEST}: its "
                "writer was killed or is still running, so that rows may be missing or there twice; wait for its end, "
                "or write the dataset again"
            )


def _check_no_job(url: str, names: Sequence[str]) -> None:
    """Raises ValueError for a folder in which something else says which files count."""
    for name in names:
        parts = name.split("/")
        depth, hidden = next(((i, part) for i, part in enumerate(parts, 1) if _is_hidden(part)), (0, ""))
        for start, why in _NOT_WHOLE.items():
            if hidden.startswith(start):
                found = "/".join(parts[:depth])
                raise ValueError(f"{url} cannot be read as plain Parquet files: found {found} in it; {why}")


def _check_success(url: str, names: Sequence[str]) -> None:
    """Raises ValueError for files that Spark wrote, by these names, whose job has not said that it ended well."""
    done = {posixpath.dirname(name) for name in names if posixpath.basename(name) == "_SUCCESS"}
    for name in sorted(name for name in names if not any(_is_hidden(part) for part in name.split("/"))):
        folders = {"", *itertools.accumulate(posixpath.dirname(name).split("/"), posixpath.join)}
        if re.match(r"(.*/)?part-\d{5}-", name) and not done & folders:
            raise ValueError(
                f"{url} may not be whole: found {name}, which Spark wrote, and no _SUCCESS, which it writes last: its "
                "job was killed or is still running, or writes none; write the dataset again, or, if it is whole, put "
                "an empty file _SUCCESS there or set data.require_success to false"
            )


def _check_links(path: str, names: Sequence[str]) -> None:
    """Raises ValueError for links in a local folder that lead nowhere, or twice to a file, whose rows would be there
    twice. # names: of its data files"""
    for folder, _, files in os.walk(path):
        for file in files:
            link = os.path.join(folder, file)
            if not os.path.exists(link) and not any(map(_is_hidden, os.path.relpath(link, path).split(os.sep))):
                raise ValueError(f"{link} is a link to {os.readlink(link)}, where nothing is; take it out, or mend it")
    known: dict[str, str] = {}
    for name in names:
        if (other := known.setdefault(os.path.realpath(os.path.join(path, name)), name)) != name:
            raise ValueError(
                f"{name} and {other} in {path} are one file, through a link: its rows would be there twice; take the "
                "link out"
            )


def read_footer(url: str, is_folder: bool, names: Sequence[str], name: str, size: int) -> File:
    path = storage.join(url, name) if is_folder else url
    try:
        with storage.open_input(path) as source:
            footer = parquet_file.open_file(source)
            rows = tuple(footer.metadata.row_group(i).num_rows for i in range(footer.metadata.num_row_groups))
            return File(name, size, rows, footer.schema_arrow, _sizes(footer, names), _nulls(footer, names))
    except PermissionError as error:
        raise ValueError(f"{path} cannot be read: {error}; check its owner and mode") from error
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
        and any(parquet_file.is_of(name, leaf.path) for name in names)
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


def elements_of(name: str, file: File, *, unit: int | None) -> tuple[int, ...]:
    """The elements of a column in each row group: its values, nulls and empty lists among them, or bytes by a unit.

    Bytes are what they take in the file without Parquet's compression, but with its dictionaries and a codec's own:
    less than they have where there are such, which the loader finds when it reads them.
    """
    sizes = next((sizes for path, sizes in file.sizes.items() if parquet_file.is_of(name, path)), ())
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


def check_in_all(url: str, name: str, has: Mapping[str, bool], *, key: str = "") -> None:
    """Raises ValueError for a column that some files have, and others have not.

    `has` is by the names of the files, `key` what begins the message: the setting that asks for the column.
    """
    there, missing = ([file for file, is_there in has.items() if is_there == wanted] for wanted in (True, False))
    if there and missing:
        raise ValueError(
            f"{key}column {name!r} is in {there[0]} and not in {missing[0]} of {url}; all files of a dataset must have "
            f"it, or be in folders {name}=..."
        )


def without_nullability(arrow: pa.DataType | None) -> pa.DataType | None:
    """The type, whose elements and fields may be null: what no value tells is not a difference between files."""
    types = pa.types
    if arrow is None:
        return None
    if types.is_struct(arrow):
        return pa.struct([pa.field(f.name, without_nullability(f.type)) for f in arrow])
    if types.is_large_list(arrow):
        return pa.large_list(without_nullability(arrow.value_type))
    if types.is_fixed_size_list(arrow):
        return pa.list_(without_nullability(arrow.value_type), arrow.list_size)
    return pa.list_(without_nullability(arrow.value_type)) if types.is_list(arrow) else arrow
