"""Ranks whose models differ: one error that names the tensor, before they exchange anything."""

import dataclasses
import os

import pytest
from torch import nn

from spark_dl import DDP, LocalSGD, Mesh, ModelSpec, ParameterServer
from tests.builders.models import small_config
from tests.ranks.launcher import RankFailed, run_ranks
from tests.ranks.runs import make_run, train_rank


def build_wider_on_rank_1():
    width = 5 if os.environ["RANK"] == "1" else 3
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3))


def build_deeper_on_rank_1():
    more = [nn.Linear(3, 3)] if os.environ["RANK"] == "1" else []
    return nn.Sequential(nn.Linear(4, 3), *more)


def build_of_another_type_on_rank_1():
    model = nn.Sequential(nn.Linear(4, 3))
    return model.double().float() if os.environ["RANK"] != "1" else model.half()


@pytest.mark.parametrize(("build", "found"), [
    (build_wider_on_rank_1, r"'0\.weight' \(5, 4\) float32 on rank 1 and \(3, 4\) float32 on rank 0"),
    (build_deeper_on_rank_1, r"'1\.weight' \(3, 3\) float32 on rank 1 and no such tensor on rank 0"),
    (build_of_another_type_on_rank_1, r"'0\.weight' \(3, 4\) float16 on rank 1 and \(3, 4\) float32 on rank 0"),
], ids=["wider", "deeper", "type"])  # fmt: skip
def test_B28_models_that_differ_per_rank_are_an_error_that_names_the_tensor(tmp_path, build, found):
    run = make_run(tmp_path, small_config(2), spec=ModelSpec(build=build))
    with pytest.raises(
        RankFailed, match=rf"ValueError: spec\.build: expected the same model on all ranks, found for {found}"
    ):
        run_ranks(train_rank, 2, run, wait_s=1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("parallel", [
    DDP(all_reduce="ring"), DDP(compression="topk"), LocalSGD(sync_every_steps=2), Mesh(zero_stage=3),
    ParameterServer(),
], ids=lambda s: f"{s.strategy}")  # fmt: skip
def test_B28_every_strategy_finds_it(tmp_path, parallel):
    run = make_run(tmp_path, small_config(2), spec=ModelSpec(build=build_wider_on_rank_1))
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, parallel=parallel))
    with pytest.raises(RankFailed, match=r"found for '0\.weight' \(5, 4\) float32 on rank 1"):
        run_ranks(train_rank, 2, run, wait_s=1)
