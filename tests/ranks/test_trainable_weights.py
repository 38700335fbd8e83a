"""Checkpoints without frozen weights: whoever loads them builds the model first, and other frozen weights are found."""

import dataclasses
import os

import pytest
import torch
from torch import nn

from spark_dl import Checkpoint, Hooks, ModelSpec
from spark_dl.evaluate import load_model
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.training.initial import InitialWeights
from tests.builders.models import same_bits, small_config
from tests.ranks.launcher import RankFailed
from tests.ranks.runs import assert_same_to_the_bit, cut_at, make_run, resume, train

SMALL = Checkpoint(weights="trainable")


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A network whose first layer is pretrained and frozen, with a low-rank part that is trained."""

    seed: int = 7

    def __call__(self):
        model = nn.Sequential(nn.Linear(4, 256), Lora(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 3))
        generator = torch.Generator().manual_seed(self.seed)
        for parameter in (*model[0].parameters(), model[1].weight):
            nn.init.normal_(parameter, std=0.1, generator=generator)
            parameter.requires_grad = False
        return model


class Lora(nn.Module):
    def __init__(self, n, m, rank=2):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(m, n))
        self.down, self.up = nn.Linear(n, rank, bias=False), nn.Linear(rank, m, bias=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight) + self.up(self.down(x))


FROZEN = ["0.bias", "0.weight", "1.weight"]
SPEC = ModelSpec(build=Pretrained())


def config(num_ranks=2, **more):
    return small_config(num_ranks, train={"max_steps": 6, "epochs": 9}, **{"checkpoint": SMALL, **more})


@pytest.mark.parametrize("more", [{}, {"ema_decay": 0.9}, {"asynchronous": True}], ids=["plain", "average", "async"])
def test_a_run_trains_resumes_and_is_loaded_as_with_all_weights(tmp_path, more):
    average = {"ema_decay": more["ema_decay"]} if "ema_decay" in more else {}
    small = dataclasses.replace(SMALL, asynchronous=more.get("asynchronous", False))
    given = config(checkpoint=small)
    given = dataclasses.replace(given, train=dataclasses.replace(given.train, **average))
    whole = dataclasses.replace(given, checkpoint=Checkpoint())
    expected = train(make_run(tmp_path, whole, spec=SPEC, name="all"))
    saved = train(make_run(tmp_path, given, spec=SPEC, name="small"))
    assert sorted(saved.frozen) == FROZEN
    assert not {*FROZEN} & {*load_weights(saved)}
    assert same_bits(load_model(SPEC, expected.url).state_dict(), load_model(SPEC, saved.url).state_dict())
    sizes = [os.path.getsize(f"{each.url}/model.pt") for each in (expected, saved)]
    assert sizes[1] < sizes[0] / 10
    cut = train(make_run(tmp_path, cut_at(given, 3), spec=SPEC, name="cut"))
    again = resume(make_run(tmp_path, given, spec=SPEC, name="cut"), cut)
    assert_same_to_the_bit(saved, again)


def test_other_frozen_weights_are_an_error_that_names_them(tmp_path):
    cut = train(make_run(tmp_path, cut_at(config(), 3), spec=SPEC))
    other = ModelSpec(build=Pretrained(seed=8))
    message = "do not have the frozen weights .*makes other ones than in the training: 0.weight, 0.bias, 1.weight"
    with pytest.raises(ValueError, match=message):
        load_model(other, cut.url)
    with pytest.raises(RankFailed, match=f"cannot resume: .*{message}"):
        resume(make_run(tmp_path, config(), spec=other), cut)


class Teacher(Hooks):
    """Moves a frozen layer, as the teacher of a student is."""

    def after_step(self, step):
        with torch.no_grad():
            step.model[0].weight.mul_(0.99)


def test_a_frozen_weight_that_the_run_itself_changes_is_saved(tmp_path):
    spec = dataclasses.replace(SPEC, hooks=Teacher)
    saved, expected = (
        train(make_run(tmp_path, config(checkpoint=each), spec=spec, name=each.weights))
        for each in (SMALL, Checkpoint())
    )
    assert sorted(saved.frozen) == ["0.bias", "1.weight"]
    assert same_bits(load_model(SPEC, expected.url).state_dict(), load_model(SPEC, saved.url).state_dict())


def test_later_runs_begin_with_the_weights_of_such_a_checkpoint(tmp_path):
    saved = train(make_run(tmp_path, config(), spec=SPEC, name="first"))
    settings = config(1, checkpoint=Checkpoint())
    run = make_run(tmp_path, cut_at(settings, 1), spec=SPEC, name="second")
    weights = InitialWeights(SPEC.build, saved)
    assert same_bits(weights().state_dict(), load_model(SPEC, saved.url).train().state_dict())
    train(dataclasses.replace(run, spec=dataclasses.replace(SPEC, build=weights)))
    assert checkpoint.latest(run.run_dir).frozen == {}
