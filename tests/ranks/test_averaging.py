"""The exponential moving average of the weights, on real ranks."""

import dataclasses
import math

import pytest
import torch

from spark_dl import Checkpoint, ModelSpec, Single
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint_files import TensorFiles
from spark_dl.rundir.metrics import read_metrics
from tests.builders.models import DROPOUT_MLP, MLP, same_bits, small_config
from tests.builders.settings import parallel
from tests.ranks.runs import cut_at, make_run, on_ranks, resume, train
from tests.ranks.test_training import evaluate_rank

DECAY = 0.6
EVERY_STEP = {"checkpoint": Checkpoint(every_steps=1, keep=99)}


MESHES = {
    "plain": (2, {}),
    "zero1": (2, {"zero_stage": 1}),
    "zero2": (3, {"zero_stage": 2}),
    "zero3": (2, {"zero_stage": 3}),
    "tensor": (2, {"tensor": 2}),
    "pipeline": (2, {"pipeline": 2, "schedule": "gpipe"}),
    "zero1 of pipelines": (4, {"pipeline": 2, "schedule": "gpipe", "zero_stage": 1}),
    "zero3 of tensors": (4, {"tensor": 2, "zero_stage": 3}),
}


def weights_themselves(saved):
    if "tensors" in saved.manifest:
        return TensorFiles(saved.url, saved.manifest, "model").read_whole()
    return checkpoint.load(saved, "model.pt")["0"]


def averaged(start, weights):
    """The average of the weights after each step, by its definition."""
    found = {name: value.clone().double() for name, value in start.items()}
    for step, after in enumerate(weights):
        decay = min(DECAY, (1 + step) / (10 + step))
        found = {name: decay * found[name] + (1 - decay) * after[name].double() for name in found}
    return found


@pytest.mark.parametrize(("strategy", "num_ranks"), [("single", 1), ("ddp", 2), ("ddp", 3), ("horovod", 2)])
def test_the_saved_weights_are_the_average_of_those_of_all_steps(tmp_path, strategy, num_ranks):
    config = small_config(num_ranks, {"ema_decay": DECAY, "seed": 3}, parallel=parallel(strategy), **EVERY_STEP)
    run = make_run(tmp_path, config)
    found = checkpoint.load_weights(train(run))
    steps = [weights_themselves(saved) for saved in checkpoint.list_checkpoints(run.run_dir)]
    torch.manual_seed(3)
    expected = averaged(MLP.build().state_dict(), steps)
    assert len(steps) == 12
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-6)
    assert not same_bits(found, steps[-1])


def mesh_config(name, **train):
    num_ranks, settings = MESHES[name]
    return small_config(num_ranks, {"seed": 3, **train}, parallel=parallel("mesh", **settings), **EVERY_STEP)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", MESHES)
def test_each_rank_of_a_mesh_averages_its_parts(tmp_path, name):
    """Validations between the steps have the average, and the steps go on with the weights themselves."""
    settings = {"validate_every_steps": 5, "validation_fraction": 0.2}
    run = make_run(tmp_path, mesh_config(name, ema_decay=DECAY, **settings))
    saved = train(run)
    found = checkpoint.load_weights(saved)
    steps = [weights_themselves(each) for each in checkpoint.list_checkpoints(run.run_dir)]
    torch.manual_seed(3)
    expected = averaged(MLP.build().state_dict(), steps)
    for key, value in expected.items():
        torch.testing.assert_close(found[key].double(), value, rtol=1e-5, atol=1e-6)
    plain = train(make_run(tmp_path, mesh_config(name, **settings), name="without"))
    assert same_bits(weights_themselves(plain), steps[-1])

    lines = [line for line in read_metrics(run.run_dir) if line["kind"] in ("validation", "epoch")]
    alone = small_config(1, {"ema_decay": DECAY, "seed": 3, **settings}, parallel=Single())
    one = make_run(tmp_path, alone, name="alone")
    train(one)
    expected = [line for line in read_metrics(one.run_dir) if line["kind"] in ("validation", "epoch")]
    assert [line["metrics"]["loss"] for line in lines] == pytest.approx(
        [line["metrics"]["loss"] for line in expected], rel=1e-4
    )


class Scaled(torch.nn.Module):
    """Has a weight outside its layers, which ZeRO-3 keeps gathered after a forward pass without a backward pass."""

    def __init__(self):
        super().__init__()
        self.layers, self.scale = MLP.build(), torch.nn.Parameter(torch.ones(3))

    def forward(self, features):
        return self.layers(features) * self.scale


def test_steps_after_a_validation_have_the_weights_and_not_their_average(tmp_path):
    config = mesh_config("zero3", validate_every_steps=2, validation_fraction=0.2)
    config = dataclasses.replace(config, checkpoint=Checkpoint())  # a save would free the weight, too
    with_average = dataclasses.replace(config, train=dataclasses.replace(config.train, ema_decay=DECAY))
    saved = train(make_run(tmp_path, with_average, spec=ModelSpec(build=Scaled)))
    without = train(make_run(tmp_path, config, spec=ModelSpec(build=Scaled), name="without"))
    assert same_bits(weights_themselves(saved), weights_themselves(without))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("before", MESHES)
