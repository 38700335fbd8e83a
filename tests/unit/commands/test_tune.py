"""The spaces that tune searches, as a YAML mapping says them."""

import optuna
import pytest

from spark_dl.cli import UsageError
from spark_dl.commands import tune

SEARCH = {
    "train.lr": {"low": 0.001, "high": 0.1, "log": True},
    "train.global_batch_size": {"low": 32, "high": 128, "step": 32},
    "train.optimizer": ["SGD", "AdamW", None],
    "train.optimizer_args": [{"momentum": 0.9}, {}],
}


def test_each_trial_gets_a_value_of_each_space():
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    suggest = tune.suggester(SEARCH)
    found = [suggest(study.ask()) for _ in range(60)]
    assert all(0.001 <= each["train.lr"] <= 0.1 for each in found)
    assert sum(each["train.lr"] < 0.01 for each in found) in range(20, 41), "on a scale of logarithms"
    assert {each["train.global_batch_size"] for each in found} == {32, 64, 96, 128}
    assert {each["train.optimizer"] for each in found} == {"SGD", "AdamW", None}
    assert {*map(str, (each["train.optimizer_args"] for each in found))} == {"{'momentum': 0.9}", "{}"}


@pytest.mark.parametrize(("search", "message"), [
    ({"lr": [0.1]}, "search: expected settings such as train.lr, found 'lr'"),
    ({"train.lr": []}, "search.train.lr: expected a list of choices, or a range such as .*, found \\[\\]"),
    ({"train.lr": 0.1}, "search.train.lr: expected a list of choices, or a range such as .*, found 0.1"),
    ({"train.lr": {"low": 0.1}}, "search.train.lr: expected a list of choices, or a range"),
    ({"train.lr": {"low": 0.1, "high": "1"}}, "search.train.lr: expected a list of choices, or a range"),
    ({"train.lr": {"low": 0.1, "high": 1, "lgo": True}}, "search.train.lr: expected a list of choices, or a range"),
    ({"train.lr": {"low": 1, "high": 0.1}}, "search.train.lr: expected low <= high, found 1 and 0.1"),
])  # fmt: skip
def test_what_is_no_space_is_wrong_usage(search, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        tune.suggester(search)


def test_the_best_settings_are_a_file_of_sections():
    assert tune.nested({"train.lr": 0.1, "train.optimizer": "SGD", "loader.seed": 3}) == {
        "train": {"lr": 0.1, "optimizer": "SGD"}, "loader": {"seed": 3},
    }  # fmt: skip
