"""Which settings of an optimizer and its schedule a resumed run takes from its checkpoint, and which are new."""

import copy
import logging
import math
import re

import pytest
import torch
from torch import nn

from spark_dl import Config, Data, Train
from spark_dl.training import optimizer_settings as settings
from spark_dl.training.optimizer_settings import OptimizerSettings, RateSchedule, by_name, group_names

MODEL = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "abcdef"})


def of(groups=("abcdef",), optimizer="Adam", each=(), scheduler=None, scheduler_args=(), lr=0.1, **options):
    """groups: names of the modules of each. each: settings of each group, in place of those for all."""
    parameters = [
        {"params": [MODEL[name].weight for name in names], **(each[i] if each else {})}
        for i, names in enumerate(groups)
    ]
    built = getattr(torch.optim, optimizer)(parameters, lr=lr, **options)
    train = Train(lr=lr, scheduler=scheduler, scheduler_args=dict(scheduler_args))
    schedule = RateSchedule(built, Config(data=Data(), train=train))
    names = [[f"{name}.weight" for name in names] for names in groups]
    return built, schedule, OptimizerSettings(built, schedule, names, "train.optimizer")


def saved(*args, epochs=0, **options):
    """What a checkpoint has of a run after some epochs."""
    optimizer, schedule, taken = of(*args, **options)
    for epoch in range(1, epochs + 1):
        optimizer.step()
        schedule.end_epoch(1.0, epoch=epoch)
    return copy.deepcopy(taken.state_dict())


STEPS = {"scheduler": "StepLR", "scheduler_args": {"step_size": 1, "gamma": 0.5}}


def test_what_nobody_has_changed_is_that_of_the_checkpoint(caplog):
    optimizer, schedule, taken = of(**STEPS)
    taken.load_state_dict([saved(**STEPS, epochs=3)], tells=True)
    assert optimizer.param_groups[0]["lr"] == 0.1 / 8
    assert schedule.scheduler.last_epoch == 3
    schedule.end_epoch(1.0)
    assert optimizer.param_groups[0]["lr"] == 0.1 / 16
    assert not caplog.records


@pytest.mark.parametrize(("before", "now", "rate", "text"), [
    ({**STEPS}, {**STEPS, "lr": 0.3}, 0.3 / 8, "lr of a.weight, .*, d.weight and 2 more was 0.1, is 0.3"),
    ({}, {"lr": 0.3}, 0.3, "was 0.1, is 0.3"),
    ({**STEPS}, {**STEPS, "scheduler_args": {"step_size": 1, "gamma": 0.1}}, 0.1 / 8, "gamma of StepLR was .*0.1"),
    ({}, {"betas": (0.5, 0.9)}, 0.1, "betas of .* was .0.9, 0.999., is .0.5, 0.9."),
    ({}, {"weight_decay": 0.1, "eps": 1e-6}, 0.1, "eps of .* was 1e-08, is 1e-06; weight_decay of .* was 0, is 0.1"),
])  # fmt: skip
def test_what_the_user_has_changed_is_new_and_told(caplog, before, now, rate, text):
    optimizer, _, taken = of(**now)
    with caplog.at_level(logging.WARNING, "spark_dl"):
        taken.load_state_dict([saved(**before, epochs=3 if before.get("scheduler") else 0)], tells=True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, rel=1e-12)
    for key in now.keys() - {"lr", "scheduler", "scheduler_args"}:
        assert optimizer.param_groups[0][key] == now[key]
    (record,) = caplog.records
    assert record.getMessage().startswith("the run goes on with new settings: ")
    assert re.search(text, record.getMessage())
    assert "initial_lr" not in record.getMessage()


def test_a_new_rate_is_exact_where_nothing_has_scheduled_it():
    optimizer, _, taken = of(lr=0.11)
    taken.load_state_dict([saved(lr=0.1)])
    assert 0.1 * (0.11 / 0.1) != optimizer.param_groups[0]["lr"] == 0.11


def test_only_one_rank_tells_it(caplog):
    of(lr=0.3)[2].load_state_dict([saved()])
    assert not caplog.records


def test_a_setting_that_needs_a_state_is_an_error_but_for_sgd():
    with pytest.raises(
        ValueError, match=r"^cannot resume: amsgrad of a.weight, .* was False, and is True now, .*state"
    ):
        of(amsgrad=True)[2].load_state_dict([saved()])
    of(amsgrad=True)[2].load_state_dict([saved(amsgrad=True)])
    of()[2].load_state_dict([saved(amsgrad=True)])
    optimizer, _, taken = of(optimizer="SGD", momentum=0.9)
    taken.load_state_dict([saved(optimizer="SGD")])
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_groups_may_be_divided_otherwise_if_their_settings_are_the_same():
    rates = [{"lr": 0.1}, {"lr": 0.2}]
    of(("abc", "def"))[2].load_state_dict([saved(("ab", "cdef"))])
    optimizer, _, taken = of(("a", "bc", "def"), each=[rates[0], rates[0], rates[1]])
    taken.load_state_dict([saved(("abc", "def"), each=rates)])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1, 0.2]
    with pytest.raises(
        ValueError, match=r"^train.optimizer: a.weight, .* are one group now, and were in groups with oth"
    ):
        of()[2].load_state_dict([saved(("abc", "def"), each=rates)])


