"""Weights that leave a mesh in formats of other programs, and begin a run on another mesh."""

import pytest

from spark_dl import Mesh, export
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from tests.builders.models import same_bits, small_config
from tests.ranks.runs import make_run, train


@pytest.mark.parametrize("second", [{"zero_stage": 1}, {"pipeline": 2, "schedule": "gpipe"}])
def test_a_run_on_another_mesh_begins_with_the_same_bits(tmp_path, second):
    first = make_run(tmp_path, small_config(2, parallel=Mesh(zero_stage=3)), name="first")
    train(first)
    urls = [first.run_dir] + [
        export(first.run_dir, tmp_path / f"{kind}.safetensors", format=kind) for kind in ("safetensors", "hf", "dcp")
    ]
    trained = []
    for i, url in enumerate(urls):
        how = {"init_from": url, "epochs": 1, "max_steps": 1}
        run = make_run(tmp_path, small_config(2, train=how, parallel=Mesh(**second)), name=f"second-{i}")
        trained.append(load_weights(train(run)))
    assert all(same_bits(trained[0], found) for found in trained[1:])
    assert not same_bits(trained[0], load_weights(checkpoint.latest(first.run_dir)))
