"""Parameter servers in barrier tasks: a whole run from a DataFrame, and a server that is killed."""

import os
import signal
import threading
import time

import pytest

import spark_dl
from spark_dl import Checkpoint, ModelSpec, ParameterServer, RankError
from spark_dl.rundir import checkpoint
from tests.builders.models import MLP, blobs, build_mlp, small_config


@pytest.fixture(scope="module")
def points(spark):
    columns = blobs(500)
    rows = [(x.tolist(), int(y)) for x, y in zip(*columns.values(), strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label bigint").repartition(3).cache()


def servers(mode, train=None, **sections):
    parallel = ParameterServer(server_mode=mode)
    return small_config(3, train, {"validation_fraction": 0.2}, {"threads": 1}, parallel=parallel, **sections)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_train_from_a_dataframe(spark, points, tmp_path):
    seen, config = [], servers("k_batch_async", {"epochs": 4})
    result = spark_dl.train(points, MLP, config, run_dir=str(tmp_path / "run"), on_event=seen.append)
    assert (result.epochs, result.rows) == (4, 1600)
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]
    assert result.staleness["discarded"] == 0
    steps = [event["step"] for event in seen if event["kind"] == "step"]
    assert steps == list(range(1, result.steps + 1))
    assert spark_dl.evaluate(points, MLP, result.run_dir)["rows"] == 500
    assert spark_dl.predict(points, MLP, result.run_dir).count() == 500


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.modes("local")
def test_F29_a_server_that_is_killed_is_an_error_that_names_it_and_the_run_goes_on_from_its_checkpoint(
    spark, points, tmp_path
):
    run_dir, died = str(tmp_path / "run"), str(tmp_path / "died")

    def build():
        def die():
            while checkpoint.latest(run_dir) is None:
                time.sleep(0.02)
            with open(died, "w"):
                os.kill(os.getpid(), signal.SIGKILL)

        if os.environ["RANK"] == "2" and not os.path.exists(died):  # ranks 0 and 1 train
            threading.Thread(target=die, daemon=True).start()
        return build_mlp()

    config = servers("async", {"epochs": 40}, checkpoint=Checkpoint(every_steps=7))
    with pytest.raises(RankError, match=r"rank 2 on \S+ \(pid \d+\) was killed") as error:
        spark_dl.train(points, ModelSpec(build=build), config, run_dir=run_dir)
    assert error.value.rank == 2
    saved = checkpoint.latest(run_dir)
    assert 0 < saved.step < 40 * 18
    result = spark_dl.train(points, ModelSpec(build=build), config, run_dir=run_dir, resume=True)
    assert (result.epochs, result.rows) == (40, 40 * 400)
