"""What follows from measured exchanges: the fitted model, held-out points, crossings, large clusters."""

import contextlib

import pytest

from spark_dl.bench.exchange import compare, exchange, overlap, report
from spark_dl.bench.exchange.log import Log
from spark_dl.bench.model import model
from spark_dl.bench.model.cost import Network, cost
from spark_dl.bench.model.work import Exchange
from spark_dl.bench.testbed import links

RING = Network(alpha_s=2e-4, bytes_per_s=24e6, overhead_s=1e-3)
TREE = Network(alpha_s=1e-3, bytes_per_s=22e6, gamma_s_per_byte=4e-9, overhead_s=0.08)


def row(method, hosts, mib, factor=1.0):
    name, network = ("ring", RING) if method == "ddp" else (method, TREE)
    seconds = factor * cost(Exchange(name, hosts, mib * 2**20), network).seconds
    return {"method": method, "hosts": hosts, "mib": mib, "seconds": seconds}


def test_the_ends_fit_the_model_and_the_middle_is_held_out():
    rows = [row(method, 4, mib) for method in ("ddp", "tree_reduce") for mib in (1, 16, 64)]
    found = model.conclude({"exchange": rows})
    assert [p["held_out"] for p in found["model"]] == [False, True, False] * 2
    for point in found["model"]:
        assert point["predicted_s"] == pytest.approx(point["measured_s"], rel=0.02)
    assert {p["method"] for p in found["plan"]} == {"ddp", "tree_reduce"}
    assert {p["ranks"] for p in found["plan"]} == {16, 64, 256, 1024, 4096}
    assert found["crossings"] == []  # the ring is the faster one at all sizes


def test_a_method_that_is_faster_for_small_gradients_crosses_the_ring():
    slow_start = [{**row("ddp", 4, mib), "seconds": row("ddp", 4, mib)["seconds"] + 1.0} for mib in (1, 16, 64)]
    (crossing,) = model.conclude({"exchange": [*slow_start, *(row("tree_reduce", 4, m) for m in (1, 16, 64))]})[
        "crossings"
    ]
    assert crossing["method"] == "tree_reduce"
    assert crossing["faster"] == "below"
    assert 0.1 < crossing["mib"] < 16


def test_a_method_that_is_faster_for_large_gradients_only_crosses_the_other_way():
    late = [{**row("ddp", 4, mib, 0.8), "method": "ring"} for mib in (1, 16, 64)]
    rows = [*(row("ddp", 4, mib) for mib in (1, 16, 64)), *({**r, "seconds": r["seconds"] + 0.1} for r in late)]
    (crossing,) = model.conclude({"exchange": rows})["crossings"]
    assert (crossing["method"], crossing["faster"]) == ("ring", "above")


def test_rows_say_how_many_times_as_long_as_the_ring_they_take():
    rows = [row(method, hosts, mib) for hosts in (4, 8) for mib in (1, 64) for method in ("tree_reduce", "ddp")]
    found = model.conclude({"exchange": rows})["exchange"]
    for tree, ring in zip(found[::2], found[1::2], strict=True):
        assert ring["times_ring"] == 1
        assert tree["times_ring"] == tree["seconds"] / ring["seconds"] > 1
    assert [r["times_ring"] for r in model.conclude({"exchange": rows[:1]})["exchange"]] == [None]


def test_methods_that_the_model_does_not_know_are_left_out_of_it():
    rows = [{"method": "another", "hosts": 4, "mib": 1, "seconds": 1.0}]
    assert model.conclude({"exchange": rows}).keys() == {"exchange"}
    assert model.conclude({}) == {}


def test_the_fewest_and_the_most_hosts_fit_the_model():
    rows = [row("ddp", hosts, mib) for hosts in (2, 4, 8) for mib in (1, 16, 64)]
    held_out = {(p["hosts"], p["mib"]) for p in model.conclude({"exchange": rows})["model"] if p["held_out"]}
    assert held_out == {(4, 1), (4, 16), (4, 64), (2, 16), (8, 16)}


def test_what_is_compressed_is_planned_by_the_bytes_that_were_counted():
    """As if a hundredth of a gradient went to each of the three other ranks."""
    rows = [
        {**row("ddp", 4, mib), "method": "ddp topk", "bytes_per_rank": 3 * 0.01 * mib * 2**20} for mib in (1, 16, 64)
    ]
    found = model.conclude({"exchange": rows})
    gradient = 25_557_032 * 4
    assert [r["bytes_per_rank"] for r in found["plan"]] == [
        pytest.approx(0.01 * gradient * (p - 1)) for p in (16, 64, 256, 1024, 4096)
    ]


def test_what_each_bucket_costs_is_told_from_what_each_byte_costs():
    """15 ms for each bucket of 25 MiB and 2 ms for each MiB, as compression takes."""
    seconds = {1: 0.017, 16: 0.047, 64: 0.173}
    rows = [
        {"method": "ddp powersgd", "hosts": 4, "mib": mib, "seconds": s, "bytes_per_rank": 0.006 * mib * 2**20}
        for mib, s in seconds.items()
    ]
    for point in model.conclude({"exchange": rows})["model"]:
        assert point["predicted_s"] == pytest.approx(point["measured_s"], rel=0.01)


