"""Mixtures: the share of each dataset in every batch, every row at least once an epoch, on any number of ranks."""

import collections
import itertools

import numpy as np
import pytest
import torch

from spark_dl import Config, Data, Train
from spark_dl.data.manifest import ShardSet
from spark_dl.data.mixture import MixedLoader, MixedPlan, Mixture, batch_shares
from spark_dl.data.plan import Plan
from spark_dl.data.schema import Column
from tests.datasets import write_dataset

STREAMS, BATCH = 4, 40


@pytest.mark.parametrize(
    ("proportions", "batch", "streams", "expected"),
    [
        ({"a": 1.0}, 64, 16, {"a": 64}),
        ({"a": 0.5, "b": 0.5}, 64, 16, {"a": 32, "b": 32}),
        ({"a": 7, "b": 3}, 160, 16, {"a": 112, "b": 48}),
        ({"a": 7, "b": 3}, 64, 16, {"a": 48, "b": 16}),
        ({"a": 1, "b": 1, "c": 1}, 16, 4, {"a": 8, "b": 4, "c": 4}),
        ({"a": 0.98, "b": 0.01, "c": 0.01}, 100, 1, {"a": 98, "b": 1, "c": 1}),
    ],
)
def test_shares_are_multiples_of_the_streams_nearest_to_the_proportions(proportions, batch, streams, expected):
    assert batch_shares(proportions, batch, streams) == expected


def test_a_dataset_without_a_row_in_a_batch_is_an_error_that_says_what_to_change():
    with pytest.raises(ValueError, match="the dataset 'b' would have no row in a global batch of 64, .* in 4 lots"):
        batch_shares({"a": 0.99, "b": 0.01}, 64, 16)


def test_the_plan_counts_the_rows_of_datasets_that_begin_again():
    plans = (Plan((100,), 32, 4), Plan((50,), 8, 4), Plan((5,), 8, 4))
    plan = MixedPlan(plans)
    assert plan.steps == 7
    assert [plan.passes(p) for p in plans] == [2, 1, 7]
    rows = [sum(p.batch_rows(s % p.steps) for p in plans) for s in range(7)]
    assert [plan.batch_rows(s) for s in range(7)] == rows
    assert [plan.rows_before(s) for s in range(8)] == [sum(rows[:s]) for s in range(8)]
    assert plan.rows == sum(rows)


def mixture(folder, sizes):
    """Datasets whose ids tell which they are of: 1000 * number + row."""
    return Mixture(
        {
            name: write_dataset(
                str(folder / name),
                {"x": np.full((rows, 2), i, dtype=np.float32), "id": 1000 * i + np.arange(rows)},
                7,
                21,
            )
            for i, (name, rows) in enumerate(sizes.items())
        }
    )


def config(**proportions):
    data = Data(features=("x",), label="id", num_streams=STREAMS, shuffle_window_rows=30, proportions=proportions)
    return Config(data=data, train=Train(global_batch_size=BATCH))


def ids(loader, epoch=0, start=0):
    """True ids of every step."""
    return [
        [int(i) for m in step.micro_batches for i in m["id"][m["weight"] > 0]] for step in loader.epoch(epoch, start)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_row_of_the_longest_dataset_comes_once_and_the_others_begin_again(tmp_path, world_size):
    mixed = mixture(tmp_path, {"a": 200, "b": 30})
    loaders = [MixedLoader(mixed, config(a=0.7, b=0.3), rank=r, world_size=world_size) for r in range(world_size)]
    by_rank = [ids(loader) for loader in loaders]
    steps = [sorted(itertools.chain(*parts)) for parts in zip(*by_rank, strict=True)]
    plan = loaders[0].plan
    assert [len(step) for step in steps] == [plan.batch_rows(s) for s in range(plan.steps)]
    counts = collections.Counter(itertools.chain(*steps))
    assert all(counts[i] == 1 for i in range(200))
    assert {counts[1000 + i] for i in range(30)} <= {2, 3}  # 8 steps of 12 rows, 3 to a pass
    assert sum(i >= 1000 for i in steps[0]) == 12
    alone = MixedLoader(mixed, config(a=0.7, b=0.3), rank=0, world_size=1)
    assert [sorted(step) for step in ids(alone)] == steps


def test_an_epoch_can_be_taken_up_at_any_step(tmp_path):
    loader = MixedLoader(mixture(tmp_path, {"a": 200, "b": 30}), config(a=0.7, b=0.3), rank=0, world_size=1)
    whole = ids(loader, epoch=1)
    for start in range(len(whole)):
        assert ids(loader, epoch=1, start=start) == whole[start:]


def test_micro_batches_have_rows_of_each_dataset(tmp_path):
    loader = MixedLoader(mixture(tmp_path, {"a": 80, "b": 80}), config(a=1, b=1), rank=0, world_size=1, micro_batches=2)
    for step in loader.epoch(0):
        for batch in step.micro_batches:
            assert sorted(set((batch["id"] // 1000).tolist())) == [0, 1]
            assert torch.equal(batch["x"][:, 0], (batch["id"] // 1000).float())


def test_datasets_with_other_columns_are_an_error_that_names_both():
    def dataset(dtype):
        return ShardSet("/nowhere", (Column("x", dtype, (2,), "ndarray"), Column("id", "int64")), ())

    with pytest.raises(ValueError, match="'x' has dtype float32 .* in the dataset 'a', and float64 .* in 'b'"):
        Mixture({"a": dataset("float32"), "b": dataset("float64")}).select(["x", "id"])
