"""An optimizer of the user's own, with a scheduler: what is accepted, and its learning rates."""

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler

from spark_dl import CombinedOptimizer, Config, Launch, ModelSpec, Optimization, Train
from spark_dl.optimization import check_parameters, class_name
from spark_dl.parallel.trainable import build_optimization, build_optimizer
from spark_dl.training.optimizer_settings import RateSchedule, check_optimization

MODEL = nn.Linear(1, 1)


def sgd(lr=0.1):
    return SGD(MODEL.parameters(), lr=lr)


def build(optimizer, **train):
    config = Config(train=Train(**train), launch=Launch(num_ranks=4))
    return build_optimization(ModelSpec(build=nn.Identity, optimizer=optimizer), MODEL, config, 4)


def by_steps(_, **options):
    optimizer = sgd()
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    return Optimization(optimizer=optimizer, scheduler=scheduler, interval="step", **options)


def rates_of(optimization, steps, **train):
    """The rates of steps of epochs of 3 steps."""
    schedule = RateSchedule(optimization.optimizer, Config(train=Train(**train)), own=optimization)
    found = []
    for step in range(steps):
        with schedule.warm(step) as lr:
            optimization.optimizer.step()
        schedule.end_step(step % 3 + 1)
        found.append(lr)
        if step % 3 == 2:
            schedule.end_epoch(1.0, {}, epoch=step // 3 + 1)
    return found


def test_a_bare_optimizer_keeps_its_rate():
    assert rates_of(build(lambda model: sgd(0.3)), 2) == [0.3, 0.3]


def test_a_scheduler_of_its_own_steps_by_its_interval_and_frequency():
    assert rates_of(build(by_steps), 3) == pytest.approx([0.1, 0.05, 0.025])
    every_second = build(functools.partial(by_steps, frequency=2))
    assert rates_of(every_second, 7) == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.05, 0.025, 0.025]), "within an epoch"


def test_warm_up_and_scaling_multiply_the_rates():
    optimization = build(by_steps, lr_scaling="linear")
    assert rates_of(optimization, 3, warmup_steps=2) == pytest.approx([0.2, 0.2, 0.1])


def sequential(model, factor=1.0):
    optimizer = sgd(0.1 * factor)
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.CosineAnnealingLR(optimizer, 4)]
    scheduler = lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
    return Optimization(optimizer=optimizer, scheduler=scheduler, interval="step")


def test_scaling_reaches_the_schedulers_inside_a_scheduler():
    scaled = rates_of(build(sequential, lr_scaling="linear"), 6)
    assert scaled == pytest.approx(rates_of(build(functools.partial(sequential, factor=4)), 6))


def test_scaling_has_no_effect_on_a_one_cycle_and_is_an_error():
    def one_cycle(model):
        optimizer = sgd()
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=6)
        return Optimization(optimizer=optimizer, scheduler=scheduler, interval="step")

    with pytest.raises(ValueError, match=r"^train\.lr_scaling: has no effect on OneCycleLR, whose rates are absolute"):
        build(one_cycle, lr_scaling="linear")


def plateau(monitor):
    optimizer = sgd()
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    return Optimization(optimizer=optimizer, scheduler=scheduler, monitor=monitor)


@pytest.mark.parametrize(("monitor", "expected"), [
    (None, 0.05), ("loss", 0.05), ("val_acc", 0.1), ("train_loss", 0.1),
])  # fmt: skip
def test_a_plateau_reads_the_value_that_it_monitors(monitor, expected):
    own = plateau(monitor)
    schedule = RateSchedule(own.optimizer, Config(), own=own)
    for epoch, (train_loss, loss, val_acc) in enumerate([(3.0, 1.0, 0.9), (2.0, 1.5, 0.5)], 1):
        schedule.end_epoch(train_loss, {"loss": loss, "val_acc": val_acc}, epoch=epoch)
    assert own.optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def test_a_value_that_is_not_there_is_an_error_that_names_those_that_are():
    own = plateau("val_los")
    with pytest.raises(ValueError, match=r"monitors 'val_los', expected one of \['train_loss', 'loss'\]"):
        RateSchedule(own.optimizer, Config(), own=own).end_epoch(1.0, {"loss": 2.0, "matrix": [[1]]})


