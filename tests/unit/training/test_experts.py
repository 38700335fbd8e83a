"""The balance of experts after a step, and which strategies have one."""

import types

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spark_dl import Mesh, ParameterServer, Single
from spark_dl.nn import MoE
from spark_dl.training.checks import ExpertBalance
from spark_dl.world import World
from tests.builders.settings import make_config, parallel

ALONE = World(0, 1, 0, 1, "host", torch.device("cpu"), dist.HashStore())


def balance(model, strategy, num_ranks=1, **trainable):
    trainable = types.SimpleNamespace(modules=[model], sum_over_data=None, **trainable)
    return ExpertBalance(trainable, ALONE, make_config(num_ranks=num_ranks, parallel=strategy))


def test_each_layer_is_balanced_by_its_own_tokens_and_its_load_is_that_since_the_last_line():
    model = nn.ModuleDict({"a": MoE(4, 2, top_k=1, bias_rate=0.5), "b": MoE(4, 3, balance="none"), "idle": MoE(4, 2)})
    own = balance(model, Single())
    model["a"].router.weight.data = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0]])
    for _ in range(2):
        model["a"](torch.eye(4)[[0, 0, 0, 1]])
        model["b"](torch.eye(4))
        own.end_step()
        model["a"].router.bias.mul_(0.01)
    assert torch.allclose(model["a"].router.bias, torch.tensor([-0.00505, 0.00505]))
    load = own.take_load()["expert_load"]
    assert load.keys() == {"a", "b"}
    assert load["a"] == {"share": [0.75, 0.25], "max_over_mean": 1.5, "dropped": 0.0}
    assert sum(load["b"]["share"]) == pytest.approx(1)
    assert own.take_load() == {}


def test_the_layer_can_be_the_model():
    model = MoE(4, 2)
    own = balance(model, Mesh())
    model(torch.eye(4))
    own.end_step()
    assert own.take_load()["expert_load"].keys() == {"model"}


@pytest.mark.parametrize(("strategy", "num_ranks"), [
    (ParameterServer(), 2), (parallel("tree_reduce"), 1), (parallel("dp_single_process"), 1),
])  # fmt: skip
def test_strategies_that_train_copies_of_the_model_have_no_bias(strategy, num_ranks):
    message = rf"parallel.strategy: '{strategy.strategy}' cannot balance the experts of 'moe' by a bias"
    with pytest.raises(ValueError, match=message):
        balance(nn.ModuleDict({"moe": MoE(4, 2)}), strategy, num_ranks)
    balance(nn.ModuleDict({"moe": MoE(4, 2, balance="loss")}), strategy, num_ranks)
