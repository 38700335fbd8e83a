"""`train.init_from`: the weights of a checkpoint in a new model, and what does not fit."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from spark_dl import Config, ModelSpec, Train
from spark_dl.rundir import checkpoint
from spark_dl.training import initial
from tests.builders.models import same_bits
from tests.unit.rundir.test_checkpoint import COLUMNS, save
from tests.unit.rundir.test_checkpoint import group as group


def build():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


@pytest.fixture
def trained(tmp_path, group):
    """A run of one checkpoint, and the state of its model: its running mean is not that of a new one."""
    model = build()
    model(torch.randn(8, 2))
    save(tmp_path / "first", model={"0": model.state_dict()})
    return str(tmp_path / "first"), model.state_dict()


def begin(spec, url, run_dir="/other", saved=None, overwrite=False):
    return initial.begin(spec, Config(train=Train(init_from=url)), saved, run_dir, overwrite=overwrite)


@pytest.mark.parametrize("name", ["", "checkpoints/step-00000001.gen-0000"])
def test_the_model_begins_with_the_weights_and_buffers_of_a_run_or_a_checkpoint(trained, name):
    url, state = trained
    spec, columns = begin(ModelSpec(build=build), f"{url}/{name}".rstrip("/"))
    model = spec.build_to_train()
    assert same_bits(model.state_dict(), state)
    assert model.training
    assert tuple(columns) == COLUMNS


def test_random_numbers_of_the_driver_stay_as_they_were(trained):
    before = torch.get_rng_state()
    begin(ModelSpec(build=build), trained[0])
    assert torch.equal(torch.get_rng_state(), before)


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)


@pytest.mark.parametrize(("other", "facts"), [
    (Renamed, ["not in the checkpoint: first.weight, first.bias",
               "not in the model: 0.weight, 0.bias, 1.weight, 1.bias, 1.running_mean and 2 more"]),
    (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
     ["0.weight: [3, 2] float32 in the checkpoint, [3, 4] float32 in the model)"]),
    (lambda: build().double(), ["0.weight: [3, 2] float32 in the checkpoint, [3, 2] float64 in the model"]),
], ids=["names", "shape", "dtype"])  # fmt: skip
def test_weights_of_another_model_are_an_error_on_the_driver_that_lists_what_differs(trained, other, facts):
    with pytest.raises(ValueError, match=r"^train\.init_from: the weights of .* do not fit the model") as error:
        begin(ModelSpec(build=other), trained[0])
    assert [fact for fact in facts if fact not in str(error.value)] == []


def test_a_model_that_only_ranks_can_build_is_left_to_them(trained):
    def fail():
        raise RuntimeError("no GPU on the driver")

    spec, _ = begin(ModelSpec(build=fail), trained[0])
    with pytest.raises(RuntimeError, match="no GPU"):
        spec.build_to_train()


def test_no_checkpoint_is_an_error_that_names_the_setting(tmp_path):
    with pytest.raises(ValueError, match=r"^train\.init_from: no checkpoint at .*: expected a checkpoint, or a run fo"):
        begin(ModelSpec(build=build), str(tmp_path / "nothing"))


def test_a_damaged_checkpoint_is_an_error(trained):
    path = Path(trained[0], "checkpoints/step-00000001.gen-0000/model.pt")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"^train\.init_from: .*model\.pt"):
        begin(ModelSpec(build=build), trained[0])


def test_a_checkpoint_that_changes_before_ranks_read_it_is_an_error(trained, group):
    spec, _ = begin(ModelSpec(build=build), trained[0])
    shutil.rmtree(trained[0])
    save(trained[0], model={"0": build().state_dict()})
    with pytest.raises(RuntimeError, match="has changed since this run checked or saved it"):
        spec.build_to_train()


def test_overwrite_does_not_delete_the_checkpoint_that_a_run_begins_with(trained):
    with pytest.raises(ValueError, match=r"^train\.init_from: .* which overwrite deletes; use another run_dir"):
        begin(ModelSpec(build=build), trained[0], run_dir=trained[0], overwrite=True)


def test_a_resumed_run_keeps_its_own_weights_and_the_columns_of_its_checkpoint(trained):
    spec, saved = ModelSpec(build=build), checkpoint.latest(trained[0])
    assert begin(spec, "/gone", saved=saved) == (spec, saved.columns)
    without = dataclasses.replace(Config(), train=Train())
    assert initial.begin(spec, without, saved, "/other", overwrite=False) == (spec, saved.columns)


def test_the_checksum_of_a_function_is_of_its_code_and_its_plain_data():
    def made(value, default=1):
        return lambda x, more=default: (x, value, more)

    first = initial._checksum(made("a"))
    assert initial._checksum(made("a")) == first
    assert len({first, initial._checksum(made("b")), initial._checksum(made("a", 2)), initial._checksum(len)}) == 4
    same = "a word"
    assert [*initial._lines([same, same, 1], 0, set())] == ["list", "'a word'", "'a word'", "1"]
    cycle = []
    cycle.append(cycle)
    assert [*initial._lines(cycle, 0, set())] == ["list"]
    assert [*initial._lines({"b": (1,), "a": None}, 0, set())] == ["'a'", "None", "'b'", "tuple", "1"]
