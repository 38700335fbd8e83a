"""External datasets: Parquet files and folders, hive partitions, and Petastorm datasets that spark_dl did not write.

Only footers are read to open a dataset, and the first row for the shapes of cells. Files must have the same columns.
When cells are read, strings, timestamps and decimals become numbers as `data.encode` says, and nulls, NaN and Inf are
dropped or filled.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from spark_dl import storage
from spark_dl.config import Data
from spark_dl.data.columns import schema
from spark_dl.data.columns.policies import CleaningRules
from spark_dl.data.columns.schema import Column, unit_of
from spark_dl.data.columns.source import NO_NULLS, check_batch_names, check_names
from spark_dl.data.dataset.records import Shard, ShardSet, ShardTable
from spark_dl.data.external.columns import external_column
from spark_dl.data.external.files import (
    File,
    comparable_type,
    elements_of,
    list_files,
    parents_of,
    read_footer,
    type_at,
    without_values,
)
from spark_dl.data.petastorm import metadata as petastorm_metadata
from spark_dl.data.petastorm.unischema import Field, read_unischema

_log = logging.getLogger("spark_dl")
_READERS = 16


def open_parquet(
    url: str | os.PathLike[str],
    names: Sequence[str],
    *,
    data: Data | None = None,
    reference_columns: Sequence[Column] = (),
) -> ShardSet:
    """Opens columns of a Parquet file, of a folder of Parquet files, or of a Petastorm dataset. Called on the driver.

    `data.encode` says how columns become numbers. Vocabularies come from `data.encode` or from `reference_columns`, the
    columns of another dataset. Nulls, NaN and Inf are filled when they are read. `filter_rows` drops rows with them.

    Raises ValueError for a path without Parquet files, a file that is not Parquet, files whose columns differ, a column
    that is missing or cannot become a tensor, nulls in the footers that are neither dropped nor filled, and Petastorm
    metadata that contain anything but a schema.
    """
    data = data or Data()
    check_names("encode", data.encode, names)
    check_names("fill", data.fill, names)
    url = storage.absolute(url)
    try:
        root, paths = list_files(url, require_success=data.require_success)
    except OSError as error:
        raise storage.error_class(error)(f"cannot read the dataset {url}: {error}; check its owner and mode") from error
    with ThreadPoolExecutor(_READERS) as readers:
        listed = list(readers.map(lambda path: read_footer(url, root, names, *path), paths))
    base = url if root else storage.dirname(url)
    fields = _petastorm_fields(base, listed if root else ())
    files = [f for f in listed if sum(f.row_groups)]
    if not files:
        raise ValueError(f"the dataset {url} has no rows")
    partitions = {f.name: _partitions_of(f) if root else {} for f in files}
    vocabularies = schema.vocabularies_of(reference_columns)
    settings = {
        n: {**({"values": list(vocabularies[n])} if n in vocabularies else {}), **data.encode.get(n, {})} for n in names
    }
    columns = tuple(external_column(name, base, files, partitions, fields, settings[name], data) for name in names)
    check_batch_names(names, [c.name for c in columns if c.is_ragged], data.weight)
    schema.check_reference_columns(columns, reference_columns)
    _check_same_columns(url, files, [c.name for c in columns if c.codec != "partition"])
    _check_nulls(url, files, columns, data)
    _check_finite(url, columns, data)
    shards = ShardTable.of(_shard(file, columns, partitions[file.name]) for file in files)
    return ShardSet(
        base, columns, shards, rules=CleaningRules(data.nulls, data.nonfinite, dict(data.fill)), external=True
    )


def _partitions_of(file: File) -> dict[str, str]:
    """Returns the hive partition's values by column, without columns that the file itself has."""
    partitions = petastorm_metadata.hive_partitions(file.name)
    return {name: value for name, value in partitions.items() if name not in file.schema.names}