def test_the_rates_of_groups_follow_their_parameters():
    each = [{"lr": 0.1}, {"lr": 0.4}]
    before = saved(("abc", "def"), each=each, **STEPS, epochs=2)
    optimizer, schedule, taken = of(("def", "abc"), each=each[::-1], **STEPS)
    taken.load_state_dict([before])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.025]
    assert schedule.scheduler.base_lrs == [0.4, 0.1]


def test_a_parameter_of_another_rank_and_one_that_is_new(caplog):
    ranks = [saved(("ab",), lr=0.2, weight_decay=0.1), saved(("cd",), lr=0.2, weight_decay=0.1)]
    optimizer, _, taken = of(("cd",), lr=0.2, weight_decay=0.1)
    taken.load_state_dict(iter(ranks), tells=True)
    assert not caplog.records
    optimizer, _, taken = of(("ab", "ef"), lr=0.2, weight_decay=0.1)
    with caplog.at_level(logging.WARNING, "spark_dl"):
        taken.load_state_dict(iter(ranks), tells=True)
    assert caplog.messages == [
        "the run goes on with new settings: the optimizer has no state of e.weight, f.weight, which is new"
    ]
    assert len(optimizer.param_groups) == 2


def test_a_rank_without_elements_of_a_group_takes_those_of_another():
    optimizer, _, taken = of(("",), **STEPS)
    taken.load_state_dict([saved(("ab",), **STEPS, epochs=1)])
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize(("before", "now", "message"), [
    ({}, {"optimizer": "SGD"}, "the optimizer was Adam, and is SGD now, whose state is another one"),
    ({}, STEPS, "the scheduler was none, and is StepLR now"), (STEPS, {}, "the scheduler was StepLR, and is none now"),
])  # fmt: skip
def test_another_class_is_an_error(before, now, message):
    of(**before)[2].check_classes(saved(**before))
    with pytest.raises(ValueError, match=f"^cannot resume: {message}"):
        of(**now)[2].check_classes(saved(**before))


@pytest.mark.parametrize("ratio", [1, 4])
def test_of_older_checkpoints_rates_are_those_of_the_scaling_that_was(ratio):
    optimizer, schedule, taken = of(lr=0.8, **STEPS)
    older = taken.of_older(optimizer.param_groups, schedule.state_dict(), ratio)
    assert older["built"][0]["lr"] == older["built"][0]["initial_lr"] == 0.8 / ratio
    assert older["schedule_built"]["base_lrs"] == [0.8 / ratio]
    assert [*older["built"][0]["betas"]] == [0.9, 0.999]
    assert "params" not in older["groups"][0]
    assert older["groups"][0]["lr"] == 0.8
    assert taken.state_dict()["built"][0]["lr"] == 0.8


def test_what_the_user_has_removed_is_gone_and_what_is_added_is_there():
    saved_value, then, now = {"a": 5, "gone": 1, "own": 7}, {"a": 1, "gone": 1}, {"a": 1, "new": 2}
    assert settings._merged(saved_value, then, now) == {"a": 5, "own": 7, "new": 2}
    assert settings._merged({"a": {"b": 5}}, None, {"a": {"b": 1}}) == {"a": {"b": 5}}
    assert settings._merged([5, 6], [1, 2], [1, 3]) == [5, 3]
    assert settings._merged((5, 6), (1, 2), (1, 2)) == (5, 6)
    assert settings._merged([5, 6], [1, 2], [1]) == [1]
    assert settings._merged([5, 6], [1, 2], [1, 2, 3]) == [1, 2, 3]


@pytest.mark.parametrize(("a", "b", "same"), [
    (1, 1.0, True), (1, 2, False), (math.nan, math.nan, True), (math.nan, 1.0, False), ([1, 2], (1, 2), True),
    ([1, 2], [1], False), ({"a": 1}, {"a": 1}, True), ({"a": 1}, {"b": 1}, False), ({"a": 1}, {"a": 2}, False),
    (torch.ones(2), torch.ones(2), True), (torch.ones(2), torch.zeros(2), False), (torch.ones(1), 1.0, False),
    (1.0, torch.ones(1), False), (None, None, True), (None, {}, False),
])  # fmt: skip
def test_same(a, b, same):
    assert settings._same(a, b) is same


def test_what_a_scheduler_had_is_compared_in_words_but_for_its_rates():
    then = {"gamma": 1, "_step": 2, "base_lrs": [1], "old": 4, "milestones": [1]}
    now = {"gamma": 3, "_step": 2, "base_lrs": [2], "new": 5, "milestones": [2]}
    assert settings._differences(then, now, "X") == [
        "gamma of X was 1, is 3", "new of X was None, is 5", "old of X was 4, is None",
    ]  # fmt: skip
    assert settings._differences(None, now, "X") == settings._differences(then, [], "X") == []


def test_names_of_groups_and_the_state_of_parameters_that_have_other_places():
    optimizer, _, _ = of(("cb", "a"))
    names = group_names(optimizer, MODEL)
    assert names == [["c.weight", "b.weight"], ["a.weight"]]
    assert group_names(optimizer, nn.Linear(1, 1)) == [["0/0", "0/1"], ["1/0"]]
    state = {0: "of c", 1: "of b", 2: "of a"}
    assert by_name(state, names, [["a.weight", "new"], ["c.weight"]]) == {0: "of a", 2: "of c"}
    assert by_name({1: "of b"}, names, names) == {1: "of b"}
