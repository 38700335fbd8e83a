"""`train.compile` and `train.channels_last`: the same training, in another layout."""

import functools
import os

import cloudpickle
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from spark_dl import DDP, LocalSGD, Mesh, ModelSpec, worker
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from tests.builders.models import small_config
from tests.ranks.launcher import run_ranks
from tests.ranks.runs import make_run, train


def build_cnn():
    """Of classes of torch alone, which `nn.Module.compile` leaves as they are."""
    return nn.Sequential(
        nn.Unflatten(1, (2, 1, 2)), nn.Conv2d(2, 8, 2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(48, 3),
    )  # fmt: skip


CNN = ModelSpec(build=build_cnn)
MOMENTUM = {"optimizer_args": {"momentum": 0.9}, "validation_fraction": 0.1}


def config_of(num_ranks, parallel, **settings):
    return small_config(
        num_ranks, train={**MOMENTUM, **settings}, launch={"collective_timeout_s": 90}, parallel=parallel
    )


def train_and_count(run):
    counters.clear()
    worker.main(run)
    return counters["frames"]["ok"]


def assert_close(saved, other):
    expected, found = (checkpoint.load(s, "model.pt")["0"] for s in (saved, other))
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("parallel", [DDP(), DDP(compression="topk"), LocalSGD(sync_every_steps=2)], ids=str)
def test_channels_last_trains_the_same(tmp_path, parallel):
    plain = train(make_run(tmp_path, config_of(2, parallel), spec=CNN, name="plain"))
    other = train(make_run(tmp_path, config_of(2, parallel, channels_last=True), spec=CNN, name="other"))
    assert_close(plain, other)
    weight = checkpoint.load(other, "model.pt")["0"]["1.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.norm = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), nn.LayerNorm(8)

    def forward(self, x):
        return x + self.net(self.norm(x))


BLOCKS = ModelSpec(build=lambda: nn.Sequential(nn.Linear(4, 8), *(Block() for _ in range(3)), nn.Linear(8, 3)))


def blocks_compiled(payload):
    counters.clear()
    worker.main(cloudpickle.loads(payload))
    return counters["frames"]["ok"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("mesh", "again"), [
    ({"zero_stage": 3}, "full"),
    pytest.param({"zero_stage": 3}, (), marks=pytest.mark.slow),
    pytest.param({"zero_stage": 1}, (), marks=pytest.mark.slow),
    pytest.param({"zero_stage": 2}, ("[123]",), marks=pytest.mark.slow),
    pytest.param({"pipeline": 2, "schedule": "1f1b"}, (), marks=pytest.mark.slow),
    pytest.param({"pipeline": 2, "schedule": "gpipe"}, "full", marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_the_blocks_of_a_mesh_are_compiled_and_train_the_same(tmp_path, mesh, again):
    settings = {"accumulation_steps": 2, "epochs": 1}
    plain = train(make_run(tmp_path, config_of(2, Mesh(**mesh), **settings), spec=BLOCKS, name="plain"))
    config = config_of(2, Mesh(**mesh), **settings, compile=True, activation_checkpointing=again)
    run = make_run(tmp_path, config, spec=BLOCKS, name="compiled")
    assert min(run_ranks(blocks_compiled, 2, cloudpickle.dumps(run), timeout_s=180)) >= 1
    expected, found = load_weights(plain), load_weights(checkpoint.latest(run.run_dir))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


class AsksForMode(nn.Linear):
    """A layer that has an operation without a form that gives the same bits each time, if `is_bad`."""

    is_bad = False

    def forward(self, features):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
        if self.is_bad:
            torch.utils.deterministic.fill_uninitialized_memory = True
            torch._C._log_api_usage_once("test")
            torch.zeros(2).put_(torch.tensor([0]), torch.ones(1), accumulate=False)
        return super().forward(features)


class AsksForBad(AsksForMode):
    is_bad = True


def settings_of_torch():
    cudnn = torch.backends.cudnn
    return torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark


def train_and_ask(run):
    worker.main(run)
    return settings_of_torch()


def test_deterministic_is_set_for_a_run_alone(tmp_path):
    spec = ModelSpec(build=functools.partial(AsksForMode, 4, 3))
    run = make_run(tmp_path, config_of(2, DDP(), deterministic=True), spec=spec)
    assert run_ranks(train_and_ask, 2, run) == [settings_of_torch()] * 2
    bad = make_run(tmp_path, config_of(2, DDP(), deterministic=True), name="bad",
                   spec=ModelSpec(build=functools.partial(AsksForBad, 4, 3)))  # fmt: skip
    with pytest.raises(Exception, match="put_ does not have a deterministic implementation"):
        run_ranks(train_and_ask, 2, bad)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_compiled_model_trains_the_same_and_each_run_compiles_its_own(tmp_path):
    plain = train(make_run(tmp_path, config_of(2, DDP()), spec=CNN, name="plain"))
    for name in ("first", "second"):  # in the same processes
        run = make_run(tmp_path, config_of(2, DDP(), compile=True, channels_last=True), spec=CNN, name=name)
        assert min(run_ranks(train_and_count, 2, run, timeout_s=180)) >= 2  # in training and in evaluation mode
        assert_close(plain, checkpoint.latest(run.run_dir))
