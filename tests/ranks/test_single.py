"""One rank without a process group: `single`, and `dp_single_process` where there is one GPU or none."""

import logging

import pytest
import torch.distributed as dist

from spark_dl import DPSingleProcess, ModelSpec, Single, worker
from tests.builders.models import DROPOUT_MLP, build_mlp, small_config
from tests.builders.settings import parallel
from tests.ranks.launcher import run_ranks
from tests.ranks.runs import assert_same_to_the_bit, cut_at, make_run, resume, train
from tests.ranks.test_parity import assert_same_training

METRICS = {"accuracy": {"class": "MulticlassAccuracy", "num_classes": 3, "average": "micro"}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["single", "dp_single_process"])
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_same_as_a_plain_loop(tmp_path, strategy, accumulation_steps):
    settings = {"optimizer_args": {"momentum": 0.9}, "clip_grad_norm": 0.3, "accumulation_steps": accumulation_steps}
    assert_same_training(tmp_path, small_config(1, train=settings, parallel=parallel(strategy=strategy)), 245)


@pytest.mark.parametrize("precision", ["float32", "fp16-mixed"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, precision):
    config = small_config(1, train={"precision": precision}, parallel=Single())
    whole = make_run(tmp_path, config, spec=DROPOUT_MLP, name="whole")
    uninterrupted = train(whole)
    cut = make_run(tmp_path, cut_at(config, 5), spec=DROPOUT_MLP, name="cut")
    assert_same_to_the_bit(uninterrupted, resume(cut, train(cut), config))


def build_and_look():
    assert not dist.is_initialized()
    return build_mlp()


def train_and_listen(run):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("spark_dl")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        return worker.main(run).result, lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def test_there_is_no_process_group_and_a_task_without_gpus_says_so(tmp_path):
    settings = {"metrics": METRICS, "early_stop_metric": "accuracy", "early_stop_mode": "max", "epochs": 3}
    config = small_config(
        1, train=settings, data={"validation_fraction": 0.2}, parallel=DPSingleProcess(),
        launch={"device": "cpu"},
    )  # fmt: skip
    run = make_run(tmp_path, config, spec=ModelSpec(build=build_and_look))
    [(result, lines)] = run_ranks(train_and_listen, 1, run)
    assert result["metrics"].keys() == {"loss", "accuracy"}
    assert "parallel.strategy 'dp_single_process' trains as 'single' does: the task has no GPU" in lines
