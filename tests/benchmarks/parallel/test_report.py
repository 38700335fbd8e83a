"""The page about models that are cut, and the figures that the command prints."""

import json

import pytest

from benchmarks.parallel import parallel, report, stages
from benchmarks.parallel.plans import rank_correlation, times_best
from spark_dl.parallel.mesh.planner.search import StageTimes, timeline

pytest.importorskip("matplotlib", reason="the report needs matplotlib")

PASSES = timeline([StageTimes(1.0, 2.0)] * 4, "gpipe", 4)


def schedule(name, micro_batches, measured):
    return {
        "schedule": name, "stages": 4, "micro_batches": micro_batches, "measured": measured,
        "formula": stages.bubble(name, 4, micro_batches), "step_s": 1.0, "stages_per_rank": stages.SCHEDULES[name],
        "passes_per_s": 4.0, "passes": PASSES,
    }  # fmt: skip


def plan(pipeline, predicted_s, measured_s):
    return {
        "pipeline": pipeline, "data": 4 // pipeline, "zero_stage": 0, "schedule": "gpipe", "micro_batches": 4,
        "stages": [1] * pipeline, "predicted_s": predicted_s, "measured_s": measured_s, "rate_mbit": 190.0,
        "latency_ms": 0.5,
    }  # fmt: skip


def vgg16(form, rate_gbit, mini_batch_s):
    return {"form": form, "rate_gbit": rate_gbit, "stages": [17], "mini_batches": 4, "mini_batch_s": mini_batch_s,
            "predicted_s": 0.3, "times_data_parallel": 0.25 / mini_batch_s, "passes": PASSES}  # fmt: skip


def held(form, point, other):
    return {"form": form, "point": point, "held": 16 + other, "weights": 4.0, "gradients": 4.0, "optimizer": 8.0,
            "other": other, "formula": 16.0, "unit": 0.1}  # fmt: skip


def sent(form, of_gradients):
    return {"form": form, "sent_bytes": 3e6, "formula_bytes": 2.9e6, "times_formula": 1.03, "gradient_bytes": 2e6,
            "per_gradient": 1.5, "of_gradients": of_gradients, "formula": "2 (N - 1) / N gradients"}  # fmt: skip


RESULTS = {
    "about": {"date": "2026-01-02", "network": "4 hosts", "machine": "2 cores", "repeats": 3},
    "held": [held("ddp", point, other) for point, other in (("built", 0.0), ("backward", 0.2), ("stepped", 0.0))],
    "activations": [
        {"form": form, "zero_stage": 0, "held": held, "formula": formula, "most": formula + 8}
        for form, held, formula in (("kept", 150.0, 144), ("full", 30.0, 24))
    ],
    "sent": [sent("ddp", True), sent("pipeline", False)],
    "bubbles": [schedule("gpipe", 4, 0.45), schedule("interleaved", 8, 0.2), schedule("zbv", 8, 0.09)],
    "pipedream": [
        {"schedule": name, "stages": 4, "steps": 8, "rows": 4, "micro_batches": 1, "seconds": 8 / rate,
         "steps_per_s": rate, "of_ideal": 0.95, "passes": PASSES}
        for name, rate in (("pipedream", 1.6), ("gpipe", 1.0))
    ],
    "plans": [plan(4, 1.0, 1.3), plan(2, 1.5, 1.2), plan(1, 2.0, 2.4)],
    "vgg16": [vgg16("data parallel", 10.0, 0.25), vgg16("pipedream", 10.0, 0.5), vgg16("gpipe", 1.0, 0.8)],
    "left_out": ["plans: <why>"],
}  # fmt: skip


def test_the_summary_has_the_main_figures():
    found = parallel.summary(RESULTS)
    assert found["held_bytes_per_parameter"] == {"ddp": 16.2}
    assert found["sent_per_gradient"] == {"ddp": 1.5}
    assert found["sent_times_formula"] == {"ddp": 1.03, "pipeline": 1.03}
    assert [(row["schedule"], row["formula"]) for row in found["bubble"]] == [
        ("gpipe", pytest.approx(3 / 7)), ("interleaved", pytest.approx(3 / 19)),
    ]  # fmt: skip
    assert found["bubble"][0].keys() == {"schedule", "stages", "micro_batches", "measured", "formula"}
    assert len(found["throughput"]) == 3
    assert found["pipedream"] == {"of_ideal": 0.95, "times_gpipe": 1.6}
    assert found["planner"] == {"times_best": pytest.approx(1.3 / 1.2), "rank_correlation": 0.5, "plans": 3}
    assert found["vgg16"][1] == {
        "form": "pipedream", "rate_gbit": 10.0, "mini_batch_s": 0.5, "predicted_s": 0.3, "times_data_parallel": 0.5,
    }  # fmt: skip
    assert parallel.summary({"left_out": []}) == {}


def test_the_page_shows_all_sections_and_links_to_the_other_report(tmp_path):
    other = tmp_path / "exchange" / "report.html"
    other.parent.mkdir()
    other.write_text("")
    path = tmp_path / "parallel" / "report.html"
    report.write_report(RESULTS, path, exchange_report=other, literature=["ZeRO, table 1", "54 of 54 <cells>"])
    page = path.read_text()
    assert json.loads(path.with_suffix(".json").read_text())["left_out"] == RESULTS["left_out"]
    assert '<a href="../exchange/report.html">' in page
    assert page.count("<h2>") == 10  # seven sections, published figures, left out, how it was measured
    assert page.count("<svg") == 5 + 1 + 2 + 2 + 3  # a figure for each of five, and timelines
    assert "54 of 54 &lt;cells&gt;" in page
    assert "plans: &lt;why&gt;" in page
    assert "#00a0" not in page  # what stands for the colors of the page
    assert all(f"--{name}:" in page for name in ("text", "line", "forward", "backward", "weights", "number", "sync"))
    assert "VGG-16 on 4 workers at 10 Gbit/s, seconds of a mini-batch: data parallel 0.250, pipedream 0.500." in page
    assert "takes 1.083 times as long as the best of 3 plans" in page


def test_without_the_other_report_there_is_no_link(tmp_path):
    results = {"about": RESULTS["about"], "sent": RESULTS["sent"], "left_out": []}
    report.write_report(results, tmp_path / "page.html", exchange_report=tmp_path / "none.html", literature=[])
    assert "<a href" not in (tmp_path / "page.html").read_text()


def test_rank_correlation_gives_equal_values_the_mean_of_their_ranks():
    rows = [plan(1, predicted, measured) for predicted, measured in ((1, 1), (2, 2), (2, 3), (4, 4))]
    assert rank_correlation(rows) == pytest.approx(0.9486833)  # as scipy.stats.spearmanr
    assert times_best(rows) == 1


@pytest.mark.parametrize(("options", "message"), [
    ({"sections": ("held", "hold")}, "sections: unknown hold"),
    ({"rate_mbit": 0}, "rate_mbit: expected a number above 0"),
    ({"repeats": 0}, "repeats: expected at least 1"),
])  # fmt: skip
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        parallel.Options(**options)
