"""Which module of the benchmarks imports which: the source is read, nothing is run."""

import graphlib

import pytest

from tests.unit.test_imports import MODULES, files, ours

BENCH = files("bench/")
ROOMS = {"peers": set(), "model": set(), "testbed": set(), "literature": set(), "exchange": {"model", "testbed"},
         "parallel": {"exchange", "testbed", "literature"}, "faults": {"testbed"}}  # fmt: skip
"""Each folder, and the other folders that it may import."""


def room(module):
    return module.removeprefix("bench.").split(".")[0]


def test_the_modules_of_the_benchmarks_import_each_other_in_no_circle():
    names = {path.removesuffix(".py").replace("/", "."): path for path in BENCH}
    graph = {name: ours(MODULES[path]) & names.keys() for name, path in names.items()}
    assert sum(len(imported) for imported in graph.values()) > 20
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize("name", [name for name in BENCH if name.count("/") > 1])
def test_a_folder_of_the_benchmarks_imports_those_below_it_alone(name):
    own = room(name.replace("/", "."))
    imported = {room(module) for module in ours(MODULES[name]) if module.startswith("bench.")}
    assert imported <= ROOMS[own] | {own}


def test_a_folder_of_the_benchmarks_holds_at_most_sixteen_modules():
    for own in ROOMS:
        assert 0 < len([name for name in files(f"bench/{own}/") if not name.endswith("__init__.py")]) <= 16
