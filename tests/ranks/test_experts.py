"""Experts on different ranks give what one process gives, in the layer and in whole training runs."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spark_dl import DDP, Launch, Mesh, ModelSpec
from spark_dl.launch.rank import rendezvous
from spark_dl.nn import MoE
from spark_dl.parallel.mesh.groups import build_groups
from spark_dl.parallel.mesh.layers import connect_experts, cut_experts
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.rundir.metrics import read_metrics
from tests.builders.models import MLP, small_config
from tests.ranks.launcher import RankFailed, run_ranks
from tests.ranks.runs import cut_at, make_run, resume, train, train_rank
from tests.ranks.test_mesh import with_mesh
from tests.ranks.test_parity import assert_same_training

ROWS, WIDTH, EXPERTS = 32, 8, 4


def build_layer(top_k, *, even=False):
    """A layer of which some experts get far more tokens than others, or all get equally many of those of `one_hot`."""
    torch.manual_seed(0)
    layer = MoE(WIDTH, EXPERTS, top_k=top_k, balance="loss", loss_weight=0.1)
    with torch.no_grad():
        if even:
            first, second = torch.eye(EXPERTS), torch.eye(EXPERTS).roll(1, 0)
            layer.router.weight.copy_((2 * first + second).repeat(1, WIDTH // EXPERTS))
        else:
            layer.router.weight.copy_(layer.router.weight + torch.tensor([1.0, 0.2, 0.0, -0.5])[:, None])
    return layer


def some_tokens():
    return torch.randn(ROWS, 3, WIDTH, generator=torch.Generator().manual_seed(1)) + 0.5


def one_hot():
    return torch.eye(WIDTH).unsqueeze(1).repeat(ROWS // WIDTH, 3, 1)


def backward(layer, x, rows):
    output = layer(x)
    (output.sin().sum() + rows * layer.auxiliary_loss).backward()
    return output.detach()


class Counted:
    """Counts the bytes of float32 tokens that this rank sends to others."""

    def __init__(self, group):
        self.exchange, self.own, self.sent = dist.all_to_all_single, group.rank(), []

    def __call__(self, output, tensor, output_splits=None, input_splits=None, group=None):
        if tensor.dtype == torch.float32:
            to_others = sum(input_splits) - input_splits[self.own]
            self.sent.append(to_others * tensor.shape[1] * tensor.element_size())
        return self.exchange(output, tensor, output_splits, input_splits, group=group)


def layer_on_ranks(experts, top_k, even):
    """Output, gradients and sent bytes of this rank, and which experts it has."""
    with rendezvous.join(Launch()) as world:
        groups = build_groups(world, Mesh(experts=experts).dims(world.world_size), 20)
        layer = build_layer(top_k, even=even)
        layouts = cut_experts(layer, [""], groups)
        connect_experts(layer, [""], groups, None)
        layer.sum_over_data = dist.all_reduce
        rows = ROWS // world.world_size
        tokens = one_hot() if even else some_tokens()
        x = tokens[world.rank * rows : (world.rank + 1) * rows].requires_grad_()
        dist.all_to_all_single = counted = Counted(groups.experts)
        try:
            output = backward(layer, x, rows)
        finally:
            dist.all_to_all_single = counted.exchange
        gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
        for name, gradient in gradients.items():
            if name not in layouts:
                dist.all_reduce(gradient)
            elif groups.expert_replicas is not None:
                dist.all_reduce(gradient, group=groups.expert_replicas)
        counts = layer.take_counts()
        return (
            output.tolist(),
            x.grad.tolist(),
            {n: g.tolist() for n, g in gradients.items()},
            counted.sent,
            counts.tolist(),
        )


MESHES = [(2, 2), (4, 4), (4, 2)]


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize(("num_ranks", "experts"), MESHES)
def test_the_layer_gives_what_one_process_gives(num_ranks, experts, top_k):
    layer, x = build_layer(top_k), some_tokens().requires_grad_()
    output = backward(layer, x, ROWS)
    counts = layer.take_counts()[:-1]
    assert counts.max() > 2 * counts.mean() if top_k == 1 else counts.max() > 1.5 * counts.mean()
    assert counts.min() < 0.5 * counts.mean()
    found = run_ranks(layer_on_ranks, num_ranks, experts, top_k, False)

    def same(values, expected):
        torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-6, atol=1e-6)

    same([row for each in found for row in each[0]], output)
    same([row for each in found for row in each[1]], x.grad)
    for name, parameter in layer.named_parameters():
        for rank, each in enumerate(found):
            parts = parameter.grad.chunk(experts) if name.startswith("experts.") else [parameter.grad]
            same(each[2][name], parts[rank % len(parts)])
    same([sum(column) for column in zip(*(each[4] for each in found), strict=True)][:-1], counts.float())


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize(("num_ranks", "experts"), MESHES)
def test_bytes_sent(num_ranks, experts, top_k):
    """Two exchanges forward and two backward, each of all tokens but those whose expert is on their own rank."""
    tokens = ROWS // num_ranks * 3
    for *_, sent, _ in run_ranks(layer_on_ranks, num_ranks, experts, top_k, True):
        assert len(sent) == 4
        assert sum(sent) == 4 * (experts - 1) / experts * tokens * top_k * WIDTH * 4


class Residual(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.moe = MoE(16, 4, hidden=8, **options)

    def forward(self, x):
        return x + self.moe(x.view(-1, 2, 16)).view(x.shape)


def build_moe(**options):
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), Residual(**options), nn.Linear(32, 3))


def build_biased():
    return build_moe(bias_rate=0.05)


def build_with_loss():
    return build_moe(top_k=1, balance="loss", loss_weight=0.2)


def build_with_sigmoid():
    return build_moe(top_k=1, score="sigmoid", bias_rate=0.05, gated=True)


BIASED = ModelSpec(build=build_biased)
MOMENTUM = {"optimizer_args": {"momentum": 0.9, "weight_decay": 0.01}, "clip_grad_norm": 0.3}
ADAM = {"optimizer": "Adam", "lr": 0.003}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("num_ranks", "parallel", "build"), [
    (1, Mesh(), build_biased),
    (3, DDP(), build_biased),
    (3, DDP(), build_with_loss),
    (2, Mesh(experts=2), build_with_sigmoid),
    (2, Mesh(experts=2), build_with_loss),
    (4, Mesh(experts=2), build_biased),
    (4, Mesh(experts=4), build_with_sigmoid),
])  # fmt: skip
def test_training_gives_what_one_process_gives(tmp_path, num_ranks, parallel, build):
    config = small_config(num_ranks, train=MOMENTUM, parallel=parallel)
    assert_same_training(tmp_path, config, 245, spec=ModelSpec(build=build))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [
    {"zero_stage": 1}, {"zero_stage": 2, "bucket_mib": 0.0001}, {"zero_stage": 1, "replicas": 2},
    {"zero_stage": 2, "replicas": 2},
])  # fmt: skip
@pytest.mark.parametrize("train", [MOMENTUM, ADAM], ids=["SGD", "Adam"])
def test_experts_with_shards(tmp_path, train, options):
    train = {**train, "accumulation_steps": 2} if train is ADAM else train
    config = small_config(4, train=train, parallel=Mesh(experts=2, **options))
    assert_same_training(tmp_path, config, 245, spec=BIASED)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_adam_with_all_experts_on_different_ranks(tmp_path, zero_stage):
    config = small_config(4, train=ADAM, parallel=Mesh(experts=4, zero_stage=zero_stage))
    assert_same_training(tmp_path, config, 245, spec=BIASED)


def build_deep():
    layers = (nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 32), Residual(), Residual(bias_rate=0.05), nn.Linear(32, 3))
    return nn.Sequential(*layers)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [
    {"pipeline": 2},
    {"pipeline": 2, "schedule": "gpipe", "zero_stage": 1},
    {"tensor": 2},
    {"tensor": 2, "zero_stage": 2},
], ids=str)  # fmt: skip
def test_experts_of_models_that_are_cut(tmp_path, mesh):
    config = small_config(4, train={**MOMENTUM, "accumulation_steps": 2}, parallel=Mesh(experts=2, **mesh))
    assert_same_training(tmp_path, config, 245, spec=ModelSpec(build=build_deep))
    lines = [line for line in read_metrics(str(tmp_path / "run")) if line["kind"] == "step"]
    assert all(line["expert_load"].keys() == {"3.moe", "4.moe"} for line in lines)


def test_shards_with_as_many_replicas_as_ranks(tmp_path):
    assert_same_training(tmp_path, small_config(2, train=MOMENTUM, parallel=Mesh(zero_stage=1, replicas=2)), 245)


STEPS = [
    (2, {"experts": 2}), (4, {"experts": 4, "zero_stage": 1}), (1, {}), (4, {"experts": 2, "zero_stage": 2}),
    (4, {"experts": 2, "zero_stage": 1, "replicas": 2}), (2, {"zero_stage": 3}), (4, {"experts": 2}), (2, {}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("train_options", [{"optimizer_args": {"momentum": 0.9}}, ADAM], ids=["SGD", "Adam"])
def test_a_run_goes_on_with_other_numbers_of_experts_per_rank(tmp_path, train_options):
    config = small_config(1, train={**train_options, "epochs": 2}, parallel=Mesh())
    expected = train(make_run(tmp_path, config, spec=BIASED, name="whole"))
    run, saved = make_run(tmp_path, config, spec=BIASED), None
    for step, (num_ranks, mesh) in enumerate(STEPS, 1):
        run = dataclasses.replace(run, config=cut_at(with_mesh(config, num_ranks, **mesh), step))
        before = None if saved is None else load_weights(saved)
        saved = train(run) if saved is None else resume(run, saved)
        if before is not None:
            weights = load_weights(saved)
            assert {name: w.shape for name, w in weights.items()} == {name: w.shape for name, w in before.items()}
    last = resume(run, saved, config)
    assert last.step == expected.step
    for name, weight in load_weights(expected).items():
        torch.testing.assert_close(load_weights(last)[name], weight, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
def test_the_same_mesh_gives_the_same_bits(tmp_path):
    config = small_config(4, train=ADAM, parallel=Mesh(experts=2, zero_stage=1))
    expected = load_weights(train(make_run(tmp_path, config, spec=BIASED, name="whole")))
    run = make_run(tmp_path, config, spec=BIASED)
    saved = train(dataclasses.replace(run, config=cut_at(config, 4)))
    found = load_weights(resume(run, saved))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_the_load_of_experts_and_the_validation_are_those_of_one_process(tmp_path):
    lines, results = [], []
    for num_ranks, parallel in ((1, Mesh()), (4, Mesh(experts=4))):
        train = {"log_every": 3, "validation_fraction": 0.2}
        run = make_run(
            tmp_path, small_config(num_ranks, train=train, parallel=parallel), spec=BIASED, name=f"{num_ranks}"
        )
        results.append(run_ranks(train_rank, num_ranks, run)[0])
        lines.append([line["expert_load"]["2.moe"] for line in read_metrics(run.run_dir) if line["kind"] == "step"])
    assert lines[0] == lines[1]
    for load in lines[0]:
        assert sum(load["share"]) == pytest.approx(1, abs=1e-5)
        assert load["max_over_mean"] == pytest.approx(4 * max(load["share"]), abs=1e-4)
        assert load["dropped"] == 0
    one, four = ([entry["metrics"]["loss"] for entry in result["history"]] for result in results)
    assert one == pytest.approx(four, rel=1e-5)


def build_with_capacity():
    return build_moe(top_k=1, capacity_factor=0.5, balance="none")


def test_dropped_tokens_are_in_the_metrics(tmp_path):
    """With half of an equal share for each expert, at least half of all choices are dropped in whole batches."""
    spec, config = ModelSpec(build=build_with_capacity), small_config(2, parallel=Mesh(experts=2))
    run = make_run(tmp_path, config, spec=spec, rows=240)
    run_ranks(train_rank, 2, run)
    loads = [line["expert_load"]["2.moe"] for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    assert all(0.5 <= load["dropped"] < 1 for load in loads)


def two_layers():
    return nn.Sequential(nn.Linear(4, 16), MoE(16, 4, hidden=8), nn.Linear(16, 8), MoE(8, 3, hidden=8), nn.Linear(8, 3))


def test_only_the_layers_that_are_named_are_divided(tmp_path):
    spec = ModelSpec(build=two_layers, experts=["[01]"])
    assert_same_training(tmp_path, small_config(2, train=MOMENTUM, parallel=Mesh(experts=2)), 245, spec=spec)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("spec", "message"), [
    (ModelSpec(build=two_layers), r"parallel.experts: expected a divisor of the number of experts of '3', 3, found 2"),
    (ModelSpec(build=two_layers, experts=["1", "4"]), r"spec.experts: .* such as '1', found '4', .* '4', a Linear"),
    (ModelSpec(build=two_layers, experts=["moe*"]), r"spec.experts: .* such as '1', found 'moe\*', which matches no"),
    (MLP, r"parallel.experts: expected 1, as the model has no spark_dl.nn.MoE"),
])  # fmt: skip
def test_models_whose_experts_cannot_be_divided(tmp_path, spec, message):
    with pytest.raises(RankFailed, match=message):
        train(make_run(tmp_path, small_config(2, parallel=Mesh(experts=2)), spec=spec))


def test_bf16_on_different_ranks_is_bf16_in_one_process(tmp_path):
    losses = []
    for num_ranks, parallel in ((1, Mesh()), (2, Mesh(experts=2))):
        config = small_config(num_ranks, train={"precision": "bf16-mixed"}, parallel=parallel)
        run = make_run(tmp_path, config, spec=BIASED, name=f"{num_ranks}")
        losses.append([entry["train_loss"] for entry in run_ranks(train_rank, num_ranks, run)[0]["history"]])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def compile_layer():
    """Largest differences of the output and of a gradient of a compiled layer."""
    layer = build_layer(2)
    compiled, x = torch.compile(copy.deepcopy(layer)), some_tokens()
    outputs = [backward(module, x, ROWS) for module in (layer, compiled)]
    gradients = [module.experts.up.grad for module in (layer, compiled)]
    return [float((a - b).abs().max()) for a, b in (outputs, gradients)]


@pytest.mark.long
@pytest.mark.slow
def test_a_compiled_layer_gives_the_same():
    assert max(run_ranks(compile_layer, 1, timeout_s=100)[0]) < 1e-5
