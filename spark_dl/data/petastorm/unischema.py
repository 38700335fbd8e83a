"""Petastorm's schema: the Unischema, its fields and their codecs, as frozen records, read and written as its pickle.

No code of the pickle is run: its opcodes are checked first (kinds, count and depth), and each class in it is looked
up in an exact list and becomes an inert record, so that only code of this module is called. It is written opcode by
opcode, without pickling an object.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import numpy as np

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

_MAX_PICKLE_BYTES = 16 << 20
_MAX_OPCODES = 1_000_000

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

_PACKAGES = ("petastorm", "av.experimental.deepdrive.dataset_toolkit", "av.ml.dataset_toolkit")
"""Petastorm, and its names before it was published."""
_FIELD_NAMES = ("name", "numpy_dtype", "shape", "codec", "nullable")
_NUMPY_NAMES = {name: name for name in (*NUMBERS, *TIMES)} | {
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

_UNISCHEMA_ATTRIBUTES = (
    "fields", "create_schema_view", "as_spark_schema", "make_namedtuple", "make_namedtuple_tf", "from_arrow_schema",
)  # fmt: skip
"""Fields with these names are not set as attributes, as they would hide attributes of Petastorm's object."""


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


class UnsafeMetadataError(ValueError):
    """Metadata that is not a plain Unischema. Raised before any code that it names can run."""


def check_opcodes(pickled: bytes) -> None:
    """Raises UnsafeMetadataError for a pickle that could take much time or memory, or run code.

    The stack is followed only to check the keys of dicts. A key of nested tuples, each twice in the next, would be
    hashed for a very long time, and deep nesting overflows the C stack.
    """
    if len(pickled) > _MAX_PICKLE_BYTES:
        raise UnsafeMetadataError(f"a pickled Unischema of {len(pickled)} bytes; expected at most {_MAX_PICKLE_BYTES}")
    stack: list[bool | None] = []  # True for a string or a number, False for another object, None for a mark
    memo: dict[int, bool] = {}
    for count, (op, arg, _) in enumerate(pickletools.genops(pickled), 1):
        if op.name not in _OPCODES:
            named = f" {arg!r:.100}" if isinstance(arg, str) else ""
            raise UnsafeMetadataError(
                f"the pickled Unischema has the opcode {op.name}{named}, which a Unischema does not need"
            )
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
    """Applies an opcode to the stack."""
    fixed, items = len(op.stack_before), list[bool]()
    if pickletools.markobject in op.stack_before:
        fixed = op.stack_before.index(pickletools.markobject)
        while (item := stack.pop()) is not None:
            items.append(item)
    operands: list[bool | None] = [stack.pop() for _ in range(fixed)]  # the last item first
    if None in operands:
        raise UnsafeMetadataError(f"the pickled Unischema has the opcode {op.name} without its operands")
    keys: Mapping[str, Sequence[bool | None]] = {
        "SETITEM": operands[1::2],
        "SETITEMS": items[1::2],
        "DICT": items[1::2],
    }
    if not all(keys.get(op.name, ())):
        raise UnsafeMetadataError("the pickled Unischema has a dict whose keys are not strings")
    stack.extend(None if o is pickletools.markobject else op.name in _ATOMS for o in op.stack_after)


def read_unischema(pickled: bytes) -> Unischema:
    """Reads a Unischema pickled by Petastorm 0.4.0 to 0.13.1 under Python 2 or 3. No code of it is
    run.

    Raises UnsafeMetadataError (a ValueError) for another class or function (named in the message), an opcode that a
    Unischema does not need, more than 16 MiB, or a truncated pickle.
    """
    try:
        check_opcodes(pickled)
        root = _InertUnpickler(io.BytesIO(pickled), fix_imports=False, encoding="latin1").load()
        return _unischema(root)
    except UnsafeMetadataError:
        raise
    except Exception as error:  # pickle may raise any exception for invalid bytes
        raise UnsafeMetadataError(f"not a pickled Unischema: {type(error).__name__}: {error!s:.200}") from error


class _Sealed(type):
    """Metaclass of classes that a pickle cannot change. (The opcode BUILD sets attributes of any object.)"""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise UnsafeMetadataError(f"the pickled Unischema sets {name!r:.80} of the class {cls.__name__}")


