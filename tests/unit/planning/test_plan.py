import json
import re

import pytest

import spark_dl
from spark_dl import cli
from spark_dl.commands import plan as job
from spark_dl.parallel.mesh.planner.search import FORWARD, end_s
from spark_dl.planning.page import passes_of

BLOCK = {
    "name": "block", "repeat": 8, "forward_s": {"per_row": 0.01}, "backward_s": {"per_row": 0.02},
    "parameter_bytes": 2**27, "output_bytes": 2**16, "kept_bytes": 2**20, "tensor": ["block"],
}  # fmt: skip
PROFILE = {"name": "gpt <small>", "layers": [BLOCK]}


def plan(**options):
    return spark_dl.plan_mesh(PROFILE, **{"num_ranks": 4, "global_batch_size": 32, "memory_gib": 2, **options})


def test_the_settings_are_those_of_the_best_plan():
    found = plan(rate_mbit=100, hosts=4, schedules=("1f1b",))
    best = found.best
    assert found.settings == {
        "parallel": {"strategy": "mesh", "pipeline": 4, "schedule": "1f1b", "stages": [2, 2, 2, 2]},
        "train": {"accumulation_steps": best.choice.micro_batches},
    }
    assert best.step_s == min(each.step_s for each in found.plans)
    assert plan(hosts=4).problem.cluster.between.bytes_per_s == 1.25e9
    data = plan(rate_mbit=1e9, local_rate_mbit=1e9, memory_gib=None)
    assert data.settings == {"parallel": {"strategy": "mesh"}, "train": {"accumulation_steps": 1}}
    sharded = plan(rate_mbit=1e9, local_rate_mbit=1e9, local_latency_ms=0, memory_gib=2.5, schedules=("gpipe",))
    assert {each.choice.zero_stage for each in sharded.plans} > {0}


def test_the_text_has_the_stages_and_the_other_plans():
    text = plan(hosts=4, rate_mbit=100).text
    assert re.search(r"^pipeline 4, data 1, tensor 1, ZeRO stage 0, \w+, \d+ micro-batches of \d rows?: ", text)
    assert re.search(r"^ *0  block.0 to block.1 \(2\) +0 .* of 2$", text, re.MULTILINE)
    assert "stages: [2, 2, 2, 2]" in text
    assert "The best plan of each mesh:" in text


def test_plans_are_plain_data():
    found = plan(memory_gib=1.5)
    data = json.loads(json.dumps(found.to_dict()))
    assert len(data["plans"]) == len(found.plans)
    for each in data["plans"]:
        assert each["pipeline"] * each["data"] * each["tensor"] == 4
        assert [name for stage in each["stages"] for name in stage["layers"]] == [f"block.{i}" for i in range(8)]
        assert each["memory_bytes"] == max(sum(stage["memory"].values()) for stage in each["stages"]) <= 1.5 * 2**30
        assert {kind for stage in each["stages"] for kind in stage["tensor"]} <= {"replicated", "block"}


def test_the_page_has_a_picture_of_the_stages_and_loads_nothing(tmp_path):
    page = tmp_path / "plans" / "plan.html"
    found = plan(hosts=4, rate_mbit=100, page=page)
    assert found.page == found.to_dict()["page"] == str(page)
    html = page.read_text()
    assert html.count("<svg ") == 2
    assert not re.findall(r'(?:src|href)="(?!#)', html)
    assert "Plan: gpt &lt;small&gt;" in html
    assert "Timeline of 4 stages" in html
    assert "#00a0" not in html  # all colors are variables, for light and dark
    assert set(re.findall(r"var\((--\w+)\)", html)) <= set(re.findall(r"(--\w+):", html))
    plan(hosts=4, rate_mbit=100, page=page)  # replaces it


def test_a_page_replaces_nothing_but_a_plan(tmp_path):
    page = tmp_path / "mine.html"
    page.write_text("<html>mine</html>")
    with pytest.raises(ValueError, match="page: .* is a file that is not a plan of spark_dl; nothing was changed"):
        plan(page=page)
    assert page.read_text() == "<html>mine</html>"
    with pytest.raises(ValueError, match="is a folder"):
        plan(page=tmp_path)


def test_the_picture_of_gpipe_ends_when_the_step_does_and_that_of_many_micro_batches_has_the_first():
    best = plan(hosts=4, rate_mbit=100, schedules=("gpipe",)).best
    assert end_s(passes_of(best)) == pytest.approx(best.step_s)
    many = plan(hosts=4, rate_mbit=100, global_batch_size=64 * 4, schedules=("1f1b",)).plans
    plans = [each for each in many if each.choice.micro_batches > 32]
    assert plans
    for each in plans:
        forward = [found for found in passes_of(each) if found.kind == FORWARD]
        assert {found.micro_batch for found in forward} == set(range(32))


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"num_ranks": 0}, "num_ranks: expected a whole number >= 1, found 0"),
        ({"hosts": 3}, "hosts: expected a divisor of the number of ranks, 4"),
        ({"global_batch_size": 1.5}, "global_batch_size: expected a whole number >= 1, found 1.5"),
        ({"memory_gib": 0}, "memory_gib: expected a number above 0, found 0"),
        ({"memory_gib": 0.01}, "no plan fits into memory_gib=0.01 of a rank. The smallest needs "),
        ({"optimizer": "adamw"}, "optimizer: unknown 'adamw'; did you mean 'adam'?"),
        ({"rate_mbit": 0}, "rate_mbit: expected a number above 0, found 0"),
        ({"local_latency_ms": -1}, "local_latency_ms: expected a number >= 0, found -1"),
        ({"zero_stages": (4,)}, "zero_stages: expected some of 0, 1, 2, 3, found (4,)"),
        ({"schedules": ("zbv",)}, "schedules: expected some of 1f1b, gpipe, found ('zbv',)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_error_names_the_option_and_what_to_change(options, fact):
    with pytest.raises(ValueError, match=r"\w") as error:
        plan(**options)
    assert fact in str(error.value)


def test_the_job_prints_what_the_function_returns(tmp_path, capsys):
    path = tmp_path / "gpt.json"
    path.write_text(json.dumps(PROFILE))
    words = [str(path), "--ranks", "4", "--hosts", "2", "--global_batch_size", "32", "--memory_gib", "2",
             "--zero_stages", "0,1", "--schedules", "gpipe", "--rate_mbit", "100"]  # fmt: skip
    found = job.plan(cli.parse("plan", "", job.OPTIONS, words, has_settings=False))
    expected = plan(hosts=2, zero_stages=(0, 1), schedules=("gpipe",), rate_mbit=100)
    assert found == expected.to_dict()
    assert expected.text in capsys.readouterr().err
