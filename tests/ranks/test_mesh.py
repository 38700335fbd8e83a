"""The strategy `mesh` gives the weights of one process, and its checkpoints go from any mesh to any other."""

import dataclasses

import pytest
import torch

from spark_dl import Mesh
from spark_dl.parallel.mesh.pieces import Piece, missing_elements, overlapping
from spark_dl.rundir.weights import load_weights
from tests.builders.models import small_config
from tests.ranks.runs import cut_at, make_run, resume, train
from tests.ranks.test_parity import assert_same_training

MOMENTUM = {"optimizer_args": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, "clip_grad_norm": 0.3}


@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_shards_change_nothing(tmp_path, num_ranks, zero_stage, accumulation_steps):
    train = {**MOMENTUM, "accumulation_steps": accumulation_steps}
    mesh = Mesh(zero_stage=zero_stage, bucket_mib=0.0001 if num_ranks == 4 else 25)
    assert_same_training(tmp_path, small_config(num_ranks, train=train, parallel=mesh), 245)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_shards_with_replicas(tmp_path, zero_stage):
    config = small_config(4, train=MOMENTUM, parallel=Mesh(zero_stage=zero_stage, replicas=2))
    assert_same_training(tmp_path, config, 245)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad"])
def test_optimizers_with_state(tmp_path, optimizer, zero_stage):
    config = small_config(3, train={"optimizer": optimizer}, parallel=Mesh(zero_stage=zero_stage))
    assert_same_training(tmp_path, config, 245)


def with_mesh(config, num_ranks, **mesh):
    launch = dataclasses.replace(config.launch, num_ranks=num_ranks)
    return dataclasses.replace(config, parallel=Mesh(**mesh), launch=launch)


MESHES = [(4, {"zero_stage": 3}), (2, {"zero_stage": 2}), (1, {}), (3, {"zero_stage": 1}), (2, {}),
          (4, {"zero_stage": 3, "replicas": 2})]  # fmt: skip


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_run_goes_on_on_another_mesh(tmp_path, optimizer):
    args = {"momentum": 0.9} if optimizer == "SGD" else {}
    config = small_config(1, train={"optimizer": optimizer, "optimizer_args": args, "epochs": 2}, parallel=Mesh())
    whole = train(make_run(tmp_path, config, name="whole"))
    steps = range(1, len(MESHES) + 1)
    run, saved = make_run(tmp_path, config), None
    for step, (num_ranks, mesh) in zip(steps, MESHES, strict=True):
        now = cut_at(with_mesh(config, num_ranks, **mesh), step)
        run = dataclasses.replace(run, config=now)
        saved = train(run) if saved is None else resume(run, saved)
        tensors = saved.manifest["tensors"]
        for kind in ("model", "optimizer"):
            for entry in tensors[kind].values():
                pieces = [Piece.from_plain(p) for part in entry["files"].values() for p in part]
                assert overlapping(pieces) is None
                assert missing_elements(entry["shape"], pieces) == 0
    last = resume(run, saved, config)
    assert last.step == whole.step
    for name, weight in load_weights(whole).items():
        torch.testing.assert_close(load_weights(last)[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mesh", [{"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}])
def test_a_run_that_is_resumed_on_the_same_mesh_has_the_same_bits(tmp_path, mesh):
    config = small_config(3, train={"optimizer": "Adam"}, parallel=Mesh(**mesh))
    whole = train(make_run(tmp_path, config, name="whole"))
    run = make_run(tmp_path, config)
    again = resume(run, train(dataclasses.replace(run, config=cut_at(config, 4))))
    expected, found = load_weights(whole), load_weights(again)
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
