"""Functions by importable name, as the files of saved models hold them."""

import functools
import sys  # noqa: F401 - a name that is no function
import types

import pytest

from spark_dl.scoring.names import name_of, object_of
from tests.builders.models import build_mlp


class Named:
    @staticmethod
    def build():
        return build_mlp()


def scaled(factor, offset=0):
    return factor + offset


@pytest.mark.parametrize("function", [build_mlp, Named, Named.build, scaled])
def test_a_function_is_found_again_by_its_name(function):
    assert object_of(name_of(function, "spec.build"), "build") is function


def test_a_partial_keeps_plain_arguments():
    found = object_of(name_of(functools.partial(scaled, 2, offset=[3]), "spec.build"), "build")
    assert (found.func, found.args, found.keywords) == (scaled, (2,), {"offset": [3]})


def test_what_another_process_cannot_import_is_refused():
    def local():
        pass

    notebook = types.FunctionType(scaled.__code__, {}, "cell")
    notebook.__module__, notebook.__qualname__ = "__main__", "cell"
    replaced = types.FunctionType(scaled.__code__, {}, "scaled")
    replaced.__module__, replaced.__qualname__ = __name__, "scaled"
    for function, match in (
        (local, "no name that another process can import"), (lambda: None, "no name that another process can import"),
        (notebook, "defined in a notebook or a script"), (replaced, "another object"),
        (functools.partial(scaled, object()), "must be numbers, strings and lists"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"spec.build: .*{match}"):
            name_of(function, "spec.build")


@pytest.mark.parametrize(("found", "match"), [
    ("no_such_module:build", "cannot import the module 'no_such_module'"),
    ("tests.builders.models:no_such", "has no 'no_such'"), ("tests.builders.models", "expected 'package.module:name'"),
    ("a:b:c", "expected 'package.module:name'"), (3, "expected 'package.module:name'"),
    (f"{__name__}:sys", "expected a function"),
])  # fmt: skip
def test_a_name_that_is_no_function_of_a_model_is_refused(found, match):
    with pytest.raises(ValueError, match=match):
        object_of(found, "model.json: functions.build")
