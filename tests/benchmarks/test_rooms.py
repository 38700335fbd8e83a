"""Which module of the benchmarks imports which: the source is read, nothing is run."""

import graphlib

import pytest

from tests.unit.test_imports import BENCHMARKS, PACKAGE, imports_of, module_of, top_name

GRAPH = {
    module_of(name): {i.module for i in imports_of(path) if i.module.startswith("benchmarks.") and not i.is_for_types}
    for name, path in BENCHMARKS.items()
}
ROOMS = {"peers": set(), "model": set(), "testbed": set(), "literature": set(), "exchange": {"model", "testbed"},
         "parallel": {"exchange", "testbed", "literature"}, "faults": {"testbed"}}  # fmt: skip
"""Each folder, and the other folders that it may import."""


def room(module):
    return module.split(".")[1]


def test_the_modules_of_the_benchmarks_import_each_other_in_no_circle():
    graph = {name: imported & GRAPH.keys() for name, imported in GRAPH.items()}
    assert sum(len(imported) for imported in graph.values()) > 20
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize("name", [name for name in GRAPH if name.count(".") > 1])
def test_a_folder_of_the_benchmarks_imports_those_below_it_alone(name):
    assert {room(module) for module in GRAPH[name]} <= ROOMS[room(name)] | {room(name)}


def test_the_package_knows_nothing_of_the_benchmarks():
    assert [
        path for path in PACKAGE.rglob("*.py") for i in imports_of(path) if top_name(i.module) == "benchmarks"
    ] == []
