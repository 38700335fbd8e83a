"""A server's block of the weights: its optimizer does what one over the whole model does."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from spark_dl import Config, Launch, ModelSpec, ParameterServer, Train
from spark_dl.baselines.servers.block import Block
from spark_dl.baselines.servers.flat import FlatModel
from spark_dl.config.conflicts import ELEMENTWISE
from spark_dl.parallel.trainable import OptimizerState, build_optimizer
from tests.builders.models import MLP, build_mlp

ARGS = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True}, "Adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.5},
}  # fmt: skip


def config(optimizer="SGD", num_servers=1, **train):
    args = {"optimizer_args": ARGS.get(optimizer, {}), **train}
    return Config(
        train=Train(optimizer=optimizer, lr=0.05, **args), launch=Launch(num_ranks=4),
        parallel=ParameterServer(num_servers=num_servers),
    )  # fmt: skip


def flat_model(num_servers, spec=MLP):
    torch.manual_seed(0)
    return FlatModel(spec, torch.device("cpu"), num_servers)


def gradient(flat, step):
    return np.random.default_rng(step).normal(size=len(flat.weights)).astype(np.float32)


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_blocks_are_updated_as_the_whole_model_is(optimizer):
    settings = config(optimizer, num_servers=3)
    flat, whole = flat_model(3), flat_model(1)
    reference = build_optimizer(whole.model, settings, 4)
    blocks = [Block(flat.weights[part], settings, 4) for part in flat.blocks]
    for step in range(6):
        whole.gradients.copy_(torch.from_numpy(gradient(flat, step)))
        reference.step()
        for block, part in zip(blocks, flat.blocks, strict=True):
            block.update([gradient(flat, step)[part]], [1.0], 1.0, None)
    got = np.concatenate([block.snapshot() for block in blocks])
    np.testing.assert_allclose(got, whole.weights.numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_the_state_of_a_block_comes_back(optimizer):
    flat, settings = flat_model(1), config(optimizer)
    one = Block(flat.weights, settings, 4)
    for step in range(3):
        one.update([gradient(flat, step)], [1.0], 1.0, None)
    two = Block(torch.zeros_like(flat.weights), settings, 4)
    two.place(torch.from_numpy(one.snapshot()))
    two.optimizer.param_groups[0]["lr"] = one.optimizer.param_groups[0]["lr"] = 0.01
    OptimizerState(two.optimizer).load_state_dict(copy.deepcopy(OptimizerState(one.optimizer).state_dict()))
    assert two.optimizer.param_groups[0]["lr"] == 0.01  # the loop's, not the state's
    for block in (one, two):
        block.update([gradient(flat, 9)], [1.0], 1.0, None)
    np.testing.assert_array_equal(one.snapshot(), two.snapshot())


def test_an_update_takes_each_gradient_s_share_and_the_factor_of_the_learning_rate():
    flat = flat_model(1)
    settings = config(optimizer_args={})
    block, before = Block(flat.weights, settings, 4), flat.weights.numpy().copy()
    a, b = gradient(flat, 1), gradient(flat, 2)
    block.update([a.copy(), b.copy()], [0.75, 0.25], 0.5, None)
    np.testing.assert_allclose(block.snapshot(), before - 0.05 * 0.5 * (0.75 * a + 0.25 * b), rtol=1e-5, atol=1e-7)


def test_the_sum_is_clipped_not_each_gradient():
    flat = flat_model(1)
    block, before = Block(flat.weights, config(optimizer_args={}), 4), flat.weights.numpy().copy()
    a = gradient(flat, 1)
    block.update([a.copy(), -0.5 * a], [0.5, 0.5], 1.0, 0.1)
    np.testing.assert_allclose(np.linalg.norm(block.snapshot() - before), 0.05 * 0.1, rtol=1e-4)


def test_a_snapshot_stays_as_it_is():
    flat = flat_model(1)
    block = Block(flat.weights, config(), 4)
    snapshot = block.snapshot()
    assert block.snapshot() is snapshot  # one copy for all trainers
    kept = snapshot.copy()
    block.update([gradient(flat, 1)], [1.0], 1.0, None)
    np.testing.assert_array_equal(snapshot, kept)
    assert not np.array_equal(block.snapshot(), kept)


def test_a_trainer_s_block_is_empty_and_knows_the_learning_rate():
    block = Block(torch.zeros(0), config("Adagrad"), 4)
    block.optimizer.step()
    assert block.optimizer.param_groups[0]["lr"] == 0.05


# The flat model


def test_parameters_and_gradients_are_views_of_the_flat_vectors():
    flat = flat_model(1)
    torch.manual_seed(0)
    plain = build_mlp()
    for a, b in zip(flat.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    for model in (flat.model, plain):
        for _ in range(2):  # gradients are added up
            nn.functional.cross_entropy(model(x), y).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in plain.parameters()])
    torch.testing.assert_close(flat.gradients, expected)
    flat.weights.zero_()
    assert not any(p.any() for p in flat.model.parameters())


class Tied(nn.Module):
    """A weight that is used twice, one that is frozen, and one whose memory is not laid out row by row."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.conv = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)


def test_tied_frozen_and_strided_parameters():
    flat = flat_model(1, ModelSpec(build=Tied))
    assert len(flat.weights) == 16 + 36 + 2
    assert flat.model.a.weight is flat.model.b.weight
    torch.manual_seed(0)
    for name, value in Tied().state_dict().items():
        assert torch.equal(flat.model.state_dict()[name], value)


@pytest.mark.parametrize(("num_servers", "sizes"), [(1, [131]), (2, [65, 66]), (4, [32, 33, 33, 33])])
def test_blocks_cover_the_weights(num_servers, sizes):
    flat = flat_model(num_servers)
    assert [part.stop - part.start for part in flat.blocks] == sizes
    assert [part.start for part in flat.blocks] == [0, *(part.stop for part in flat.blocks[:-1])]


@pytest.mark.parametrize(("build", "num_servers", "message"), [
    (nn.Identity, 1, "spec.build: no parameter of the model requires a gradient"),
    (lambda: nn.Linear(2, 2).half(), 1, r"spec.build: parameter servers hold float32, found the parameter weight of"),
    (lambda: nn.Linear(1, 1), 3, "parallel.num_servers: expected at most 2, the model's weights, found 3"),
])  # fmt: skip
def test_models_that_cannot_be_served_are_refused(build, num_servers, message):
    with pytest.raises(ValueError, match=message):
        flat_model(num_servers, ModelSpec(build=build))
