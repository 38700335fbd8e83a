"""What travels between driver and ranks: code in one direction, only data in the other."""

import concurrent.futures
import datetime
import functools
import importlib
import io
import json
import math
import os
import pickle
import re
import socket
import struct
import subprocess
import sys
import threading
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from spark_dl import import_object
from spark_dl.config.checks import UnfitPythonError
from spark_dl.launch.code import payload
from spark_dl.launch.code.payload import pack_call, pack_result, unpack_call, unpack_result
from spark_dl.launch.failures.errors import is_retryable

PLAIN = [
    None, True, False, 0, -1, 10**30, 1.5, -0.0, math.inf, -math.inf, "", "ä\n\0'\"🙂", [], {}, (),
    [1, [2.0, ["x", None]]], (1, (2, ()), [3]), {"a": {"b": [1, {"c": (True, None)}]}},
    {2: "int", "2": "str", True: 0, None: 1, 2.5: 2, (1, "a"): 3},
    {"kind": "tensor"}, [{"kind": "dict", "items": []}],
]  # fmt: skip


def round_trip(value):
    return unpack_result(pack_result(value))


def assert_same(a, b):
    """Equal in value and in type, all the way down."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert [(type(k), k) for k in a] == [(type(k), k) for k in b]
        a, b = list(a.values()), list(b.values())
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_same(left, right)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    else:
        assert a == b
        if isinstance(a, float):
            assert math.copysign(1, a) == math.copysign(1, b)  # tells 0.0 and -0.0 apart


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back_as_they_are(value):
    assert_same(round_trip(value), value)


def test_nan_comes_back():
    assert math.isnan(round_trip({"loss": math.nan})["loss"])


NUMPY_DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", ">f4", ">i2",
                "M8[s]", "m8[ms]", "U5", "S3"]  # fmt: skip


@pytest.mark.sampled(25)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3)])
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_arrays_come_back_as_they_are(dtype, shape):
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    assert_same(round_trip(array), array)


@pytest.mark.parametrize("dtype", ["?", "i1", "i8", "u8", "f2", "f4", "c8", "M8[s]"])
def test_numpy_scalars_come_back_as_they_are(dtype):
    (value,) = np.ones(1, dtype="i1").astype(dtype)
    assert_same(round_trip([value]), [value])


@pytest.mark.parametrize("value", [np.float64(1.5), np.str_("x")])
def test_numpy_scalars_that_are_python_s_own_types_become_these(value):
    assert_same(round_trip(value), value.item())


TORCH_DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64,
                torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]  # fmt: skip


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1, 1, 4)])
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_tensors_come_back_as_they_are(dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    assert_same(round_trip(tensor), tensor)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
@pytest.mark.parametrize("dtype", [d for d in TORCH_DTYPES if d != torch.bfloat16], ids=str)
def test_empty_tensors_come_back_as_they_are(dtype, shape):
    tensor = torch.empty(shape, dtype=dtype)
    assert_same(round_trip(tensor), tensor)


@pytest.mark.parametrize("tensor", [
    torch.arange(6.0).reshape(2, 3).T, torch.arange(10)[::3], torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
    torch.ones(1).expand(4), torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag,
])  # fmt: skip
def test_tensors_of_any_layout_come_back(tensor):
    assert_same(round_trip(tensor), tensor)


def test_the_weights_of_a_model_come_back_detached():
    model = torch.nn.Linear(2, 3)
    found = round_trip(dict(model.named_parameters()))
    assert all(torch.equal(found[k], v) and not found[k].requires_grad for k, v in model.named_parameters())


def test_many_arrays_each_find_their_place():
    value = {"a": [np.arange(n) for n in range(5)], "b": (torch.ones(2), {"c": np.float32(3)}), 7: torch.zeros(0)}
    assert_same(round_trip(value), value)


@pytest.mark.parametrize("value", [
    b"", b"\x00\xff" * 99, bytearray(b"ab"), {1, "a", None}, frozenset([(1, 2)]), set(), 1 - 2.5j, Decimal("-1.50"),
    datetime.date(1, 1, 1), datetime.datetime(2026, 3, 29, 2, 30, 0, 7),
    datetime.datetime(2026, 3, 29, tzinfo=datetime.timezone(datetime.timedelta(hours=5, minutes=45))),
    {"of all": [b"x", {b"y"}, {"d": Decimal(1)}], "array": np.arange(3)},
])  # fmt: skip
def test_bytes_sets_dates_and_decimals_come_back_as_they_are(value):
    assert_same(round_trip(value), value)
    assert type(round_trip(value)) is type(value)


class Unknown:
    def __str__(self):
        raise AssertionError("not to be turned into text")


@pytest.mark.parametrize(("value", "path"), [
    (Unknown(), "result"),
    ({"a": [1, Unknown()]}, r"result\['a'\]\[1\]"),
    ((1, {"x": {2, Unknown}}), r"result\[1\]\['x'\] item"),
    ([memoryview(b"bytes")], r"result\[0\]"),
    ({"model": torch.nn.Linear(1, 1)}, r"result\['model'\]"),
    ({"f": len}, r"result\['f'\]"),
    ({"z": datetime.timedelta(1)}, r"result\['z'\]"),
    ([np.array([Unknown()])], r"result\[0\]"),
    ({"p": Path("x")}, r"result\['p'\]"),
    ({frozenset(): 1}, "result key"),
])  # fmt: skip
def test_B30_other_objects_are_refused_with_their_path(value, path):
    with pytest.raises(TypeError, match=rf"^{path}: cannot return"):
        pack_result(value)


class Touch:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def as_result(tree, *blobs):
    text = json.dumps(tree).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(blobs)


def npy_of_objects(value):
    header = str({"descr": "|O", "fortran_order": False, "shape": (1,)}).encode().ljust(117) + b"\n"
    return (
        b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + pickle.dumps(np.array([value], dtype=object))
    )


def npy_of_bytes():
    np.lib.format.write_array(out := io.BytesIO(), np.zeros(4, np.uint8))
    return out.getvalue()


@pytest.mark.parametrize("pack", [
    lambda bad: pickle.dumps(bad),
    lambda bad: struct.pack("<Q", len(pickle.dumps(bad))) + pickle.dumps(bad),
    lambda bad: as_result({"kind": "array"}, pickle.dumps(bad)),
    lambda bad: as_result({"kind": "array"}, npy_of_objects(bad)),
    lambda bad: as_result({"kind": "tensor", "dtype": "float32", "shape": [1]}, npy_of_objects(bad)),
    lambda bad: as_result({"kind": "tensor", "dtype": "load", "shape": [1]}, npy_of_bytes()),
    lambda bad: as_result({"kind": "tensor", "dtype": "os", "shape": [1]}, npy_of_bytes()),
    lambda bad: as_result({"kind": "tensor", "dtype": "float32", "shape": [2**62]}, npy_of_bytes()),
    lambda bad: as_result({"kind": "tensor"}, npy_of_bytes()), lambda bad: as_result({}, b""),
    lambda bad: as_result({"kind": "dict", "items": [[{"kind": "dict", "items": []}, 1]]}, b""),
    lambda bad: as_result({"kind": "array"}, b"\x93NUMPY\x01\x00\xff\xff"),
    lambda bad: struct.pack("<Q", 200_000) + b"[" * 200_000, lambda bad: struct.pack("<Q", 2**63) + b"{}",
    lambda bad: b"", lambda bad: b"\xff" * 100,
])  # fmt: skip
def test_S16_nothing_that_a_rank_sends_is_unpickled_or_looked_up(tmp_path, pack):
    with pytest.raises(ValueError, match=r"a rank sent \d+ bytes that are not the result of a rank"):
        unpack_result(pack(Touch(tmp_path / "was here")))
    assert list(tmp_path.iterdir()) == []
    assert unpack_result(pack_result({"a": [1, (2, "b")]})) == {"a": [1, (2, "b")]}


# Code on its way to the ranks

LOCK = threading.Lock()


def test_a_call_arrives_whole():
    offset = 10
    fn, args, kwargs = unpack_call(pack_call(lambda a, b: a + b + offset, (1,), {"b": 2}))
    assert fn(*args, **kwargs) == 13


def test_code_from_a_file_needs_no_file_on_the_ranks(tmp_path, monkeypatch):
    (tmp_path / "code_of_test.py").write_text("FACTOR = 3\ndef triple(x):\n    return FACTOR * x\n")
    fn = import_object(f"{tmp_path}/code_of_test.py:triple", "model.build")
    (tmp_path / "code_of_test.py").unlink()
    packed = pack_call(fn, (5,), {})
    monkeypatch.delitem(sys.modules, fn.__module__)
    there, args, _ = unpack_call(packed)
    assert there(*args) == 15


def test_what_repeats_takes_few_bytes_on_the_way():
    packed, without = pack_call(len, (np.full(1_000_000, 1024),), {}), pack_call(len, (), {})
    assert len(packed) - len(without) < 10_000
    np.testing.assert_array_equal(unpack_call(packed)[1][0], np.full(1_000_000, 1024))


class Holder:
    def __init__(self, **values):
        vars(self).update(values)


def closure():
    held = LOCK
    return lambda: held


def nested_closure():
    inner = closure()
    return lambda: inner


def nested_function():
    held = LOCK

    def inner():
        return held

    return lambda: inner


def with_default(value=LOCK, *, other=None):
    return value, other


def rank_task(fn, args, kwargs):
    return fn(*args, **kwargs)


class Slotted:
    __slots__ = ("empty", "lock")

    def __init__(self):
        self.lock = LOCK


@pytest.mark.parametrize(("fn", "args", "kwargs", "root", "path"), [
    (closure(), (), {}, "function", "the variable `held` of `function`"),
    (nested_closure(), (), {}, "function", "the variable `held` of the variable `inner` of `function`"),
    (nested_function(), (), {}, "function", "the variable `held` of the variable `inner` of `function`"),
    (functools.partial(len, LOCK), (), {}, "function", "`function.args[0]`"),
    (functools.partial(rank_task, args=LOCK), (), {}, "function", "`function.keywords['args']`"),
    (Holder(lock=LOCK).__eq__, (), {}, "function", "`function.__self__.lock`"),
    (len, (1, LOCK), {}, "args[1]", "it"),
    (rank_task, (len, (1, LOCK), {}), {}, "args", "`args[1]`"),
    (rank_task, (len, (), {"report": {LOCK}}), {}, "kwargs", "`kwargs['report'][0]`"),
    (len, (), {"spec": Holder(deep=[0, Holder(lock=LOCK)])}, "spec", "`spec.deep[1].lock`"),
    (len, (), {"spec": Holder(build=closure())}, "spec", "the variable `held` of `spec.build`"),
    (len, (), {"value": Slotted()}, "value", "`value.lock`"),
])  # fmt: skip
def test_B17_what_cannot_be_pickled_is_named_by_its_path(fn, args, kwargs, root, path):
    found = f"{root} cannot be sent to the ranks: {path} is a _thread.lock"
    with pytest.raises(ValueError, match=rf"^{re.escape(found)} .*build it inside"):
        pack_call(fn, args, kwargs)


@pytest.mark.parametrize(("make", "kind"), [
    (lambda: (n for n in ()), "generator"),
    (lambda: open(os.devnull, "w"), r"_io\.TextIOWrapper"),  # noqa: SIM115
    (socket.socket, r"socket\.socket"),
    (threading.Event, r"threading\.Event"),
    (lambda: concurrent.futures.ThreadPoolExecutor(1), r"concurrent\.futures\.thread\.ThreadPoolExecutor"),
])  # fmt: skip
def test_B17_what_holds_a_resource_is_named_as_a_whole(make, kind):
    held = make()
    try:
        with pytest.raises(ValueError, match=rf"the variable `held` of `function` is a {kind} "):
            pack_call(lambda: held, (), {})
    finally:
        getattr(held, "close", lambda: None)()


def test_parts_that_refer_to_each_other_are_searched_once():
    first, second = Holder(), Holder()
    first.other, second.other, second.lock = second, first, LOCK
    with pytest.raises(ValueError, match=r"`obj\.other\.lock` is a _thread\.lock"):
        pack_call(len, (first,), {})


CODE_WITH_LOCK = """
import threading
LOCK = threading.Lock()
def build():
    return LOCK
