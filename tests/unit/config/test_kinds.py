"""The types of settings in words."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Optional, Union

import pytest

from spark_dl import Launch
from spark_dl.config import strategies
from spark_dl.config.kinds import describe, explain_value, hints_of
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


@pytest.mark.parametrize("message", [
    "argument --run_dir: expected one argument",
    "Parser key \"config\": File does not exist: '/nowhere.yaml'",
    "the following arguments are required: other.key",
])  # fmt: skip
def test_errors_of_other_kinds_are_left_as_they_are(message):
    assert explain_value(message, hints_of(sections())) is None
