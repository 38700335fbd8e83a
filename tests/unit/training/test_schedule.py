"""The learning rate of each step: what the user wrote, times warm-up, under a scheduler."""

import copy
from fractions import Fraction

import pytest
import torch
from torch.optim import lr_scheduler

from spark_dl import Config, Launch, ParameterServer, Train
from spark_dl.parallel.trainable import build_optimizer, lr_factor
from spark_dl.rundir.checkpoint_files import plain_state
from spark_dl.training.optimizer_settings import OptimizerSettings, RateSchedule, with_length


def build(lr=0.1, groups=1, **train):
    parameters = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr * (i + 1)} for i in range(groups)]
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    return optimizer, RateSchedule(optimizer, Config(train=Train(**train)))


def rates(optimizer, schedule, steps, first=0):
    """The learning rate that each step is taken with."""
    found = []
    for step in range(first, first + steps):
        with schedule.warm(step) as lr:
            assert optimizer.param_groups[0]["lr"] == lr
            optimizer.step()
        schedule.end_step()
        found.append(lr)
    return found


@pytest.mark.parametrize(("name", "args", "interval", "expected"), [
    ("CosineAnnealingLR", {}, "step", {"T_max": 30}), ("CosineAnnealingLR", {"T_max": 7}, "step", {"T_max": 7}),
    ("CosineAnnealingLR", {"eta_min": 0.1}, "epoch", {"T_max": 3, "eta_min": 0.1}),
    ("OneCycleLR", {"max_lr": 1.0}, "step", {"max_lr": 1.0, "total_steps": 30}),
    ("OneCycleLR", {"max_lr": 1.0, "epochs": 2, "steps_per_epoch": 5}, "step",
     {"max_lr": 1.0, "epochs": 2, "steps_per_epoch": 5}),
    ("PolynomialLR", {}, "step", {}), ("PolynomialLR", {"total_iters": "run"}, "step", {"total_iters": 30}),
    ("StepLR", {"step_size": 2}, "step", {"step_size": 2}), (None, {}, "step", {}),
])  # fmt: skip
def test_a_scheduler_that_asks_for_it_gets_the_length_of_the_run(name, args, interval, expected):
    config = Config(train=Train(scheduler=name, scheduler_args=args, scheduler_interval=interval))
    assert with_length(config, total_steps=30, steps_per_epoch=10).train.scheduler_args == expected
    assert with_length(config, total_steps=5, steps_per_epoch=10).train.scheduler_args.get("T_max") != 0


def test_without_settings_the_rate_is_what_the_user_wrote():
    assert rates(*build(lr=0.3), steps=5) == [0.3] * 5


@pytest.mark.parametrize("warmup", [1, 4, 10])
def test_warm_up_rises_linearly_to_the_whole_rate(warmup):
    found = rates(*build(lr=0.2, warmup_steps=warmup), steps=warmup + 3)
    assert found == pytest.approx([0.2 * min(1, (step + 1) / warmup) for step in range(warmup + 3)])


def test_warm_up_holds_for_every_parameter_group_and_is_taken_back():
    optimizer, schedule = build(lr=0.1, groups=3, warmup_steps=4)
    with schedule.warm(1) as lr:
        assert lr == pytest.approx(0.05)
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.05, 0.1, 0.15])
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.1, 0.2, 0.3])


