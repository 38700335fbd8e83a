"""The types of settings in words."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Optional, Union

import pytest

from spark_dl import Launch
from spark_dl.config import strategies
from spark_dl.config.kinds import describe, fitted, hints_of
from spark_dl.config.load import config_keys, sections


@pytest.mark.parametrize(("hint", "words"), [
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a number"),
    (str, "a string"),
    (Any, "a value"),
    (Literal["a"], "'a'"),
    (Literal["a", "b"], "'a' or 'b'"),
    (Literal[0, 1, 2], "0, 1 or 2"),
    (int | None, "a whole number or null"),
    (Optional[str], "a string or null"),  # noqa: UP045
    (None | float, "a number or null"),
    (float | Literal["auto"], "a number or 'auto'"),
    (Union[int, str, None], "a whole number, a string or null"),  # noqa: UP007
    (tuple[str, ...], "a list of strings"),
    (tuple[int, int], "a list of 2 whole numbers"),
    (tuple[int, int] | None, "a list of 2 whole numbers or null"),
    (tuple[str, int], "a list of 2 strings and whole numbers"),
    (list[str] | None, "a list of strings or null"),
    (tuple[Literal["a", "b"], ...], "a list of values that are each 'a' or 'b'"),
    (Sequence[Any], "a list"),
    (list, "a list"),
    (dict, "a mapping"),
    (dict[str, Any], "a mapping"),
    (dict[str, float], "a mapping of names to numbers"),
    (Mapping[str, bool], "a mapping of names to true and false"),
    (dict[str, dict[str, Any]], "a mapping of names to mappings"),
    (dict[str, tuple[str, ...]], "a mapping of names to lists of strings"),
    (dict[str, str | int], "a mapping of names to values that are each a string or a whole number"),
    (Launch, "a section with settings"),
    (Launch | None, "a section with settings or null"),
    (complex, "a value of the type complex"),
])  # fmt: skip
def test_a_type_in_words(hint, words):
    assert describe(hint) == words


@pytest.mark.parametrize("strategy", strategies.names())
def test_every_setting_has_a_type_in_words(strategy):
    hints = hints_of(sections(strategy))
    assert {*config_keys(strategy)} - {"parallel.strategy"} <= {*hints}
    assert [key for key, hint in hints.items() if "of the type" in describe(hint)] == []


@pytest.mark.parametrize(("hint", "value", "found"), [
    (bool, True, True), (int, 3, 3), (float, 3, 3.0), (float, 0.5, 0.5), (str, "3", "3"), (Any, [1], [1]),
    (Literal["a", 1], 1, 1), (int | None, None, None), (float | Literal["auto"], "auto", "auto"), (int | float, 3, 3),
    (float | int, 3, 3), (tuple[int, ...], [1, 2], (1, 2)), (tuple[int, ...], [], ()),
    (tuple[str, int], ["a", 1], ("a", 1)),
    (list[float], [1], [1.0]), (Sequence[Any], [1, "a"], [1, "a"]), (dict[str, float], {"a": 1}, {"a": 1.0}),
    (dict, {1: 2}, {1: 2}), (dict[str, str | bool | int], {"a": True, "b": 1, "c": "1"}, {"a": True, "b": 1, "c": "1"}),
    (tuple[tuple[str, Any], ...], [["a", [1]]], (("a", [1]),)),
])  # fmt: skip
def test_a_value_of_yaml_becomes_one_of_the_type(hint, value, found):
    became = fitted(hint, value)
    assert became == found
    assert repr(became) == repr(found), "also its type"


@pytest.mark.parametrize(("hint", "value"), [
    (bool, 1), (bool, "true"), (int, True), (int, 1.0), (int, "1"), (float, "1"), (float, True), (str, 1), (str, None),
    (Literal["a", 1], True), (Literal["a", 1], "1"), (int | None, "null"), (tuple[int, ...], "12"),
    (tuple[int, int], [1]),
    (list[int], {"a": 1}), (list[int], [1, None]), (dict[str, float], {1: 1.0}), (dict[str, float], [1]), (complex, 1),
])  # fmt: skip
def test_a_value_of_another_type_is_refused(hint, value):
    with pytest.raises(ValueError, match="^$"):
        fitted(hint, value)