@pytest.mark.parametrize("after", ["zero1", "zero3", "pipeline"])
def test_another_mesh_goes_on_with_the_average_of_a_mesh(tmp_path, before, after):
    expected = checkpoint.load_weights(train(make_run(tmp_path, mesh_config(before, ema_decay=DECAY), name="whole")))
    run = make_run(tmp_path, cut_at(mesh_config(before, ema_decay=DECAY), 7))
    first = train(run)
    found = checkpoint.load_weights(resume(run, first, mesh_config(after, ema_decay=DECAY)))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
    without = resume(run, first, mesh_config(after))
    assert same_bits(checkpoint.load_weights(without), weights_themselves(without))
    again = resume(run, without, mesh_config(before, ema_decay=DECAY, epochs=3))
    assert not same_bits(checkpoint.load_weights(again), weights_themselves(again))


@pytest.mark.parametrize(("start", "num_ranks"), [(0.0, 1), (0.5, 2), (0.7, 3), (0.99, 1)])
def test_the_mean_from_a_part_of_the_run_on_is_that_of_its_last_steps(tmp_path, start, num_ranks):
    config = small_config(num_ranks, {"swa_start": start}, **EVERY_STEP)
    run = make_run(tmp_path, config)
    found = checkpoint.load_weights(train(run))
    steps = [weights_themselves(saved) for saved in checkpoint.list_checkpoints(run.run_dir)]
    last = steps[math.ceil(start * len(steps)) :] or steps[-1:]
    for name, value in found.items():
        torch.testing.assert_close(value, torch.stack([step[name] for step in last]).mean(0), rtol=1e-5, atol=1e-6)
    cut = train(make_run(tmp_path, cut_at(config, 7), name="cut"))
    resumed = checkpoint.load_weights(resume(make_run(tmp_path, config, name="cut"), cut))
    for name, value in found.items():
        if start < 0.6:  # after the cut, the run has another length, and begins the mean earlier
            continue
        assert torch.equal(resumed[name], value)


def test_the_average_does_not_change_the_training(tmp_path):
    config = small_config(2, {"validation_fraction": 0.2})
    plain = train(make_run(tmp_path, config, spec=DROPOUT_MLP, name="plain"))
    with_average = dataclasses.replace(config, train=dataclasses.replace(config.train, ema_decay=DECAY))
    saved = train(make_run(tmp_path, with_average, spec=DROPOUT_MLP))
    assert same_bits(weights_themselves(saved), weights_themselves(plain))


def test_validations_and_evaluations_have_the_average(tmp_path):
    config = small_config(2, {"ema_decay": DECAY, "validation_fraction": 0.2})
    run = make_run(tmp_path, config)
    saved = train(run)
    (line,) = [line for line in read_metrics(run.run_dir) if line["kind"] == "epoch"][-1:]
    assert saved.manifest["score"] == line["metrics"]["loss"]
    one = small_config(1, parallel=Single())
    train_and_validation = dataclasses.replace(run, config=one, checkpoint=saved.url)
    whole = on_ranks(evaluate_rank, train_and_validation)[0]["loss"]
    model = MLP.build()
    model.load_state_dict(checkpoint.load_weights(saved))
    assert whole == pytest.approx(_loss_of_all_rows(model), rel=1e-5)
    model.load_state_dict(weights_themselves(saved))
    assert whole != pytest.approx(_loss_of_all_rows(model), rel=1e-3)


def _loss_of_all_rows(model):
    from tests.builders.models import blobs

    rows = blobs(245)
    output = model(torch.from_numpy(rows["features"]))
    return float(torch.nn.functional.cross_entropy(output, torch.from_numpy(rows["label"])))


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3)])
def test_a_resumed_run_goes_on_with_its_average(tmp_path, before, after):
    settings = {"ema_decay": DECAY, "validation_fraction": 0.2}
    config = small_config(before, settings)
    expected = checkpoint.load_weights(train(make_run(tmp_path, config, name="whole")))
    run = make_run(tmp_path, cut_at(config, 4))
    saved = resume(run, train(run), small_config(after, settings))
    found = checkpoint.load_weights(saved)
    assert before != after or same_bits(found, expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_a_run_without_an_average_can_go_on_with_one(tmp_path):
    run = make_run(tmp_path, cut_at(small_config(2), 6))
    first = train(run)
    saved = resume(run, first, small_config(2, {"ema_decay": DECAY}))
    start = weights_themselves(first)
    assert not same_bits(checkpoint.load_weights(saved), weights_themselves(saved))
    assert not same_bits(checkpoint.load_weights(saved), start)
    without = resume(run, saved, small_config(2, {"epochs": 3}))
    assert same_bits(checkpoint.load_weights(without), weights_themselves(without))
