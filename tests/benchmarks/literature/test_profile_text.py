import itertools

import pytest

from benchmarks.literature.profile_text import Graph, Node, chain, read_graph, states
from tests.benchmarks.literature.test_literature import profiles

TEXT = """\
node1 -- Input -- forward_compute_time=9.000, backward_compute_time=0.000, activation_size=5.000, parameter_size=0.000
node2 -- Conv2d(3, 64, kernel_size=(3, 3)) -- forward_compute_time=1.500, backward_compute_time=2.500, \
activation_size=100.000, parameter_size=40.000
node3 -- LSTM(8, 8) -- forward_compute_time=1.000, backward_compute_time=1.000, activation_size=[60.000; 4.000], \
parameter_size=8.000 -- stage_id=1
node4 -- __getitem__(1) -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=4.000, \
parameter_size=0.000
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
"""


def write(tmp_path, text):
    path = tmp_path / "graph.txt"
    path.write_text(text)
    return path


def test_a_profile_is_read_without_inputs_and_unused_parts_of_tuples(tmp_path):
    graph = read_graph(write(tmp_path, TEXT))
    assert graph.nodes == {
        "node2": Node("Conv2d(3, 64, kernel_size=(3, 3))", 0.0015, 0.0025, 100.0, 40.0),
        "node3": Node("LSTM(8, 8)", 0.001, 0.001, 64.0, 8.0),
    }
    assert graph.edges == {("node2", "node3")}
    first, last = states(graph)
    assert (first.compute_s, first.parameter_bytes, first.output_bytes) == pytest.approx((0.004, 40, 100))
    assert (last.compute_s, last.parameter_bytes, last.before) == (pytest.approx(0.006), 48, {0})


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda text: text + "\nnode9: Linear", "line 9 is neither a layer nor an edge of a profile: node9: Linear"),
        (lambda text: text.replace("\tnode1 -- node2", "\tnode1 -- x"), "edges name layers that have no line: x"),
        (lambda text: "", "expected lines of layers, found none"),
        (lambda text: text.replace("1.500", "fast"), "line 2 is neither"),
    ],
    ids=["line", "edge", "empty", "number"],
)  # fmt: skip
def test_a_file_that_is_no_profile_is_an_error_with_the_line(tmp_path, change, fact):
    path = write(tmp_path, change(TEXT))
    with pytest.raises(ValueError, match="graph.txt") as error:
        read_graph(path)
    assert fact in str(error.value)


def graph_of(*edges):
    names = sorted({name for edge in edges for name in edge})
    return Graph({name: Node(name, 1.0, 0.0, 10.0, 1.0) for name in names}, frozenset(edges))


def test_branches_can_be_cut_side_by_side():
    """A diamond a -> (b, c) -> d: before b and c, after one of them, after both."""
    found = states(graph_of(("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")))
    assert [state.compute_s for state in found] == [1, 2, 2, 3, 4]
    assert [state.output_bytes for state in found] == [10, 20, 20, 20, 10]  # a is sent on until both have had it
    assert [sorted(state.before) for state in found] == [[], [0], [0], [0, 1, 2], [0, 1, 2, 3]]


def test_states_are_all_sets_of_layers_that_contain_what_comes_before():
    edges = {("a", "c"), ("b", "c"), ("c", "d"), ("b", "e"), ("e", "f"), ("d", "f")}
    graph, names = graph_of(*edges), "abcdef"
    expected = [
        set(chosen)
        for size in range(1, 7)
        for chosen in itertools.combinations(names, size)
        if all(source in chosen for source, target in edges if target in chosen)
    ]
    assert len(states(graph)) == len(expected)


def test_a_circle_and_too_many_branches_are_errors():
    with pytest.raises(ValueError, match="in a circle"):
        states(graph_of(("a", "b"), ("b", "c"), ("c", "b")))
    with pytest.raises(ValueError, match="more than 2000 places to cut"):
        states(graph_of(*((f"in{i}", f"out{i}") for i in range(12))))


def test_published_profiles_have_as_many_states_as_in_the_authors_program():
    counts = {name: len(states(read_graph(profiles() / f"{name}.txt"))) for name in ("vgg16", "resnet50", "alexnet")}
    assert counts == {"vgg16": 40, "resnet50": 240, "alexnet": 22}


def test_the_layers_of_a_chain_have_what_follows_them_without_weights():
    layers = chain(read_graph(profiles() / "vgg16.txt"))
    assert [layer.name.split("(")[0] for layer in layers] == ["Conv2d"] * 13 + ["Linear"] * 3
    states_of_vgg16 = states(read_graph(profiles() / "vgg16.txt"))
    assert sum(layer.forward_s + layer.backward_s for layer in layers) == pytest.approx(states_of_vgg16[-1].compute_s)
    assert sum(layer.parameter_bytes for layer in layers) == states_of_vgg16[-1].parameter_bytes
    assert layers[12].output_bytes == 4 * 128 * 512 * 7 * 7  # of 128 images, after the last pooling
    assert layers[15].output_bytes == 4 * 128 * 1000


def test_a_graph_with_a_branch_over_a_layer_is_no_chain():
    assert [layer.name for layer in chain(graph_of(("a", "b"), ("b", "c")))] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="feed one that is not the next: a -> c"):
        chain(graph_of(("a", "b"), ("b", "c"), ("a", "c")))
