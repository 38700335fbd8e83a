"""Writes a Unischema as the pickle that Petastorm reads, opcode by opcode, without pickling an object."""

from __future__ import annotations

import struct

from spark_dl.data.petastorm.unischema import CODECS, Codec, Field, Unischema, split_spark_type


def write_unischema(unischema: Unischema) -> bytes:
    """Returns the pickle (protocol 2) of this Unischema for Petastorm, with the fields in this order."""
    out = [b"\x80\x02", _global("petastorm.unischema", "Unischema"), b")\x81}(", _text("_name")]
    out += [_text(unischema.name), _text("_fields"), _global("collections", "OrderedDict"), b")R("]
    for i, field in enumerate(unischema.fields):
        out += [_text(field.name), _pickled_field(field), b"r", struct.pack("<I", i)]
    out.append(b"u")
    for i, field in enumerate(unischema.fields):
        if field.name not in _UNISCHEMA_ATTRIBUTES and not field.name.startswith("_"):
            out += [_text(field.name), b"j", struct.pack("<I", i)]
    return b"".join([*out, b"ub."])


_UNISCHEMA_ATTRIBUTES = (
    "fields", "create_schema_view", "as_spark_schema", "make_namedtuple", "make_namedtuple_tf", "from_arrow_schema",
)  # fmt: skip
"""Fields with these names are not set as attributes, as they would hide attributes of Petastorm's object."""


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _number(value: int | None) -> bytes:
    return b"N" if value is None else b"J" + struct.pack("<i", value)


def _pickled_field(field: Field) -> bytes:
    dtypes = {"bool": "bool_", "str": "str_", "bytes": "bytes_", "object": "object_"}
    dtype = _global("decimal", "Decimal")
    if field.dtype != "decimal":
        dtype = _global("numpy", dtypes.get(field.dtype, field.dtype))
    shape = b"".join([b"(", *(_number(n) for n in field.shape), b"t"])
    codec = b"N" if field.codec is None else _pickled_codec(field.codec)
    values = _text(field.name) + dtype + shape + codec + (b"\x88" if field.nullable else b"\x89")
    return _global("petastorm.unischema", "UnischemaField") + b"(" + values + b"t\x81"


def _pickled_codec(codec: Codec) -> bytes:
    name = {kind: name for name, kind in CODECS.items()}[codec.kind]
    made = _global("petastorm.codecs", name) + b")\x81"
    if codec.spark_type is not None:
        return made + b"}" + _text("_spark_type") + _pickled_spark_type(codec.spark_type) + b"sb"
    if codec.kind == "image":
        return b"".join([made, b"}(", _text("_image_codec"), _text(f".{codec.image_format}"),
                         _text("_quality"), _number(codec.quality), b"ub"])  # fmt: skip
    return made


def _pickled_spark_type(spark_type: str) -> bytes:
    """Returns the call of the type's constructor, which sets the state for the reader's version of PySpark."""
    name, args = split_spark_type(spark_type)
    values = [_pickled_spark_type(a) if name == "ArrayType" else _number(int(a)) for a in args]
    return b"".join([_global("pyspark.sql.types", name), b"(", *values, b"tR"])
