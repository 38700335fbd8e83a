"""A small recurrent model learns from sequences, on any number of ranks, and a resumed run equals a whole one."""

import dataclasses

import pytest
import torch

from spark_dl import worker
from spark_dl.rundir import checkpoint
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.models import same_bits, small_config
from tests.builders.series import GRU, SEQUENCES, waves
from tests.ranks.launcher import run_ranks


def train_rank(run):
    return worker.main(run).result


def final_weights(run):
    return checkpoint.load(checkpoint.latest(run.run_dir), "model.pt")["0"]


def make_run(tmp_path, name, num_ranks, shards, validation, **train):
    train = {"optimizer": "Adam", "epochs": 5, "lr": 0.02, **train}
    config = small_config(num_ranks, train=train, data=SEQUENCES)
    return Run(spec=GRU, config=config, train=shards, validation=validation, run_dir=str(tmp_path / name))


@pytest.mark.slow
def test_a_recurrent_model_learns_resumes_and_is_the_same_on_any_number_of_ranks(tmp_path):
    shards = write_dataset(str(tmp_path / "train"), waves(9, 61), 25, 75)
    validation = write_dataset(str(tmp_path / "validation"), waves(4, 30), 16, 64)
    weights = []
    for num_ranks in (1, 2):
        run = make_run(tmp_path, f"run{num_ranks}", num_ranks, shards, validation)
        result = run_ranks(train_rank, num_ranks, run)[0]
        assert result["rows"] == 5 * 9 * 28  # of 61 rows of a device 28 samples begin in 0, 2 ... 54
        assert result["metrics"]["loss"] < 0.02 < 0.1 < result["history"][0]["train_loss"]
        weights.append(final_weights(run))
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], atol=1e-4), name
    cut = make_run(tmp_path, "cut", 2, shards, validation, max_steps=8)
    run_ranks(train_rank, 2, cut)
    saved = checkpoint.latest(cut.run_dir)
    resumed = dataclasses.replace(
        cut, config=run.config, checkpoint=saved.url, generation=checkpoint.start_generation(cut.run_dir)
    )
    run_ranks(train_rank, 2, resumed)
    assert same_bits(final_weights(resumed), weights[1])
    assert [c.shape for c in saved.columns] == [()]


def test_rows_that_go_back_end_the_run_with_the_place(tmp_path):
    columns = waves(2, 40)
    columns["time"][50:] -= 5
    run = make_run(tmp_path, "run", 1, write_dataset(str(tmp_path / "d"), columns, 25, 75), None)
    with pytest.raises(Exception, match=r"row 0 of row group 2 of part-\w+-0000\.parquet .* expected rows in order"):
        run_ranks(train_rank, 1, run)
