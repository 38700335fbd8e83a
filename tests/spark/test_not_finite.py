"""NaN stops a run that Spark started: the driver's error names the rank where it began, and nothing bad is left."""

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist

import spark_dl
from spark_dl import Checkpoint, Faults, ModelSpec, RankError
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.models import MLP, blobs, small_config
from tests.builders.row_places import rows_named
from tests.builders.settings import parallel
from tests.faults import assert_last_good, place_of_row, with_bad_row

STEPS = 6
DRIVER_LOOPS = ("tree_reduce", "shuffle_reduce")


def run_of(tmp_path, strategy, train=None, **where):
    config = small_config(
        2, {"epochs": 1, "log_every": 100, **(train or {})}, launch={"start_timeout_s": 60, "collective_timeout_s": 60},
        parallel=parallel(strategy), checkpoint=Checkpoint(every_steps=2),
    )  # fmt: skip
    shards = write_dataset(str(tmp_path / "data"), blobs(STEPS * 48), group_rows=40, shard_rows=120)
    run = Run(spec=MLP, config=config, train=shards, run_dir=str(tmp_path / "run"))
    return with_bad_row(run, num_trainers=2, **where)


def train(run, **options):
    return spark_dl.train(run.train.url, run.spec, run.config, run_dir=run.run_dir, overwrite=True, **options)


@pytest.mark.modes("local", "connect")
@pytest.mark.parametrize(("rank", "step", "last"), [(0, 4, 2), (1, STEPS, 4)], ids=["before a save", "last step"])
def test_F22_the_error_is_of_the_rank_whose_gradient_is_nan(spark, tmp_path, rank, step, last):
    run = run_of(tmp_path, "ddp", rank=rank, step=step)
    with pytest.raises(RankError, match=rf"gradient of 'net.0.weight' .* on rank {rank} in step {step} ") as error:
        train(run)
    assert error.value.rank == rank
    assert str(error.value).startswith(f"rank {rank} on ")
    assert f"the last good checkpoint is {assert_last_good(run, last)}. " in str(error.value)


@pytest.mark.sampled(1)
@pytest.mark.modes("local")
@pytest.mark.parametrize(("strategy", "step", "last"), [
    ("tree_reduce", 3, 2), pytest.param("shuffle_reduce", 4, 2, marks=pytest.mark.slow), ("tree_reduce", STEPS, 4),
], ids=["middle", "before a save", "last step"])  # fmt: skip
def test_F22_a_driver_loop_names_the_rank_whose_gradient_is_nan(spark, tmp_path, strategy, step, last):
    run = run_of(tmp_path, strategy, rank=1, step=step)
    with pytest.raises(RuntimeError, match=rf"gradient of 'net.0.weight' .* on rank 1 in step {step} ") as error:
        train(run)
    assert f"(step {step} of epoch 0)" in str(error.value)
    assert place_of_row(run, run.spec.build.row) in rows_named(str(error.value))
    assert f"the last good checkpoint is {assert_last_good(run, last)}. " in str(error.value)


@pytest.mark.sampled(1)
@pytest.mark.modes("local")
@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in DRIVER_LOOPS)])
def test_F22_a_step_that_is_left_out_is_in_the_result_the_events_and_the_log(spark, tmp_path, caplog, strategy, policy):
    events = []
    run = run_of(tmp_path, strategy, {"on_nonfinite": policy}, rank=1, step=4)
    result = train(run, on_event=events.append)
    assert (result.steps, result.skipped_steps, result.skipped_rows) == (STEPS, 1, 48)
    assert (result.rows, result.rollbacks) == ((STEPS - 1) * 48, int(policy == "rollback"))
    (event,) = [event for event in events if event["kind"] in ("skip", "rollback")]
    assert (event["kind"], event["bad_rank"], event["bad_step"]) == (policy, 1, 4)
    assert event["what"] == "the gradient of 'net.0.weight'"
    (text,) = [text for text in caplog.messages if "on_nonfinite" in text]
    assert "the gradient of 'net.0.weight' is not finite (NaN or Inf) on rank 1" in text
    assert place_of_row(run, run.spec.build.row) in rows_named(event["bad_rows"])
    assert f"its rows in that step: {event['bad_rows']}" in text
    assert_last_good(run, STEPS)


