"""The exponential moving average of the weights, on real ranks."""

import dataclasses
import math

import pytest
import torch

from spark_dl import Checkpoint, Single
from spark_dl.rundir import checkpoint
from spark_dl.rundir.metrics import read_metrics
from tests.builders.models import DROPOUT_MLP, MLP, same_bits, small_config
from tests.builders.settings import parallel
from tests.ranks.runs import cut_at, make_run, on_ranks, resume, train
from tests.ranks.test_training import evaluate_rank

DECAY = 0.6
EVERY_STEP = {"checkpoint": Checkpoint(every_steps=1, keep=99)}


def weights_themselves(saved):
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
