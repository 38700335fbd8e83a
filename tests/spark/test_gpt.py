"""The jobs of conf/train/gpt*.yaml as a user runs them: every mesh reaches the same loss."""

import json
import re

import pytest
import safetensors.torch
import yaml

from tests.spark.conftest import REPOSITORY
from tests.spark.test_examples import run
from tests.spark.test_jobs import PLAIN, result_of, run_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = ["--train.max_steps", "12", "--train.warmup_steps", "4"]
LOCAL = ["--master", "local[4]"]


def train(run_dir, *args, conf="gpt"):
    """Runs the job. Returns its result, the settings of the run, and what it has logged."""
    arguments = ["--config", f"conf/train/{conf}.yaml", *LOCAL, *STEPS, "--run_dir", str(run_dir), *map(str, args)]
    out, err = run_job(*PLAIN, "jobs/train.py", *arguments)
    return result_of(out), yaml.safe_load((run_dir / "config.yaml").read_text()), err


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory):
    """The job as it is: its folder, its datasets as arguments for other jobs, and its result."""
    folder = tmp_path_factory.mktemp("gpt")
    result, config, _ = train(folder / "run", "--export", folder / "gpt.safetensors")
    assert (config["parallel"]["pipeline"], config["parallel"]["tensor"], config["launch"]["num_ranks"]) == (2, 2, 4)
    urls = {name: f"{folder}/run/shards/{name}" for name in ("train", "validation")}
    return folder, ["--input.datasets", json.dumps(urls)], result


def assert_same_loss(found, expected):
    assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)
    assert found["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-4)


@pytest.mark.long
def test_the_weights_of_a_model_that_is_cut_are_one_file(two_by_two):
    folder, _, result = two_by_two
    assert 2 < result["metrics"]["loss"] < 4.5  # 4.56 is that of a guess
    weights = safetensors.torch.load_file(folder / "gpt.safetensors")
    assert weights["embed.tokens.weight"].equal(weights["head.weight"])
    assert weights["blocks.3.up.weight"].shape == (256, 64)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [
    {"pipeline": 1, "tensor": 1, "zero_stage": 3},
    pytest.param({"pipeline": 1, "tensor": 1, "ranks": 1}, marks=pytest.mark.long),
])  # fmt: skip
def test_other_sizes_reach_the_same_loss(two_by_two, tmp_path, mesh):
    _, datasets, expected = two_by_two
    ranks = ["--launch.num_ranks", mesh.pop("ranks", 4)]
    sizes = [word for name, size in mesh.items() for word in (f"--parallel.{name}", size)]
    assert_same_loss(train(tmp_path / "run", *datasets, *ranks, *sizes)[0], expected)


@pytest.mark.long
def test_the_twin_plans_its_mesh_and_reaches_the_same_loss(two_by_two, tmp_path):
    _, datasets, expected = two_by_two
    limit = ["--parallel.memory_gib", 0.005]  # weights, states and the activations of a row need more
    found, config, err = train(tmp_path / "run", *datasets, *limit, conf="gpt-auto")
    assert_same_loss(found, expected)
    parallel = config["parallel"]
    assert parallel["strategy"] == "mesh"
    assert parallel["pipeline"] * parallel["tensor"] > 1 or parallel["zero_stage"] > 0
    assert re.search(r"auto: pipeline \d, data \d, tensor \d, ZeRO stage \d, .* s per step", err)
    assert "auto: to train with the same mesh again, set parallel.strategy=mesh and parallel." in err


@pytest.mark.long
def test_experts_of_stages_reach_the_loss_of_one_rank_with_all_of_them(two_by_two, tmp_path):
    _, datasets, _ = two_by_two
    one_rank = ["--launch.num_ranks", 1, "--parallel.pipeline", 1, "--parallel.experts", 1]
    cut, config, _ = train(tmp_path / "cut", *datasets, conf="gpt-experts")
    whole, _, _ = train(tmp_path / "whole", *datasets, *one_rank, conf="gpt-experts")
    assert (config["parallel"]["pipeline"], config["parallel"]["experts"], config["launch"]["num_ranks"]) == (2, 2, 4)
    assert 2 < cut["metrics"]["loss"] < 4.5
    assert_same_loss(cut, whole)
    lines = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    load = next(line["expert_load"] for line in lines if "expert_load" in line)
    assert load.keys() == {f"blocks.{i}.experts" for i in range(4)}
    assert all(sum(layer["share"]) == pytest.approx(1) for layer in load.values())


def test_the_twins_differ_in_the_mesh_and_the_experts_in_the_model_too():
    gpt, twin, experts = (
        yaml.safe_load((REPOSITORY / f"conf/train/{name}.yaml").read_text())
        for name in ("gpt", "gpt-auto", "gpt-experts")
    )
    assert [each.pop("parallel")["strategy"] for each in (gpt, twin, experts)] == ["mesh", "auto", "mesh"]
    own = {"build": "examples/gpt.py:GPT", "tensor_plan": gpt["model"]["tensor_plan"]}
    assert {key: value for key, value in gpt["model"].items() if experts["model"].get(key) != value} == own
    assert {**gpt, "model": experts["model"]} == experts
    del gpt["train"]["accumulation_steps"]
    assert gpt == twin


@pytest.mark.long
def test_a_model_larger_than_the_memory_of_a_rank_is_trained_by_four(tmp_path):
    out, _ = run("memory_limit", "--run_dir", tmp_path, "--steps", "3")
    last = out.splitlines()[-1]
    found = re.fullmatch(
        r"(\d+) MiB of states, (\d+) MiB for each rank: 1 rank has no memory left, 4 ranks with ZeRO-3 train to a loss "
        r"of \d\.\d+", last,
    )  # fmt: skip
    assert found, out
    assert int(found[1]) > int(found[2])
    assert re.search(r"^1 rank: rank 0 on .* has no memory left, with about 1 rows in a micro-batch; .*mesh", out, re.M)
