"""A model that is cut, from the driver: checked there, trained on barrier tasks, and used as any other."""

import functools
import os
import re
import signal
import time

import numpy as np
import pytest
import yaml
from torch import nn

import spark_dl
from spark_dl import Auto, Mesh, ModelSpec, RankError
from spark_dl.rundir import checkpoint
from tests.builders.models import blobs, small_config

pytestmark = pytest.mark.modes("local", "connect")


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        return x + self.inner(x)


class Skips(nn.Module):
    """Its second layer gets the input again, so it is no chain."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.second(x + self.first(x))


def build():
    return nn.Sequential(nn.Linear(4, 16), Wide(), Wide(), nn.Linear(16, 3))


def frame(spark, rows=245):
    columns = blobs(rows)
    return spark.createDataFrame(
        [(list(map(float, f)), int(y)) for f, y in zip(columns["features"], columns["label"], strict=True)],
        "features array<float>, label long",
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.modes("local")
def test_shards_are_right_in_each_run_of_a_session_whose_workers_have_other_ranks_each_time(spark, tmp_path):
    df, spec, weights = frame(spark), ModelSpec(build=build), []
    for number in range(4):
        mesh = Mesh(zero_stage=3) if number else Mesh()
        config = small_config(4 if number else 1, parallel=mesh)
        result = spark_dl.train(df, spec, config, run_dir=str(tmp_path / f"{number}"), spark=spark)
        weights.append({name: value.numpy() for name, value in result.load_model(spec).state_dict().items()})
    for other in weights[1:]:
        for name, value in weights[0].items():
            np.testing.assert_allclose(other[name], value, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_model_that_is_cut_trains_as_on_one_rank_and_predicts(spark, tmp_path):
    df, spec = frame(spark), ModelSpec(build=build)
    losses = {}
    for name, num_ranks, mesh in (("one", 1, Mesh()), ("four", 4, Mesh(pipeline=2, tensor=2))):
        config = small_config(num_ranks, train={"accumulation_steps": 2}, parallel=mesh)
        result = spark_dl.train(df, spec, config, run_dir=str(tmp_path / name), spark=spark)
        losses[name] = result.train_loss
    assert losses["four"] == pytest.approx(losses["one"], rel=1e-5)
    saved = checkpoint.find(result.checkpoint)
    assert sum(saved.manifest["config"]["parallel"]["stages"]) == 4
    predicted = spark_dl.predict(df, spec, result.checkpoint, config, spark=spark).collect()
    assert len(predicted) == 245
    assert np.isfinite([row.prediction for row in predicted]).all()
    goes_on = spark_dl.train(
        df, spec, small_config(1, train={"accumulation_steps": 2, "epochs": 3}, parallel=Mesh()),
        run_dir=str(tmp_path / "four"), resume=True, spark=spark,
    )  # fmt: skip
    assert goes_on.epochs == 3


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_mesh_that_the_driver_plans_is_kept_on_resume(spark, tmp_path, caplog):
    caplog.set_level("INFO", "spark_dl")
    df, spec, run_dir = frame(spark), ModelSpec(build=build), str(tmp_path / "run")
    one = spark_dl.train(df, spec, small_config(1), run_dir=str(tmp_path / "one"), spark=spark)
    auto = Auto(zero_stages=(0,), memory_gib=5e-5)  # the states of the whole model are about 36 KiB
    result = spark_dl.train(df, spec, small_config(4, parallel=auto), run_dir=run_dir, spark=spark)
    assert result.train_loss == pytest.approx(one.train_loss, rel=1e-5)
    planned = checkpoint.find(result.checkpoint).manifest["config"]
    assert planned["parallel"]["strategy"] == "mesh"
    assert planned["parallel"]["pipeline"] * planned["parallel"]["tensor"] > 1
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["train"].pop("early_stop_mode") is None  # as the user has set it; a checkpoint has what it means
    assert written == {**planned, "train": {k: v for k, v in planned["train"].items() if k != "early_stop_mode"}}
    assert re.search(r"auto: network within hosts: [\d,]+ Mbit/s \(measured\), \S+ ms \(measured\)", caplog.text)
    longer = small_config(4, train={"epochs": 3}, parallel=auto)
    spark_dl.train(df, spec, longer, run_dir=run_dir, resume=True, spark=spark)
    assert "auto: going on with the mesh of the checkpoint" in caplog.text
    again = checkpoint.find(run_dir).manifest["config"]
    assert (again["parallel"], again["train"]["epochs"]) == (planned["parallel"], 3)


@pytest.mark.sampled(2)
@pytest.mark.modes("local")
@pytest.mark.parametrize(("spec", "mesh", "message"), [
    (ModelSpec(build=Skips, layers=["first", "second"]), {"pipeline": 2}, "spec.layers: .* give another output"),
    (ModelSpec(build=build, layers=["0", "4"]), {"pipeline": 2}, "spec.layers: no module of Sequential matches '4'"),
    (ModelSpec(build=build), {"pipeline": 2, "stages": (1, 1)}, "parallel.stages: .* with the sum 4"),
    (ModelSpec(build=Skips), {"tensor": 2}, "spec.tensor_plan: expected a plan for Skips"),
    (ModelSpec(build=build, tensor_plan={"1.inner.0": "colums"}), {"tensor": 2}, "spec.tensor_plan: .*colwise"),
])  # fmt: skip
def test_a_model_that_cannot_be_cut_is_an_error_before_any_task(spark, tmp_path, spec, mesh, message):
    config = small_config(2, train={"accumulation_steps": 2}, parallel=Mesh(**mesh))
    with pytest.raises(ValueError, match=message):
        spark_dl.train(frame(spark), spec, config, run_dir=str(tmp_path / "run"), spark=spark)
    assert not (tmp_path / "run" / "checkpoints").exists()


def killed_on_rank_2(model, batch, folder):
    model.calls = getattr(model, "calls", 0) + 1
    if os.environ.get("RANK") == "2" and model.calls == 9:
        (folder / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    return model(batch["features"])


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.modes("local")
@pytest.mark.parametrize("mesh", [{"pipeline": 2, "tensor": 2}, {"pipeline": 2, "zero_stage": 1}, {"tensor": 2}])
def test_a_rank_that_is_killed_in_any_group_is_named(spark, tmp_path, mesh):
    train = {"accumulation_steps": 2, "epochs": 100}
    config = small_config(4, train=train, launch={"collective_timeout_s": 10}, parallel=Mesh(**mesh))
    spec = ModelSpec(build=build, forward=functools.partial(killed_on_rank_2, folder=tmp_path))
    with pytest.raises(RankError, match="rank 2 on .* was killed.*: its .*process ended without an error") as error:
        spark_dl.train(frame(spark), spec, config, run_dir=str(tmp_path / "run"), spark=spark)
    assert time.time() - float((tmp_path / "killed").read_text()) < 10 + 5
    assert error.value.rank == 2
