"""Dtypes that do not fit the model are found on the driver, with the setting that mends them."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from spark_dl import ModelSpec
from spark_dl.checks.storage import check_dtypes, check_transform
from spark_dl.data.columns.schema import Column
from tests.builders.settings import make_config


def build():
    return nn.Linear(3, 2)


def columns(feature, label, label_shape=()):
    return (Column("features", feature, (3,)), Column("label", label, label_shape))


def check(loss, feature, label, label_shape=(), build=build, **fields):
    check_dtypes(ModelSpec(build=build, loss=loss), columns(feature, label, label_shape), make_config(**fields))


@pytest.mark.parametrize(
    ("loss", "feature", "label", "label_shape", "setting"),
    [
        ("CrossEntropyLoss", "float64", "int64", (), "{features: float32}"),
        ("CrossEntropyLoss", "float32", "float64", (), "{label: int64}"),
        ("CrossEntropyLoss", "float64", "float64", (), "{features: float32, label: int64}"),
        ("CrossEntropyLoss", "float32", "int32", (), "{label: int64}"),
        ("MSELoss", "float64", "float64", (2,), "{features: float32}"),
    ],
)
def test_the_error_names_the_columns_and_the_casts_that_work(loss, feature, label, label_shape, setting):
    with pytest.raises(ValueError, match=rf"does not take the dtype of a column: .*set data.cast: {setting}"):
        check(loss, feature, label, label_shape)
    cast = dict(pair.split(": ") for pair in setting.strip("{}").split(", "))
    check(loss, feature, label, label_shape, cast=cast)


@pytest.mark.parametrize(
    ("loss", "feature", "label", "build"),
    [
        ("CrossEntropyLoss", "float32", "int64", build),
        ("CrossEntropyLoss", "float64", "int64", lambda: nn.Linear(3, 2).double()),
        ("CrossEntropyLoss", "float64", "int64", lambda: nn.Sequential(nn.Flatten(), Float(), nn.Linear(3, 2))),
    ],
)
def test_what_the_model_takes_is_no_error(loss, feature, label, build):
    check(loss, feature, label, build=build)


class Float(nn.Module):
    def forward(self, x):
        return x.float()


def test_other_errors_of_the_step_are_left_to_the_ranks():
    def broken():
        raise RuntimeError("CUDA is not here, and dtype neither")

    check("CrossEntropyLoss", "float64", "int64", build=broken)
    check("CrossEntropyLoss", "float64", "int64", build=lambda: nn.Linear(5, 2).double())


def test_the_trial_draws_nothing_from_the_generator_of_the_driver():
    torch.manual_seed(3)
    with pytest.raises(ValueError, match="data.cast"):
        check("CrossEntropyLoss", "float64", "int64")
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))


def draws_of_torch(batch):
    return {**batch, "x": batch["x"] + torch.randn(1)}


def draws_of_numpy(batch):
    return {**batch, "x": batch["x"] * float(np.random.rand())}


def draws_of_python(batch):
    return {**batch, "x": batch["x"] * random.random()}


def draws_of_its_own(batch):
    return {**batch, "x": batch["x"] + torch.randn(1, generator=torch.Generator().manual_seed(0))}


def fails(batch):
    raise KeyError("y")


X = [Column("x", "float32", (3,))]


@pytest.mark.parametrize("transform", [draws_of_torch, draws_of_numpy, draws_of_python])
def test_a_transform_that_draws_random_numbers_is_an_error_and_changes_no_generator(transform):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"spec\.transform: it draws random numbers.*use spec\.augment"):
        check_transform(ModelSpec(build=build, transform=transform), X, make_config(features=("x",), label=None))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("transform", [None, draws_of_its_own, fails])
def test_other_transforms_are_left_to_the_ranks(transform):
    check_transform(ModelSpec(build=build, transform=transform), X, make_config(features=("x",), label=None))
