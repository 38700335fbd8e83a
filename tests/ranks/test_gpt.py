"""The GPT of the examples, whose embedding and head share a weight, has the loss of one rank on every mesh."""

import functools
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml

from examples import gpt
from spark_dl import Mesh, ModelSpec, export
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.settings import make_config
from tests.ranks.launcher import run_ranks
from tests.ranks.runs import train_rank

MODEL = yaml.safe_load((Path(gpt.__file__).parents[1] / "conf/train/gpt.yaml").read_text())["model"]
SPEC = ModelSpec(
    build=functools.partial(gpt.GPT, width=16, num_blocks=2, head_dim=8), forward=gpt.forward, loss=gpt.loss,
    layers=MODEL["layers"], tensor_plan=MODEL["tensor_plan"],
)  # fmt: skip


def write_codes(url):
    """Blocks of characters, each of which says something about the next one."""
    steps = np.random.default_rng(0).integers(1, 4, (72, gpt.CONTEXT + 1))
    return write_dataset(url, {"codes": (steps.cumsum(1) % len(gpt.CHARACTERS)).astype(np.int32)})


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_codes(str(tmp_path_factory.mktemp("codes") / "data"))


def result(rows, folder, num_ranks, **mesh):
    config = make_config(
        features=("codes",), label=None, global_batch_size=16, accumulation_steps=4, epochs=2, optimizer="AdamW",
        lr=0.01, clip_grad_norm=0.5, validation_fraction=0.1, num_ranks=num_ranks, collective_timeout_s=60,
        start_timeout_s=60, parallel=Mesh(**mesh),
    )  # fmt: skip
    return run_ranks(train_rank, num_ranks, Run(spec=SPEC, config=config, train=rows, run_dir=str(folder)))[0]


@pytest.fixture(scope="module")
def on_one_rank(rows, tmp_path_factory):
    return result(rows, tmp_path_factory.mktemp("one"), 1)


@pytest.mark.parametrize("mesh", [
    {"pipeline": 2, "tensor": 2},
    pytest.param({"pipeline": 2, "zero_stage": 3}, marks=pytest.mark.slow),
    pytest.param({"tensor": 2, "zero_stage": 1}, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_shared_weight_is_trained_as_on_one_rank(rows, tmp_path, on_one_rank, mesh):
    found = result(rows, tmp_path, 4, **mesh)
    assert found["train_loss"] == pytest.approx(on_one_rank["train_loss"], rel=1e-5)
    assert found["metrics"]["loss"] == pytest.approx(on_one_rank["metrics"]["loss"], rel=1e-5)
    model = SPEC.build()
    model.load_state_dict(safetensors.torch.load_file(export(tmp_path, tmp_path / "gpt.safetensors")))
    saved = checkpoint.find(found["checkpoint"])
    assert saved.manifest["tensors"]["model"]["embed.tokens.weight"]["shape"] == [len(gpt.CHARACTERS), 16]
    for name, weight in load_weights(saved).items():
        assert torch.equal(model.state_dict()[name], weight)
