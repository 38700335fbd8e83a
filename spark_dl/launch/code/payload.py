"""Serialization of calls and results between the driver and the ranks.

Calls are pickled with Spark's cloudpickle. Results are data only: JSON, NumPy arrays and tensors, in dicts, lists,
tuples and sets. The driver never unpickles data from a rank.
"""

from __future__ import annotations

import datetime
import decimal
import io
import json
import pickle
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from spark_dl._version import __version__
from spark_dl.config.checks import UnfitPythonError
from spark_dl.launch.code import sources

_FILE_MODULES = "_spark_dl_file_"
_LEVEL = 3
"""Level of zstd. A table of millions of row groups is 300 times larger with level 1, as its rows are similar."""

_WITH_TEXT: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "Decimal": (decimal.Decimal, str, decimal.Decimal),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "complex": (complex, repr, complex),
}
"""Types of results that are sent as text, by their names, with the functions that write and read it."""


def pack_call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickles a call, with the sources of the modules beside the user's program. Called on the driver.

    Raises ValueError that names the part that cannot be pickled.
    """
    from pyspark import cloudpickle

    from spark_dl.launch.code.culprit import describe_culprit, dumps

    for name, module in list(sys.modules.items()):
        if name.startswith(_FILE_MODULES):  # modules that were loaded from a file path exist only on the driver
            cloudpickle.register_pickle_by_value(module)
    try:
        call = dumps((fn, args, kwargs))
    except Exception as error:
        raise ValueError(describe_culprit(fn, args, kwargs)) from error
    packed = pickle.dumps((__version__, sources.project(), call))
    compressed: bytes = pa.Codec("zstd", compression_level=_LEVEL).compress(packed, asbytes=True)
    return struct.pack("<Q", len(packed)) + compressed


def unpack_call(packed: bytes) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Unpickles a call from the driver. Called on a rank.

    Raises UnfitPythonError if a module is missing there, or if spark_dl has another version than on the driver.
    """
    try:
        (size,) = struct.unpack_from("<Q", packed)
        unpacked = pa.decompress(memoryview(packed)[8:], size, codec="zstd")
        version, project, pickled = pickle.loads(unpacked)  # noqa: S301 - from the driver
        if version != __version__:  # before classes of another version are made from what it has not written
            raise UnfitPythonError(
                f"host {socket.gethostname()}: found spark_dl {__version__} in {sys.executable}, expected {version}, "
                "which the driver has; install that version there, or set PYSPARK_PYTHON to an interpreter that has it"
            )
        sources.install(project)
        call: tuple[Any, tuple[Any, ...], dict[str, Any]] = pickle.loads(pickled)  # noqa: S301 - from the driver
    except ModuleNotFoundError as error:
        raise UnfitPythonError(
            f"no module {error.name!r} on this executor (Python is {sys.executable}, sys.path begins with "
            f"{sys.path[:3]}); install it there, or send it with spark-submit --py-files"
        ) from error
    return call


