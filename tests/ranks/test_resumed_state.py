"""What the user's objects put into a checkpoint, and what a resume makes of an optimizer that is built otherwise."""

import dataclasses
import datetime
import itertools
import logging
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, lr_scheduler

from spark_dl import CombinedOptimizer, Mesh, ModelSpec, Optimization
from spark_dl.data.load.build import build_loader
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.rundir.metrics import read_metrics
from tests.builders.models import build_mlp, same_bits, small_config
from tests.ranks.launcher import RankFailed
from tests.ranks.runs import assert_same_to_the_bit, cut_at, make_run, on_ranks, resume, train, train_rank

FIRST, LAST = 4, 8


def config(num_ranks=1, **fields):
    return small_config(num_ranks, train={"epochs": 9, "max_steps": LAST, **fields.pop("train", {})}, **fields)


def whole_and_resumed(tmp_path, before, now, settings=None, **run):
    """The weights of a run of the spec `now` in one piece, and of one with `before` that goes on with `now`."""
    settings = settings or config()
    whole = train(make_run(tmp_path, settings, spec=now, name="whole", **run))
    saved = train(make_run(tmp_path, cut_at(settings, FIRST), spec=before, name="cut", **run))
    return whole, resume(make_run(tmp_path, settings, spec=now, name="cut", **run), saved)


def weights(saved):
    return checkpoint.load(saved, "model.pt")["0"]


# What is saved


def numpy_sgd(model):
    return SGD(model.parameters(), lr=np.float64(0.1), momentum=np.float32(0.5))


def cosine_of_numpy(model):
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: np.float32(1 + np.cos(step / 10)) / 2)
    return Optimization(optimizer=optimizer, scheduler=schedule, interval="step")


@pytest.mark.parametrize("optimizer", [numpy_sgd, cosine_of_numpy])
def test_R1_numbers_of_numpy_in_an_optimizer_are_saved_as_numbers(tmp_path, optimizer):
    spec = ModelSpec(build=build_mlp, optimizer=optimizer)
    assert_same_to_the_bit(*whole_and_resumed(tmp_path, spec, spec))


def test_R1_numbers_of_numpy_in_settings_are_saved_as_numbers(tmp_path):
    fields = {"lr": np.logspace(-3, -1, 3)[1], "optimizer": "SGD", "optimizer_args": {"momentum": np.float64(0.9)}}
    fields |= {"scheduler": "ExponentialLR", "scheduler_args": {"gamma": np.float64(0.8)}, "seed": np.int64(3)}
    settings = config(train=fields)
    assert [type(v) for v in (settings.train.lr, settings.train.optimizer_args["momentum"])] == [float, float]
    assert_same_to_the_bit(
        *whole_and_resumed(tmp_path, ModelSpec(build=build_mlp), ModelSpec(build=build_mlp), settings)
    )


class Stateful(nn.Sequential):
    """A model that saves an object of its own beside its weights."""

    def __init__(self, extra):
        super().__init__(*build_mlp())
        self.extra = extra

    def get_extra_state(self):
        return {"value": self.extra}

    def set_extra_state(self, state):
        self.extra = state["value"]


def test_R1b_numbers_of_a_model_are_read_back(tmp_path):
    spec = ModelSpec(build=lambda: Stateful([np.float64(0.1), {np.int64(2)}]))
    found, again = map(weights, whole_and_resumed(tmp_path, spec, spec))
    assert found.pop("_extra_state") == again.pop("_extra_state") == {"value": [0.1, {2}]}
    assert same_bits(found, again)


@pytest.mark.parametrize("extra", [np.zeros(2), datetime.date(2020, 1, 1), len], ids=["array", "date", "function"])
def test_R1b_an_object_that_no_checkpoint_can_hold_ends_the_run_before_its_first_step(tmp_path, extra):
    run = make_run(tmp_path, config(), spec=ModelSpec(build=lambda: Stateful(extra)))
    kind = f"{type(extra).__module__}.{type(extra).__qualname__}"
    with pytest.raises(RankFailed, match=re.escape(f"spec.build: the model['_extra_state']['value']: found a {kind}")):
        train(run)
    assert checkpoint.folders(run.run_dir) == []


