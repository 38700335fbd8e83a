"""Columns of external datasets: how each becomes a tensor, and the shape of its cells. Called on the driver."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_dl import storage
from spark_dl.config import Data
from spark_dl.config.checks import suggestion
from spark_dl.data.columns import schema
from spark_dl.data.columns.cells import read_cells
from spark_dl.data.columns.elements import leaf_type, null_rows
from spark_dl.data.columns.schema import Column, unit_of
from spark_dl.data.columns.source import HAS_DOT, NO_NULLS, SourceColumn
from spark_dl.data.columns.types import arrow_source_column, check_fill
from spark_dl.data.external.files import File, check_in_all, elements_of, names_below, type_at, without_values
from spark_dl.data.parquet import file as parquet_file
from spark_dl.data.parquet.file import table_column
from spark_dl.data.parquet.filters import NULL_PARTITION
from spark_dl.data.petastorm.columns import is_string_or_time, petastorm_column, shape_of
from spark_dl.data.petastorm.unischema import NUMBERS, Field

_ROWS_AT_ONCE = 64
_Shape = tuple[int | None, ...]


def external_column(
    name: str,
    url: str,
    files: Sequence[File],
    partitions: Mapping[str, Mapping[str, str]],
    fields: Mapping[str, Field],
    settings: Mapping[str, Any],
    data: Data,
) -> Column:
    """Returns a column by its name, from Petastorm's schema, the Parquet schema or hive partitions. Called on the
    driver.

    Raises ValueError for a column that is missing or cannot become a tensor, and for settings that do not fit it.
    """
    is_partition = all(name in partition for partition in partitions.values())
    types = [type_at(file.schema, name) for file in files]
    arrow = next((kind for kind in types if not without_values(kind)), types[0])
    if name in fields and name in files[0].schema.names and not is_string_or_time(fields[name]):
        column = petastorm_column(fields[name], settings)
        _check_vocabulary(column)
        return _petastorm_column(column, settings.get("ragged", False), url, files, data)
    if arrow is not None:
        return _arrow_column(arrow_source_column(name, arrow, settings), arrow, url, files, data)
    if is_partition:
        values = {partition[name] for partition in partitions.values()}
        stored = fields[name].dtype if name in fields else ""
        dtype = stored if stored in NUMBERS and "complex" not in stored else "int64"
        return _partition_column(name, values, dtype, settings, data)
    check_in_all(url, name, {f.name: name in partitions[f.name] or type_at(f.schema, name) is not None for f in files})
    known = [*names_below(files[0].schema), *next(iter(partitions.values()))]
    if name in known:
        raise ValueError(f"column {name!r}: {HAS_DOT}")
    raise ValueError(f"no column {name!r} in the dataset {url}{suggestion(name, known)} (data.features, data.label)")


def _fill(source: SourceColumn, arrow: pa.DataType, data: Data) -> Any:
    """Returns the value that replaces nulls; None if `data.fill` has none. # arrow: the type of the column's cells"""
    value = data.fill.get(source.name)
    if value is None:
        return None
    leaf = leaf_type(arrow)
    check_fill(source, value, leaf.value_type if pa.types.is_dictionary(leaf) else leaf)
    return value if data.nulls == "fill" else None


def _partition_column(
    name: str, values: Collection[str], dtype: str, settings: Mapping[str, Any], data: Data
) -> Column:
    """Returns the column of a hive partition. # dtype: of the cells, if `settings` (`data.encode`) are empty"""
    column = _string_partition(name, settings) if settings else Column(name, dtype, (), "partition")
    arrow = pa.string() if settings else pa.from_numpy_dtype(np.dtype(dtype))
    fill = _fill(SourceColumn(name, column.dtype, "scalar", encoding=column.encoding), arrow, data)
    if NULL_PARTITION in values and fill is None and data.nulls != "drop" and not data.filters:
        raise ValueError(
            f"column {name!r} is a partition that is null in some rows (the folder {name}={NULL_PARTITION}), expected "
            f"{NO_NULLS}, with data.fill.{name}"
        )
    if not settings:
        _check_numbers(name, {*values} - {NULL_PARTITION}, np.dtype(dtype))
    return dataclasses.replace(column, fill=fill)


def _petastorm_column(column: Column, is_ragged: bool, url: str, files: Sequence[File], data: Data) -> Column:
    dtype, shape = np.dtype(column.dtype), column.shape
    is_lookup = column.encoding.is_lookup
    if column.name in data.fill and ("image" in column.codec or dtype.kind == "c"):
        raise ValueError(
            f"data.fill.{column.name}: images and complex numbers cannot be filled; set data.nulls to drop"
        )
    fill = None
    if column.name in data.fill:
        source = SourceColumn(column.name, column.dtype, "array" if shape else "scalar", encoding=column.encoding)
        fill = _fill(source, pa.string() if is_lookup else pa.from_numpy_dtype(dtype), data)
    if None in shape[1 if is_ragged else 0 :]:
        paths = [storage.join(url, f.name) for f in files]
        first_shape = _first_shape(column.name, paths, functools.partial(_petastorm_shape, column, is_ragged))
        shape = (None, *first_shape[1:]) if is_ragged else first_shape
    mean = _mean_size(column.name, files, unit=unit_of(column)) if is_ragged else None
    return dataclasses.replace(column, shape=shape, mean_size=mean, fill=fill)


