"""What follows from measured exchanges: crossings, the fitted model, held-out points, large clusters."""

import re

import pytest

from benchmarks.exchange import report
from benchmarks.exchange.answers import answers
from benchmarks.exchange.conclusions import conclude, with_efficiency
from benchmarks.exchange.log import Log
from spark_dl.parallel.cost.cost import ExchangeSize, Network, cost

RING = Network(alpha_s=2e-4, bytes_per_s=24e6, overhead_s=1e-3)
TREE = Network(alpha_s=1e-3, bytes_per_s=22e6, gamma_s_per_byte=4e-9, overhead_s=0.08)


def row(method, hosts, mib, factor=1.0):
    name, network = ("ring", RING) if method == "ddp" else (method, TREE)
    seconds = factor * cost(ExchangeSize(name, hosts, mib * 2**20), network).seconds
    return {"method": method, "hosts": hosts, "mib": mib, "seconds": seconds}


def timed(method, seconds, hosts=4):
    """Rows of a method by the seconds of each size."""
    return [{"method": method, "hosts": hosts, "mib": mib, "seconds": s, "ratio_to_limit": None}
            for mib, s in seconds.items()]  # fmt: skip


def concluded(*rows):
    """What follows, and what is left out of it."""
    log = Log()
    return conclude({"exchange": rows}, log), log.left_out


@pytest.mark.parametrize("sizes", [(16,), (1, 16)])
def test_a_model_that_nothing_checks_is_neither_fitted_nor_drawn(sizes):
    found, left_out = concluded(*(row(method, 4, mib) for method in ("ddp", "tree_reduce") for mib in sizes))
    assert found.keys() == {"exchange", "plan"}
    (line,) = left_out
    assert line.startswith("the cost model of ddp, tree_reduce: ")
    assert "three sizes (--mib)" in line


def test_one_size_says_nothing_of_others():
    """With figures like these the fits of one size crossed far above it."""
    rows = timed("ddp", {16: 1.029}) + timed("tree_reduce", {16: 4.881}) + timed("shuffle_reduce", {16: 3.712})
    found, _ = concluded(*rows)
    said = answers(found)
    assert len(said) == 1
    assert set(re.findall(r"([\d.]+) MiB", " ".join(said))) == {"16"}
    assert re.findall(r"(\d+) hosts", " ".join(said)) == ["4"]


def test_large_clusters_are_counted_and_have_no_seconds():
    found, _ = concluded(*(row(method, 4, 16) | {"busiest_link_bytes": 3 * 2**24} for method in ("ddp", "tree_reduce")))
    by_key = {(r["method"], r["ranks"]): r for r in found["plan"]}
    assert by_key.keys() == {(m, p) for m in ("ddp", "tree_reduce") for p in (4, 16, 64, 256, 1024, 4096)}
    assert not any(name.endswith("_s") or name == "seconds" for r in found["plan"] for name in r)
    gradient = 25_557_032 * 4
    assert by_key["ddp", 4096]["busiest_link_bytes"] == pytest.approx(2 * gradient * 4095 / 4096)
    assert by_key["tree_reduce", 4096]["busiest_link_bytes"] > 60 * gradient  # what the last level leaves
    assert by_key["ddp", 4096]["messages"] == 4 * 2 * 4095  # of buckets of 25 MiB
    for (_, ranks), r in by_key.items():
        assert r.get("measured_busiest_bytes") == (3 * gradient if ranks == 4 else None)


def test_the_ends_fit_the_model_and_the_middle_is_held_out():
    found, left_out = concluded(*(row(method, 4, mib) for method in ("ddp", "tree_reduce") for mib in (1, 16, 64)))
    assert [p["held_out"] for p in found["model"]] == [False, True, False] * 2
    for point in found["model"]:
        assert point["predicted_s"] == pytest.approx(point["measured_s"], rel=0.02)
    assert "crossings" not in found  # the ring is the faster one at all sizes
    assert left_out == []


@pytest.mark.parametrize(("tree", "crossing"), [
    ({1: 0.9, 16: 0.9, 64: 1.2}, {"faster_mib": 16, "slower_mib": 64}),
    ({1: 1.5, 16: 1.0, 64: 0.8}, {"faster_mib": 64, "slower_mib": 1}),  # equal between
    ({1: 0.97, 16: 1.5, 64: 2.0}, None), ({1: 1.03, 16: 0.99, 64: 1.02}, None), ({1: 1.3, 16: 1.2, 64: 1.1}, None),
])  # fmt: skip
def test_a_crossing_lies_between_measured_sizes_of_which_both_are_clear(tree, crossing):
    rows = timed("ddp", dict.fromkeys(tree, 1.0)) + timed("tree_reduce", tree)
    found = concluded(*rows)[0]
    expected = [{"method": "tree_reduce", "hosts": 4, **crossing}] if crossing else []
    assert found.get("crossings", []) == expected
    said = [text for text in answers(found) if "is faster than" in text]
    assert len(said) == len(expected)
    if crossing:
        faster, slower = crossing["faster_mib"], crossing["slower_mib"]
        assert f"On 4 hosts tree_reduce is faster than DDP's ring at {faster} MiB and slower at {slower} MiB" in said[0]