def test_warm_up_is_taken_back_after_an_error_too():
    optimizer, schedule = build(lr=0.1, warmup_steps=4)
    with pytest.raises(KeyError), schedule.warm(0):
        raise KeyError
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_scheduler_by_steps_moves_with_steps_only():
    optimizer, schedule = build(scheduler="StepLR", scheduler_args={"step_size": 2}, scheduler_interval="step")
    assert rates(optimizer, schedule, 5) == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])
    schedule.end_epoch(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_a_scheduler_by_epochs_moves_with_epochs_only():
    optimizer, schedule = build(scheduler="StepLR", scheduler_args={"step_size": 1})
    for epoch in range(3):
        assert rates(optimizer, schedule, 4) == pytest.approx([0.1 * 0.1**epoch] * 4)
        schedule.end_epoch(1.0)


def test_warm_up_multiplies_what_the_scheduler_says():
    args = {"scheduler": "StepLR", "scheduler_args": {"step_size": 2}, "scheduler_interval": "step", "warmup_steps": 4}
    assert rates(*build(**args), steps=5) == pytest.approx([0.025, 0.05, 0.0075, 0.01, 0.001])


def test_the_plateau_reads_the_loss():
    optimizer, schedule = build(scheduler="ReduceLROnPlateau", scheduler_args={"patience": 0, "factor": 0.5})
    found = []
    for loss in (1.0, 0.5, 0.6, 0.4, 0.5):
        schedule.end_epoch(loss)
        found.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025])


def test_wrong_arguments_are_an_error_that_names_the_key():
    with pytest.raises(ValueError, match=r"^train\.scheduler_args: StepLR does not take {'stepsize': 2}: "):
        build(scheduler="StepLR", scheduler_args={"stepsize": 2})


SCHEDULERS = {
    "StepLR": {"step_size": 3},
    "MultiStepLR": {"milestones": [2, 6]},
    "CosineAnnealingLR": {"T_max": 10},
    "ExponentialLR": {"gamma": 0.8},
    "LinearLR": {"total_iters": 8},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "OneCycleLR": {"max_lr": 0.5, "total_steps": 12},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3},
}


def settings_of(optimizer, schedule):
    names = [[f"{i}/{k}" for k in range(len(group["params"]))] for i, group in enumerate(optimizer.param_groups)]
    return OptimizerSettings(optimizer, schedule, names, "train.optimizer: SGD")


def interrupted(name, tmp_path, steps, ratio=1.0, warmup=0):
    """The rates after `steps` steps, in a run that was saved then and goes on with `ratio` times the rate."""
    args = {"scheduler": name, "scheduler_args": SCHEDULERS[name], "scheduler_interval": "step", "warmup_steps": warmup}
    optimizer, schedule = build(**args)
    settings = settings_of(optimizer, schedule)
    rates(optimizer, schedule, steps)
    torch.save(settings.state_dict(), tmp_path / "state.pt")
    optimizer, schedule = build(lr=0.1 * ratio, **args)
    settings_of(optimizer, schedule).load_state_dict([torch.load(tmp_path / "state.pt", weights_only=True)])
    return rates(optimizer, schedule, 11 - steps, first=steps)


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_run_that_is_taken_up_has_the_rates_of_one_that_never_stopped(tmp_path, name, warmup):
    args = {"scheduler": name, "scheduler_args": SCHEDULERS[name], "scheduler_interval": "step", "warmup_steps": warmup}
    whole = rates(*build(**args), steps=11)
    for steps in (0, 1, 5):
        assert interrupted(name, tmp_path, steps, warmup=warmup) == whole[steps:]


@pytest.mark.parametrize("ratio", [0.5, 2.0])
@pytest.mark.parametrize("name", [n for n in SCHEDULERS if n not in ("OneCycleLR", "CyclicLR")])
def test_with_another_number_of_ranks_the_rates_are_those_of_that_number(tmp_path, name, ratio):
    args = {"scheduler": name, "scheduler_args": SCHEDULERS[name], "scheduler_interval": "step"}
    whole = rates(*build(lr=0.1 * ratio, **args), steps=11)
    assert interrupted(name, tmp_path, 5, ratio) == pytest.approx(whole[5:])