def test_a_value_of_validation_rows_needs_them():
    for monitor, needs in (("val_loss", True), ("loss", True), ("train_loss", False), (None, False)):
        own = plateau(monitor)
        schedule = RateSchedule(own.optimizer, Config(), own=own)
        expected = pytest.raises(ValueError, match=f"monitors '{monitor}', which needs validation rows")
        with expected if needs else contextlib.nullcontext():
            schedule.check_without_validation()


def of_another():
    return Optimization(optimizer=sgd(), scheduler=lr_scheduler.StepLR(sgd(), 1))


def plateau_by_steps():
    optimizer = sgd()
    return Optimization(optimizer=optimizer, scheduler=lr_scheduler.ReduceLROnPlateau(optimizer), interval="step")


@pytest.mark.parametrize(("make", "fact"), [
    (lambda: torch.optim.LBFGS(MODEL.parameters()), "takes one gradient per step, found LBFGS"),
    (lambda: None, "found NoneType"),
    (lambda: Optimization(optimizer=sgd(), scheduler="StepLR"), "expected a scheduler.*found str"),
    (of_another, "the StepLR schedules another optimizer"),
    (plateau_by_steps, "expected interval 'epoch' for ReduceLROnPlateau"),
    (lambda: by_steps(None, frequency=0), "integer frequency of at least 1, found 0"),
    (lambda: SGD(nn.Linear(1, 1).parameters()), "parameters that are not parameters of the model"),
    (lambda: SGD([p.requires_grad_(False) for p in nn.Linear(1, 1).parameters()]), "not parameters of the model"),
])  # fmt: skip
def test_what_is_no_optimization_is_an_error_that_says_why(make, fact):
    with pytest.raises(ValueError, match=rf"spec\.optimizer: .*{fact}"):
        build(lambda model: make())


def test_an_optimizer_without_a_parameter_to_train_is_an_error():
    frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="spec.optimizer: no parameter of the optimizer requires a gradient"):
        check_parameters(torch.optim.SGD(frozen.parameters(), lr=0.1), frozen)


