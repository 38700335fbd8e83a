"""The sections of the comparison: which are measured, and what is left out with its reason."""

import argparse
import contextlib
import dataclasses

import pytest

from benchmarks.exchange import compare, exchange, overlap
from benchmarks.exchange.log import Log
from benchmarks.exchange.options import FULL, SECTIONS, Options, add_arguments, from_arguments


@pytest.mark.parametrize(("wrong", "named"), [({"methods": ("ddp", "rign")}, "rign"), ({"sections": ("all",)}, "all")])
def test_an_unknown_method_or_section_is_named_with_those_that_are_known(wrong, named):
    with pytest.raises(ValueError, match=rf"^{next(iter(wrong))}: unknown {named}; expected some of "):
        Options(**wrong)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"hosts": (4, 1)}, "hosts: expected numbers >= 2, found 4, 1"), ({"hosts": ()}, "found none"),
    ({"scaling_ranks": (2, 4)}, "scaling_ranks: expected 1 among the numbers, as the baseline, found 2, 4"),
    ({"scaling_ranks": (1, 32)}, "scaling_ranks: expected numbers from 1 to 16, found 1, 32"),
    ({"profile": "resnet"}, "profile: unknown resnet; expected one of resnet50, bert_base, bert_large"),
    ({"mib": (0,)}, "mib: expected sizes above 0, found 0"), ({"scale": 1.5}, "scale: .*, found 1.5"),
    ({"repeats": 0}, "repeats of at least 1"), ({"rate_mbit": 0}, "a rate_mbit above 0"),
    ({"mtu": 100}, "mtu: expected 576 to 65535 bytes, found 100"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused_before_anything_is_measured(wrong, message):
    with pytest.raises(ValueError, match=message):
        Options(**wrong)


def test_more_hosts_than_one_machine_makes_are_refused_with_another_way():
    with pytest.raises(
        ValueError, match=r"^hosts: at most 16 can be created on one machine, found 4, 17; set --master"
    ):
        compare.compare(Options(hosts=(4, 17)), Log())


def test_sections_that_measure_none_of_the_methods_say_so(monkeypatch):
    monkeypatch.setattr(compare.testbed, "unavailable", lambda: None)
    log = Log()
    options = Options(methods=("tree_reduce",), sections=("compression", "scaling"))
    with pytest.raises(RuntimeError, match="no results; see the log above"):
        compare.compare(options, log)
    why = "measures none of the selected methods"
    assert log.left_out == [f"compression: {why}", f"scaling: {why}"]


def test_a_section_that_fails_is_left_out_with_its_reason_and_the_others_stay(monkeypatch):
    def fail(*args, **settings):
        raise RuntimeError("no slots")

    for module in ("exchange", "overlap"):
        monkeypatch.setattr(getattr(compare, module), "measure", fail)
    monkeypatch.setattr(compare.waves, "measure", lambda *args, **settings: ["a row"])
    options = Options(sections=("exchange", "breakdown", "waves"))
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
    rows = compare._scaling(Options(methods=("ddp",), scaling_ranks=(1, 4, 8)), log)
    assert [row["ranks"] for row in rows] == [1, 1, 4, 4]
    assert log.left_out == ["scaling to 8 ranks: no room"]


def test_compression_has_no_limit():
    found = {"seconds": 0.5}
    assert exchange._limit("ddp", found, 4, 1.0, 200.0)["ratio_to_limit"] == pytest.approx(1.5 * 2**20 / 25e6 / 0.5)
    for method, rate in (("ddp topk", 200.0), ("ddp fp16", 200.0), ("ddp", None)):
        assert exchange._limit(method, found, 4, 1.0, rate) == {"limit_s": None, "ratio_to_limit": None}


def test_a_method_that_fails_is_left_out_of_the_breakdown_alone(monkeypatch):
    def run(spark, call, *, launch):
        if call.func is overlap._choose_on_rank:
            return [4.0]
        (settings,) = call.args
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


def parsed(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--master")
    return from_arguments(parser.parse_args(words))


def test_the_command_measures_the_contrast_and_with_full_all_of_it():
    assert parsed() == Options()
    assert parsed("--full") == FULL
    assert {"ddp", "tree_reduce", "shuffle_reduce", "parameter_server sync"} < {*Options().methods} < {*FULL.methods}
    assert len(Options().mib) >= 3  # one of them to check the model
    assert {*Options().sections} < {*FULL.sections} == {*SECTIONS}


def test_what_is_given_holds_in_both_and_the_rate_of_a_cluster_is_not_known():
    given = ("--mib", "2", "--repeats", "1", "--scaling-ranks", "1,2")
    for whole, base in (((), Options()), (("--full",), FULL)):
        expected = dataclasses.replace(base, mib=(2.0,), repeats=1, scaling_ranks=(1, 2))
        assert parsed(*whole, *given) == expected
        on_cluster = parsed(*whole, *given, "--master", "spark://host:7077")
        assert on_cluster == dataclasses.replace(expected, rate_mbit=None)
    assert parsed("--master", "spark://host:7077", "--rate-mbit", "400").rate_mbit == 400
