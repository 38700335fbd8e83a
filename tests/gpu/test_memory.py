"""Precision, memory and meshes on a GPU: the weights of a rank on the CPU, and less memory."""

import gc

import pytest
import torch
from torch import nn

from spark_dl import Mesh, ModelSpec, export
from spark_dl.rundir import checkpoint, foreign
from spark_dl.rundir.checkpoint import load_weights
from tests.builders.models import same_bits
from tests.gpu.test_ranks import assert_close, config_on
from tests.ranks.runs import make_run, on_ranks, train, train_rank
from tests.unit.scoring.test_tables import batches, scored

WIDTH = 512


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.net = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.net(self.norm(x))


def spec_of(width=8, blocks=3):
    return ModelSpec(
        build=lambda: nn.Sequential(
            nn.Linear(4, width), *(Block(width) for _ in range(blocks)), nn.Linear(width, 3)
        )
    )  # fmt: skip


def weights_of(tmp_path, name, device, num_ranks=1, parallel=None, spec=None, **settings):
    config = config_on(device, num_ranks, parallel=parallel, **{"epochs": 1, **settings})
    return load_weights(train(make_run(tmp_path, config, spec=spec or spec_of(), name=name)))


def peak(run):
    """The most bytes that torch had on the GPU during a run."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    train_rank(run)
    return torch.cuda.max_memory_allocated()


def bytes_of(tmp_path, device, name, **settings):
    config = config_on(device, **{"epochs": 1, "optimizer": "Adam", "optimizer_args": {}, "global_batch_size": 240,
                                  **settings})  # fmt: skip
    return on_ranks(peak, make_run(tmp_path, config, spec=spec_of(WIDTH, 6), name=name))[0]


@pytest.mark.parametrize("mesh", [{"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}])
def test_one_rank_of_a_mesh_has_the_weights_of_the_cpu(tmp_path, device, mesh):
    expected = weights_of(tmp_path, "cpu", "cpu")
    assert_close(expected, weights_of(tmp_path, "device", device, parallel=Mesh(**mesh)))


@pytest.mark.parametrize("mesh", [
    {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}, {"tensor": 2}, {"pipeline": 2, "schedule": "1f1b"},
], ids=str)  # fmt: skip
def test_two_ranks_of_a_mesh_share_a_gpu_by_gloo(tmp_path, device, mesh):
    settings = {"accumulation_steps": 2}
    expected = weights_of(tmp_path, "cpu", "cpu", **settings)
    assert_close(expected, weights_of(tmp_path, "device", device, 2, Mesh(**mesh), **settings))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mesh", [{"zero_stage": 3}, {"zero_stage": 1}])
def test_the_blocks_of_a_mesh_are_compiled(tmp_path, device, mesh):
    expected = weights_of(tmp_path, "cpu", "cpu")
    assert_close(expected, weights_of(tmp_path, "device", device, parallel=Mesh(**mesh), compile=True))


@pytest.mark.parametrize("settings", [
    {"offload_optimizer": True}, {"activation_checkpointing": "full"}, {"deterministic": True},
], ids=str)  # fmt: skip
def test_what_takes_less_memory_has_the_weights_of_the_cpu(tmp_path, device, settings):
    expected = weights_of(tmp_path, "cpu", "cpu")
    assert_close(expected, weights_of(tmp_path, "device", device, **settings))


def test_deterministic_operations_give_the_same_bits(tmp_path, device):
    first, again = (weights_of(tmp_path, name, device, deterministic=True) for name in ("first", "again"))
    assert same_bits(first, again)


def test_weights_in_bfloat16_come_close_and_go_on_with_the_same_bits(tmp_path, device):
    found = weights_of(tmp_path, "low", device, precision="bf16")
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    expected = weights_of(tmp_path, "cpu", "cpu")
    assert_close(expected, {name: value.float() for name, value in found.items()}, 5e-2)
    both = weights_of(tmp_path, "both", device, precision="bf16", offload_optimizer=True)
    assert_close(expected, {name: value.float() for name, value in both.items()}, 5e-2)


@pytest.mark.parametrize(("settings", "most"), [
    ({"offload_optimizer": True}, 0.7), ({"offload_optimizer": True, "precision": "bf16"}, 0.5),
    ({"activation_checkpointing": "full"}, 0.97),
], ids=str)  # fmt: skip
def test_a_gpu_holds_less(tmp_path, gpu, settings, most):
    """Of 16 bytes for each parameter with Adam: 8 with the state on the host, 4 if the weights are bfloat16, too."""
    assert bytes_of(tmp_path, "cuda", "other", **settings) < most * bytes_of(tmp_path, "cuda", "plain")


@pytest.mark.parametrize("kind", ["safetensors", "hf", "dcp"])
def test_weights_of_a_gpu_leave_in_other_formats(tmp_path, device, kind):
    expected = weights_of(tmp_path, "run", device)
    url = export(tmp_path / "run", tmp_path / "out.safetensors", format=kind)
    assert same_bits(foreign.find(url).read(), expected)
    assert checkpoint.find(tmp_path / "run").step > 0


def test_rows_are_decoded_ahead_of_the_device(monkeypatch, device):
    plain, ahead = (scored(monkeypatch, n, batches(), device=device) for n in (0, 3))
    for one, other in zip(plain, ahead, strict=True):
        expected, found = (torch.tensor(part["prediction"].to_pylist()) for part in (one, other))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
