"""A dataset for a loop of the user's own: every row once on one rank, in an order that can be continued anywhere."""

import functools
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import spark_dl
from spark_dl import Data, Loader
from spark_dl.data.columns.ragged import from_lengths
from spark_dl.data.load.local import RankRows, RowSettings
from tests.builders.datasets import write_dataset
from tests.ranks.launcher import run_ranks

ROWS = 245
DATA = Data(features=("x",), label="id")


@pytest.fixture
def url(tmp_path):
    rng = np.random.default_rng(0)
    columns = {"x": rng.random((ROWS, 3), dtype=np.float32), "id": np.arange(ROWS), "w": np.full(ROWS, 2.0)}
    write_dataset(str(tmp_path / "data"), columns, group_rows=20, shard_rows=60)
    return str(tmp_path / "data")


def ids_of(batch):
    """The true rows of a batch."""
    return batch["id"][batch["weight"] > 0].tolist()


def read_epochs(url, epochs, batch_size, **options):
    """The rows of each batch of each epoch, and what the dataset says of itself."""
    dataset = spark_dl.open_dataset(url, DATA, batch_size=batch_size, **options)
    found = [[ids_of(batch) for batch in dataset] for _ in range(epochs)]
    return {"batches": found, "len": len(dataset), "rows": dataset.rows, "epoch": dataset.epoch}


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 16), (2, 16), (3, 10), (3, 100)])
def test_every_row_is_in_one_batch_of_one_rank_in_each_epoch(url, world_size, batch_size):
    ranks = run_ranks(read_epochs, world_size, url, 2, batch_size)
    for epoch in range(2):
        rows = [row for rank in ranks for batch in rank["batches"][epoch] for row in batch]
        assert sorted(rows) == list(range(ROWS))
    assert {rank["len"] for rank in ranks} == {len(b) for rank in ranks for b in rank["batches"]}
    assert {(rank["rows"], rank["epoch"]) for rank in ranks} == {(ROWS, 1)}
    assert ranks[0]["batches"][0] != ranks[0]["batches"][1]


@pytest.mark.parametrize(("world_size", "batch_size", "steps"), [(1, 16, 15), (2, 16, 7), (3, 10, 8), (1, 49, 5)])
def test_the_last_batch_is_left_out_on_all_ranks_if_it_is_not_full(url, world_size, batch_size, steps):
    kept = run_ranks(functools.partial(read_epochs, drop_last=True), world_size, url, 2, batch_size)
    whole = run_ranks(read_epochs, world_size, url, 2, batch_size)
    for some, all_of_rank in zip(kept, whole, strict=True):
        assert some["batches"] == [epoch[:steps] for epoch in all_of_rank["batches"]]
        assert {len(batch) for epoch in some["batches"] for batch in epoch} == {batch_size}
        assert (some["len"], some["rows"]) == (steps, steps * batch_size * world_size)


def test_a_position_at_the_end_of_full_batches_is_the_next_epoch(url):
    dataset = spark_dl.open_dataset(url, DATA, batch_size=16, drop_last=True)
    first, second = [[ids_of(batch) for batch in dataset] for _ in range(2)]
    batches = iter(again := spark_dl.open_dataset(url, DATA, batch_size=16, drop_last=True))
    assert [ids_of(next(batches)) for _ in range(15)] == first
    state = again.state_dict()
    batches.close()
    last = spark_dl.open_dataset(url, DATA, batch_size=16, drop_last=True)
    last.load_state_dict(state)
    assert [ids_of(batch) for batch in last] == second
    with pytest.raises(ValueError, match="drop_last leaves no batch: found 245 rows, and a batch of all ranks has 246"):
        spark_dl.open_dataset(url, DATA, batch_size=246, drop_last=True)
    with pytest.raises(ValueError, match="drop_last: expected true or false, found 1"):
        spark_dl.open_dataset(url, DATA, batch_size=16, drop_last=1)