def _check_numbers(name: str, values: Collection[str], dtype: np.dtype[Any]) -> None:
    if dtype.kind == "f":
        are_numbers = all(re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", v) for v in values)
        expected = "numbers"
    else:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        are_numbers = all(re.fullmatch(r"-?[0-9]+", v) and low <= int(v) <= high for v in values)
        expected = f"integers of {8 * dtype.itemsize} bits"
    if not are_numbers:
        raise ValueError(
            f"column {name!r} is a partition with values such as {sorted(values)[:3]}; only {expected} "
            f"become tensors without an encoding; set data.encode: {{{name}: {{as: hash, buckets: 1000}}}}, "
            f"or {{{name}: {{as: vocabulary, values: [...]}}}}"
        )


def _string_partition(name: str, settings: Mapping[str, Any]) -> Column:
    source = arrow_source_column(name, pa.string(), settings)
    if not source.encoding.is_lookup:
        found = source.encoding.kind
        raise ValueError(f"data.encode.{name}.as: expected vocabulary or hash for a partition, found {found!r}")
    _check_vocabulary(source)
    return Column(name, source.dtype, (), "partition", source.encoding)


def _arrow_column(source: SourceColumn, arrow: pa.DataType, url: str, files: Sequence[File], data: Data) -> Column:
    _check_vocabulary(source)
    if data.encode.get(source.name, {}).get("bad", "raise") != "raise":
        raise ValueError(
            f"data.encode.{source.name}.bad: expected raise for files that are read in place, whose images are not "
            "looked at before training; write them with write_shards, which leaves bad ones out"
        )
    source = dataclasses.replace(source, fill=_fill(source, arrow, data))
    kind = source.encoding.kind
    codec = "vector" if source.kind == "vector" else "list" if source.kind == "array" else schema.codec_of(source)
    if codec == "scalar" and kind != "number":
        codec = "converted"
    unit = 1 if kind in ("bytes", "image") else None
    mean = _mean_size(source.name, files, unit=unit) if source.ragged or codec == "image" else None
    shape: tuple[int | None, ...] = (None,) if source.ragged else ()
    if codec in ("vector", "list", "image") and not (source.ragged and source.depth == 1):
        paths = [storage.join(url, f.name) for f in files]
        shape = _first_shape(source.name, paths, lambda cell: _arrow_shape(source, codec, cell, data))
    return Column(source.name, source.dtype, shape, codec, source.encoding, mean, source.fill)


def _check_vocabulary(source: SourceColumn | Column) -> None:
    if source.encoding.kind == "vocabulary" and source.encoding.vocabulary is None:
        raise ValueError(
            f"data.encode.{source.name}.values: expected the vocabulary, found none; spark_dl counts strings "
            "only when Spark writes the shards (write_shards, spark-dl prepare); list the strings, or set as: hash"
        )


def _mean_size(name: str, files: Sequence[File], *, unit: int | None) -> float:
    return sum(sum(elements_of(name, file, unit=unit)) for file in files) / sum(sum(file.row_groups) for file in files)


def _arrow_shape(source: SourceColumn, codec: str, cell: pa.Array, data: Data) -> _Shape | None:
    """Returns the shape of a cell; None for an empty ragged cell, and for nulls that are filled or dropped."""
    may_be_null = data.nulls != "error" or data.filters
    if may_be_null and (cell.null_count if source.fill is not None else null_rows(cell) is not None):
        return None
    if source.ragged and not pc.list_value_length(cell)[0].as_py():
        return None
    return schema.cell_shape(codec, read_cells(source, cell), source.encoding)


def _petastorm_shape(column: Column, is_ragged: bool, cell: pa.Array) -> _Shape | None:
    """Returns the shape of a cell; None for a null, and for an empty ragged cell."""
    shape = shape_of(column, cell)
    return None if shape is None or (is_ragged and 0 in shape) else shape


def _first_shape(name: str, paths: Sequence[str], shape_of_cell: Callable[[pa.Array], _Shape | None]) -> _Shape:
    """Returns the shape of the first cell that has one. All cells must have it, except for a ragged column's first
    axis.

    An empty cell does not have an inner shape.
    """
    for path, cell in _cells(name, paths):
        try:
            shape = shape_of_cell(cell)
        except ValueError as error:
            raise ValueError(f"{error}; in a row of {path}, which gives the shape of all cells") from error
        if shape is not None and 0 in shape:
            raise ValueError(schema.empty_first_cell(name, path))
        if shape is not None:
            return shape
    raise ValueError(f"column {name!r}: the cells of {paths[0]} and of all other files are empty")


def _cells(name: str, paths: Sequence[str]) -> Iterator[tuple[str, pa.Array]]:
    """Yields the file and the cell, for each cell of a column. # cell: (1,)"""
    for path in paths:
        with storage.open_input(path) as file:
            opened = parquet_file.open_file(file, buffered=storage.is_local(path))
            for batch in opened.iter_batches(_ROWS_AT_ONCE, columns=[name], use_threads=False):
                stored = table_column(pa.Table.from_batches([batch]), name).combine_chunks()
                yield from ((path, stored.slice(i, 1)) for i in range(len(stored)))