def build_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def two_optimizers(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def set_gradients(model, seed):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def test_several_optimizers_as_one_take_the_steps_of_each_also_from_their_state():
    alone, together = build_net(), build_net()
    parts, combined = two_optimizers(alone), CombinedOptimizer(two_optimizers(together))
    assert class_name(combined) == "Muon + AdamW"
    assert [len(group["params"]) for group in combined.param_groups] == [2, 4]
    for step in range(5):
        set_gradients(alone, step)
        set_gradients(together, step)
        for part in parts:
            part.step()
            part.param_groups[0]["lr"] *= 0.9
        combined.step()
        for group in combined.param_groups:
            group["lr"] *= 0.9
        for a, b in zip(alone.parameters(), together.parameters(), strict=True):
            assert torch.equal(a, b)
        if step == 2:  # another process goes on with the state
            saved = copy.deepcopy(combined.state_dict())
            combined = CombinedOptimizer(two_optimizers(together))
            combined.load_state_dict(saved)
    combined.zero_grad()
    assert all(p.grad is None for p in together.parameters())


def test_one_scheduler_has_the_rates_of_all_optimizers():
    combined = CombinedOptimizer(two_optimizers(build_net()))
    scheduler = lr_scheduler.LambdaLR(combined, [lambda step: 1 / (1 + step), lambda step: 0.5**step])
    combined.step()
    scheduler.step()
    assert [part.param_groups[0]["lr"] for part in combined.optimizers] == [0.01, 0.005]


@pytest.mark.parametrize(("make", "message"), [
    (list, "expected at least one optimizer"), (lambda: [SGD, sgd()], "expected optimizers .*found type"),
    (lambda: [torch.optim.LBFGS(MODEL.parameters())], "take one gradient per step, found LBFGS"),
    (lambda: [sgd(), sgd()], "some parameters appear in more than one parameter group"),
])  # fmt: skip
def test_what_is_not_several_optimizers_is_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        CombinedOptimizer(make())
    with pytest.raises(ValueError, match="step takes no closure"):
        CombinedOptimizer([sgd()]).step(lambda: 0.0)


NORMS = {"match": r"^1\.|bias", "weight_decay": 0.0}


def of_settings(**train):
    model = build_net()
    config = Config(train=Train(**train), launch=Launch(num_ranks=4))
    return model, build_optimizer(model, config, 4)


def test_groups_of_parameters_are_found_by_their_names():
    args = {"optimizer_args": {"weight_decay": 0.1}, "lr_scaling": "sqrt"}
    model, optimizer = of_settings(optimizer="AdamW", lr=0.01, param_groups=(NORMS, {"match": "^2", "lr": 0.1}), **args)
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [
        ([named[id(p)] for p in group["params"]], group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]
    assert type(optimizer) is torch.optim.AdamW
    assert found == [
        (["0.bias", "1.weight", "1.bias", "2.bias"], 0.02, 0.0), (["2.weight"], 0.2, 0.1), (["0.weight"], 0.02, 0.1),
    ]  # fmt: skip


def test_groups_may_have_optimizers_of_their_own():
    groups = ({"match": r"[02]\.weight", "optimizer": "Muon", "lr": 0.02, "momentum": 0.8}, NORMS)
    _, optimizer = of_settings(optimizer="AdamW", lr=0.01, optimizer_args={"betas": [0.8, 0.9]}, param_groups=groups)
    assert class_name(optimizer) == "Muon + AdamW"
    muon, adam = optimizer.optimizers
    assert [(g["lr"], g["momentum"], len(g["params"])) for g in muon.param_groups] == [(0.02, 0.8, 2)]
    assert [(g["lr"], g["betas"], g["weight_decay"], len(g["params"])) for g in adam.param_groups] == [
        (0.01, (0.8, 0.9), 0.0, 4)
    ]


@pytest.mark.parametrize(("groups", "message"), [
    (({"match": "bais"},), r"train.param_groups\[0\].match: found no parameter .*'bais' in its name .*'0.weight'"),
    ((NORMS, {"match": "bias"}), r"train.param_groups\[1\].match: found no parameter .* in no group before"),
    ((NORMS, {"match": "0", "momentum": 1}), r"train.param_groups\[1\]: AdamW does not take .*'momentum'"),
    (({"match": "0", "optimizer": "Muon"},), r"train.param_groups\[0\]: Muon does not take .*2D"),
])  # fmt: skip
def test_groups_that_do_not_fit_the_model_or_the_optimizer_are_named(groups, message):
    with pytest.raises(ValueError, match=message):
        of_settings(optimizer="AdamW", param_groups=groups)


def test_the_driver_tries_the_arguments_of_groups_before_ranks_start():
    with pytest.raises(ValueError, match=r"train.param_groups\[1\]: SGD does not take .*'betas'"):
        check_optimization(Config(train=Train(param_groups=(NORMS, {"match": "0", "betas": [0, 1]}))))
    check_optimization(Config(train=Train(param_groups=(NORMS, {"match": "0", "optimizer": "Muon"}))))


def test_groups_of_one_optimizer_have_the_state_that_it_is_built_with():
    groups = ({"match": "bias", "lr": 0.1}, {"match": "^1", "initial_accumulator_value": 2.0})
    model, optimizer = of_settings(optimizer="Adagrad", lr=0.01, param_groups=groups)
    set_gradients(model, 0)
    optimizer.step()
    assert [group["initial_accumulator_value"] for group in optimizer.param_groups] == [0, 2.0, 0]
    named = dict(model.named_parameters())
    assert float(optimizer.state[named["1.weight"]]["sum"].min()) >= 2.0
    assert len(optimizer.state) == 6