def build_inside():
    def inner():
        return LOCK
    return inner()
def default(lock=LOCK, **kw):
    return lock
def keyword_default(*, lock=LOCK):
    return lock
class Builder:
    def __call__(self):
        return LOCK
class Derived(Builder):
    @classmethod
    def make(cls):
        return 1
class WithClassMethod:
    @classmethod
    def make(cls):
        return LOCK
builder, derived, class_method = Builder(), Derived(), WithClassMethod().make
"""


@pytest.mark.parametrize(("name", "path"), [
    ("build", "the variable `LOCK` of `function`"),
    ("build_inside", "the variable `LOCK` of `function`"),
    ("default", "the variable `lock` of `function`"),
    ("keyword_default", "the variable `lock` of `function`"),
    ("builder", "the variable `LOCK` of `Builder.__call__`"),
    ("derived", "the variable `LOCK` of `Builder.__call__`"),
    ("class_method", "the variable `LOCK` of `function`"),
])  # fmt: skip
def test_B17_a_global_that_code_without_a_module_uses_is_named(tmp_path, name, path):
    (tmp_path / "code_with_lock.py").write_text(CODE_WITH_LOCK)
    fn = import_object(f"{tmp_path}/code_with_lock.py:{name}", "model.build")
    with pytest.raises(ValueError, match=rf"^function cannot be sent to the ranks: {re.escape(path)} is a _thread"):
        pack_call(fn, (), {})


MISSING = (
    r"^no module 'on_the_driver' on this executor \(Python is \S+, sys\.path begins with \['.*\]\); install it there, "
    r"or send it with spark-submit --py-files$"
)


def test_B18_code_that_an_executor_lacks_is_an_error_that_names_the_module(tmp_path, monkeypatch):
    (tmp_path / "on_the_driver.py").write_text("def work():\n    return 1\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        packed = pack_call(importlib.import_module("on_the_driver").work, (), {})
    monkeypatch.delitem(sys.modules, "on_the_driver")
    with pytest.raises(RuntimeError, match=MISSING):
        unpack_call(packed)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_empty_tensors_of_a_dtype_that_numpy_lacks_come_back(shape):
    back = unpack_result(pack_result(torch.empty(shape, dtype=torch.bfloat16)))
    assert (back.shape, back.dtype) == (torch.Size(shape), torch.bfloat16)


def test_numpy_numbers_as_keys_come_back_as_plain_ones_beside_arrays():
    back = unpack_result(pack_result({np.int64(1): np.arange(3), np.float32(0.5): np.arange(2)}))
    assert [type(k) for k in back] == [int, float]
    assert back[1].tolist() == [0, 1, 2]
    assert back[0.5].tolist() == [0, 1]


def test_B17_a_bound_method_is_searched_for_what_cannot_be_pickled():
    class Owner:
        def __init__(self):
            self.guard = threading.Lock()

        def work(self):
            return self.guard

    with pytest.raises(ValueError, match=r"`function\.__self__\.guard` is a _thread\.lock"):
        pack_call(Owner().work, (), {})


def test_B30_a_result_that_is_larger_than_the_driver_can_take_is_an_error_with_both_sizes():
    result = {"weights": [torch.zeros(3 << 18), np.zeros(1 << 18)], "name": "x"}  # 3 + 2 MiB
    assert len(pack_result(result, 6 << 20)) > 5 << 20
    with pytest.raises(ValueError, match=r"has 5 MiB, and the driver can take 4 MiB of each rank; .*maxResultSize"):
        pack_result(result, 4 << 20)


NOTEBOOK = """
import functools, io, pickle, subprocess, sys
from spark_dl.launch.code.culprit import dumps

