"""Petastorm's dataset metadata, without Petastorm and without unpickling what others wrote.

Petastorm keeps a dataset's schema, the Unischema, as a pickle in the key-value metadata of `_common_metadata`. Here the
opcodes of the pickle are checked first; then every class that it names is looked up in an exact list and stands for an
inert record, so that reading calls no code but that of this module. Writing assembles the opcodes that Petastorm reads.
"""

from __future__ import annotations

import io
import json
import keyword
import pickle
import pickletools
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spark_dl import storage
from spark_dl.data.schema import Column

COMMON_METADATA = "_common_metadata"
UNISCHEMA_KEY = b"dataset-toolkit.unischema.v1"
ROW_GROUPS_KEY = b"dataset-toolkit.num_row_groups_per_file.v1"

Kind = Literal["scalar", "ndarray", "compressed_ndarray", "image"]
_CODECS: dict[str, Kind] = {
    "ScalarCodec": "scalar",
    "NdarrayCodec": "ndarray",
    "CompressedNdarrayCodec": "compressed_ndarray",
    "CompressedImageCodec": "image",
}
_PACKAGES = ("petastorm", "av.experimental.deepdrive.dataset_toolkit", "av.ml.dataset_toolkit")
"""Petastorm, and its names before it was published."""
_FIELD_NAMES = ("name", "numpy_dtype", "shape", "codec", "nullable")
_SPARK_TYPES = (
    "NullType", "StringType", "CharType", "VarcharType", "BinaryType", "BooleanType", "DateType", "TimestampType",
    "TimestampNTZType", "DecimalType", "DoubleType", "FloatType", "ByteType", "ShortType", "IntegerType", "LongType",
    "ArrayType",
)  # fmt: skip
_SPARK_PARAMETERS = {
    "DecimalType": {"precision": 10, "scale": 0},
    "CharType": {"length": 1},
    "VarcharType": {"length": 1},
}
"""Whole numbers that a type has, and their defaults."""
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
_NUMBERS = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
TIMES = ("datetime64", "timedelta64")
_NUMPY_NAMES = {name: name for name in (*_NUMBERS, *TIMES)} | {
    "bool_": "bool", "bool8": "bool", "bool": "bool", "str_": "str", "str0": "str", "unicode_": "str",
    "bytes_": "bytes", "bytes0": "bytes", "string_": "bytes", "object_": "object",
    "intc": "int32", "uintc": "uint32", "longlong": "int64", "ulonglong": "uint64",
}  # fmt: skip
_NUMPY_MODULES = ("numpy", *(f"numpy.{c}.{m}" for c in ("core", "_core") for m in ("multiarray", "numerictypes")))
_BUILTIN_NAMES = {"str": "str", "unicode": "str", "basestring": "str", "bytes": "bytes", "int": "int64",
                  "long": "int64", "float": "float64", "bool": "bool"}  # fmt: skip
_OTHER_NAMES = {
    ("decimal", "Decimal"): "decimal",
    ("datetime", "datetime"): "datetime64",
    ("datetime", "date"): "datetime64",
    ("datetime", "timedelta"): "timedelta64",
}
_DTYPES = frozenset(_NUMPY_NAMES.values()) | {"decimal"}

_MAX_PICKLE_BYTES = 16 << 20
_MAX_OPCODES = 1_000_000


class UnsafeMetadataError(ValueError):
    """Metadata that is not a plain Unischema, refused before anything that it names could run."""


@dataclass(frozen=True)
class Codec:
    """How the cells of a field are stored. Raises ValueError for a kind that there is not."""

    kind: Kind
    image_format: str | None = None
    """Of images: `png` or `jpeg` (`jpg`)."""
    quality: int | None = None
    """Of images: JPEG's quality, by default 80."""
    spark_type: str | None = None
    """Of scalars: a name of `pyspark.sql.types`, such as `LongType` or `DecimalType(10,9)`."""

    def __post_init__(self) -> None:
        if self.kind not in _CODECS.values():
            raise ValueError(f"codec: expected one of {list(_CODECS.values())}, found {self.kind!r}")
        if (self.kind == "image") != (self.image_format is not None):
            raise ValueError(f"codec {self.kind}: found the image format {self.image_format!r}; images alone have one")
        if (self.kind == "scalar") != (self.spark_type is not None):
            raise ValueError(f"codec {self.kind}: found the Spark type {self.spark_type!r}; scalars alone have one")
        if self.spark_type is not None:
            _split_spark_type(self.spark_type)
        if self.kind == "image" and self.quality is None:
            object.__setattr__(self, "quality", 80)  # Petastorm's default
        is_quality = type(self.quality) is int and abs(self.quality) < 2**31
        if is_quality != (self.kind == "image"):
            raise ValueError(f"codec {self.kind}: found the quality {self.quality!r:.20}; images have a whole number")


