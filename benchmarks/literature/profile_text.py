"""Reads the profiles of layers that the authors of PipeDream published: text, a line for each layer, then the edges.

    <id> -- <name> -- forward_compute_time=22.307, backward_compute_time=24.613, activation_size=1644.0,
        parameter_size=7168.000
    <tab><id> -- <id>

A layer is one line. Times are milliseconds and sizes are bytes, for one mini-batch. The files are
`profiler/*/profiles/*/graph.txt` of github.com/msr-fiddle/pipedream (MIT licence).
"""

from __future__ import annotations

import graphlib
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.literature.pipedream_cuts import State

_NODE = re.compile(
    r"(?P<id>\S+) -- (?P<name>.*) -- forward_compute_time=(?P<forward_ms>[\d.]+), "
    r"backward_compute_time=(?P<backward_ms>[\d.]+), activation_size=(?P<sizes>[\d.]+|\[[\d.; ]*\]), "
    r"parameter_size=(?P<parameters>[\d.]+)( -- stage_id=\d+)?"
)
_EDGE = re.compile(r"\t(?P<source>\S+) -- (?P<target>\S+)")
_MOST_STATES = 2_000


@dataclass(frozen=True)
class Node:
    """One layer."""

    name: str
    forward_s: float
    backward_s: float
    output_bytes: float
    parameter_bytes: float


@dataclass(frozen=True)
class Graph:
    """Layers by their names in the file, and which layers each feeds."""

    nodes: Mapping[str, Node]
    edges: frozenset[tuple[str, str]]


def read_graph(path: str | Path) -> Graph:
    """Reads a profile without its inputs, which take no part in a cut.

    Raises ValueError, with the line, for a line that is neither a layer nor an edge.
    """
    nodes: dict[str, Node] = {}
    edges: set[tuple[str, str]] = set()
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if found := _NODE.fullmatch(line.strip()):
            sizes = [float(size) for size in found["sizes"].strip("[]").split(";") if size.strip()]
            times = float(found["forward_ms"]) / 1e3, float(found["backward_ms"]) / 1e3
            nodes[found["id"]] = Node(found["name"], *times, sum(sizes), float(found["parameters"]))
        elif found := _EDGE.fullmatch(line.rstrip()):
            edges.add((found["source"], found["target"]))
        elif line.strip():
            raise ValueError(f"{path}: line {number} is neither a layer nor an edge of a profile: {line.strip()[:100]}")
    if missing := {name for edge in edges for name in edge} - nodes.keys():
        raise ValueError(f"{path}: edges name layers that have no line: {', '.join(sorted(missing))}")
    if not nodes:
        raise ValueError(f"{path}: expected lines of layers, found none")
    return _without_ends(nodes, edges)


def _without_ends(nodes: Mapping[str, Node], edges: set[tuple[str, str]]) -> Graph:
    """Leaves out inputs, and then what is taken from a tuple and not used."""
    inputs = {name for name in nodes if nodes[name].name.startswith("Input") and not any(t == name for _, t in edges)}
    kept = {edge for edge in edges if not inputs & {*edge}}
    unused = {
        name for name in nodes if nodes[name].name.startswith("__getitem__") and not any(s == name for s, _ in kept)
    }
    left = {name: node for name, node in nodes.items() if name not in inputs | unused}
    return Graph(left, frozenset(edge for edge in kept if not unused & {*edge}))


def chain(graph: Graph) -> list[Node]:
    """Returns the layers in their order. Each has weights, and includes the layers without weights that follow it.

    Raises ValueError if they are not a chain, because a layer feeds one that is not the next.
    """
    before = {name: {source for source, target in graph.edges if target == name} for name in graph.nodes}
    found: list[list[Node]] = []
    place: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(before).static_order():
        if graph.nodes[name].parameter_bytes or not found:
            found.append([])
        found[-1].append(graph.nodes[name])
        place[name] = len(found) - 1
    if branches := [f"{source} -> {target}" for source, target in graph.edges if place[target] > place[source] + 1]:
        raise ValueError(f"expected a chain of layers; these feed one that is not the next: {', '.join(branches)}")
    return [
        Node(
            nodes[0].name, sum(node.forward_s for node in nodes), sum(node.backward_s for node in nodes),
            nodes[-1].output_bytes, nodes[0].parameter_bytes,
        )
        for nodes in found
    ]  # fmt: skip


def states(graph: Graph) -> list[State]:
    """Returns the places to cut the graph: each set of layers that contains all layers before its own.

    Raises ValueError for a graph with more than 2,000 of them, and for one with a circle.
    """
    before, after = defaultdict(set), defaultdict(set)
    for source, target in graph.edges:
        before[target].add(source)
        after[source].add(target)
    sources = [name for name in graph.nodes if not before[name]]
    found: list[frozenset[str]] = []
    waiting = {frozenset({name}) for name in sources}
    while waiting:  # all sets of one size
        found += sorted(waiting, key=sorted)
        if len(found) > _MOST_STATES:
            raise ValueError(f"the graph has more than {_MOST_STATES} places to cut it, because it has many branches")
        waiting = {
            done | {name}
            for done in waiting
            for name in {*sources, *(each for own in done for each in after[own])} - done
            if before[name] <= done
        }
    if not found or len(found[-1]) < len(graph.nodes):
        raise ValueError("the layers feed each other in a circle")
    index = {done: i for i, done in enumerate(found)}
    return [_state(graph, after, done, index) for done in found]


def _state(
    graph: Graph, after: Mapping[str, set[str]], done: frozenset[str], index: Mapping[frozenset[str], int]
) -> State:
    nodes = [graph.nodes[name] for name in sorted(done)]
    return State(
        compute_s=sum(node.forward_s + node.backward_s for node in nodes),
        parameter_bytes=sum(node.parameter_bytes for node in nodes),
        output_bytes=sum(
            graph.nodes[name].output_bytes for name in sorted(done) if after[name] - done or not after[name]
        ),
        before=frozenset(i for other, i in index.items() if other < done),
    )
