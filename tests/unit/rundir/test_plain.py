"""What a checkpoint can hold is what `torch.load(weights_only=True)` reads back; anything else is named when saved."""

import datetime
import enum
import io
import re
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from spark_dl.rundir.checkpoint_files import plain_state

Place = namedtuple("Place", "row column")
Level = enum.IntEnum("Level", "LOW HIGH")


class Names(dict):
    """A dict of the user's own."""


class Masked(torch.Tensor):
    """A tensor of the user's own."""


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("value", [
    None, True, 7, 10**30, 0.1, 1 + 2j, "ä", b"\x00", bytearray(b"a"), {1, 2}, (1, (2,)), [1, [2.5]], {"a": {1: None}},
    torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), torch.strided, Counter("aab"), OrderedDict(b=1, a=2),
], ids=repr)  # fmt: skip
def test_plain_data_is_read_back_as_the_same(value):
    found = saved_and_loaded(plain_state({"value": value}, "its"))["value"]
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("number", [
    np.float64(0.1), np.float32(1.5), np.float16(1.5), np.int64(7), np.uint8(7), np.bool_(True), np.complex128(1j),
    np.str_("a"),
], ids=lambda number: type(number).__name__)  # fmt: skip
def test_numpy_scalars_become_numbers(number):
    found = saved_and_loaded(plain_state({"a": [number], np.int64(3): (number,)}, "its"))
    assert found == {"a": [number.item()], 3: (number.item(),)}
    assert type(found["a"][0]) is type(number.item())


@pytest.mark.parametrize("value", [
    np.zeros(2), np.datetime64("2020-01-01"), np.longdouble(1), datetime.date(2020, 1, 1), deque([1]), frozenset({1}),
    defaultdict(int, a=1), Level.HIGH, Place(1, 2), Names(a=1), Fraction(1, 3), range(3), slice(1), len, nn.Linear,
    torch.zeros(1).as_subclass(Masked), torch.Generator(),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_what_would_not_be_read_back_is_an_error_with_its_place_and_type(value):
    kind = type(value)
    found = re.escape(f"its['a'][1]['b']: found a {kind.__module__}.{kind.__qualname__} in its state")
    with pytest.raises(ValueError, match=f"^{found}"):
        plain_state({"a": [1, {"b": value}]}, "its")


def test_tensors_stay_the_same_and_a_state_that_contains_itself_is_an_error():
    weight = nn.Parameter(torch.zeros(2))
    found = plain_state({"a": weight, "b": [weight.data]}, "its")
    assert found["a"] is weight
    assert found["b"][0].data_ptr() == weight.data_ptr()
    around: dict = {}
    around["a"] = [around]
    with pytest.raises(ValueError, match=r"^its\['a'\]\[0\]: found a dict that contains itself"):
        plain_state(around, "its")


def test_a_state_dict_keeps_the_versions_of_its_modules():
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    found = saved_and_loaded(plain_state(state, "its"))
    assert found._metadata == state._metadata
    assert found._metadata["0"] == {"version": 2}


def test_of_a_scheduler_functions_are_left_out_and_counters_are_dicts():
    state = {"f": len, "n": np.float32(1.5), "c": Counter([3, 3]), "l": [1, (2, {"g": len, "t": True})], "none": None}
    found = plain_state(state, "its", of_scheduler=True)
    assert found == {"n": 1.5, "c": {3: 2}, "l": [1, (2, {"t": True})], "none": None}
    assert [type(found[k]) for k in ("n", "c")] == [float, dict]


def test_types_that_torch_was_told_are_safe_are_kept():
    torch.serialization.add_safe_globals([Fraction])
    try:
        assert saved_and_loaded(plain_state([Fraction(1, 3)], "its")) == [Fraction(1, 3)]
    finally:
        torch.serialization.clear_safe_globals()