@dataclass(frozen=True)
class Field:
    """One column. Raises ValueError for a dtype or a shape that no field has."""

    name: str
    dtype: str
    """NumPy's name, or `str`, `bytes`, `decimal`, `object`, `datetime64`, `timedelta64`."""
    shape: tuple[int | None, ...] = ()
    """Of a cell; None where the length varies from row to row."""
    codec: Codec | None = None
    nullable: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name == "":
            raise ValueError(f"field: expected a name, found {type(self.name).__name__}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"field {self.name!r}: expected a dtype among {sorted(_DTYPES)}, found {self.dtype!r}")
        for n in self.shape:
            if n is not None and not (type(n) is int and 0 <= n < 2**31):
                raise ValueError(f"field {self.name!r}: expected a shape of lengths and None, found {self.shape!r:.80}")
        if not isinstance(self.nullable, bool):
            raise ValueError(f"field {self.name!r}: expected nullable to be true or false")

    @property
    def fixed_shape(self) -> tuple[int, ...] | None:
        """The shape of every cell, or None where it varies."""
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
            raise ValueError(f"unischema {self.name!r}: expected each field once, found {names}")

    def field(self, name: str) -> Field:
        """The field of this name. Raises ValueError if there is none."""
        for field in self.fields:
            if field.name == name:
                return field
        raise ValueError(f"no field {name!r} in the unischema; it has {[f.name for f in self.fields]}")


# --- Reading a Unischema ---


def read_unischema(pickled: bytes) -> Unischema:
    """A Unischema from its pickle, as Petastorm 0.4.0 to 0.13.1 wrote it under Python 2 or 3. Nothing of it is run.

    Raises UnsafeMetadataError (a ValueError) for anything else: another class or function (named in the message), an
    opcode that no Unischema needs, more than 16 MiB, or a pickle that is cut short.
    """
    if len(pickled) > _MAX_PICKLE_BYTES:
        raise UnsafeMetadataError(f"a pickled Unischema of {len(pickled)} bytes; at most {_MAX_PICKLE_BYTES} are read")
    try:
        _check_opcodes(pickled)
        root = _InertUnpickler(io.BytesIO(pickled), fix_imports=False, encoding="latin1").load()
        return _unischema(root)
    except UnsafeMetadataError:
        raise
    except Exception as error:  # pickle promises no particular errors for what is not a pickle
        raise UnsafeMetadataError(f"not a pickled Unischema: {type(error).__name__}: {error!s:.200}") from error


_PUTS, _GETS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"GET", "BINGET", "LONG_BINGET"}
_ATOMS = {
    "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES",
}  # fmt: skip
_OPCODES = _ATOMS | _PUTS | _GETS | {
    "PROTO", "FRAME", "STOP", "MARK", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST",
    "APPEND", "APPENDS", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ",
    "BUILD",
}  # fmt: skip


def _check_opcodes(pickled: bytes) -> None:
    """Refuses what could cost much time or memory, or run anything, before the unpickler sees it.

    The stack is followed as far as to know the keys of dicts: a key of nested tuples, each twice in the next, would be
    hashed for ever, and a deep one overruns the stack of C.
    """
    stack: list[bool | None] = []  # True for text and numbers, False for other objects, None for a mark
    memo: dict[int, bool] = {}
    for count, (op, arg, _) in enumerate(pickletools.genops(pickled), 1):
        if op.name not in _OPCODES:
            named = f" {arg!r:.100}" if isinstance(arg, str) else ""
            raise UnsafeMetadataError(f"the pickled Unischema has the opcode {op.name}{named}, which none needs")
        if count > _MAX_OPCODES:
            raise UnsafeMetadataError(f"the pickled Unischema has more than {_MAX_OPCODES} opcodes")
        if op.name == "FRAME" and int(arg or 0) > len(pickled):
            raise UnsafeMetadataError(f"the pickled Unischema has a frame of {arg} bytes, and {len(pickled)} in all")
        if op.name in _PUTS:
            index = len(memo) if op.name == "MEMOIZE" else int(arg or 0)
            if not 0 <= index <= count:  # the unpickler's memo is an array up to the largest index
                raise UnsafeMetadataError(f"the pickled Unischema has the memo index {index} after {count} opcodes")
            memo[index] = bool(stack[-1])
        elif op.name in _GETS:
            stack.append(memo[int(arg or 0)])
        else:
            _follow(op, stack)


