"""Pipelines give the bits of a single process with the same micro-batches, with every schedule."""

import contextlib
import functools
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spark_dl import ModelSpec
from spark_dl.parallel.mesh.layers import balance, build_chain
from spark_dl.parallel.mesh.pipeline import Pipeline
from tests.builders.models import same_bits
from tests.ranks.launcher import RankFailed, run_ranks
from tests.ranks.pipelines import CPU, Case, adam, build_normed, data_ranks, joined, part_of, sum_gradients

SCHEDULES = [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2),
             ("zbv", 2)]  # fmt: skip


def build_pipeline(case, group, schedule, stages_per_rank, cut=None):
    model = case.spec.build_to_train()
    chain = build_chain(model, case.layers)
    num_stages = dist.get_world_size(group) * stages_per_rank
    return Pipeline(
        case.spec, model, chain, cut or balance([1.0] * len(chain), num_stages), case.config,
        group=group, device=CPU, schedule=schedule, stages_per_rank=stages_per_rank,
    )  # fmt: skip


def train_rank(case, schedules):
    """What each schedule gives: losses of each step, the state of this rank, the output, and numbers of parameters."""
    found = []
    with joined() as group, nothing_pickled():
        for schedule, stages_per_rank, cut in schedules:
            pipeline = build_pipeline(case, group, schedule, stages_per_rank, cut)
            optimizer = case.optimizer(pipeline.module.parameters())
            losses = []
            for micro_batches, rows in case.steps():
                losses.append(float(pipeline.forward_backward(micro_batches, rows)))
                optimizer.step()
                optimizer.zero_grad()
            state = {name: tensor.clone() for name, tensor in pipeline.module.state_dict().items()}
            output = case.output(pipeline.module, pipeline.forward)
            counted = sum(p.numel() for p in pipeline.counted_parameters())
            found.append((losses, state, output, counted, pipeline.tied))
    return found


@contextlib.contextmanager
def nothing_pickled():
    def fail(*args, **kwargs):
        raise AssertionError("pickled")

    own = pickle.Pickler, pickle.Unpickler, dist.send_object_list, dist.recv_object_list
    pickle.Pickler = pickle.Unpickler = dist.send_object_list = dist.recv_object_list = fail
    try:
        yield
    finally:
        pickle.Pickler, pickle.Unpickler, dist.send_object_list, dist.recv_object_list = own


def same_output(found, expected):
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same_output(found[name], expected[name]) for name in expected)
    return torch.equal(found, expected)


def assert_same_bits(case, num_ranks, *schedules):
    """Trains with schedules (name, stages per rank[, cut]) on ranks, and compares with a single process."""
    schedules = [(*schedule, None)[:3] for schedule in schedules]
    losses, state, output = case.train_alone()
    results = run_ranks(train_rank, num_ranks, case, schedules)
    for schedule, of_ranks in zip(schedules, zip(*results, strict=True), strict=True):
        assert [sum(each) for each in zip(*(r[0] for r in of_ranks), strict=True)] == losses, schedule
        names = [name for r in of_ranks for name in r[1]]
        assert sorted(names) == sorted(state), schedule  # each tensor on one rank
        assert same_bits({name: t for r in of_ranks for name, t in r[1].items()}, {n: state[n] for n in names}), (
            schedule
        )
        last = 0 if schedule[0] == "zbv" else num_ranks - 1
        assert [r[2] is None for r in of_ranks] == [rank != last for rank in range(num_ranks)], schedule
        assert same_output(of_ranks[last][2], output), schedule
        assert sum(r[3] for r in of_ranks) == sum(p.numel() for p in case.spec.build().parameters()), schedule


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_schedule_gives_the_bits_of_one_process(num_ranks):
    """BatchNorm, which would show an extra pass; a short last batch; a layer in place; outputs that are views."""
    cuts = {4: {1: [2, 2, 6, 2], 2: [1, 1, 1, 1, 4, 1, 2, 1]}}.get(num_ranks, {})
    assert_same_bits(Case(), num_ranks, *((name, count, cuts.get(count)) for name, count in SCHEDULES))


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_adam_more_micro_batches_and_autocast(num_ranks):
    cut = [2, 2, 6, 2] if num_ranks == 4 else None
    schedules = [("1f1b", 1, cut), ("zero_bubble", 1, cut), ("gpipe", 1, cut)]
    assert_same_bits(Case(optimizer=adam, micro_batches=8), num_ranks, *schedules)
    assert_same_bits(Case(more={"precision": "bf16-mixed"}), num_ranks, *schedules)


