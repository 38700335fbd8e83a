"""Reads a Unischema from its pickle, without running code from the pickle.

The opcodes of the pickle are checked first. Each class in the pickle is then looked up in an exact list and becomes
an inert record, so that only code of this module is called.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any, ClassVar, cast

import numpy as np

from spark_dl.data.columns.ragged import MAX_AXES
from spark_dl.data.petastorm.pickle_opcodes import UnsafeMetadataError, check_opcodes
from spark_dl.data.petastorm.unischema import (
    CODECS,
    NUMBERS,
    SPARK_PARAMETERS,
    SPARK_TYPES,
    TIMES,
    Codec,
    Field,
    Unischema,
)

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
    found = {(f"{package}.codecs", name): codecs[name] for package in _PACKAGES for name in codecs}
    for package in _PACKAGES:
        found |= {(f"{package}.unischema", "Unischema"): unischema, (f"{package}.unischema", "UnischemaField"): field}
    found |= {("pyspark.sql.types", name): _stub(_Record, name) for name in SPARK_TYPES}
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
