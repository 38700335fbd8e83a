"""Training on rows that are drawn by weight: the same rows on any number of ranks, and after a resume in an epoch."""

import dataclasses

import numpy as np
import pytest
import torch

from spark_dl import worker
from spark_dl.data.columns.ragged import from_lengths
from spark_dl.data.load.build import build_train_loader
from spark_dl.data.load.draws import weigh_groups
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.models import MLP, blobs, small_config
from tests.ranks.launcher import run_ranks

ROWS = 245


def columns(rows=ROWS):
    rng = np.random.default_rng(4)
    weights = rng.lognormal(0, 1, rows).astype(np.float32)
    weights[::7] = 0
    return {**blobs(rows), "w": weights, "id": np.arange(rows)}


def config(num_ranks=1, train=None, data=None, **sections):
    return small_config(num_ranks, {"epochs": 3, **(train or {})}, {"sampling_weight": "w", **(data or {})}, **sections)


def dataset(tmp_path, given, more=None):
    url = str(tmp_path / "data")
    return weigh_groups(write_dataset(url, {**columns(), **(more or {})}, group_rows=40, shard_rows=120), given)


def ids_of(shards, given, epoch, num_ranks=1):
    """The ids of each step, over all ranks."""
    found = {}
    for rank in range(num_ranks):
        loader = build_train_loader(shards, MLP, given, rank=rank, world_size=num_ranks)
        for step in loader.epoch(epoch):
            for batch in step.micro_batches:
                found.setdefault(step.step, []).extend(batch["id"][batch["weight"] > 0].tolist())
    return {step: sorted(ids) for step, ids in found.items()}


@pytest.mark.parametrize("more", [{}, {"validation_fraction": 0.2}], ids=str)
@pytest.mark.parametrize("epoch_size", [None, 100, 1000])
def test_an_epoch_has_the_rows_that_the_weights_say_on_any_number_of_ranks(tmp_path, epoch_size, more):
    given = config(train=more, data={"labels": ("id",)})
    given = dataclasses.replace(given, loader=dataclasses.replace(given.loader, epoch_size=epoch_size))
    shards = dataset(tmp_path, given)
    expected = [ids_of(shards, given, epoch) for epoch in range(2)]
    assert expected[0] != expected[1]
    for n in (2, 3, 5):
        assert [ids_of(shards, given, epoch, n) for epoch in range(2)] == expected
    drawn = np.bincount([i for ids in expected[0].values() for i in ids], minlength=ROWS)
    held_out = ROWS - int(drawn.size and sum(drawn > 0))
    assert drawn.sum() == (epoch_size or (ROWS if not more else ROWS - round(0.2 * ROWS)))
    weights = columns()["w"].astype(np.float64)
    if not more:
        exact = weights / weights.sum() * drawn.sum()
        assert (np.abs(drawn - exact) < 1).all()
    else:
        assert held_out > 0.2 * ROWS
    assert (drawn[::7] == 0).all()


def test_the_column_is_no_tensor_of_a_batch_unless_it_is_a_feature(tmp_path):
    shards = dataset(tmp_path, config())
    (batch,) = next(iter(build_train_loader(shards, MLP, config(), rank=0, world_size=1).epoch(0))).micro_batches
    assert {*batch} == {"features", "label", "weight"}
    both = config(data={"weight": "w"})
    (batch,) = next(iter(build_train_loader(shards, MLP, both, rank=0, world_size=1).epoch(0))).micro_batches
    assert {*batch} == {"features", "label", "weight"}
    assert len(batch["weight"].unique()) > 2
    given = config(data={"features": ("features", "w")})
    (batch,) = next(iter(build_train_loader(shards, MLP, given, rank=0, world_size=1).epoch(0))).micro_batches
    assert "w" in batch


def test_ragged_rows_are_drawn_too_and_sorted_by_length(tmp_path):
    lengths = np.arange(ROWS) % 9 + 1
    tokens = from_lengths(np.repeat(np.arange(ROWS), lengths), lengths)
    given = config(data={"labels": ("id", "tokens")})
    shards = dataset(tmp_path, given, {"tokens": tokens})
    expected = ids_of(shards, given, 1)
    loader = build_train_loader(shards, MLP, given, rank=0, world_size=1)
    for step in loader.epoch(1):
        (batch,) = step.micro_batches
        for number, row, mask in zip(batch["id"], batch["tokens"], batch["tokens_mask"], strict=True):
            assert mask.sum() == number % 9 + 1
            assert (row[mask] == number).all()
    grouped = dataclasses.replace(given, loader=dataclasses.replace(given.loader, group_by_length=True))
    found = ids_of(shards, grouped, 1)
    assert sorted(i for ids in found.values() for i in ids) == sorted(i for ids in expected.values() for i in ids)


def train_rank(run):
    return worker.main(run).result


def trained(tmp_path, name, shards, given, saved=None):
    run = Run(spec=MLP, config=given, train=shards, run_dir=str(tmp_path / name))
    if saved is not None:
        run = dataclasses.replace(run, checkpoint=saved.url, generation=checkpoint.start_generation(run.run_dir))
    run_ranks(train_rank, given.launch.num_ranks, run)
    return checkpoint.latest(run.run_dir)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_the_weights_are_those_of_one_rank_and_of_a_run_in_one_piece(tmp_path, accumulation_steps):
    train = {"accumulation_steps": accumulation_steps, "validation_fraction": 0.1}
    shards = dataset(tmp_path, config(train=train))
    expected = load_weights(trained(tmp_path, "one", shards, config(1, train)))
    cut = trained(tmp_path, "cut", shards, config(2, {**train, "max_steps": 5}))
    for saved in (
        trained(tmp_path, "three", shards, config(3, train)), trained(tmp_path, "cut", shards, config(3, train), cut),
    ):  # fmt: skip
        for name, value in load_weights(saved).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("weights", "message"), [
    (np.full(ROWS, -1.0), "expected finite weights >= 0 in column 'w', found -1.0 in row group 0 of .* in "),
    (np.where(np.arange(ROWS) == 130, -2, 1), "expected finite .*, found -2 in row group 0 of .*1.*parquet in "),
    (np.zeros(ROWS), "expected weights above 0 in column 'w', found none"),
    (np.ones((ROWS, 2)), r"expected one number per row in column 'w', found float64 of shape \(2,\)"),
])  # fmt: skip
def test_B27_weights_that_cannot_be_drawn_by_are_named(tmp_path, weights, message):
    with pytest.raises(ValueError, match=f"data.sampling_weight: {message}"):
        weigh_groups(write_dataset(str(tmp_path / "data"), {**columns(), "w": weights}, group_rows=40, shard_rows=120),
                     config())  # fmt: skip


def test_a_loader_without_sums_says_where_they_come_from(tmp_path):
    shards = write_dataset(str(tmp_path / "data"), columns())
    with pytest.raises(ValueError, match="the weights have not been summed; it needs spark_dl.train"):
        build_train_loader(shards, MLP, config(), rank=0, world_size=1)