class WithDates(SGD):
    """An optimizer whose state no checkpoint can hold, from its first step on."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["when"] = datetime.date(2020, 1, 1)
        return super().step(closure)


def test_R1_the_state_of_an_optimizer_is_checked_after_the_first_step(tmp_path):
    spec = ModelSpec(build=build_mlp, optimizer=lambda model: WithDates(model.parameters(), lr=0.1))
    with pytest.raises(
        RankFailed, match=r"spec\.optimizer: WithDates\['state'\]\[0\]\['when'\]: found a datetime\.date"
    ):
        train(make_run(tmp_path, config(), spec=spec))


# Groups and state, by the names of the parameters


class Named(nn.Module):
    """Layers of equal shapes, so that nothing but the names tells their states apart."""

    def __init__(self, order):
        super().__init__()
        made = {name: nn.Linear(4, 4) for name in ("a", "b")}
        for name in order:
            self.add_module(name, made[name])
        self.head = nn.Linear(4, 3)

    def forward(self, features):
        return self.head(torch.tanh(self.b(torch.tanh(self.a(features)))))


def momentum(parameters):
    return SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("build", [momentum, lambda p: Adam(p, lr=0.01)], ids=["SGD", "Adam"])
def test_R4_layers_in_another_order_keep_their_states(tmp_path, build):
    before, now = (
        ModelSpec(build=lambda order=order: Named(order), optimizer=lambda m: build(m.parameters()))
        for order in ("ab", "ba")
    )
    settings = dataclasses.replace(config(), train=dataclasses.replace(config().train, seed=5))
    whole, resumed = whole_and_resumed(tmp_path, before, now, settings)
    found, expected = weights(resumed), weights(whole)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def by_layers(*prefixes):
    def optimizer(model):
        named = dict(model.named_parameters())
        groups = [
            {"params": [p for name, p in named.items() if name.startswith(prefix)], "lr": 0.1 / 2**i}
            for prefix, i in prefixes
        ]
        return SGD(groups, lr=0.1, momentum=0.9)

    return optimizer


def test_R4b_groups_in_another_order_keep_their_states_and_rates(tmp_path):
    before = ModelSpec(build=lambda: Named("ab"), optimizer=by_layers(("a", 0), ("b", 1), ("head", 2)))
    now = ModelSpec(build=lambda: Named("ab"), optimizer=by_layers(("head", 2), ("b", 1), ("a", 0)))
    whole, resumed = whole_and_resumed(tmp_path, before, now)
    assert same_bits(weights(whole), weights(resumed))


def test_R4b_groups_that_are_joined_are_an_error_if_their_rates_differ(tmp_path):
    before = ModelSpec(build=lambda: Named("ab"), optimizer=by_layers(("a", 0), ("b", 1), ("head", 2)))
    saved = train(make_run(tmp_path, cut_at(config(), FIRST), spec=before))
    now = ModelSpec(build=lambda: Named("ab"), optimizer=lambda model: momentum(model.parameters()))
    with pytest.raises(RankFailed, match=r"spec\.optimizer: SGD: a\.weight, .* are one group now, and were in groups"):
        resume(make_run(tmp_path, config(), spec=now), saved)


def test_R4c_a_layer_that_thaws_has_no_momentum_of_another(tmp_path):
    def without(frozen):
        def build():
            model = Named("ab")
            getattr(model, frozen).requires_grad_(False)
            return model

        return build

    fields = {"optimizer": "SGD", "lr": 0.1, "optimizer_args": {"momentum": 0.9}}
    settings = config(train=fields)
    saved = train(make_run(tmp_path, cut_at(settings, FIRST), spec=ModelSpec(build=without("a"))))
    run = make_run(tmp_path, cut_at(settings, FIRST + 1), spec=ModelSpec(build=without("b")))
    resumed = resume(run, saved)
    state = checkpoint.load(resumed, "training.pt")
    names = [name for group in state["settings"]["names"] for name in group]
    before, after = weights(saved), weights(resumed)
    for i, name in enumerate(names):
        if name.startswith("a."):  # the first momentum is the gradient, so the step is lr times it
            expected = before[name] - 0.1 * state["optimizer"]["state"][i]["momentum_buffer"]
            assert torch.allclose(after[name], expected, atol=1e-7)
    assert torch.equal(before["b.weight"], after["b.weight"])


# What the user changes


def steps_of(lr=0.1, kind=SGD, gamma=None, **more):
    def optimizer(model):
        made = kind(model.parameters(), lr=lr, **more)
        if gamma is None:
            return made
        return Optimization(optimizer=made, scheduler=lr_scheduler.ExponentialLR(made, gamma), interval="step")

    return ModelSpec(build=build_mlp, optimizer=optimizer)


def rates(saved):
    (group,) = checkpoint.load(saved, "training.pt")["settings"]["groups"]
    return group


def test_R5_a_new_rate_and_new_settings_count(tmp_path):
    saved = train(make_run(tmp_path, cut_at(config(), FIRST), spec=steps_of(lr=0.1)))
    resumed = resume(make_run(tmp_path, config(), spec=steps_of(lr=0.001, weight_decay=0.1)), saved)
    assert (rates(resumed)["lr"], rates(resumed)["weight_decay"]) == (0.001, 0.1)
    again = resume(make_run(tmp_path, cut_at(config(), LAST + 2), spec=steps_of(lr=0.001, weight_decay=0.1)), resumed)
    assert (again.step, rates(again)["lr"]) == (LAST + 2, 0.001)


def test_R5_a_new_rate_is_scheduled_as_the_old_one_was(tmp_path):
    whole, resumed = whole_and_resumed(tmp_path, steps_of(lr=0.1, gamma=0.8), steps_of(lr=0.01, gamma=0.8))
    assert rates(resumed)["lr"] == pytest.approx(rates(whole)["lr"])
    assert rates(resumed)["initial_lr"] == 0.01


def test_R5_a_new_setting_of_a_scheduler_counts_from_now_on(tmp_path):
    _, resumed = whole_and_resumed(tmp_path, steps_of(gamma=0.8), steps_of(gamma=0.5))
    assert rates(resumed)["lr"] == pytest.approx(0.1 * 0.8**FIRST * 0.5 ** (LAST - FIRST))


def test_R5_what_has_changed_is_told(tmp_path):
    saved = train(make_run(tmp_path, cut_at(config(), FIRST), spec=steps_of(lr=0.1, gamma=0.8)))
    run = make_run(tmp_path, config(), spec=steps_of(lr=0.01, gamma=0.5))
    (found,) = on_ranks(_messages, run, saved)
    (warning,) = [message for message in found if "new settings" in message]
    assert "lr of 0.weight, 0.bias, 2.weight, 2.bias was 0.1, is 0.01" in warning
    assert "gamma of ExponentialLR was 0.8, is 0.5" in warning


def _messages(run, saved):
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("spark_dl").addHandler(handler)
    try:
        generation = checkpoint.start_generation(run.run_dir)
        train_rank(dataclasses.replace(run, checkpoint=saved.url, generation=generation))
    finally:
        logging.getLogger("spark_dl").removeHandler(handler)
    return found


@pytest.mark.parametrize(("now", "message"), [
    (steps_of(kind=AdamW), "the optimizer was SGD, and is AdamW now"),
    (steps_of(gamma=0.9), "the scheduler was none, and is ExponentialLR now"),
], ids=["optimizer", "scheduler"])  # fmt: skip
def test_R13_another_class_is_an_error_that_names_both(tmp_path, now, message):
    saved = train(make_run(tmp_path, cut_at(config(), FIRST), spec=steps_of()))
    with pytest.raises(RankFailed, match=f"cannot resume: {message}"):
        resume(make_run(tmp_path, config(), spec=now), saved)


# Stages of a pipeline, which have other groups than rank 0


def layer_rates(model):
    groups = [{"params": [p], "lr": 0.3 * 0.4 ** int(n.split(".")[0])} for n, p in model.named_parameters()]
    optimizer = SGD(groups, lr=0.1, momentum=0.9)
    return Optimization(optimizer=optimizer, scheduler=lr_scheduler.StepLR(optimizer, 3, gamma=0.5), interval="step")


def build_deep():
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 3)
    )  # fmt: skip


MESHES = {
    "pipeline": Mesh(pipeline=2, stages=(4, 3)),
    "zero": Mesh(zero_stage=1),
    "zero 3": Mesh(zero_stage=3),
    "tensor": Mesh(tensor=2),
}


@pytest.mark.parametrize("last", MESHES)
@pytest.mark.parametrize("first", ["pipeline", "zero"])
def test_M1_rates_by_name_go_on_in_every_mesh(tmp_path, first, last):
    spec = ModelSpec(build=build_deep, optimizer=layer_rates, tensor_plan={"0": "colwise", "2": "rowwise"})
    settings = {name: config(2, parallel=mesh, train={"accumulation_steps": 2}) for name, mesh in MESHES.items()}
    whole = train(make_run(tmp_path, config(1, train={"accumulation_steps": 2}), spec=spec, name="whole"))
    saved = train(make_run(tmp_path, cut_at(settings[first], FIRST), spec=spec, name="cut"))
    resumed = resume(make_run(tmp_path, settings[last], spec=spec, name="cut"), saved)
    expected, found = load_weights(whole), load_weights(resumed)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-5), name


def test_the_checkpoint_that_a_run_goes_on_from_stays_until_a_second_one_is_there(tmp_path):
    """The first one could turn out to be damaged, as after a power cut."""
    settings = config(train={"every_steps": 2, "every_epochs": 9, "keep": 9})
    train(make_run(tmp_path, cut_at(settings, FIRST)))
    begun = checkpoint.list_checkpoints(str(tmp_path / "run"))[0]
    assert begun.step == 2
    for last_step, is_there in ((4, True), (6, False)):
        shutil.copytree(tmp_path / "run", tmp_path / str(last_step))
        url = begun.url.replace(str(tmp_path / "run"), str(tmp_path / str(last_step)))
        kept = config(train={"every_steps": 2, "every_epochs": 9, "keep": 1, "max_steps": last_step})
        resume(make_run(tmp_path, kept, name=str(last_step)), checkpoint.open_checkpoint(url))
        assert Path(url).exists() == is_there
        assert [saved.step for saved in checkpoint.list_checkpoints(str(tmp_path / str(last_step)))][-1] == last_step


# Several optimizers


MUON = {
    "optimizer": "AdamW", "lr": 0.01, "optimizer_args": {"weight_decay": 0.1},
    "param_groups": ({"match": "weight", "optimizer": "Muon", "lr": 0.02}, {"match": "0.bias", "lr": 0.1}),
}  # fmt: skip


def muon_and_adam(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    together = CombinedOptimizer([torch.optim.Muon(matrices, lr=0.02), AdamW(others, lr=0.01, weight_decay=0.1)])
    schedule = lr_scheduler.LambdaLR(together, [lambda step: 0.9**step, lambda step: 1 / (1 + step)])
    return Optimization(optimizer=together, scheduler=schedule, interval="step")


def plain_steps(tmp_path, settings, optimizers, schedule=None):
    """Weights after the steps of a plain loop in one process."""
    torch.manual_seed(settings.train.seed)
    model = build_mlp()
    parts = optimizers(model)
    loader = build_loader(make_run(tmp_path, settings, name="plain").train, settings, rank=0, world_size=1)
    steps = itertools.chain.from_iterable(loader.epoch(epoch) for epoch in range(settings.train.epochs))
    for at, step in enumerate(itertools.islice(steps, LAST)):
        (batch,) = step.micro_batches
        rows = {name: batch[name][batch["weight"] > 0] for name in ("features", "label")}
        model.zero_grad()
        F.cross_entropy(model(rows["features"]), rows["label"]).backward()
        for part, rate in zip(parts, schedule(at) if schedule else (1, 1), strict=True):
            for group in part.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * rate
            part.step()
    return model.state_dict()


def of_settings(model):
    named = dict(model.named_parameters())
    biases = [{"params": [named["0.bias"]], "lr": 0.1}, {"params": [named["2.bias"]]}]
    return [
        torch.optim.Muon([p for p in named.values() if p.ndim == 2], lr=0.02), AdamW(biases, lr=0.01, weight_decay=0.1)
    ]  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("is_own", [False, True], ids=["settings", "spec"])
def test_several_optimizers_train_as_a_plain_loop_and_resume_to_the_bit(tmp_path, is_own, num_ranks):
    spec = ModelSpec(build=build_mlp, optimizer=muon_and_adam if is_own else None)
    settings = config(num_ranks, train={} if is_own else MUON)
    whole, resumed = whole_and_resumed(tmp_path, spec, spec, settings)
    assert_same_to_the_bit(whole, resumed)
    assert whole.manifest["optimizer"]["optimizer"] == "Muon + AdamW"
    if is_own:
        expected = plain_steps(
            tmp_path, settings, lambda model: muon_and_adam(model).optimizer.optimizers,
            lambda step: (0.9**step, 1 / (1 + step)),
        )  # fmt: skip
    else:
        expected = plain_steps(tmp_path, settings, of_settings)
    for name, value in weights(whole).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def to_zero(model, total_steps):
    optimizer = SGD(model.parameters(), lr=1.0)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total_steps)
    return Optimization(optimizer=optimizer, scheduler=schedule, interval="step")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_optimizer_that_asks_for_the_steps_of_the_run_gets_them(tmp_path, num_ranks):
    run = make_run(
        tmp_path, config(num_ranks, train={"log_every": 1}), spec=ModelSpec(build=build_mlp, optimizer=to_zero)
    )
    train(run)
    rates = [line["lr"] for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    assert rates == pytest.approx([1 - step / LAST for step in range(LAST)])