def test_hosts_and_compressed_gradients_do_not_cross():
    rows = [
        *timed("ddp", {16: 1.0, 64: 1.0}, hosts=4), *timed("tree_reduce", {16: 0.5}, hosts=4),
        *timed("ddp", {64: 1.0}, hosts=8), *timed("tree_reduce", {64: 2.0}, hosts=8),
        *({**r, "bytes_per_rank": 1e6} for r in timed("ddp topk", {16: 0.5, 64: 2.0}, hosts=4)),
    ]  # fmt: skip
    assert "crossings" not in concluded(*rows)[0]


def test_a_model_that_does_not_pass_is_shown_and_predicts_nothing():
    off = [row("ddp", 4, mib, factor) for mib, factor in ((1, 1.0), (16, 1.6), (64, 1.0))]
    times = {"profile": "resnet50", "scale": 0.1, "forward_s": 0.3, "backward_s": 0.6}
    scaling = [{"kind": "weak", "method": "ddp", "ranks": p, "step_s": 1.0, **times} for p in (1, 8)]
    log = Log()
    found = conclude({"exchange": off, "scaling": scaling}, log)
    assert [p["held_out"] for p in found["model"]] == [False, True, False]
    assert not any("predicted_efficiency" in r for r in found["scaling"])
    assert len(log.left_out) == 1
    assert "predictions of the cost model for ddp: the error on held-out points is up to 38%" in log.left_out[0]


def test_rows_say_how_many_times_as_long_as_the_ring_they_take():
    rows = [row(method, hosts, mib) for hosts in (4, 8) for mib in (1, 64) for method in ("tree_reduce", "ddp")]
    found = concluded(*rows)[0]["exchange"]
    for tree, ring in zip(found[::2], found[1::2], strict=True):
        assert ring["times_ring"] == 1
        assert tree["times_ring"] == tree["seconds"] / ring["seconds"] > 1
    assert [r["times_ring"] for r in concluded(rows[0])[0]["exchange"]] == [None]


def test_methods_that_the_model_does_not_know_are_left_out_of_it():
    rows = [{"method": "another", "hosts": 4, "mib": 1, "seconds": 1.0}]
    assert concluded(*rows)[0].keys() == {"exchange"}
    assert conclude({}, Log()) == {}


def test_the_fewest_and_the_most_hosts_fit_the_model():
    rows = [row("ddp", hosts, mib) for hosts in (2, 4, 8) for mib in (1, 16, 64)]
    held_out = {(p["hosts"], p["mib"]) for p in concluded(*rows)[0]["model"] if p["held_out"]}
    assert held_out == {(4, 1), (4, 16), (4, 64), (2, 16), (8, 16)}


def test_what_each_bucket_costs_is_told_from_what_each_byte_costs():
    """15 ms for each bucket of 25 MiB and 2 ms for each MiB, as compression takes."""
    seconds = {1: 0.017, 16: 0.047, 64: 0.173}
    rows = [
        {"method": "ddp powersgd", "hosts": 4, "mib": mib, "seconds": s, "bytes_per_rank": 0.006 * mib * 2**20}
        for mib, s in seconds.items()
    ]
    for point in concluded(*rows)[0]["model"]:
        assert point["predicted_s"] == pytest.approx(point["measured_s"], rel=0.01)


def test_all_rows_fit_the_report(tmp_path):
    pytest.importorskip("matplotlib", reason="the report needs matplotlib")
    rows = [
        {**row(method, 4, mib), "bytes_per_rank": 1.5 * mib * 2**20, "busiest_link_bytes": 3.0 * mib * 2**20,
         "limit_s": 0.06 * mib, "ratio_to_limit": 0.9} for method in ("ddp", "tree_reduce") for mib in (1, 16, 64)
    ]  # fmt: skip
    results = concluded(*rows)[0]
    report.write_report(results, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().count("<h2>") == 4


def test_weak_and_strong_scaling_have_their_own_ideal():
    rows = [
        {"kind": kind, "method": "ddp", "ranks": ranks, "step_s": seconds}
        for kind, times in (("weak", {1: 2.0, 4: 2.5}), ("strong", {1: 2.0, 4: 0.8})) for ranks, seconds in
        times.items()
    ]  # fmt: skip
    found = {(r["kind"], r["ranks"]): with_efficiency(r, rows, {})["efficiency"] for r in rows}
    assert found == {("weak", 1): 1.0, ("weak", 4): 0.8, ("strong", 1): 1.0, ("strong", 4): 0.625}


def test_scaling_without_the_step_on_one_rank_has_no_efficiency_and_loses_nothing():
    rows = [{"kind": "weak", "method": "ddp", "ranks": ranks, "step_s": 2.5} for ranks in (2, 4)]
    assert conclude({"scaling": rows}, Log())["scaling"] == rows


def test_scaling_is_beside_what_the_model_predicts():
    times = {"profile": "resnet50", "scale": 0.1, "forward_s": 0.3, "backward_s": 0.6}
    scaling = [{"kind": "weak", "method": m, "ranks": p, "step_s": 1.0, **times} for m in ("ddp", "x") for p in (1, 8)]
    exchange = [row("ddp", 4, mib) for mib in (1, 16, 64)]
    alone, eight, *others = conclude({"exchange": exchange, "scaling": scaling}, Log())["scaling"]
    assert alone["predicted_efficiency"] == 1
    size = 0.1 * 25_557_032 * 4 * 2 * 7 / 8
    assert 1 > eight["predicted_efficiency"] > 0.9 / (0.9 + 1.2 * size / RING.bytes_per_s)
    assert not any("predicted_efficiency" in r for r in others)