def drift(model, position):
    if position.global_step == 2 and dist.get_rank() == 1:
        with torch.no_grad():
            model[2].bias[0] += 2**-12


@pytest.mark.modes("local")
def test_F23_the_error_is_of_the_rank_whose_weights_differ_and_it_can_be_retried(spark, tmp_path):
    run = run_of(tmp_path, "ddp", {"check_replicas_every": 3, "num_ranks": 3}, rank=0, step=1)
    spec = ModelSpec(build=MLP.build, set_position=drift)
    with pytest.raises(RankError, match=r"after step 3: rank 1 on \S+ has other bits of '2.bias'") as error:
        train(dataclasses.replace(run, spec=spec))
    assert (error.value.rank, error.value.step, error.value.is_retryable) == (1, 3, True)
    assert f"the last checkpoint is {assert_last_good(run, 2)}" in str(error.value)


@pytest.mark.modes("local")
@pytest.mark.slow
def test_F20_the_driver_says_which_rank_is_slow_while_the_run_goes_on(spark, tmp_path, caplog):
    slow = Faults(straggler="constant", straggler_s=0.1)
    run = run_of(tmp_path, "ddp", {"epochs": 6, "log_every": 5}, rank=0, step=1, factor=1.0)
    for ranks in ((1,), ()):  # the healthy twin has two ranks that take as long as the slow one
        caplog.clear()
        faults = dataclasses.replace(slow, straggler_ranks=ranks)
        events = []
        train(dataclasses.replace(run, config=dataclasses.replace(run.config, faults=faults)), on_event=events.append)
        found = [event for event in events if event["kind"] == "straggler"]
        said = [text for text in caplog.messages if "other ranks wait for it" in text]
        assert len(found) == len(said) == len(ranks)
        if ranks:
            (host,) = {event["host"] for event in events if event["kind"] == "joined" and event["rank"] == 1}
            assert (found[0]["rank"], found[0]["host"], found[0]["cause"]) == (1, host, "compute")
            assert f"rank 1 on {host} is slow" in said[0]
            last = max(i for i, event in enumerate(events) if event["kind"] == "step")
            assert events.index(found[0]) < last


@pytest.mark.sampled(1)
@pytest.mark.modes("local")
@pytest.mark.parametrize("strategy", DRIVER_LOOPS)
def test_weights_that_overflow_on_the_driver_are_not_saved(spark, tmp_path, strategy):
    run = run_of(tmp_path, strategy, {"lr": 1e4, "max_steps": 1}, rank=1, step=1, factor=1e38)
    with pytest.raises(RuntimeError, match=r"the weight 'net.\d.(weight|bias)' is not finite .* in step 1 "):
        train(run)
    assert assert_last_good(run, 0) == ""


@pytest.mark.sampled(1)
@pytest.mark.modes("local")
@pytest.mark.parametrize("strategy", DRIVER_LOOPS)
def test_a_driver_loop_with_fp16_leaves_out_a_step_that_overflows(spark, tmp_path, strategy):
    run = run_of(tmp_path, strategy, {"precision": "fp16-mixed"}, rank=1, step=4)
    assert train(run).steps == STEPS
    assert_last_good(run, STEPS)


@pytest.mark.modes("local")
def test_a_metric_of_several_values_cannot_stop_early(spark, tmp_path):
    metrics = {"recall": {"class": "MulticlassRecall", "num_classes": 3, "average": "none"}}
    run = run_of(tmp_path, "ddp", rank=0, step=1)
    early = {"metrics": metrics, "early_stop_metric": "recall"}
    config = dataclasses.replace(run.config, train=dataclasses.replace(run.config.train, **early))
    with pytest.raises(ValueError, match=r"train.early_stop_metric: .*'recall' with values of shape \[3\]"):
        spark_dl.train(run.train.url, ModelSpec(build=MLP.build), config, validation=run.train.url, run_dir=run.run_dir)
    assert not re.search("GENERATION", " ".join(p.name for p in tmp_path.glob("run/*")))