def _follow(op: pickletools.OpcodeInfo, stack: list[bool | None]) -> None:
    """What an opcode does to the stack."""
    fixed, items = len(op.stack_before), list[bool]()
    if pickletools.markobject in op.stack_before:
        fixed = op.stack_before.index(pickletools.markobject)
        while (item := stack.pop()) is not None:
            items.append(item)
    operands: list[bool | None] = [stack.pop() for _ in range(fixed)]  # the last one first, as the items
    if None in operands:
        raise UnsafeMetadataError(f"the pickled Unischema has the opcode {op.name} without its operands")
    keys: Mapping[str, Sequence[bool | None]] = {
        "SETITEM": operands[1::2],
        "SETITEMS": items[1::2],
        "DICT": items[1::2],
    }
    if not all(keys.get(op.name, ())):
        raise UnsafeMetadataError("the pickled Unischema has a dict whose keys are not text")
    stack.extend(None if o is pickletools.markobject else op.name in _ATOMS for o in op.stack_after)


class _Sealed(type):
    """Classes that a pickle cannot change (BUILD sets attributes of whatever object it is given)."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise UnsafeMetadataError(f"the pickled Unischema sets {name!r:.80} of the class {cls.__name__}")


class _Stub(metaclass=_Sealed):
    """Stands for a class that a pickle names. Cannot be called."""

    __slots__ = ()
    dtype: ClassVar[str] = ""
    """What it means as the type of a field."""

    def __new__(cls, *args: Any) -> Any:
        raise UnsafeMetadataError(f"the pickled Unischema calls {cls.__name__}, which is only the name of a type there")

    def __setstate__(self, state: Any) -> None:
        raise UnsafeMetadataError(f"the pickled Unischema sets the state of {type(self).__name__}")


class _Record(_Stub):
    """Stands for an object: what its class was called with, and the state that was set."""

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Any:
        self = object.__new__(cls)
        self.args, self.state = args, {}
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _NumpyDtype(_Record):
    """`numpy.dtype("f4", False, True)`; the state repeats it, save for the byte order, which is not the field's."""

    __slots__ = ()


class _Reconstructor(_Stub):
    """`copyreg._reconstructor(class, object, None)`, or with a tuple as the base and its items."""

    def __new__(cls, *args: Any) -> Any:
        made, base, state = args
        is_tuple = base is _GLOBALS["builtins", "tuple"] and type(state) is tuple
        if not _is_record_class(made) or not (is_tuple or (base is _GLOBALS["builtins", "object"] and state is None)):
            raise UnsafeMetadataError("the pickled Unischema rebuilds an object that is none of Petastorm's")
        return made(*state) if is_tuple else made()


class _Restore(_Stub):
    """`pyspark.serializers._restore("UnischemaField", names, values)`: how PySpark makes namedtuples picklable."""

    def __new__(cls, *args: Any) -> Any:
        name, names, values = args
        if name != "UnischemaField" or type(names) is not tuple or names != _FIELD_NAMES or type(values) is not tuple:
            raise UnsafeMetadataError("the pickled Unischema restores a namedtuple that is not a UnischemaField")
        return _GLOBALS["petastorm.unischema", "UnischemaField"](*values)


class _Dict(_Stub):
    """`OrderedDict()`, or of pairs as Python 2 has it."""

    def __new__(cls, pairs: Any = ()) -> Any:
        if not all(type(p) in (list, tuple) and len(p) == 2 and type(p[0]) is str for p in pairs):
            raise UnsafeMetadataError("the pickled Unischema has a dict whose keys are not text")
        return dict(pairs)