def test_all_rows_fit_the_report(tmp_path):
    pytest.importorskip("matplotlib", reason="the report needs matplotlib")
    rows = [
        {**row(method, 4, mib), "bytes_per_rank": 1.5 * mib * 2**20, "busiest_link_bytes": 3.0 * mib * 2**20,
         "limit_s": 0.06 * mib, "ratio_to_limit": 0.9} for method in ("ddp", "tree_reduce") for mib in (1, 16, 64)
    ]  # fmt: skip
    results = model.conclude({"exchange": rows})
    report.write_report(results, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().count("<h2>") == 4


@pytest.mark.parametrize(("wrong", "named"), [({"methods": ("ddp", "rign")}, "rign"), ({"sections": ("all",)}, "all")])
def test_an_unknown_method_or_section_is_named_with_those_that_are_known(wrong, named):
    with pytest.raises(ValueError, match=rf"^{next(iter(wrong))}: unknown {named}; known are "):
        compare.Options(**wrong)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"hosts": (4, 1)}, "hosts: expected numbers of at least 2, found 4, 1"), ({"hosts": ()}, "found none"),
    ({"scaling_ranks": (2, 4)}, "scaling_ranks: expected 1 among them, to compare with, found 2, 4"),
    ({"scaling_ranks": (1, 32)}, "scaling_ranks: expected numbers from 1 to 16, found 1, 32"),
    ({"profile": "resnet"}, "profile: unknown resnet; known are resnet50, bert_base, bert_large"),
    ({"mib": (0,)}, "mib: expected sizes above 0, found 0"), ({"scale": 1.5}, "scale: .*, found 1.5"),
    ({"repeats": 0}, "repeats of at least 1"), ({"rate_mbit": 0}, "a rate_mbit above 0"),
    ({"mtu": 100}, "mtu: expected 576 to 65535 bytes, found 100"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused_before_anything_is_measured(wrong, message):
    with pytest.raises(ValueError, match=message):
        compare.Options(**wrong)


def test_more_hosts_than_one_machine_makes_are_refused_with_another_way():
    with pytest.raises(ValueError, match=r"^hosts: at most 16 are made on one machine, found 4, 17; give --master"):
        compare.compare(compare.Options(hosts=(4, 17)), Log())


def test_sections_that_measure_none_of_the_methods_say_so(monkeypatch):
    monkeypatch.setattr(compare.testbed, "unavailable", lambda: None)
    log = Log()
    options = compare.Options(methods=("tree_reduce",), sections=("compression", "scaling"))
    with pytest.raises(RuntimeError, match="nothing was measured; see above"):
        compare.compare(options, log)
    why = "none of the methods that were asked for is measured there"
    assert log.left_out == [f"compression: {why}", f"scaling: {why}"]


def test_a_section_that_fails_is_left_out_with_its_reason_and_the_others_stay(monkeypatch):
    def fail(*args, **settings):
        raise RuntimeError("no slots")

    for module in ("exchange", "overlap"):
        monkeypatch.setattr(getattr(compare, module), "measure", fail)
    monkeypatch.setattr(compare.waves, "measure", lambda *args, **settings: ["a row"])
    options = compare.Options(sections=("exchange", "breakdown", "waves"))
    shown, saved = [], []
    log = Log(shown.append)
    found = compare.measure(None, "", options, same_clock=True, log=log, save=lambda r: saved.append(dict(r)))
    assert found == {"waves": ["a row"]} == saved[-1]
    assert shown == ["left out: exchange: no slots", "left out: breakdown: no slots"]
    assert log.left_out == ["exchange: no slots", "breakdown: no slots"]


def test_hosts_that_cannot_be_made_lose_nothing_of_the_scaling_before_them(monkeypatch):
    class Bed:
        folder = ""

    @contextlib.contextmanager
    def hosts(num_hosts, **options):
        if num_hosts > 4:
            raise RuntimeError("no room")
        yield Bed()

    monkeypatch.setattr(compare.testbed, "hosts", hosts)
    monkeypatch.setattr(
        compare, "_scaled_step", lambda bed, kind, method, ranks, options: {"step_s": 1.0, "ranks": ranks}
    )
    log = Log()
    rows = compare._scaling(compare.Options(methods=("ddp",), scaling_ranks=(1, 4, 8)), log)
    assert [row["ranks"] for row in rows] == [1, 1, 4, 4]
    assert log.left_out == ["scaling to 8 ranks: no room"]


def test_compression_has_no_limit():
    found = {"seconds": 0.5}
    assert exchange._limit("ddp", found, 4, 1.0, 200.0)["ratio_to_limit"] == pytest.approx(1.5 * 2**20 / 25e6 / 0.5)
    for method, rate in (("ddp topk", 200.0), ("ddp fp16", 200.0), ("ddp", None)):
        assert exchange._limit(method, found, 4, 1.0, rate) == {"limit_s": None, "ratio_to_limit": None}


def test_a_method_that_fails_is_left_out_of_the_breakdown_alone(monkeypatch):
    def run(spark, fn, *arguments, launch):
        if fn is overlap._choose_on_rank:
            return [4.0]
        (settings,) = arguments
        assert settings["profile"] == "bert_base"
        if settings["parallel"].get("compression") == "powersgd":
            raise RuntimeError("no memory\nTraceback ...")
        return [{"step_s": 2.0, "optimizer_s": 0.5}]

    monkeypatch.setattr(overlap, "run_barrier", run)
    log = Log()
    found = overlap.measure(
        None, "", num_hosts=2, scale=0.1, repeats=1, sections=("breakdown",), same_clock=True, log=log,
        methods=("ddp", "ddp powersgd", "ddp topk"), profile="bert_base",
    )  # fmt: skip
    assert [row["method"] for row in found["breakdown"]] == ["ddp", "ddp topk"]
    assert found["auto_bucket_mib"] == 4
    assert log.left_out == ["breakdown of ddp powersgd: no memory"]


def test_weak_and_strong_scaling_have_their_own_ideal():
    rows = [
        {"kind": kind, "method": "ddp", "ranks": ranks, "step_s": seconds}
        for kind, times in (("weak", {1: 2.0, 4: 2.5}), ("strong", {1: 2.0, 4: 0.8})) for ranks, seconds in
        times.items()
    ]  # fmt: skip
    found = {(r["kind"], r["ranks"]): model.with_efficiency(r, rows, {})["efficiency"] for r in rows}
    assert found == {("weak", 1): 1.0, ("weak", 4): 0.8, ("strong", 1): 1.0, ("strong", 4): 0.625}


def test_scaling_without_the_step_on_one_rank_has_no_efficiency_and_loses_nothing():
    rows = [{"kind": "weak", "method": "ddp", "ranks": ranks, "step_s": 2.5} for ranks in (2, 4)]
    assert model.conclude({"scaling": rows})["scaling"] == rows


def test_scaling_is_beside_what_the_model_predicts():
    times = {"profile": "resnet50", "scale": 0.1, "forward_s": 0.3, "backward_s": 0.6}
    scaling = [{"kind": "weak", "method": m, "ranks": p, "step_s": 1.0, **times} for m in ("ddp", "x") for p in (1, 8)]
    exchange = [row("ddp", 4, mib) for mib in (1, 16, 64)]
    alone, eight, *others = model.conclude({"exchange": exchange, "scaling": scaling})["scaling"]
    assert alone["predicted_efficiency"] == 1
    size = 0.1 * 25_557_032 * 4 * 2 * 7 / 8
    assert 1 > eight["predicted_efficiency"] > 0.9 / (0.9 + 1.2 * size / RING.bytes_per_s)
    assert not any("predicted_efficiency" in r for r in others)


def test_the_exact_methods():
    found = {method for method in compare.METHODS if exchange.is_exact(method)}
    assert found == {
        "backend", "naive", "reduce_broadcast", "tree", "ring", "halving_doubling", "ddp", "ddp ring", "horovod",
        "tree_reduce", "shuffle_reduce", "parameter_server sync",
    }  # fmt: skip


PROC_NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier comp
    lo: 1104     12    0    0    0     0          0         0     2208      12    0    0    0     0       0          0
  eth0:123456789    9    0    0    0     0          0         0 987654321    8    0    0    0     0       0          0
"""


def test_the_kernel_s_counters():
    found = links.parse_counters(PROC_NET_DEV)
    assert found == {"lo": links.LinkBytes(1104, 2208), "eth0": links.LinkBytes(123456789, 987654321)}
    assert found["eth0"] - found["lo"] == links.LinkBytes(123456789 - 1104, 987654321 - 2208)


def test_the_counters_of_this_host_go_up():
    before = links.read_link("127.0.0.1")
    assert (links.read_link("127.0.0.1") - before).received >= 0
    with pytest.raises(RuntimeError, match=r"no network interface .* 192\.0\.2\.1"):
        links.read_link("192.0.2.1")


def test_the_interface_of_gloo_counts_where_it_is_another_one(monkeypatch):
    content = {"bytes": PROC_NET_DEV}
    monkeypatch.setattr(links.Path, "read_text", lambda path: content["bytes"])
    assert links.read_link("127.0.0.1") == links.LinkBytes(1104, 2208)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert links.read_link("127.0.0.1") == links.LinkBytes(1104, 2208)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert links.read_link("127.0.0.1") == links.LinkBytes(1104 + 123456789, 2208 + 987654321)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(RuntimeError, match="has no network interface eth7"):
        links.read_link("127.0.0.1")