def pack_result(result: Any, limit_bytes: int | None = None) -> bytes:
    """Returns a rank's result as bytes: a JSON tree, and then its arrays in NumPy's format.

    Raises TypeError with the place of a value of an unsupported type, and ValueError for more than `limit_bytes`.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    tree = json.dumps(_to_tree(result, "result", arrays)).encode()
    size = len(tree) + sum(array.nbytes for array in arrays)
    if limit_bytes is not None and size > limit_bytes:
        raise ValueError(
            f"the result of this rank has {size / 2**20:,.0f} MiB, and the driver can take {limit_bytes / 2**20:,.0f} "
            "MiB of each rank; write it to a file and return its path, or raise spark.driver.memory and "
            "spark.driver.maxResultSize"
        )
    out = io.BytesIO()
    out.write(struct.pack("<Q", len(tree)))
    out.write(tree)
    for array in arrays:
        np.lib.format.write_array(out, array, allow_pickle=False)
    return out.getvalue()


def unpack_result(packed: bytes) -> Any:
    """Returns the result of a rank from the bytes of `pack_result`. Called on the driver.

    Raises ValueError for bytes that are no result. They are data in any case: nothing in them is run.
    """
    try:
        (length,) = struct.unpack_from("<Q", packed)
        tree = json.loads(packed[8 : 8 + length])
        return _from_tree(tree, io.BytesIO(packed[8 + length :]))
    except (
        ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError, ArithmeticError, struct.error,
    ) as error:  # fmt: skip
        raise ValueError(
            f"a rank sent {len(packed)} bytes that are not the result of a rank ({type(error).__name__}: {error}); it "
            "runs another version of spark_dl, or something else than spark_dl"
        ) from error


def _to_tree(value: Any, path: str, arrays: list[np.ndarray[Any, Any]]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise TypeError(f"{path}: cannot return a sparse or quantized tensor from a rank; make it dense")
        tensor = value.detach().cpu().resolve_conj().resolve_neg()
        dtype = str(tensor.dtype).removeprefix("torch.")
        try:
            array = tensor.contiguous().numpy()
        except TypeError:  # NumPy does not have this dtype, such as bfloat16: sent as bytes
            array = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        arrays.append(array)
        return {"kind": "tensor", "dtype": dtype, "shape": list(tensor.shape)}
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.hasobject or isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"{path}: cannot return an array of Python objects or a masked array from a rank")
        arrays.append(np.asarray(value))
        return {"kind": "array" if isinstance(value, np.ndarray) else "scalar"}
    if isinstance(value, (bytes, bytearray)):
        arrays.append(np.frombuffer(value, np.uint8) if value else np.empty(0, np.uint8))
        return {"kind": type(value).__name__}
    if (name := type(value).__name__) in _WITH_TEXT and type(value) is _WITH_TEXT[name][0]:
        return {"kind": name, "text": _WITH_TEXT[name][1](value)}
    if type(value) in (set, frozenset):
        items = [_to_tree(v, f"{path} item", arrays) for v in value]
        return {"kind": name, "items": items}
    if isinstance(value, (list, tuple)):
        items = [_to_tree(v, f"{path}[{i}]", arrays) for i, v in enumerate(value)]
        return items if type(value) is list else {"kind": "tuple", "items": items}
    if isinstance(value, dict):
        pairs = [[_to_key(k, path), _to_tree(v, f"{path}[{k!r}]", arrays)] for k, v in value.items()]
        return {"kind": "dict", "items": pairs}
    raise TypeError(
        f"{path}: cannot return a {type(value).__module__}.{type(value).__qualname__} from a rank, as the driver "
        "unpickles nothing; return numbers, strings, bytes, dates, NumPy arrays and tensors, in dicts, lists, tuples "
        "and sets (for a model, its state_dict(); for another object, bytes of its own format)"
    )


def _to_key(key: Any, path: str) -> Any:
    plain = key.item() if isinstance(key, np.generic) else key
    if isinstance(plain, tuple):
        return {"kind": "tuple", "items": [_to_key(k, path) for k in plain]}
    if plain is not None and not isinstance(plain, (bool, int, float, str)):
        raise TypeError(f"{path} key: cannot return a dict with a {type(key).__qualname__} as a key from a rank")
    return plain


def _from_tree(tree: Any, arrays: io.BytesIO) -> Any:
    if isinstance(tree, list):
        return [_from_tree(t, arrays) for t in tree]
    if not isinstance(tree, dict):
        return tree
    if tree["kind"] == "tuple":
        return tuple(_from_tree(t, arrays) for t in tree["items"])
    if tree["kind"] in ("set", "frozenset"):
        return {"set": set, "frozenset": frozenset}[tree["kind"]](_from_tree(t, arrays) for t in tree["items"])
    if tree["kind"] in _WITH_TEXT:
        return _WITH_TEXT[tree["kind"]][2](tree["text"])
    if tree["kind"] == "dict":
        return {_from_tree(k, arrays): _from_tree(v, arrays) for k, v in tree["items"]}
    array = np.lib.format.read_array(arrays, allow_pickle=False)
    if tree["kind"] == "tensor":
        dtype = getattr(torch, tree["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"no dtype of tensors: {tree['dtype']!r:.40}")
        if array.size == 0:
            return torch.empty(tree["shape"], dtype=dtype)
        tensor = torch.from_numpy(array)
        return (tensor if tensor.dtype == dtype else tensor.view(dtype)).reshape(tree["shape"])
    if tree["kind"] in ("bytes", "bytearray"):
        return {"bytes": bytes, "bytearray": bytearray}[tree["kind"]](array.tobytes())
    return array if tree["kind"] == "array" else array[()]
