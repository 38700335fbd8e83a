"""Petastorm's schema: the Unischema, its fields and their codecs, as frozen records."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from spark_dl.data.columns.ragged import MAX_AXES

Kind = Literal["scalar", "ndarray", "compressed_ndarray", "image"]
CODECS: dict[str, Kind] = {
    "ScalarCodec": "scalar",
    "NdarrayCodec": "ndarray",
    "CompressedNdarrayCodec": "compressed_ndarray",
    "CompressedImageCodec": "image",
}
SPARK_TYPES = (
    "NullType", "StringType", "CharType", "VarcharType", "BinaryType", "BooleanType", "DateType", "TimestampType",
    "TimestampNTZType", "DecimalType", "DoubleType", "FloatType", "ByteType", "ShortType", "IntegerType", "LongType",
    "ArrayType",
)  # fmt: skip
SPARK_PARAMETERS = {
    "DecimalType": {"precision": 10, "scale": 0},
    "CharType": {"length": 1},
    "VarcharType": {"length": 1},
}
"""Integer parameters of Spark types, and their defaults."""
NUMBERS = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
TIMES = ("datetime64", "timedelta64")
DTYPES = frozenset({*NUMBERS, *TIMES, "bool", "str", "bytes", "object", "decimal"})


@dataclass(frozen=True)
class Codec:
    """Storage format of a field's cells. Raises ValueError for an unknown kind."""

    kind: Kind
    image_format: str | None = None
    """For images: `png` or `jpeg` (`jpg`)."""
    quality: int | None = None
    """For images: JPEG quality, by default 80."""
    spark_type: str | None = None
    """For scalars: a name of `pyspark.sql.types`, such as `LongType` or `DecimalType(10,9)`."""

    def __post_init__(self) -> None:
        if self.kind not in CODECS.values():
            raise ValueError(f"codec: expected one of {list(CODECS.values())}, found {self.kind!r}")
        if (self.kind == "image") != (self.image_format is not None):
            raise ValueError(f"codec {self.kind}: found the image format {self.image_format!r}; only images have one")
        if (self.kind == "scalar") != (self.spark_type is not None):
            raise ValueError(f"codec {self.kind}: found the Spark type {self.spark_type!r}; only scalars have one")
        if self.spark_type is not None:
            split_spark_type(self.spark_type)
        if self.kind == "image" and self.quality is None:
            object.__setattr__(self, "quality", 80)  # Petastorm's default
        is_quality = type(self.quality) is int and abs(self.quality) < 2**31
        if is_quality != (self.kind == "image"):
            raise ValueError(
                f"codec {self.kind}: found the quality {self.quality!r:.20}; expected an integer for images"
            )


@dataclass(frozen=True)
class Field:
    """One column. Raises ValueError for an invalid dtype or shape."""

    name: str
    dtype: str
    """Name of the NumPy dtype, or `str`, `bytes`, `decimal`, `object`, `datetime64`, `timedelta64`."""
    shape: tuple[int | None, ...] = ()
    """Shape of a cell; None for an axis whose length varies between rows."""
    codec: Codec | None = None
    nullable: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name == "":
            raise ValueError(f"field: expected a name, found {type(self.name).__name__}")
        if self.dtype not in DTYPES:
            raise ValueError(f"field {self.name!r}: expected a dtype among {sorted(DTYPES)}, found {self.dtype!r}")
        if len(self.shape) > MAX_AXES:
            raise ValueError(
                f"field {self.name!r}: found a shape of {len(self.shape)} axes; NumPy has at most {MAX_AXES}"
            )
        for n in self.shape:
            if n is not None and not (type(n) is int and 0 <= n < 2**31):
                raise ValueError(f"field {self.name!r}: expected a shape of lengths and None, found {self.shape!r:.80}")
        if not isinstance(self.nullable, bool):
            raise ValueError(f"field {self.name!r}: expected nullable to be true or false")

    @property
    def fixed_shape(self) -> tuple[int, ...] | None:
        """Shape of every cell, or None if it varies."""
        fixed = tuple(n for n in self.shape if n is not None)
        return fixed if len(fixed) == len(self.shape) else None


@dataclass(frozen=True)
class Unischema:
    """The schema of a Petastorm dataset."""

    name: str
    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        names = [f.name for f in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"unischema {self.name!r}: found a field twice among {names}")

    def field(self, name: str) -> Field:
        """Returns a field by its name. Raises ValueError if there is none."""
        for field in self.fields:
            if field.name == name:
                return field
        raise ValueError(f"no field {name!r} in the unischema; it has {[f.name for f in self.fields]}")


def split_spark_type(spark_type: str) -> tuple[str, list[str]]:
    match = re.fullmatch(r"(\w+)(?:\((.+)\))?", spark_type)
    if match is None or match[1] not in SPARK_TYPES:
        raise ValueError(f"codec: expected a Spark type among {SPARK_TYPES}, found {spark_type!r:.80}")
    if match[1] == "ArrayType":
        split_spark_type(match[2] or "")
        return match[1], [match[2]]
    args = match[2].split(",") if match[2] else []
    parameters = ",".join(SPARK_PARAMETERS.get(match[1], ()))
    if len(args) != len(SPARK_PARAMETERS.get(match[1], ())) or not all(re.fullmatch(r"-?\d{1,9}", a) for a in args):
        expected = f"{match[1]}({parameters}) with integers" if parameters else match[1]
        raise ValueError(f"codec: expected {expected}, found {spark_type!r:.80}")
    return match[1], args