def test_the_ratio_holds_without_a_scheduler_too():
    saved = settings_of(*build(lr=0.1, groups=2)).state_dict()
    optimizer, schedule = build(lr=0.2, groups=2)
    settings_of(optimizer, schedule).load_state_dict([saved])
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.2, 0.4])


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_the_ratio_holds_for_a_checkpoint_of_an_older_version(ratio):
    args = {"scheduler": "StepLR", "scheduler_args": {"step_size": 2}, "scheduler_interval": "step"}
    optimizer, schedule = build(lr=0.1, **args)
    rates(optimizer, schedule, 3)
    groups, state = optimizer.state_dict()["param_groups"], schedule.state_dict()
    optimizer, schedule = build(lr=0.1 * ratio, **args)
    settings = settings_of(optimizer, schedule)
    settings.load_state_dict([settings.of_older(groups, state, ratio)])
    assert optimizer.param_groups[0]["initial_lr"] == pytest.approx(0.1 * ratio)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * ratio)
    assert schedule.scheduler.base_lrs == pytest.approx([0.1 * ratio])
    assert schedule.scheduler.last_epoch == 3


def test_the_plateau_keeps_its_memory(tmp_path):
    args = {"scheduler": "ReduceLROnPlateau", "scheduler_args": {"patience": 1}}
    _, schedule = build(**args)
    schedule.end_epoch(1.0)
    schedule.end_epoch(2.0)
    state = copy.deepcopy(schedule.state_dict())
    optimizer, schedule = build(**args)
    schedule.load_state_dict(state)
    schedule.end_epoch(2.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_state_that_a_checkpoint_cannot_hold_is_an_error_that_names_the_scheduler_and_the_key():
    _, schedule = build(scheduler="StepLR", scheduler_args={"step_size": 3})
    schedule.scheduler.step_size = Fraction(3)  # as a scheduler of a later torch might hold
    with pytest.raises(ValueError, match=r"^train\.scheduler: StepLR\['step_size'\]: found a fractions\.Fraction"):
        schedule.state_dict()


@pytest.mark.parametrize("scheduler", ["MultiStepLR", "LambdaLR"])
def test_a_plain_state_is_what_a_safe_load_takes(tmp_path, scheduler):
    optimizer, _ = build()
    args = {"MultiStepLR": {"milestones": [2]}, "LambdaLR": {"lr_lambda": lambda epoch: 0.5}}[scheduler]
    state = getattr(lr_scheduler, scheduler)(optimizer, **args).state_dict()
    torch.save(plain_state(state, "its", of_scheduler=True), tmp_path / "state.pt")
    torch.load(tmp_path / "state.pt", weights_only=True)


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_scaling_by_ranks_is_done_only_as_asked(scaling, factor):
    config = Config(train=Train(lr=0.1, lr_scaling=scaling))
    assert lr_factor(config, 4) == factor
    assert lr_factor(config, 1) == 1
    served = ParameterServer(num_servers=3)
    with_servers = Config(train=config.train, launch=Launch(num_ranks=7), parallel=served)
    assert lr_factor(with_servers, 7) == factor  # servers do not train
    assert build_optimizer(torch.nn.Linear(1, 1), config, 4).param_groups[0]["lr"] == pytest.approx(0.1 * factor)


def test_B27_a_model_with_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match=r"^spec\.build: no parameter"):
        build_optimizer(torch.nn.Linear(1, 1).requires_grad_(False), Config(), 1)


def test_wrong_arguments_of_the_optimizer_are_an_error_that_names_the_key():
    with pytest.raises(ValueError, match=r"^train\.optimizer_args: SGD does not take {'momentumm': 1}: "):
        build_optimizer(torch.nn.Linear(1, 1), Config(train=Train(optimizer_args={"momentumm": 1})), 1)


@pytest.mark.parametrize(
    ("name", "args"),
    [("OneCycleLR", {"max_lr": 0.3, "total_steps": 20}), ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1})],
)
def test_scaling_has_no_effect_on_absolute_rates_and_is_an_error(name, args):
    expected = r"^train\.lr_scaling: has no effect with OneCycleLR and CyclicLR, whose rates are absolute"
    with pytest.raises(ValueError, match=expected):
        Config(train=Train(scheduler=name, scheduler_args=args, scheduler_interval="step", lr_scaling="linear"))
