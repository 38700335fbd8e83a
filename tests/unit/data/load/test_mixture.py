"""Mixtures: the share of each dataset in every batch, every row at least once an epoch, on any number of ranks."""

import collections
import contextlib
import itertools
import threading

import numpy as np
import pytest
import torch

from spark_dl.data.columns.ragged import from_lengths
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.mixture import MixedLoader, MixedPlan, Mixture, batch_shares, dataset_configs
from spark_dl.data.plan import Plan
from spark_dl.inputs import shards_of
from tests.builders.datasets import write_dataset
from tests.builders.settings import make_config

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
    assert [plan.place(p, 1, 0) for p in plans] == [(2, 0), (1, 0), (7, 0)]
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


def config(epoch_size=None, **proportions):
    return make_config(
        features=("x",), label="id", num_streams=STREAMS, shuffle_window_rows=30, proportions=proportions,
        global_batch_size=BATCH, epoch_size=epoch_size,
    )  # fmt: skip


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


@pytest.mark.parametrize(("epoch_size", "world_size"), [(40, 1), (100, 2), (401, 3), (560, 1), (1000, 1)])
def test_with_an_epoch_size_each_dataset_goes_on_where_it_was(tmp_path, epoch_size, world_size):
    mixed, settings = mixture(tmp_path, {"a": 200, "b": 30}), config(a=0.7, b=0.3, epoch_size=epoch_size)
    loaders = [MixedLoader(mixed, settings, rank=r, world_size=world_size) for r in range(world_size)]
    plan, seen = loaders[0].plan, []
    assert plan.steps == -(-epoch_size // BATCH)
    for epoch in range(12):
        by_rank = [ids(loader, epoch) for loader in loaders]
        steps = [sorted(itertools.chain(*parts)) for parts in zip(*by_rank, strict=True)]
        assert [len(step) for step in steps] == [plan.batch_rows(s, epoch) for s in range(plan.steps)]
        assert len(list(itertools.chain(*steps))) == plan.rows_before(plan.steps, epoch)
        assert [len(step) for step in ids(MixedLoader(mixed, settings, rank=0, world_size=1), epoch, start=1)] == [
            len(step) for step in steps[1:]
        ]
        seen += itertools.chain(*steps)
    counts = collections.Counter(seen)
    for first, rows in ((0, 200), (1000, 30)):  # no row comes again before each has come
        found = [counts[first + i] for i in range(rows)]
        assert max(found) - min(found) <= 1


def test_micro_batches_have_rows_of_each_dataset(tmp_path):
    loader = MixedLoader(mixture(tmp_path, {"a": 80, "b": 80}), config(a=1, b=1), rank=0, world_size=1, micro_batches=2)
    for step in loader.epoch(0):
        for batch in step.micro_batches:
            assert sorted(set((batch["id"] // 1000).tolist())) == [0, 1]
            assert torch.equal(batch["x"][:, 0], (batch["id"] // 1000).float())


def test_datasets_with_other_columns_are_an_error_that_names_both():
    def dataset(dtype):
        return ShardSet("/nowhere", (Column("x", dtype, (2,), "ndarray"), Column("id", "int64")), ())

    with pytest.raises(ValueError, match="'x': found the dtype float64 .* in the dataset 'b', expected float32 .* 'a'"):
        Mixture({"a": dataset("float32"), "b": dataset("float64")}).select(["x", "id"])


def ragged_mixture(folder, sizes=(50, 30)):
    """Row i of dataset d has (i % 5) * (d + 1) tokens, all its id, and i % 3 points of two numbers."""
    datasets = {}
    for number, (name, rows) in enumerate(zip("ab", sizes, strict=True)):
        ids = 1000 * number + np.arange(rows)
        tokens, points = lengths_of(ids)
        columns = {
            "tokens": from_lengths(np.repeat(ids, tokens), tokens),
            "points": from_lengths(np.repeat(ids[:, None] * [1.0, -1.0], points, axis=0), points),
            "id": ids,
        }
        datasets[name] = write_dataset(str(folder / name), columns, 7, 21)
    return Mixture(datasets)


def lengths_of(ids):
    rows = ids % 1000
    return rows % 5 * (ids // 1000 + 1), rows % 3


def ragged_config(ragged, a=0.5, b=0.5, **data):
    settings = {"num_streams": STREAMS, "shuffle_window_rows": 30, "ragged": ragged, **data}
    return make_config(
        features=("tokens", "points"), label="id", proportions={"a": a, "b": b}, global_batch_size=BATCH, **settings
    )


def cells_of(batch, name):
    """The values of a ragged column end to end, and the length of each row, of either kind of batch."""
    if f"{name}_offsets" in batch:
        offsets = batch[f"{name}_offsets"]
        assert int(offsets[0]) == 0
        assert len(batch[name]) == int(offsets[-1])
        return batch[name], offsets.diff()
    mask = batch[f"{name}_mask"]
    assert not batch[name][~mask].any()
    assert mask.shape[1] == mask.sum(1).max()
    return batch[name][mask], mask.sum(1)


@pytest.mark.parametrize("ragged", ["pad", "offsets"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("share", [0.5, 0.3])
def test_ragged_cells_of_all_datasets_stay_with_their_rows(tmp_path, ragged, micro_batches, share):
    mixed, settings = ragged_mixture(tmp_path), ragged_config(ragged, share, 1 - share)
    seen = set()
    for step in MixedLoader(mixed, settings, rank=0, world_size=1, micro_batches=micro_batches).epoch(0):
        for batch in step.micro_batches:
            ids = batch["id"]
            assert set((ids // 1000).tolist()) == {0, 1}
            tokens, points = lengths_of(ids)
            values, lengths = cells_of(batch, "tokens")
            assert torch.equal(lengths, tokens)
            assert torch.equal(values, torch.repeat_interleave(ids, tokens))
            values, lengths = cells_of(batch, "points")
            assert torch.equal(lengths, points)
            assert torch.equal(
                values, torch.repeat_interleave(ids, points)[:, None] * torch.tensor([1.0, -1.0]).double()
            )
            seen |= set(ids.tolist())
    assert len(seen) == 80


def test_transforms_see_the_rows_of_all_datasets_in_one_batch(tmp_path):
    keys = []

    def counts(batch, key):
        keys.append(key)
        tokens = batch["tokens"] * 2
        return {"twice": tokens, "lengths": batch["tokens_mask"].sum(1), "id": batch["id"], "weight": batch["weight"]}

    loader = MixedLoader(
        ragged_mixture(tmp_path), ragged_config("pad"), rank=0, world_size=1, micro_batches=2, prepare=counts
    )
    for step in loader.epoch(3):
        for batch in step.micro_batches:
            assert torch.equal(batch["lengths"], lengths_of(batch["id"])[0])
            assert torch.equal(batch["twice"].sum(1), 2 * batch["id"] * batch["lengths"])
    assert [key[:4] for key in keys] == [(3, step, 0, i) for step in range(loader.plan.steps) for i in range(2)]


def test_batches_are_pinned_once_they_are_joined(tmp_path, monkeypatch):
    """Whatever makes another tensor of them later would leave page-locked memory."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    loader = MixedLoader(ragged_mixture(tmp_path), ragged_config("offsets"), rank=0, world_size=1, pin=True)
    batches = [batch for step in loader.epoch(0) for batch in step.micro_batches]
    assert {id(t) for batch in batches for t in batch.values()} == {id(t) for t in pinned}


def test_reading_ends_with_the_iterator_or_with_an_error(tmp_path):
    mixed = ragged_mixture(tmp_path)
    loader = MixedLoader(mixed, ragged_config("pad"), rank=0, world_size=1)
    steps = loader.epoch(0)
    next(steps)
    steps.close()
    for shard in mixed.datasets["b"].shards:
        (tmp_path / "b" / shard.name).unlink()
    with pytest.raises(RuntimeError, match=r"cannot read row group \d of .*/b/"):
        list(MixedLoader(mixed, ragged_config("pad"), rank=0, world_size=1).epoch(0))
    assert [t for t in threading.enumerate() if t.name.startswith("spark_dl")] == []


def wide_mixture(folder):
    """Row groups of 10 rows, 1.07 MiB."""
    columns = {"x": np.zeros((40, 14000)), "id": np.arange(40)}
    return Mixture({name: write_dataset(str(folder / name), columns, 10, 40) for name in "ab"})


@pytest.mark.parametrize(("memory_mib", "batch", "message"), [
    (3, 4, "10 rows of 112008 bytes, 1 MiB; .*loader.memory_mib=3 .1 for each of 2 datasets.; raise loader"),
    (4, 4, None),
    (4, 36, None),
    (5, 40, "/a: each rank has 20 rows of 112008 bytes in a global batch, 2 MiB, and loader.memory_mib=5 "
            ".2 for each of 2 datasets.; lower train.global_batch_size, raise loader.memory_mib"),
    (6, 40, None),
])  # fmt: skip
def test_what_does_not_fit_into_a_dataset_s_share_of_the_memory_is_said_on_the_driver_too(
    tmp_path, memory_mib, batch, message
):
    mixed = wide_mixture(tmp_path)
    settings = make_config(
        features=("x",), label="id", num_streams=2, proportions={"a": 1, "b": 1}, memory_mib=memory_mib,
        global_batch_size=batch,
    )  # fmt: skip

    def on_driver():
        for name, own in dataset_configs(settings).items():
            shards_of(mixed.datasets[name], "", own, contextlib.ExitStack(), reuse=False, num_datasets=2)

    for check in (on_driver, lambda: list(MixedLoader(mixed, settings, rank=0, world_size=1).epoch(0))):
        with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
            check()