class _NumpyScalar(_Stub):
    """`numpy.core.multiarray.scalar(dtype, bytes)`: a length of a shape that was a NumPy integer."""

    def __new__(cls, *args: Any) -> Any:
        dtype, value = args
        name = _dtype_name(dtype)
        if name not in _NUMBERS or np.dtype(name).kind not in "iu" or type(value) is not bytes or len(value) > 8:
            raise UnsafeMetadataError("the pickled Unischema has a NumPy scalar that is not an integer")
        return int.from_bytes(value, "little", signed=name.startswith("i"))


class _Encode(_Stub):
    """`_codecs.encode(text, "latin1")`: how Python 3 writes bytes into pickles that Python 2 can read."""

    def __new__(cls, *args: Any) -> Any:
        text, encoding = args
        if type(text) is not str or encoding != "latin1":
            raise UnsafeMetadataError("the pickled Unischema calls _codecs.encode for more than plain bytes")
        return text.encode("latin-1")


def _stub(base: type[_Stub], name: str, dtype: str = "") -> type[_Stub]:
    made: Any = _Sealed(name, (base,), {"__slots__": (), "dtype": dtype})
    return cast(type[_Stub], made)


def _globals() -> dict[tuple[str, str], type[_Stub]]:
    """Every (module, name) that a Unischema may name, and what stands for it."""
    unischema, field = _stub(_Record, "Unischema"), _stub(_Record, "UnischemaField")
    codecs = {name: _stub(_Record, name) for name in _CODECS}
    found = {(f"{package}.codecs", name): codecs[name] for package in _PACKAGES for name in codecs}
    for package in _PACKAGES:
        found |= {(f"{package}.unischema", "Unischema"): unischema, (f"{package}.unischema", "UnischemaField"): field}
    found |= {("pyspark.sql.types", name): _stub(_Record, name) for name in _SPARK_TYPES}
    found |= {key: _stub(_Stub, key[1], dtype) for key, dtype in _OTHER_NAMES.items()}
    for name, dtype in _NUMPY_NAMES.items():
        found |= {(module, name): _stub(_Stub, name, dtype) for module in _NUMPY_MODULES}
    for name, dtype in {**_BUILTIN_NAMES, "object": "object", "tuple": ""}.items():
        stub = _stub(_Stub, name, dtype)
        found |= {("builtins", name): stub, ("__builtin__", name): stub}
    found |= {(module, "dtype"): _NumpyDtype for module in _NUMPY_MODULES}
    found |= {(f"numpy.{core}.multiarray", "scalar"): _NumpyScalar for core in ("core", "_core")}
    found |= {(module, "_reconstructor"): _Reconstructor for module in ("copyreg", "copy_reg")}
    found |= {("collections", "OrderedDict"): _Dict, ("pyspark.serializers", "_restore"): _Restore}
    return {**found, ("_codecs", "encode"): _Encode}


_GLOBALS = _globals()