def _check_nulls(url: str, files: Sequence[File], columns: Sequence[Column], data: Data) -> None:
    """Raises ValueError for nulls in the footers that are neither dropped nor filled, and logs what is filled.

    With `data.filters`, the rows with nulls may not be read, so the loader checks them.
    """
    if data.nulls == "drop" or data.filters:
        return
    for column in columns:
        nulls = [(file, group, n) for file in files for group, n in enumerate(file.nulls.get(column.name, ())) if n]
        if nulls and column.fill is None:
            file, group, first = nulls[0]
            missing = "; data.nulls is fill, but this column has no value" if data.nulls == "fill" else ""
            raise ValueError(
                f"column {column.name!r}: found {sum(n for _, _, n in nulls)} null(s) in {url}, first {first} in row "
                f"group {group} of {file.name}, expected {NO_NULLS}, with data.fill.{column.name}{missing}"
            )
        if nulls:
            _log.info(
                "data.fill.%s: %d null(s) of %s become %r", column.name, sum(n for *_, n in nulls), url, column.fill
            )


def _check_finite(url: str, columns: Sequence[Column], data: Data) -> None:
    """Raises ValueError if NaN drops rows and a column must be decoded to find NaN."""
    encoded = (c.name for c in columns if c.codec.startswith("petastorm.") and np.dtype(c.dtype).kind in "fc")
    if data.nonfinite == "drop" and (name := next(encoded, None)):
        raise ValueError(
            f"data.nonfinite: found 'drop' for {url}, whose column {name!r} contains arrays that Petastorm encoded; "
            "set it to fill or allow, or write the dataset with Spark first (write_shards, spark-dl prepare)"
        )


def _shard(file: File, columns: Sequence[Column], partition: Mapping[str, str]) -> Shard:
    elements = {c.name: elements_of(c.name, file, unit=unit_of(c)) for c in columns if c.is_ragged}
    stored = {c.name: elements_of(c.name, file, unit=1) for c in columns if c.is_encoded}
    return Shard(
        file.name, file.row_groups, file.bytes, partition=tuple(partition.items()), elements=elements, stored=stored
    )


def _petastorm_fields(url: str, files: Sequence[File]) -> Mapping[str, Field]:
    """Returns the fields of Petastorm's schema, if there is one. # files: those of a whole dataset, or none"""
    top = next(reversed(parents_of(url)), url)
    metadata = petastorm_metadata.read_metadata(top)
    if files and top == url and (row_groups := petastorm_metadata.read_row_groups(url, metadata)) is not None:
        _check_listed(url, files, row_groups)
    pickled = metadata.get(petastorm_metadata.UNISCHEMA_KEY)
    try:
        return {f.name: f for f in read_unischema(pickled).fields} if pickled else {}
    except ValueError as error:
        raise type(error)(f"{storage.join(top, petastorm_metadata.COMMON_METADATA)}: {error}") from error


def _check_listed(url: str, files: Sequence[File], listed: Mapping[str, int]) -> None:
    """Raises ValueError unless the files of a folder are those in Petastorm's list, which Petastorm itself requires."""
    groups = {f.name: len(f.row_groups) for f in files if sum(f.row_groups) or f.name in listed}
    for name in sorted({*groups, *listed}):
        if groups.get(name) != listed.get(name):
            there = f"{groups[name]} row groups" if name in groups else "nothing"
            expected = f"{listed[name]} row groups" if name in listed else "no such file"
            raise ValueError(
                f"the dataset {url} is incomplete: found {there} at {name!r:.200}, expected {expected}, as its "
                f"{petastorm_metadata.COMMON_METADATA} says; restore the files, or write Petastorm's "
                "metadata again (petastorm-generate-metadata.py)"
            )


def _check_same_columns(url: str, files: Sequence[File], names: Sequence[str]) -> None:
    """Raises ValueError if a column's type differs between files. Order and other columns may differ."""
    for name in names:
        known = [f for f in files if not without_values(type_at(f.schema, name))]
        for first, other in itertools.pairwise(known):
            types: list[Any] = [type_at(f.schema, name) for f in (first, other)]
            if comparable_type(types[0]) != comparable_type(types[1]):
                raise ValueError(
                    f"column {name!r} has type {types[0]} in {first.name} and {types[1] or 'is missing'} in "
                    f"{other.name} of {url}; read the files with Spark and write them with one schema"
                )