def test_global_batches_do_not_depend_on_the_number_of_ranks(url):
    def batches_of(world_size):
        ranks = run_ranks(read_epochs, world_size, url, 1, 24 // world_size)
        steps = zip(*(rank["batches"][0] for rank in ranks), strict=True)
        return [sorted(row for part in step for row in part) for step in steps]

    assert batches_of(1) == batches_of(2) == batches_of(4)


def stop_and_go_on(url, batch_size, stop, options):
    """The batches before a stop, and after it in a new object; with those of a run that did not stop."""
    whole = spark_dl.open_dataset(url, DATA, batch_size=batch_size, **options)
    first = spark_dl.open_dataset(url, DATA, batch_size=batch_size, **options)
    second = spark_dl.open_dataset(url, DATA, batch_size=batch_size, **options)
    expected = [ids_of(b) for _ in range(2) for b in whole]
    found = []
    for batch in first:
        found.append(ids_of(batch))
        if len(found) == stop:
            break
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    while len(found) < len(expected):
        found += [ids_of(b) for b in second]
    return expected, found, second.epoch


@pytest.mark.parametrize("stop", [1, 5, 8])
@pytest.mark.parametrize("options", [{}, {"shuffle": False}])
def test_a_loop_that_stops_goes_on_with_the_next_batch(url, stop, options):
    for expected, found, epoch in run_ranks(stop_and_go_on, 2, url, 16, stop, options):
        assert found == expected
        assert epoch == 1


def go_on_with(url, batch_size, state):
    dataset = spark_dl.open_dataset(url, DATA, batch_size=batch_size)
    dataset.load_state_dict(state)
    return [ids_of(batch) for batch in dataset]


def test_the_rest_of_an_epoch_is_read_by_another_number_of_ranks(url):
    dataset = spark_dl.open_dataset(url, DATA, batch_size=24)
    batches = iter(dataset)
    read = [row for _ in range(3) for row in ids_of(next(batches))]
    rest = [row for rank in run_ranks(go_on_with, 2, url, 12, dataset.state_dict()) for b in rank for row in b]
    assert sorted(read + rest) == list(range(ROWS))


def test_a_position_in_other_rows_is_an_error_that_names_what_differs(url):
    state = spark_dl.open_dataset(url, DATA, batch_size=24).state_dict()
    for name, options in {
        "global_batch_size": {"batch_size": 12},
        "seed": {"batch_size": 24, "seed": 1},
        "shuffle": {"batch_size": 24, "shuffle": False},
    }.items():
        other = spark_dl.open_dataset(url, DATA, **options)
        with pytest.raises(ValueError, match=f"load_state_dict: found {name}="):
            other.load_state_dict(state)


HELD_OUT = {"validation_fraction": 0.2, "split": "train"}


@pytest.mark.parametrize(("before", "now", "name"), [
    ({}, {**HELD_OUT}, "split"), (HELD_OUT, {}, "split"), (HELD_OUT, {**HELD_OUT, "split": "validation"}, "split"),
    (HELD_OUT, {**HELD_OUT, "validation_fraction": 0.1}, "validation_fraction"),
    ({"loader": Loader(memory_mib=512)}, {"loader": Loader(memory_mib=8)}, "window_rows"),
])  # fmt: skip
def test_a_position_among_other_rows_or_in_another_window_is_refused(tmp_path, before, now, name):
    """Each row of 8 KiB, so that 8 MiB bound the window."""
    columns = {"x": np.zeros((4096, 2048), np.float32), "id": np.arange(4096)}
    write_dataset(str(tmp_path / "data"), columns, group_rows=64, shard_rows=2048)
    url = str(tmp_path / "data")
    dataset = spark_dl.open_dataset(url, DATA, batch_size=64, **before)
    next(iter(dataset))
    with pytest.raises(ValueError, match=f"load_state_dict: found {name}="):
        spark_dl.open_dataset(url, DATA, batch_size=64, **now).load_state_dict(dataset.state_dict())
    spark_dl.open_dataset(url, DATA, batch_size=64, **before).load_state_dict(dataset.state_dict())


def test_a_loop_with_one_batch_in_each_step_loses_no_rows_to_max_tokens(tmp_path):
    loader, texts, url = Loader(max_tokens=8), Data(features=("x",), label="id"), str(tmp_path / "texts")
    columns = {"x": from_lengths(np.zeros(96), np.full(48, 2)), "id": np.arange(48)}
    write_dataset(url, columns, encode={"x": {"ragged": True}}, label="id", features=("x",))
    expected = r"^loader\.max_tokens: expected null, found 8: a loop of your own gets one batch in each step"
    with pytest.raises(ValueError, match=expected):
        spark_dl.open_dataset(url, texts, batch_size=24, loader=loader)
    placed: Any = SimpleNamespace(placement=SimpleNamespace(part_shards=(1,)))
    with pytest.raises(ValueError, match=expected):
        RankRows(placed, RowSettings(data=DATA, loader=loader)).config(24)


@pytest.mark.parametrize("change", [{"step": 10_000}, {"step": -5}, {"step": 2.5}, {"step": "a"}, {"step": None},
                                    {"epoch": -1}, {"epoch": 1.0}, {"step": True}, {"epoch": None}])  # fmt: skip
def test_what_is_no_position_is_refused(url, change):
    dataset = spark_dl.open_dataset(url, DATA, batch_size=24)
    with pytest.raises(ValueError, match=f"expected {next(iter(change))} as a whole number"):
        dataset.load_state_dict({**dataset.state_dict(), **change})
    assert len([ids_of(b) for b in dataset]) == len(dataset)


def test_a_position_of_an_older_version_is_taken(url):
    dataset = spark_dl.open_dataset(url, DATA, batch_size=24)
    state = {k: v for k, v in dataset.state_dict().items() if not k.startswith(("split", "validation", "window"))}
    dataset.load_state_dict({**state, "step": 3})
    assert len(list(dataset)) == len(dataset) - 3


def test_a_rank_can_be_named(url, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    rows = [
        row
        for rank in range(3)
        for batch in spark_dl.open_dataset(url, DATA, batch_size=10, cur_shard=rank, shard_count=3)
        for row in ids_of(batch)
    ]
    assert sorted(rows) == list(range(ROWS))
    for wrong in ((3, 3), (0, None), (None, 2), (0.0, 2)):
        with pytest.raises(ValueError, match="expected cur_shard from 0 on and below shard_count"):
            spark_dl.open_dataset(url, DATA, batch_size=10, cur_shard=wrong[0], shard_count=wrong[1])


def test_it_is_what_training_loops_know(url):
    dataset = spark_dl.open_dataset(url, DATA, batch_size=16)
    assert isinstance(dataset, IterableDataset)
    iter(dataset)  # some loops look whether they can, and ask again
    first = [ids_of(b) for b in dataset]
    dataset.set_epoch(0)
    assert [ids_of(b) for b in DataLoader(dataset, batch_size=None)] == first
    dataset.set_epoch(3)
    third = [ids_of(b) for b in dataset]
    dataset.set_epoch(3)
    assert [ids_of(b) for b in dataset] == third != first


def test_set_epoch_at_the_start_of_an_epoch_keeps_the_position_in_it(url):
    dataset = spark_dl.open_dataset(url, DATA, batch_size=16)
    batches = iter(dataset)
    read = [ids_of(next(batches)) for _ in range(4)]
    again = spark_dl.open_dataset(url, DATA, batch_size=16)
    again.load_state_dict(dataset.state_dict())
    again.set_epoch(0)  # as loops do at the start of each epoch
    assert sorted(row for batch in [*read, *(ids_of(b) for b in again)] for row in batch) == list(range(ROWS))


def read_from(dataset, first_epoch, num_epochs, steps=None):
    """The rows of each batch in a loop over epochs, and the position after a number of steps."""
    found, position = [], None
    for epoch in range(first_epoch, num_epochs):
        dataset.set_epoch(epoch)
        for batch in dataset:
            found.append((epoch, ids_of(batch)))
            if len(found) == steps:
                position = dataset.state_dict()
    return found, position


@pytest.mark.sampled(4)
@pytest.mark.parametrize("loop", ["from the dataset's epoch", "from the saved epoch"])
@pytest.mark.parametrize("epochs_done", [0.5, 1, 2, 3])
def test_a_loop_over_epochs_goes_on_where_it_was_also_between_them(url, loop, epochs_done):
    steps = int(epochs_done * len(spark_dl.open_dataset(url, DATA, batch_size=16)))
    whole, position = read_from(spark_dl.open_dataset(url, DATA, batch_size=16), 0, 3, steps)
    again = spark_dl.open_dataset(url, DATA, batch_size=16)
    again.load_state_dict(position)
    first_epoch = again.epoch if loop == "from the dataset's epoch" else position["epoch"]
    assert read_from(again, first_epoch, 3) == (whole[steps:], None)
    assert [ids_of(batch) for batch in again] != []  # one more epoch if it is asked for


def test_worker_processes_of_a_data_loader_are_refused(url):
    batches = iter(DataLoader(spark_dl.open_dataset(url, DATA, batch_size=16), batch_size=None, num_workers=1))
    try:
        with pytest.raises(RuntimeError, match="set num_workers=0"):
            next(batches)
    finally:
        batches._shutdown_workers()  # else they end with the traceback that refers to them


def test_a_library_that_would_split_the_rows_once_more_is_refused(url):
    data_loader = pytest.importorskip("accelerate.data_loader")
    dataset = spark_dl.open_dataset(url, DATA, batch_size=16)
    shard = data_loader.IterableDatasetShard(dataset, batch_size=1, num_processes=2, process_index=0)
    with pytest.raises(RuntimeError, match="IterableDatasetShard of Accelerate"):
        list(shard)


def test_batches_have_the_weights_of_a_column_and_the_form_of_a_function(url):
    data = Data(features=("x",), label="id", weight="w")
    dataset = spark_dl.open_dataset(
        url, data, batch_size=100, transform=lambda b: (b["x"], b["id"], b["weight"]), split="all"
    )
    weights = torch.cat([weight for _, _, weight in dataset])
    assert weights.unique().tolist() == [0.0, 2.0]
    assert int((weights > 0).sum()) == ROWS


def test_the_default_columns_are_all_columns_and_splits_share_the_rows(url):
    parts = {
        split: spark_dl.open_dataset(url, batch_size=16, validation_fraction=0.2, split=split)
        for split in ("train", "validation")
    }
    assert [column.name for column in parts["train"].columns] == ["x", "id", "w"]
    rows = {split: {row for b in part for row in ids_of(b)} for split, part in parts.items()}
    assert not rows["train"] & rows["validation"]
    assert len(rows["train"] | rows["validation"]) == ROWS


def test_what_is_no_dataset_is_an_error_that_says_what_to_pass(tmp_path, url):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1.0]}), tmp_path / "plain.parquet")
    with pytest.raises(ValueError, match=r"was not written by spark_dl .* data=spark_dl\.Data"):
        spark_dl.open_dataset(tmp_path / "plain.parquet", batch_size=4)
    plain = spark_dl.open_dataset(tmp_path / "plain.parquet", Data(features=("x",), label=None), batch_size=4)
    assert next(iter(plain))["x"].tolist()[:1] == [1.0]
    with pytest.raises(ValueError, match="expected a DataFrame of Spark, the path or URL of a dataset"):
        spark_dl.open_dataset([1, 2], batch_size=4)
    with pytest.raises(ValueError, match="no column 'y'"):
        spark_dl.open_dataset(url, Data(features=("y",), label=None), batch_size=4)
    rows = RankRows(spark_dl.read_shards(url), RowSettings(data=DATA))
    with pytest.raises(ValueError, match="pass these to run_on_dataframe"):
        spark_dl.open_dataset(rows, DATA, batch_size=4)
    with pytest.raises(ValueError, match="open_dataset: drop_last: expected false for the rows of run_on_dataframe"):
        spark_dl.open_dataset(rows, batch_size=4, drop_last=True)
    with pytest.raises(ValueError, match="num_streams"):
        spark_dl.open_dataset(url, DATA, batch_size=4, loader=Loader(num_streams=0))


@pytest.mark.parametrize(("options", "match"), [
    ({"batch_size": "16"}, "batch_size: expected an integer >= 1, found '16'"),
    ({"batch_size": 0}, "batch_size: expected an integer >= 1, found 0"),
    ({"batch_size": 4, "split": "test", "validation_fraction": 0.2}, "split: expected one of .* found 'test'"),
    ({"batch_size": 4, "split": "validation"}, "split='validation' needs validation_fraction"),
    ({"batch_size": 4, "validation_fraction": 0.2}, "validation_fraction=0.2 has no effect with split='all'"),
    ({"batch_size": 4, "data": {"features": ["x"]}}, r"data: expected a spark_dl\.Data, found dict"),
])  # fmt: skip
def test_wrong_arguments_are_an_error_that_names_them(url, options, match):
    with pytest.raises(ValueError, match=f"open_dataset: {match}"):
        spark_dl.open_dataset(url, **options)
