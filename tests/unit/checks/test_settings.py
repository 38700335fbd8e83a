"""What the driver finds in settings, specs and arguments before it looks at the data."""

import types

import pytest
import torch
from torch import nn

from spark_dl import Config, Train
from spark_dl.checks.settings import check_settings
from spark_dl.config import strategies
from spark_dl.config.checks import SettingError
from spark_dl.training.optimizer_settings import check_optimization
from tests.builders.models import MLP, build_mlp


@pytest.mark.parametrize(("spec", "found"), [
    (None, "a NoneType"), ("model", "a str"), (build_mlp, "a function"), (nn.Linear(1, 1), "a Linear"),
    (Config(), "a Config"),
])  # fmt: skip
def test_B25_a_spec_that_is_none_is_an_error_before_anything_starts(spec, found):
    message = rf"^spec: expected a spark_dl\.ModelSpec, found {found}; pass ModelSpec\(build=function\)"
    with pytest.raises(ValueError, match=message):
        check_settings(None, spec, Config(), has_validation=False)


@pytest.mark.parametrize(("config", "found"), [({"train": {"lr": 1}}, "dict"), ("c.yaml", "str"), (Train(), "Train")])
def test_B25_a_config_that_is_none_is_an_error_before_anything_starts(config, found):
    message = rf"^config: expected a spark_dl\.Config, found a {found}; spark_dl\.load_config reads a file"
    with pytest.raises(ValueError, match=message):
        check_settings(None, MLP, config, has_validation=False)


def of_optimizer(name, **args):
    return {"optimizer": name, "optimizer_args": args}


def of_scheduler(name, **args):
    return {"scheduler": name, "scheduler_args": args}


@pytest.mark.parametrize(("train", "message"), [
    (of_optimizer("SGD", momentumm=0.9), "SGD does not take {'momentumm': 0.9}: .*'momentumm'"),
    (of_optimizer("SGD", momentum=-1.0), "SGD does not take {'momentum': -1.0}: Invalid momentum value: -1.0"),
    (of_optimizer("SGD", lr=0.5), "SGD does not take {'lr': 0.5}: .*multiple values .*'lr'"),
    (of_optimizer("Adam", betas=[0.9, 2.0]), "Adam does not take .*: Invalid beta parameter at index 1: 2.0"),
    (of_optimizer("Adam", betas=0.9), "Adam does not take {'betas': 0.9}: .*float"),
    (of_scheduler("StepLR"), "StepLR does not take {}: .*'step_size'"),
    (of_scheduler("StepLR", step=3), "StepLR does not take {'step': 3}: .*'step'"),
    (of_scheduler("StepLR", step_size=0), "StepLR fails with {'step_size': 0}: ZeroDivisionError"),
    (of_scheduler("StepLR", step_size="3"), "StepLR fails with {'step_size': '3'}: TypeError"),
    (of_scheduler("CosineAnnealingWarmRestarts", T_0=-1), "CosineAnnealingWarmRestarts does not take .*positive"),
], ids=str)  # fmt: skip
def test_B25_wrong_arguments_of_the_optimizer_and_the_scheduler_are_found_on_the_driver(train, message):
    key = "train.scheduler_args" if "scheduler" in train else "train.optimizer_args"
    with pytest.raises(ValueError, match=f"^{key}: {message}"):
        check_settings(None, MLP, Config(train=Train(**train)), has_validation=False)


OPTIMIZERS = sorted(
    name for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS")
)  # fmt: skip
SCHEDULERS = {
    "StepLR": {"step_size": 3}, "MultiStepLR": {"milestones": [2, 6]}, "CosineAnnealingLR": {"T_max": 10},
    "ReduceLROnPlateau": {"patience": 2}, "OneCycleLR": {"max_lr": 0.5, "total_steps": 1},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1}, "PolynomialLR": {}, "ConstantLR": {},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_B25_every_optimizer_passes_with_the_arguments_that_it_takes(name):
    check_optimization(Config(train=Train(optimizer=name)))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_B25_every_scheduler_passes_with_the_arguments_that_it_takes(name):
    config = Config(train=Train(scheduler=name, scheduler_args=SCHEDULERS[name], optimizer_args={"momentum": 0.9}))
    before = torch.random.get_rng_state()
    check_optimization(config)
    assert torch.equal(torch.random.get_rng_state(), before), "the driver's generator stays as it was"


@pytest.mark.parametrize(("train", "has_validation", "message"), [
    ({"early_stop_metric": "top"}, True, r"train.early_stop_metric: expected one of \['loss'\], found 'top'"),
    ({"early_stop_metric": "loss"}, False, "train.early_stop_metric: needs validation rows; set train.validation_fra"),
])  # fmt: skip
def test_a_metric_to_stop_by_is_one_of_the_validation_rows(monkeypatch, train, has_validation, message):
    config = Config(train=Train(**train))
    # What a strategy asks of Spark is not asked here.
    monkeypatch.setattr(strategies, "find", lambda name: types.SimpleNamespace(check=lambda spark, config: None))
    with pytest.raises(SettingError, match=message):
        check_settings(None, MLP, config, has_validation=has_validation)
