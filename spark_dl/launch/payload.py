"""What travels between the driver and the ranks.

To the ranks goes the user's code, pickled as Spark itself does it. Back come only data: JSON, NumPy arrays and tensors,
in dicts, lists and tuples. The driver never unpickles what a rank sends.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from spark_dl.launch.culprit import describe_culprit, dumps

_FILE_MODULES = "_spark_dl_file_"
_LEVEL = 3
"""Of zstd: rows of millions of row groups are mostly alike, and level 1 leaves 300 times as much of such."""


def pack_call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """A call as bytes, for the ranks. Called on the driver. Raises ValueError that names what cannot be pickled."""
    from pyspark import cloudpickle

    for name, module in list(sys.modules.items()):
        if name.startswith(_FILE_MODULES):  # code that was read from a file by its path exists only on the driver
            cloudpickle.register_pickle_by_value(module)
    try:
        packed = dumps((fn, args, kwargs))
    except Exception as error:
        raise ValueError(describe_culprit(fn, args, kwargs)) from error
    compressed: bytes = pa.Codec("zstd", compression_level=_LEVEL).compress(packed, asbytes=True)
    return struct.pack("<Q", len(packed)) + compressed


def unpack_call(packed: bytes) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call that the driver packed. Called on a rank. Raises RuntimeError if its code is missing there."""
    try:
        (size,) = struct.unpack_from("<Q", packed)
        unpacked = pa.decompress(memoryview(packed)[8:], size, codec="zstd")
        call: tuple[Any, tuple[Any, ...], dict[str, Any]] = pickle.loads(unpacked)  # noqa: S301 - from our own driver
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"no module {error.name!r} on this executor (Python is {sys.executable}); install it there, or send it "
            "with spark-submit --py-files"
        ) from error
    return call


def pack_result(result: Any) -> bytes:
    """What a rank returns, as bytes: a JSON tree, then the arrays that it refers to in NumPy's format.

    Raises TypeError that names the place of a value of another type.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    tree = json.dumps(_to_tree(result, "result", arrays)).encode()
    out = io.BytesIO()
    out.write(struct.pack("<Q", len(tree)))
    out.write(tree)
    for array in arrays:
        np.lib.format.write_array(out, array, allow_pickle=False)
    return out.getvalue()


def unpack_result(packed: bytes) -> Any:
    """What a rank returned. Called on the driver."""
    (length,) = struct.unpack_from("<Q", packed)
    tree = json.loads(packed[8 : 8 + length])
    return _from_tree(tree, io.BytesIO(packed[8 + length :]))


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
        except TypeError:  # a dtype that NumPy does not have, such as bfloat16, travels as its bytes
            array = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        arrays.append(array)
        return {"kind": "tensor", "dtype": dtype, "shape": list(tensor.shape)}
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.hasobject or isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"{path}: cannot return an array of Python objects, or a masked one, from a rank")
        arrays.append(np.asarray(value))
        return {"kind": "array" if isinstance(value, np.ndarray) else "scalar"}
    if isinstance(value, (list, tuple)):
        items = [_to_tree(v, f"{path}[{i}]", arrays) for i, v in enumerate(value)]
        return items if type(value) is list else {"kind": "tuple", "items": items}
    if isinstance(value, dict):
        pairs = [[_to_key(k, path), _to_tree(v, f"{path}[{k!r}]", arrays)] for k, v in value.items()]
        return {"kind": "dict", "items": pairs}
    raise TypeError(
        f"{path}: cannot return a {type(value).__module__}.{type(value).__qualname__} from a rank; return numbers, "
        "strings, NumPy arrays and tensors, in dicts, lists and tuples (of a model, its state_dict())"
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
    if tree["kind"] == "dict":
        return {_from_tree(k, arrays): _from_tree(v, arrays) for k, v in tree["items"]}
    array = np.lib.format.read_array(arrays, allow_pickle=False)
    if tree["kind"] == "tensor":
        dtype = getattr(torch, tree["dtype"])
        if array.size == 0:
            return torch.empty(tree["shape"], dtype=dtype)
        tensor = torch.from_numpy(array)
        return (tensor if tensor.dtype == dtype else tensor.view(dtype)).reshape(tree["shape"])
    return array if tree["kind"] == "array" else array[()]
