"""The horovod strategy in barrier tasks, whose Python workers Spark uses again."""

import os
import signal
import sys

import pytest
import torch
from torch.nn import functional as F

import spark_dl
from spark_dl import DDP, Horovod, ModelSpec, RankError
from spark_dl.rundir import checkpoint
from tests.builders.models import MLP, blobs, build_mlp, small_config

HOROVOD = Horovod()


@pytest.fixture(scope="module")
def points(spark):
    columns = blobs(245)
    rows = [(x.tolist(), int(y)) for x, y in zip(*columns.values(), strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label bigint").repartition(3).cache()


@pytest.fixture
def horovod():
    reason = "no horovod; `make setup-horovod` builds it, or says why it cannot"
    pytest.importorskip("horovod.torch", reason=reason, exc_type=ImportError)


@pytest.mark.long_in("local-cluster")
@pytest.mark.slow
@pytest.mark.modes("local", "local-cluster")
def test_twice_in_the_same_workers_as_ddp_does(spark, points, tmp_path, horovod):
    shards = spark_dl.write_shards(points, str(tmp_path / "data"))
    weights = []
    for name, parallel, num_ranks in [("ddp", DDP(), 2), ("first", HOROVOD, 2), ("second", HOROVOD, 3)]:
        config = small_config(num_ranks, parallel=parallel)
        result = spark_dl.train(shards, MLP, config, run_dir=str(tmp_path / name))
        assert result.steps == 12
        weights.append(checkpoint.load(checkpoint.open_checkpoint(result.checkpoint), "model.pt")["0"])
    for again in weights[1:]:
        for name, expected in weights[0].items():
            torch.testing.assert_close(again[name], expected, rtol=1e-5, atol=1e-6)


class Killed:
    """A loss that kills rank 1 in its fourth step."""

    calls = 0

    def __call__(self, output, label):
        self.calls += 1
        if self.calls == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(output, label, reduction="none")


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_rank_that_is_killed_is_one_error(spark, points, tmp_path, horovod):
    config = small_config(2, parallel=HOROVOD)
    with pytest.raises(RankError, match="was killed.*: its .*process ended without an error") as error:
        spark_dl.train(points, ModelSpec(build=build_mlp, loss=Killed()), config, run_dir=str(tmp_path / "killed"))
    assert error.value.rank == 1
    assert spark_dl.train(points, MLP, config, run_dir=str(tmp_path / "again")).steps == 12


@pytest.mark.slow
@pytest.mark.modes("local")
def test_what_cannot_run_is_an_error_before_any_rank_starts(spark, points, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"parallel.strategy: horovod is not installed .* conf/build_horovod.sh"):
        spark_dl.train(points, MLP, small_config(2, parallel=HOROVOD), run_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