calls = []

@functools.lru_cache(maxsize=3)
def tokenizer(name):
    calls.append(name)
    return name.upper()

def build():
    return tokenizer("a"), tokenizer("a"), tokenizer.cache_info().hits, tokenizer.cache_parameters()["maxsize"]

tokenizer("of the driver")
out = dumps(build)
there = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read())())"
print(subprocess.run([sys.executable, "-c", there], input=out, capture_output=True, check=True).stdout.decode())
"""


def test_a_cached_function_of_the_main_module_comes_with_an_empty_cache(tmp_path):
    """As in a notebook, whose main module no rank has."""
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "('A', 'A', 1, 3)"


@pytest.mark.parametrize("value", [
    torch.ones(2, 2).to_sparse(), torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
])  # fmt: skip
def test_a_tensor_that_is_sparse_or_quantized_is_not_returned(value):
    with pytest.raises(TypeError, match=r"cannot return a sparse or quantized tensor from a rank; make it dense"):
        payload._to_tree({"a": value}, "result", [])


def test_another_version_of_the_package_is_an_error_before_anything_is_unpickled(monkeypatch):
    packed = pack_call(len, ([1],), {})
    monkeypatch.setattr(payload, "__version__", "9.9.9")
    with pytest.raises(
        UnfitPythonError, match=r"^host \S+: found spark_dl 9\.9\.9 in \S+, expected \S+, which the driver has"
    ):
        unpack_call(packed)


def test_a_module_that_is_missing_is_missing_in_another_attempt_too():
    assert not is_retryable(UnfitPythonError("no module named 'x'"))