class _InertUnpickler(pickle.Unpickler):
    """An unpickler that knows nothing but the stubs above."""

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return _GLOBALS[module, name]
        except KeyError:
            raise UnsafeMetadataError(
                f"the pickled Unischema names {module!r:.100}, {name!r:.100}, which Petastorm's own schemas do not; it "
                "is not loaded (fields with codecs of your own cannot be read)"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafeMetadataError("the pickled Unischema has a persistent id, which none needs")


def _is_record_class(value: Any, name: str | None = None) -> bool:
    return isinstance(value, _Sealed) and issubclass(value, _Record) and name in (None, value.__name__)


def _expect(ok: bool, what: str) -> None:
    if not ok:
        raise UnsafeMetadataError(f"not a pickled Unischema: {what}")


def _unischema(root: Any) -> Unischema:
    _expect(_is_record_class(type(root), "Unischema"), "it holds another object")
    state = root.state
    _expect(type(state) is dict and type(state.get("_name")) is str, "it has no name")
    fields = state.get("_fields")
    _expect(type(fields) is dict, "it has no fields")
    read = tuple(_field(value) for value in fields.values())
    _expect(tuple(fields) == tuple(f.name for f in read), "the names of fields differ from their keys")
    return Unischema(state["_name"], read)


def _field(value: Any) -> Field:
    _expect(_is_record_class(type(value), "UnischemaField"), "a field is another object")
    _expect(3 <= len(value.args) <= 5, f"a field of {len(value.args)} values")
    defaults: tuple[Any, ...] = (None, False)
    values: tuple[Any, ...] = value.args + defaults[len(value.args) - 3 :]
    name, dtype, shape, codec, nullable = values
    _expect(type(shape) in (tuple, list) and all(n is None or type(n) is int for n in shape), "a shape is no tuple")
    return Field(name, _dtype_name(dtype), tuple(shape), None if codec is None else _codec(codec), nullable)


def _dtype_name(value: Any) -> str:
    """The dtype that a field's `numpy_dtype` means: a class, or an instance of `numpy.dtype`."""
    if isinstance(value, _NumpyDtype):
        code = value.args[0] if value.args else None
        _expect(type(code) is str and re.fullmatch(r"[<>|=]?[biufcUSOMm]\d{0,4}", code) is not None, "an odd dtype")
        dtype = np.dtype(code)
        kinds = {"U": "str", "S": "bytes", "O": "object", "M": "datetime64", "m": "timedelta64"}
        return kinds.get(dtype.kind, str(dtype.name))
    _expect(isinstance(value, _Sealed) and issubclass(value, _Stub) and value.dtype != "", "a field without a dtype")
    return str(value.dtype)


def _codec(value: Any) -> Codec:
    name = type(value).__name__
    _expect(_is_record_class(type(value)) and name in _CODECS, "a codec is another object")
    state = value.state
    _expect(type(state) is dict, "a codec of an odd state")
    if name == "ScalarCodec":
        return Codec("scalar", spark_type=_spark_type(state.get("_spark_type")))
    if name != "CompressedImageCodec":
        return Codec(_CODECS[name])
    suffix = state.get("_image_codec")
    _expect(type(suffix) is str and suffix.startswith("."), "an image codec without its format")
    return Codec("image", suffix[1:], state.get("_quality"))


def _spark_type(value: Any) -> str:
    kind = value if isinstance(value, _Sealed) else type(value)
    name = kind.__name__
    _expect(_is_record_class(kind) and name in _SPARK_TYPES, "a scalar codec without its Spark type")
    args = () if kind is value else value.args
    state: Any = {} if kind is value else value.state
    _expect(type(state) is dict, "a Spark type of an odd state")
    if name == "ArrayType":
        return f"ArrayType({_spark_type(args[0] if args else state.get('elementType'))})"
    if name not in _SPARK_PARAMETERS:
        return name
    known = enumerate(_SPARK_PARAMETERS[name].items())
    numbers = [args[i] if i < len(args) else state.get(key, default) for i, (key, default) in known]
    _expect(all(type(n) is int for n in numbers), f"a {name} of odd parameters")
    return f"{name}({','.join(str(n) for n in numbers)})"


# --- Writing a Unischema ---


def write_unischema(unischema: Unischema) -> bytes:
    """The pickle (protocol 2) that Petastorm reads as this Unischema, with the fields in this order."""
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
"""Fields of these names are no attributes of Petastorm's object, whose own attributes they would hide."""


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
    name = {kind: name for name, kind in _CODECS.items()}[codec.kind]
    made = _global("petastorm.codecs", name) + b")\x81"
    if codec.spark_type is not None:
        return made + b"}" + _text("_spark_type") + _pickled_spark_type(codec.spark_type) + b"sb"
    if codec.kind == "image":
        return b"".join([made, b"}(", _text("_image_codec"), _text(f".{codec.image_format}"),
                         _text("_quality"), _number(codec.quality), b"ub"])  # fmt: skip
    return made


def _split_spark_type(spark_type: str) -> tuple[str, list[str]]:
    match = re.fullmatch(r"(\w+)(?:\((.+)\))?", spark_type)
    if match is None or match[1] not in _SPARK_TYPES:
        raise ValueError(f"codec: expected a Spark type among {_SPARK_TYPES}, found {spark_type!r:.80}")
    if match[1] == "ArrayType":
        _split_spark_type(match[2] or "")
        return match[1], [match[2]]
    args = match[2].split(",") if match[2] else []
    parameters = ",".join(_SPARK_PARAMETERS.get(match[1], ()))
    if len(args) != len(_SPARK_PARAMETERS.get(match[1], ())) or not all(re.fullmatch(r"-?\d{1,9}", a) for a in args):
        expected = f"{match[1]}({parameters}) in whole numbers" if parameters else match[1]
        raise ValueError(f"codec: expected {expected}, found {spark_type!r:.80}")
    return match[1], args


def _pickled_spark_type(spark_type: str) -> bytes:
    """The call of the type: its constructor sets the state that the reader's version of PySpark has."""
    name, args = _split_spark_type(spark_type)
    values = [_pickled_spark_type(a) if name == "ArrayType" else _number(int(a)) for a in args]
    return b"".join([_global("pyspark.sql.types", name), b"(", *values, b"tR"])


def common_metadata(unischema: Unischema, row_groups_per_file: Mapping[str, int]) -> dict[bytes, bytes]:
    """The keys of `_common_metadata` that Petastorm reads. # paths relative to the dataset's folder -> row groups

    Raises ValueError for a path outside the folder, or a count that is not a whole number.
    """
    for path, count in row_groups_per_file.items():
        hive_partitions(path)
        if type(count) is not int or count < 0:
            raise ValueError(f"row groups of {path!r}: expected a whole number >= 0, found {count!r}")
    return {UNISCHEMA_KEY: write_unischema(unischema), ROW_GROUPS_KEY: json.dumps(dict(row_groups_per_file)).encode()}


def write_common_metadata(
    url: str, arrow_schema: pa.Schema, *, unischema: Unischema, row_groups_per_file: Mapping[str, int]
) -> None:
    """Writes `_common_metadata` into the folder of a dataset, so that Petastorm's `make_reader` opens it.

    arrow_schema: of the Parquet files; its own metadata are kept.
    row_groups_per_file: all files of the dataset, by their path relative to the folder.
    """
    metadata = {**(arrow_schema.metadata or {}), **common_metadata(unischema, row_groups_per_file)}
    file = io.BytesIO()
    pq.write_metadata(arrow_schema.with_metadata(metadata), file)
    storage.write_bytes(storage.join(url, COMMON_METADATA), file.getvalue())


def unischema_of(columns: Sequence[Column], *, name: str = "Schema") -> Unischema:
    """The Unischema of columns as `schema.encode` stores them: scalars as they are, tensors as `.npy` cells.

    Raises ValueError for a name that cannot be a field of a namedtuple, which is what Petastorm's rows are, and for a
    scalar dtype that has no Spark type.
    """
    fields = []
    for column in columns:
        if not column.name.isidentifier() or keyword.iskeyword(column.name) or column.name.startswith("_"):
            raise ValueError(
                f"column {column.name!r}: Petastorm makes a Python attribute of each column; expected letters, digits "
                "and underscores, a letter first, and no word of Python; rename it in the DataFrame"
            )
        if column.codec not in ("scalar", "ndarray"):
            raise ValueError(f"column {column.name!r}: found cells stored as {column.codec}, expected our own shards")
        is_tensor = column.codec == "ndarray"
        if not is_tensor and column.dtype not in _SPARK_TYPE_OF:
            raise ValueError(f"column {column.name!r}: found dtype {column.dtype}, expected one of {[*_SPARK_TYPE_OF]}")
        codec = Codec("ndarray") if is_tensor else Codec("scalar", spark_type=_SPARK_TYPE_OF[column.dtype])
        fields.append(Field(column.name, column.dtype, column.shape, codec))
    return Unischema(name, tuple(fields))


def hive_partitions(relative_path: str) -> dict[str, str]:
    """The columns that the folders of a file's path give: `day=2020-01-01/part.parquet` -> {"day": "2020-01-01"}.

    Percent signs are decoded, as Spark writes them; the name of the file gives no column. Raises ValueError for a path
    that is absolute or leads outside its folder, and for a column that is there twice.
    """
    parts = relative_path.split("/")
    if any(unquote(p) in ("", ".", "..") for p in parts) or "\\" in relative_path or "\0" in unquote(relative_path):
        raise ValueError(f"expected a path inside the folder of the dataset, found {relative_path!r}")
    found: dict[str, str] = {}
    for folder in parts[:-1]:
        key, equals, value = folder.partition("=")
        if not equals:
            continue
        if unquote(key) in found:
            raise ValueError(f"the partition column {unquote(key)!r} is there twice in {relative_path!r}")
        found[unquote(key)] = unquote(value)
    return found