def build_linears(num_layers):
    torch.manual_seed(1)
    sizes = [4, *[8] * (num_layers - 1), 3]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


@pytest.mark.parametrize("cut", [[2, 1], [1, 2], [4, 1], [2, 3]], ids=str)
def test_unequal_stages_of_three_and_five_layers(cut):
    case = Case(ModelSpec(build=functools.partial(build_linears, sum(cut))), rows=100)
    assert_same_bits(case, 2, ("1f1b", 1, cut), ("zero_bubble", 1, cut))


class TwoTowers(nn.Module):
    """Called with two columns and an option; its layers pass on a tuple of values and a mask."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.third = Join(), MaskedLinear(), MaskedLinear()
        self.head = Head()

    def forward(self, features, shifted, *, scale):
        return self.head(self.third(self.second(self.first(features, shifted, scale=scale))))


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, features, shifted, *, scale):
        return self.linear(torch.cat([features, shifted], 1)) * scale, features[:, :1] > 0


class MaskedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, pair):
        value, mask = pair
        return torch.tanh(self.linear(value)) * mask + value, mask


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, pair):
        return {"scores": self.linear(pair[0]), "mask": pair[1]}


def forward_two(model, batch):
    """Computes before and after the call of the model, and reads an attribute of the model."""
    assert isinstance(model, TwoTowers)
    features = batch["features"] * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(features, features + 1, scale=0.5)
    return {"scores": out["scores"].float() * 3, "masked": out["mask"], "training": torch.tensor(model.training)}


def loss_two(output, batch):
    assert output["masked"].shape == (len(batch["weight"]), 1)
    return nn.functional.cross_entropy(output["scores"], batch["label"], reduction="none")


TWO_TOWERS = Case(
    ModelSpec(build=TwoTowers, forward=forward_two, loss=loss_two), ("first", "second", "third", "head"),
    rows=100, more={"label": None, "labels": ("label",)},
)  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_forward_and_loss_of_the_user_with_dicts_and_tuples(num_ranks):
    schedules = [("1f1b", 1), ("zero_bubble", 1)] + ([("zbv", 2), ("interleaved", 2)] if num_ranks == 2 else [])
    assert_same_bits(TWO_TOWERS, num_ranks, *schedules)


class Tied(nn.Module):
    """Maps a number to a token, and the token to scores by the same weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(3, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        value = self.embed(tokens)
        for layer in self.layers:
            value = layer(value)
        return self.head(self.norm(value))


def forward_tokens(model, batch):
    return model((batch["features"][:, 0] > 0).long() + (batch["features"][:, 1] > 1).long())


@pytest.mark.parametrize(("num_ranks", "schedule"), [(2, ("1f1b", 1)), (2, ("zbv", 2)), (4, ("zero_bubble", 1))])
def test_tied_weights_have_the_same_bits_on_all_ranks(num_ranks, schedule):
    case = Case(ModelSpec(build=Tied, forward=forward_tokens), ("embed", "layers.*", "norm", "head"))
    losses, state, _ = case.train_alone()
    [*of_ranks] = (results[0] for results in run_ranks(train_rank, num_ranks, case, [(*schedule, None)]))
    is_v = schedule[0] == "zbv"  # where one rank has the first and the last stage, and one copy
    assert {tuple(r[4]) for r in of_ranks} == {() if is_v else ((("embed.weight", "head.weight"), (0, num_ranks - 1)),)}
    trained = {name: t for r in of_ranks for name, t in r[1].items()}
    assert torch.equal(trained["embed.weight"], trained["head.weight"])
    assert trained.keys() == state.keys()
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-5, atol=1e-6)
    assert sum(r[3] for r in of_ranks) == sum(p.numel() for p in Tied().parameters())
    torch.testing.assert_close([sum(x) for x in zip(*(r[0] for r in of_ranks), strict=True)], losses, rtol=1e-5, atol=0)


