"""Reads and writes the metadata of Petastorm datasets, without Petastorm: `_common_metadata` and hive partitions.

Petastorm stores the dataset's schema, the Unischema, as a pickle in the key-value metadata of `_common_metadata`.
`unischema_reader` reads it, and `unischema_writer` writes it.
"""

from __future__ import annotations

import io
import json
import keyword
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from spark_dl import storage
from spark_dl.data.columns.schema import Column
from spark_dl.data.petastorm.unischema import Codec, Field, Unischema, write_unischema

COMMON_METADATA = "_common_metadata"
UNISCHEMA_KEY = b"dataset-toolkit.unischema.v1"
ROW_GROUPS_KEY = b"dataset-toolkit.num_row_groups_per_file.v1"

_SPARK_TYPE_OF = {
    "bool": "BooleanType",
    "int8": "ByteType",
    "uint8": "ShortType",
    "int16": "ShortType",
    "uint16": "IntegerType",
    "int32": "IntegerType",
    "int64": "LongType",
    "float32": "FloatType",
    "float64": "DoubleType",
}


def common_metadata(unischema: Unischema, row_groups_per_file: Mapping[str, int]) -> dict[bytes, bytes]:
    """Returns the keys of `_common_metadata` that Petastorm reads. # paths relative to the dataset's folder -> row
    groups

    Raises ValueError for a path outside the folder, or a count that is not an integer.
    """
    for path, count in row_groups_per_file.items():
        hive_partitions(path)
        if type(count) is not int or count < 0:
            raise ValueError(f"row groups of {path!r}: expected an integer >= 0, found {count!r}")
    return {UNISCHEMA_KEY: write_unischema(unischema), ROW_GROUPS_KEY: json.dumps(dict(row_groups_per_file)).encode()}


def write_common_metadata(
    url: str, arrow_schema: pa.Schema, *, unischema: Unischema, row_groups_per_file: Mapping[str, int]
) -> None:
    """Writes `_common_metadata` into the folder of a dataset, so that Petastorm's `make_reader` opens it.

    # arrow_schema: of the Parquet files; its metadata are kept
    # row_groups_per_file: of all files of the dataset, by path relative to the folder
    """
    metadata = {**(arrow_schema.metadata or {}), **common_metadata(unischema, row_groups_per_file)}
    file = io.BytesIO()
    pq.write_metadata(arrow_schema.with_metadata(metadata), file)
    storage.write_bytes(storage.join(url, COMMON_METADATA), file.getvalue())


def read_metadata(url: str, name: str = COMMON_METADATA) -> Mapping[bytes, bytes]:
    """Returns the keys of `_common_metadata` or `_metadata` in a dataset's folder; none without such a file.

    Raises ValueError, with the path, if the file is not Parquet metadata.
    """
    path = storage.join(url, name)
    if not storage.exists(path):
        return {}
    try:
        metadata: Mapping[bytes, bytes] = pq.read_schema(pa.BufferReader(storage.read_bytes(path))).metadata or {}
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is not metadata of a Parquet dataset: {error}; delete it, or write Petastorm's metadata again"
        ) from error
    return metadata


def read_row_groups(url: str, metadata: Mapping[bytes, bytes]) -> Mapping[str, int] | None:
    """Returns the row groups of the files in Petastorm's metadata, by path relative to the folder; None without a list.

    Do not open these paths; only compare them. They may point anywhere. Raises ValueError for an invalid list.
    """
    if ROW_GROUPS_KEY not in metadata:
        return None
    try:
        listed = json.loads(metadata[ROW_GROUPS_KEY])
    except (ValueError, RecursionError) as error:
        raise _no_list(url, error) from error
    if not isinstance(listed, dict) or not all(type(count) is int and count >= 0 for count in listed.values()):
        raise _no_list(url, f"found {listed!r:.200}")
    return listed


def _no_list(url: str, why: object) -> ValueError:
    return ValueError(
        f"{storage.join(url, COMMON_METADATA)}: the list of row groups per file cannot be read: {why}; write "
        "Petastorm's metadata again"
    )


def unischema_of(columns: Sequence[Column], *, name: str = "Schema") -> Unischema:
    """Returns the Unischema of columns as `schema.encode` stores them: scalars without a codec, tensors as `.npy`
    cells.

    Raises ValueError for a name that cannot be a field of a namedtuple, the type of Petastorm's rows, and for a column
    without a Petastorm codec.
    """
    fields = []
    for column in columns:
        if not column.name.isidentifier() or keyword.iskeyword(column.name) or column.name.startswith("_"):
            raise ValueError(
                f"column {column.name!r}: Petastorm makes a Python attribute of each column; expected letters, digits "
                "and underscores, starting with a letter, and not a Python keyword; rename it in the DataFrame"
            )
        fields.append(_field_of(column))
    return Unischema(name, tuple(fields))


def _field_of(column: Column) -> Field:
    if column.codec == "ndarray":
        return Field(column.name, column.dtype, column.shape, Codec("ndarray"))
    if column.codec == "image":  # Petastorm detects PNG and JPEG, and does not resize
        shape = column.shape if column.encoding.resize is None else (None, None, *column.shape[2:])
        return Field(column.name, column.dtype, shape, Codec("image", "png"))
    if column.codec == "binary":
        return Field(column.name, "bytes", (), Codec("scalar", spark_type="BinaryType"))
    if column.codec == "list" and column.shape == (None,):
        return Field(column.name, column.dtype, column.shape)  # Petastorm reads the Parquet list as an array
    if column.codec != "scalar" or column.dtype not in _SPARK_TYPE_OF:
        raise ValueError(
            f"column {column.name!r}: found dtype {column.dtype}, shape {column.shape} and cells stored as "
            f"{column.codec}, for which Petastorm has no codec"
        )
    return Field(column.name, column.dtype, (), Codec("scalar", spark_type=_SPARK_TYPE_OF[column.dtype]))


def hive_partitions(relative_path: str) -> dict[str, str]:
    """Returns the hive partition of a file by its path: `day=2020-01-01/part.parquet` -> {"day": "2020-01-01"}.

    Spark's percent-encoding is decoded. The file name is not part of the partition. Raises ValueError for a path that
    is absolute or outside its folder, and for a column that occurs twice.
    """
    parts = relative_path.split("/")
    if any(unquote(p) in ("", ".", "..") for p in parts) or "\\" in relative_path or "\0" in unquote(relative_path):
        raise ValueError(f"expected a path inside the folder of the dataset, found {relative_path!r}")
    partitions: dict[str, str] = {}
    for folder in parts[:-1]:
        key, equals, value = folder.partition("=")
        if not equals:
            continue
        if unquote(key) in partitions:
            raise ValueError(f"the partition column {unquote(key)!r} occurs twice in {relative_path!r}")
        partitions[unquote(key)] = unquote(value)
    return partitions