class _Stub(metaclass=_Sealed):
    """Stands for a class in the pickle. Cannot be called."""

    __slots__ = ()
    dtype: ClassVar[str] = ""
    """Dtype of a field with this class as its type."""

    def __new__(cls, *args: Any) -> Any:
        raise UnsafeMetadataError(f"the pickled Unischema calls {cls.__name__}, which a Unischema uses only as a type")

    def __setstate__(self, state: Any) -> None:
        raise UnsafeMetadataError(f"the pickled Unischema sets the state of {type(self).__name__}")


class _Record(_Stub):
    """Stands for an object: the arguments of its class, and its state."""

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
    """`numpy.dtype("f4", False, True)`; the state adds the byte order, which a field does not have."""

    __slots__ = ()


class _Reconstructor(_Stub):
    """`copyreg._reconstructor(class, object, None)`, or with a tuple as the base and its items."""

    def __new__(cls, *args: Any) -> Any:
        made, base, state = args
        is_tuple = base is _GLOBALS["builtins", "tuple"] and type(state) is tuple
        if not _is_record_class(made) or not (is_tuple or (base is _GLOBALS["builtins", "object"] and state is None)):
            raise UnsafeMetadataError("the pickled Unischema rebuilds an object that is not Petastorm's")
        return made(*state) if is_tuple else made()


class _Restore(_Stub):
    """`pyspark.serializers._restore("UnischemaField", names, values)`: how PySpark makes namedtuples picklable."""

    def __new__(cls, *args: Any) -> Any:
        name, names, values = args
        if name != "UnischemaField" or type(names) is not tuple or names != _FIELD_NAMES or type(values) is not tuple:
            raise UnsafeMetadataError("the pickled Unischema restores a namedtuple that is not a UnischemaField")
        return _GLOBALS["petastorm.unischema", "UnischemaField"](*values)


class _Dict(_Stub):
    """`OrderedDict()`, or with pairs, as Python 2 pickles it."""

    def __new__(cls, pairs: Any = ()) -> Any:
        if not all(type(p) in (list, tuple) and len(p) == 2 and type(p[0]) is str for p in pairs):
            raise UnsafeMetadataError("the pickled Unischema has a dict whose keys are not strings")
        return dict(pairs)


class _NumpyScalar(_Stub):
    """`numpy.core.multiarray.scalar(dtype, bytes)`: an axis length that was a NumPy integer."""

    def __new__(cls, *args: Any) -> Any:
        dtype, value = args
        name = _dtype_name(dtype)
        if name not in NUMBERS or np.dtype(name).kind not in "iu" or type(value) is not bytes or len(value) > 8:
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
    """Returns the stub of every (module, name) that a Unischema may contain."""
    unischema, field = _stub(_Record, "Unischema"), _stub(_Record, "UnischemaField")
    codecs = {name: _stub(_Record, name) for name in CODECS}
    stubs = {(f"{package}.codecs", name): codecs[name] for package in _PACKAGES for name in codecs}
    for package in _PACKAGES:
        stubs |= {(f"{package}.unischema", "Unischema"): unischema, (f"{package}.unischema", "UnischemaField"): field}
    stubs |= {("pyspark.sql.types", name): _stub(_Record, name) for name in SPARK_TYPES}
    stubs |= {key: _stub(_Stub, key[1], dtype) for key, dtype in _OTHER_NAMES.items()}
    for name, dtype in _NUMPY_NAMES.items():
        stubs |= {(module, name): _stub(_Stub, name, dtype) for module in _NUMPY_MODULES}
    for name, dtype in {**_BUILTIN_NAMES, "object": "object", "tuple": ""}.items():
        stub = _stub(_Stub, name, dtype)
        stubs |= {("builtins", name): stub, ("__builtin__", name): stub}
    stubs |= {(module, "dtype"): _NumpyDtype for module in _NUMPY_MODULES}
    stubs |= {(f"numpy.{core}.multiarray", "scalar"): _NumpyScalar for core in ("core", "_core")}
    stubs |= {(module, "_reconstructor"): _Reconstructor for module in ("copyreg", "copy_reg")}
    stubs |= {("collections", "OrderedDict"): _Dict, ("pyspark.serializers", "_restore"): _Restore}
    return {**stubs, ("_codecs", "encode"): _Encode}


_GLOBALS = _globals()