class BySign(nn.Module):
    """Computes rows apart by the sign of a value, as experts do: shapes within it depend on values."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, value):
        (above,), (below,) = torch.where(value[:, 0] > 0), torch.where(value[:, 0] <= 0)
        order = torch.cat([above, below])
        parts = [layer(value[index]) for layer, index in ((self.first, above), (self.second, below)) if len(index)]
        return torch.cat(parts)[torch.argsort(order)]


def build_by_sign():
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), BySign(), nn.BatchNorm1d(8), BySign(), nn.Dropout(0.0), nn.Linear(8, 8),
        nn.BatchNorm1d(8), nn.Linear(8, 3),
    )  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_layers_whose_shapes_are_found_by_computing_them(num_ranks):
    """BatchNorm would show it if the pass that finds the shapes left anything behind."""
    schedules = [("1f1b", 1), ("zero_bubble", 1)] + ([("zbv", 2), ("interleaved", 2)] if num_ranks == 2 else [])
    cuts = {1: {2: [5, 4], 4: [2, 2, 3, 2]}[num_ranks], 2: [2, 2, 3, 2]}
    assert_same_bits(
        Case(ModelSpec(build=build_by_sign), rows=100), num_ranks, *((s, n, cuts[n]) for s, n in schedules)
    )


def train_data_rank(case):
    with joined() as world:
        group, same_stage, data_rank = data_ranks(world)
        pipeline = build_pipeline(case, group, "1f1b", 1)
        optimizer = case.optimizer(pipeline.module.parameters())
        losses = []
        for micro_batches, rows in case.steps():
            losses.append(float(pipeline.forward_backward(part_of(micro_batches, data_rank), rows)))
            sum_gradients(pipeline.module, same_stage)
            optimizer.step()
            optimizer.zero_grad()
        return losses, pipeline.module.state_dict()


def test_two_pipelines_that_share_the_rows():
    case = Case(ModelSpec(build=functools.partial(build_linears, 4)))
    losses, state, _ = case.train_alone()
    results = run_ranks(train_data_rank, 4, case)
    torch.testing.assert_close([sum(of_step) for of_step in zip(*(r[0] for r in results), strict=True)], losses)
    for _, trained in results:
        assert trained
        for name, tensor in trained.items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-5, atol=1e-6)


def build_frozen():
    """The first stage of two on the first rank has nothing to train, so what it passes on has no gradient."""
    model = build_normed()
    for layer in model[:4]:
        layer.requires_grad_(False)
    return model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble", "zbv"])
def test_a_stage_with_frozen_layers(schedule):
    assert_same_bits(Case(ModelSpec(build=build_frozen), rows=100), 2, (schedule, 2, [4, 4, 2, 2]))


class Beside(nn.Module):
    """Passes on a parameter beside its values."""

    def __init__(self):
        super().__init__()
        self.linear, self.shift = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, value):
        return self.linear(value), self.shift * 2


class Add(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1]


def build_beside():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 4), Beside(), Add(), nn.Linear(4, 3))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["zero_bubble", "1f1b"])
def test_a_gradient_that_a_schedule_would_leave_out_is_an_error(schedule):
    """With three ranks, as the first stage computes all its gradients at once."""
    case, cut = Case(ModelSpec(build=build_beside)), [1, 1, 2]
    if schedule == "1f1b":
        assert_same_bits(case, 3, (schedule, 1, cut))
        return
    with pytest.raises(
        RankFailed, match=r"RuntimeError: parallel.schedule: 'zero_bubble' cannot .* gradient of 1.shift"
    ):
        run_ranks(train_rank, 3, case, [(schedule, 1, cut)])


def hold_rank(case):
    """Bytes of storage of the parameters and buffers that are alive on this rank, and of its gradients."""
    with joined() as group:
        model = case.spec.build_to_train()
        layers = [module for module in model.modules() if not list(module.children())]
        chain = build_chain(model)
        pipeline = Pipeline(case.spec, model, chain, [2, 2, 6, 2], case.config, group=group, device=CPU)
        pipeline.forward_backward(*next(case.steps()))
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for layer in layers
                for t in (*layer.parameters(), *layer.buffers()) if t.device.type != "meta"}  # fmt: skip
        own = [p for layer in chain for p in layer.module.parameters() if p.device.type != "meta"]
        assert all(p.grad is not None for p in own)
        return sum(held.values()), sum(p.numel() for p in own)


def test_a_rank_holds_its_own_layers_alone():
    case = Case()
    model = case.spec.build()
    results = run_ranks(hold_rank, 4, case)
    assert sum(held for held, _ in results) == sum(t.untyped_storage().nbytes() for t in model.state_dict().values())
    assert sum(count for _, count in results) == sum(p.numel() for p in model.parameters())


def fail_rank(case, change):
    with joined() as group:
        pipeline = build_pipeline(case, group, "1f1b", 1)
        for i, (micro_batches, rows) in enumerate(case.steps()):
            pipeline.forward_backward(change(i, micro_batches), rows)


def cut_unequally(step, micro_batches):
    return [{name: t[:-1] for name, t in batch.items()} if i else batch for i, batch in enumerate(micro_batches)]


def widen_later(step, micro_batches):
    return [{**batch, "features": batch["features"].repeat(1, 1 + (step > 0))} for batch in micro_batches]


def label_too_large(step, micro_batches):
    return [{**batch, "label": batch["label"] + 5} for batch in micro_batches]


@pytest.mark.parametrize(
    ("change", "ranks", "message"),
    [
        (
            cut_unequally,
            2,
            "train.accumulation_steps: expected micro-batches with the same number of rows in a pipeline",
        ),
        (
            widen_later,
            2,
            "the column 'features' has the shape (12, 8) in one micro-batch, and (12, 4) in the first one",
        ),
        (label_too_large, 1, "spec.loss: Target"),
    ],
)
def test_an_error_is_that_of_the_user_and_not_of_the_schedule(change, ranks, message):
    with pytest.raises(RankFailed) as caught:
        run_ranks(fail_rank, 2, Case(), change)
    assert str(caught.value).count(f"ValueError: {message}") == ranks
    assert "failed to run forward" not in str(caught.value)


class Rounded(nn.Module):
    """Passes on whole numbers, such as indices of words."""

    def forward(self, value):
        return value.round().long()


def build_with_a_stage_that_passes_on_whole_numbers():
    return nn.Sequential(nn.Linear(4, 4), Rounded(), nn.Embedding(50, 4), nn.Linear(4, 3))


def test_a_boundary_without_gradients_is_an_error_of_schedules_that_need_one():
    case = Case(ModelSpec(build=build_with_a_stage_that_passes_on_whole_numbers))
    with pytest.raises(RankFailed) as caught:
        run_ranks(train_rank, 2, case, [("zero_bubble", 1, [2, 2])])
    message = (
        "parallel.schedule: 'zero_bubble' needs a tensor of floating-point numbers at the end of each stage, found"
    )
    assert str(caught.value).count(message) == 2


def no_parameters_rank(case):
    with joined() as group:
        build_pipeline(case, group, "gpipe", 1, [11, 1])


def build_with_a_last_layer_that_has_nothing():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(11)), nn.Tanh())


def test_a_rank_without_a_parameter_to_train_is_an_error_on_all_ranks():
    with pytest.raises(RankFailed) as caught:
        run_ranks(no_parameters_rank, 2, Case(ModelSpec(build=build_with_a_last_layer_that_has_nothing)))
    message = "parallel.stages: expected a parameter that requires a gradient on each rank of a pipeline, found none in"
    assert str(caught.value).count(f"ValueError: {message}") == 2