class _InertUnpickler(pickle.Unpickler):
    """An unpickler that creates only the stubs above."""

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return _GLOBALS[module, name]
        except KeyError:
            raise UnsafeMetadataError(
                f"the pickled Unischema names {module!r:.100}, {name!r:.100}, which Petastorm's schemas do not name; "
                "it is not loaded (fields with custom codecs cannot be read)"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafeMetadataError("the pickled Unischema has a persistent id, which a Unischema does not need")


def _is_record_class(value: Any, name: str | None = None) -> bool:
    return isinstance(value, _Sealed) and issubclass(value, _Record) and name in (None, value.__name__)


def _expect(ok: bool, what: str) -> None:
    if not ok:
        raise UnsafeMetadataError(f"not a pickled Unischema: {what}")


def _unischema(root: Any) -> Unischema:
    _expect(_is_record_class(type(root), "Unischema"), "it contains another object")
    state = root.state
    _expect(type(state) is dict and type(state.get("_name")) is str, "it has no name")
    fields = state.get("_fields")
    _expect(type(fields) is dict, "it has no fields")
    read = tuple(_field(value) for value in fields.values())
    _expect(tuple(fields) == tuple(f.name for f in read), "the names of fields differ from their keys")
    return Unischema(state["_name"], read)


def _field(value: Any) -> Field:
    _expect(_is_record_class(type(value), "UnischemaField"), "a field is another object")
    _expect(3 <= len(value.args) <= 5, f"a field with {len(value.args)} values")
    defaults: tuple[Any, ...] = (None, False)
    values: tuple[Any, ...] = value.args + defaults[len(value.args) - 3 :]
    name, dtype, shape, codec, nullable = values
    _expect(
        type(shape) in (tuple, list) and len(shape) <= MAX_AXES,
        f"a shape that is not a tuple of at most {MAX_AXES} axes",
    )
    _expect(all(n is None or type(n) is int for n in shape), "a shape with invalid lengths")
    return Field(name, _dtype_name(dtype), tuple(shape), None if codec is None else _codec(codec), nullable)


def _dtype_name(value: Any) -> str:
    """Returns the dtype of a field's `numpy_dtype`: a class, or an instance of `numpy.dtype`."""
    if isinstance(value, _NumpyDtype):
        code = value.args[0] if value.args else None
        _expect(type(code) is str and re.fullmatch(r"[<>|=]?[biufcUSOMm]\d{0,4}", code) is not None, "an invalid dtype")
        dtype = np.dtype(code)
        kinds = {"U": "str", "S": "bytes", "O": "object", "M": "datetime64", "m": "timedelta64"}
        return kinds.get(dtype.kind, str(dtype.name))
    _expect(isinstance(value, _Sealed) and issubclass(value, _Stub) and value.dtype != "", "a field without a dtype")
    return str(value.dtype)


def _codec(value: Any) -> Codec:
    name = type(value).__name__
    _expect(_is_record_class(type(value)) and name in CODECS, "a codec is another object")
    state = value.state
    _expect(type(state) is dict, "a codec with an invalid state")
    if name == "ScalarCodec":
        return Codec("scalar", spark_type=_spark_type(state.get("_spark_type")))
    if name != "CompressedImageCodec":
        return Codec(CODECS[name])
    suffix = state.get("_image_codec")
    _expect(type(suffix) is str and suffix.startswith("."), "an image codec without its format")
    return Codec("image", suffix[1:], state.get("_quality"))


def _spark_type(value: Any) -> str:
    kind = value if isinstance(value, _Sealed) else type(value)
    name = kind.__name__
    _expect(_is_record_class(kind) and name in SPARK_TYPES, "a scalar codec without its Spark type")
    args = () if kind is value else value.args
    state: Any = {} if kind is value else value.state
    _expect(type(state) is dict, "a Spark type with an invalid state")
    if name == "ArrayType":
        return f"ArrayType({_spark_type(args[0] if args else state.get('elementType'))})"
    if name not in SPARK_PARAMETERS:
        return name
    known = enumerate(SPARK_PARAMETERS[name].items())
    numbers = [args[i] if i < len(args) else state.get(key, default) for i, (key, default) in known]
    _expect(all(type(n) is int for n in numbers), f"a {name} with invalid parameters")
    return f"{name}({','.join(str(n) for n in numbers)})"


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
