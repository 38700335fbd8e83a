"""The loader: what the plan says, with the values that were stored."""

import contextlib
import dataclasses
import gc
import itertools
import os
import re
import subprocess
import sys
import threading
import time
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_dl import Data, read_shards
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.ragged import from_lengths
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.manifest import commit
from spark_dl.data.dataset.memory import check_memory, warn_of_memory
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.external.files import filter_rows
from spark_dl.data.load.loader import LoaderMemory, ShardLoader, _bundles, read_ahead
from spark_dl.data.load.mixture import MixedLoader, Mixture
from spark_dl.data.read.rows import HELD_ROW_GROUPS
from spark_dl.data.write.arrays import write_arrays
from spark_dl.data.write.writer import ShardWriter
from tests.builders.batches import assert_same, steps
from tests.builders.datasets import write_dataset
from tests.builders.images import png
from tests.builders.settings import make_config

BATCH, STREAMS = 12, 4


def config(batch=BATCH, streams=STREAMS, **data):
    settings = {"features": ("x",), "label": "id", "num_streams": streams, "shuffle_window_rows": 40, **data}
    return make_config(**settings, global_batch_size=batch, seed=7)


def dataset(url, rows, group_rows=10, shard_rows=30):
    ids = np.arange(rows, dtype=np.int64)
    x = np.stack([ids * 0.5, -ids, ids + 0.25], axis=1).astype(np.float32)
    return write_dataset(str(url), {"x": x, "id": ids}, group_rows, shard_rows)


def loaders(shards, world_size, settings=None, **kwargs):
    return [
        ShardLoader(shards, settings or config(), rank=r, world_size=world_size, **kwargs) for r in range(world_size)
    ]


def true_ids(loader, epoch=0):
    return [int(i) for _, _, batch in steps(loader, epoch) for i in batch["id"][batch["weight"] > 0]]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("rows", [1, 3, 11, 12, 13, 47, 48, 49, 100])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_ranks_together_read_every_row_once_and_at_the_same_step_as_one_rank(tmp_path, rows, world_size):
    shards = dataset(tmp_path / "d", rows)
    alone = steps(loaders(shards, 1)[0], epoch=2)
    by_rank = [steps(loader, epoch=2) for loader in loaders(shards, world_size)]
    together = [
        (parts[0][0], parts[0][1], {name: torch.cat([p[2][name] for p in parts]) for name in parts[0][2]})
        for parts in zip(*by_rank, strict=True)
    ]
    assert_same(together, alone)
    ids = torch.cat([batch["id"][batch["weight"] > 0] for _, _, batch in together])
    assert sorted(ids.tolist()) == list(range(rows))


@pytest.mark.parametrize("rows", [1, 12, 50])
def test_values_belong_to_their_row_and_are_in_the_plan_s_order(tmp_path, rows):
    loader = loaders(dataset(tmp_path / "d", rows), 1)[0]
    starts = np.cumsum([0, *loader.plan.group_rows])
    streams = [
        np.concatenate(
            [
                np.concatenate([np.arange(s.start, s.stop) + starts[s.row_group] for s in w.segments])[w.order()]
                for w in stream.windows
            ]
            or [np.empty(0, dtype=np.int64)]
        )
        for stream in loader.plan.streams(3)
    ]
    b = loader.plan.stream_batch
    for step, _, batch in steps(loader, epoch=3):
        expected = np.concatenate([s[step * b : step * b + b] for s in streams])
        np.testing.assert_array_equal(batch["id"][batch["weight"] > 0], expected)
        ids = batch["id"].to(torch.float32)
        assert torch.equal(batch["x"], torch.stack([ids * 0.5, -ids, ids + 0.25], dim=1))


@pytest.mark.parametrize("rows", [1, 13, 48, 49])
def test_shapes_are_fixed_and_only_the_last_step_is_filled_up(tmp_path, rows):
    shards = dataset(tmp_path / "d", rows)
    by_rank = [steps(loader) for loader in loaders(shards, 3)]
    places = [3, 3, 6]  # four streams on three ranks
    for number, parts in enumerate(zip(*by_rank, strict=True)):
        for (step, true_rows, batch), size in zip(parts, places, strict=True):
            assert step == number
            assert batch["x"].shape == (size, 3)
            assert batch["id"].shape == batch["weight"].shape == (size,)
            assert batch["weight"].dtype == torch.float32
            assert set(batch["weight"].tolist()) <= {0.0, 1.0}
            if number < len(by_rank[0]) - 1:
                assert bool((batch["weight"] == 1).all())
            assert true_rows == min(BATCH, rows - number * BATCH)
        assert sum(float(batch["weight"].sum()) for _, _, batch in parts) == parts[0][1]


@pytest.mark.parametrize("rows", [3, 48, 49, 62])
@pytest.mark.parametrize("world_size", [1, 3])
def test_an_epoch_that_is_taken_up_at_a_step_goes_on_exactly_as_if_it_had_not_stopped(tmp_path, rows, world_size):
    shards = dataset(tmp_path / "d", rows)
    for rank in range(world_size):
        whole = steps(loaders(shards, world_size)[rank], epoch=1)
        for start in range(len(whole) + 1):
            fresh = loaders(shards, world_size)[rank]
            assert_same(steps(fresh, epoch=1, start=start), whole[start:])


def test_a_ledger_of_an_epoch_that_goes_on_with_another_number_of_ranks_is_that_of_one_that_did_not_stop(tmp_path):
    shards = dataset(tmp_path / "d", 500)
    whole = steps(loaders(shards, 1)[0], epoch=3)
    ledger = []
    for start, world_size in zip(range(0, len(whole), 5), itertools.cycle([2, 3, 1, 4])):
        by_rank = [itertools.islice(steps(ld, epoch=3, start=start), 5) for ld in loaders(shards, world_size)]
        ledger += [
            (parts[0][0], parts[0][1], {name: torch.cat([p[2][name] for p in parts]) for name in parts[0][2]})
            for parts in zip(*by_rank, strict=True)
        ]
    assert_same(ledger, whole)


@pytest.mark.parametrize("window_rows", [1, 40, 10_000])
@pytest.mark.parametrize("threads", [1, 3])
def test_memory_for_one_window_per_stream_is_enough(tmp_path, window_rows, threads):
    """Row groups of 640 KB, four streams, a budget of 1 MiB: nothing can be read ahead."""
    ids = np.arange(200, dtype=np.int64)
    x = np.repeat(ids[:, None], 8192, axis=1)
    shards = write_dataset(str(tmp_path / "d"), {"x": x, "id": ids}, 10, 40)
    small = config(memory_mib=1, reader_threads=threads, shuffle_window_rows=window_rows)
    found = steps(loaders(shards, 1, small)[0])
    assert sorted(int(i) for _, _, b in found for i in b["id"][b["weight"] > 0]) == list(range(200))
    assert all(bool((b["x"] == b["id"][:, None]).all()) for _, _, b in found)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_B11_fewer_row_groups_than_ranks_leave_no_rank_without_rows(tmp_path, ranks):
    """Ranks read ranges of rows, also of one row group; nobody must write the dataset again."""
    shards = dataset(tmp_path / "d", 64, group_rows=64, shard_rows=64)
    assert [shard.row_groups for shard in shards.shards] == [(64,)]
    readers = loaders(shards, ranks)
    assert len({len(steps(reader, 0)) for reader in readers}) == 1, "equal steps"
    found = [true_ids(reader) for reader in readers]
    assert all(found)
    assert sorted(row for own in found for row in own) == list(range(64))


def test_B12_a_row_group_that_does_not_fit_into_memory_is_an_error_with_both_sizes(tmp_path):
    shards = write_dataset(str(tmp_path / "d"), {"x": np.zeros((20, 1 << 17)), "id": np.arange(20)}, 10, 20)
    with pytest.raises(ValueError, match=r"has 10 rows of 1048584 bytes, 10 MiB; .* loader.memory_mib=9; raise"):
        loaders(shards, 1, config(batch=8, memory_mib=9))
    loaders(shards, 1, config(batch=8, memory_mib=11))


def test_B12_a_batch_that_does_not_fit_into_memory_is_an_error_with_both_sizes(tmp_path):
    """12 rows of 1 MiB, of which each of 4 ranks has 3."""
    shards = write_dataset(str(tmp_path / "d"), {"x": np.zeros((20, 1 << 17)), "id": np.arange(20)}, 1, 20)
    message = (
        "each rank has 12 rows of 1048584 bytes in a global batch, 12 MiB, and loader.memory_mib=12; lower "
        "train.global_batch_size, raise loader.memory_mib, or use more ranks"
    )
    with pytest.raises(ValueError, match=message):
        loaders(shards, 1, config(memory_mib=12))
    for loader in (*loaders(shards, 1, config(memory_mib=13)), *loaders(shards, 4, config(memory_mib=4))):
        assert loader.prefetch == 1
    with pytest.raises(ValueError, match="3 rows of 1048584 bytes"):
        loaders(shards, 4, config(memory_mib=3))


def test_batches_that_are_ready_take_a_quarter_of_the_memory_at_most(tmp_path):
    """Batches of 1.5 MiB, of which 5 fit into a quarter of 32 MiB."""
    x = np.arange(200, dtype=np.float64)[:, None].repeat(1 << 14, axis=1)
    shards = write_dataset(str(tmp_path / "d"), {"x": x, "id": np.arange(200)}, 10, 40)
    made = []

    def prepare(batch, key):
        made.append(key[1])
        return batch

    settings = {"prefetch_batches": 8, "memory_mib": 32}
    (loader,) = loaders(shards, 1, config(**settings), prepare=prepare)
    assert loader.prefetch == 5
    batches = loader.epoch(0)
    next(batches)
    end = time.monotonic() + 10
    while len(made) < 1 + 5 and time.monotonic() < end:  # taken, waiting in the queue; no other one is begun
        time.sleep(0.01)
    time.sleep(0.1)
    assert made == list(range(6))
    batches.close()
    assert loaders(shards, 1, config(**{**settings, "memory_mib": 512}))[0].prefetch == 8
    assert sorted(true_ids(loader)) == list(range(200))


def test_columns_without_elements_are_read(tmp_path):
    shards = write_dataset(str(tmp_path / "d"), {"x": np.zeros((30, 0), dtype=np.float32)}, 7, 14)
    (loader,) = loaders(shards, 1, config(label=None))
    found = steps(loader)
    assert all(batch["x"].shape == (BATCH, 0) for _, _, batch in found)
    assert sum(float(batch["weight"].sum()) for _, _, batch in found) == 30


def test_B12_one_row_that_does_not_fit_into_memory_is_an_error_with_both_sizes(tmp_path):
    shards = write_dataset(str(tmp_path / "d"), {"x": np.zeros((2, 1 << 18)), "id": np.arange(2)}, 1, 1)
    with pytest.raises(ValueError, match=r"has 1 rows of 2097160 bytes, 2 MiB; .* loader.memory_mib=1; raise"):
        loaders(shards, 1, config(memory_mib=1))


def unequal_lists(rows, long_from, length):
    """Rows of one value, and from a row on of many."""
    lengths = np.where(np.arange(rows) < long_from, 1, length)
    return from_lengths(np.repeat(np.arange(rows), lengths).astype(np.float32), lengths)


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_row_group_of_long_lists_does_not_fit_though_most_rows_are_short(tmp_path, is_plain):
    """30 row groups of 10 rows: the last has 10 rows of 64 Ki values, 2.5 MiB, the others 10 rows of one value."""
    lists = unequal_lists(300, 290, 1 << 16)
    encode = {"x": {"ragged": True}}
    if is_plain:
        array = pa.ListArray.from_arrays(lists.offsets.astype(np.int32), pa.array(lists.values))
        pq.write_table(pa.table({"x": array, "id": np.arange(300)}), tmp_path / "a.parquet", row_group_size=10)
        shards = open_parquet(str(tmp_path / "a.parquet"), ["x", "id"], data=Data(encode=encode))
    else:
        write_dataset(str(tmp_path / "d"), {"x": lists, "id": np.arange(300)}, 10, 100)
        shards = read_shards(str(tmp_path / "d"))
    assert shards.group_bytes(shards.columns)[-2:].tolist() == [10 * (4 + 8 + 8), 10 * (4 * (1 << 16) + 8 + 8)]
    with pytest.raises(
        ValueError, match=r"row group \d+ of .* has 10 rows of 262160 bytes, 3 MiB.*loader.memory_mib=2"
    ):
        loaders(shards, 1, config(memory_mib=2, encode=encode))
    found = steps(loaders(shards, 1, config(batch=8, memory_mib=3, encode=encode))[0])
    ids = [b["id"][b["weight"] > 0].tolist() for _, _, b in found]
    assert sorted(itertools.chain(*ids)) == list(range(300))


LONG = 1 << 16


@pytest.fixture
def few_long_rows(tmp_path):
    """Of 400 rows every 50th has 64 Ki floats, and the others one: 8 bytes of them on average are 5 KiB."""
    lengths = np.where(np.arange(400) % 50 == 7, LONG, 1)
    rows = {"x": from_lengths(np.repeat(np.arange(400), lengths).astype(np.float32), lengths), "id": np.arange(400)}
    return write_dataset(str(tmp_path / "d"), rows, 100, 200)


@pytest.mark.parametrize(
    ("ragged", "micro_batches", "fits"), [("pad", 1, False), ("pad", 4, True), ("offsets", 1, True)]
)
def test_a_batch_that_does_not_fit_once_it_is_padded_is_an_error_with_both_sizes(
    few_long_rows, ragged, micro_batches, fits
):
    """16 rows of 64 Ki floats with their mask are 5 MiB; of 4 micro-batches only those with a long row are long."""
    (loader,) = loaders(
        few_long_rows,
        1,
        config(batch=16, streams=1, memory_mib=4, ragged=ragged, shuffle=False),
        micro_batches=micro_batches,
    )
    if fits:
        ids = [m["id"][m["weight"] > 0].tolist() for step in loader.epoch(0) for m in step.micro_batches]
        assert sorted(itertools.chain(*ids)) == list(range(400))
        return
    message = (
        "column 'x': the 16 rows of rank 0 in step 0 of epoch 0 take 5 MiB, of 5 MiB with all columns, and "
        "loader.memory_mib=4; the longest of them has 65536 values, to which all others are padded: set loader.ragged "
        "to offsets, which does not pad, lower train.global_batch_size, raise loader.memory_mib, or use more ranks"
    )
    with pytest.raises(ValueError, match=message):
        list(loader.epoch(0))
    mixed = Mixture(dict.fromkeys("ab", few_long_rows))
    settings = config(batch=16, streams=1, memory_mib=4, shuffle=False, proportions={"a": 1, "b": 1})
    with pytest.raises(ValueError, match="the 16 rows of rank 0 in step 0 of epoch 0 take 5 MiB"):
        list(MixedLoader(mixed, settings, rank=0, world_size=1).epoch(0))


def test_a_batch_that_cannot_fit_once_it_is_padded_is_an_error_before_training(tmp_path):
    """The last row group has 10 rows of 64 Ki floats on average: padded, 12 rows of 256 KiB and their mask."""
    shards = write_dataset(str(tmp_path / "d"), {"x": unequal_lists(300, 290, LONG), "id": np.arange(300)}, 10, 300)
    message = (
        "column 'x': the 10 rows of row group 29 of .* have 65536 values or more on average; a batch of 12 rows "
        "padded to this length takes 4 MiB, and loader.memory_mib=3; set loader.ragged to offsets"
    )
    with pytest.raises(ValueError, match=message):
        check_memory(shards, shards.columns, config(memory_mib=3), 1)
    check_memory(shards, shards.columns, config(memory_mib=3), 2)
    check_memory(shards, shards.columns, config(memory_mib=3, ragged="offsets"), 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_mixed", [False, True])
def test_ready_batches_of_ragged_rows_are_bounded_by_what_they_take(few_long_rows, is_mixed):
    """Batches with a long row take 2.5 MiB, the others some bytes; a quarter of 24 MiB has room for two of them."""
    made = []

    def prepare(batch, key):
        made.append(sum(t.nbytes for t in batch.values()))
        return batch

    settings = config(batch=8, streams=2, memory_mib=24, prefetch_batches=100, shuffle=False)
    if is_mixed:
        loader = dataclasses.replace(settings.loader, proportions={"a": 1, "b": 1})
        settings = dataclasses.replace(settings, loader=loader)
        mixed = Mixture(dict.fromkeys("ab", few_long_rows))
        loader = MixedLoader(mixed, settings, rank=0, world_size=1, prepare=prepare)
    else:
        (loader,) = loaders(few_long_rows, 1, settings, prepare=prepare)
    ready = []
    for taken, _ in enumerate(loader.epoch(0), 1):
        time.sleep(0.02)
        ready.append(sum(made[taken:]))
    assert 5 << 19 < max(ready) <= 24 << 18


def test_to_read_a_few_long_rows_takes_no_more_than_the_budget_and_a_row_group_per_stream(few_long_rows):
    """The batch that is trained on is the trainer's."""
    settings = config(batch=8, memory_mib=8)
    (loader,) = loaders(few_long_rows, 1, settings)
    list(loader.epoch(0))
    tracemalloc.start()
    try:
        for step in loader.epoch(1):
            batch = sum(t.nbytes for m in step.micro_batches for t in m.values())
            own = max(batch, 2 << 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= (8 << 20) + STREAMS * max(few_long_rows.group_bytes(few_long_rows.columns)) + own


def test_windows_of_long_rows_are_closed_by_their_bytes(tmp_path):
    """100 rows of 128 KiB after 3900 of one value: by the rows of 3.2 KiB that they are on average, 12 MiB a window."""
    rows = {"x": unequal_lists(4000, 3900, 1 << 15), "id": np.arange(4000)}
    shards = write_dataset(str(tmp_path / "d"), rows, 4, 1000)
    loader = loaders(shards, 1, config(memory_mib=8, shuffle_window_rows=10_000, shuffle=False))[0]
    windows = [w for stream in loader.plan.streams(0) for w in stream.windows]
    sizes = [sum(s.rows for s in w.segments if s.row_group >= 975) << 17 for w in windows]
    most = (8 << 20) // 4 // loader.plan.num_streams + (4 << 17)  # a stream's part, and the row group that fills it
    assert 0 < max(sizes) <= most + 10_000
    assert max(w.rows for w in windows) > 100
    assert true_ids(loader) == true_ids(loaders(shards, 1, config(shuffle_window_rows=7, shuffle=False))[0])


@pytest.mark.parametrize("kind", ["own", "plain", "texts"])
def test_files_that_are_decoded_to_less_count_as_they_are_read(tmp_path, kind):
    """30 images of 105 kB or more, scaled to 12 bytes; 30 texts of 110 kB, that become a number."""
    rng = np.random.default_rng(0)
    cells = [png((190, 185, 3), seed) for seed in range(30)]
    encode = {"x": {"as": "image", "resize": [2, 2]}}
    if kind == "texts":
        cells = [bytes(rng.integers(97, 122, 110_000, dtype=np.uint8)).decode() for _ in range(30)]
        encode = {"x": {"as": "hash", "buckets": 9}}
    if kind == "own":
        files = from_lengths(np.frombuffer(b"".join(cells), np.uint8), np.array([len(c) for c in cells]))
        column = Column("x", "uint8", (2, 2, 3), "image", Encoding("image", resize=(2, 2)), 1e5)
        writer = ShardWriter(str(tmp_path), "part-00000000-0000", (column, Column("id", "int64")), 10, 100)
        writer.append([files, np.arange(30)])
        commit(ShardSet(str(tmp_path), writer.columns, tuple(writer.close())))
        shards = read_shards(str(tmp_path))
    else:
        pq.write_table(pa.table({"x": cells, "id": np.arange(30)}), tmp_path / "a.parquet", row_group_size=10)
        shards = open_parquet(str(tmp_path), ["x", "id"], data=Data(encode=encode))
    own_bytes = (8 if kind == "texts" else 12) + 8
    for i, size in enumerate(shards.group_bytes(shards.columns)):
        read = sum(map(len, cells[10 * i :][:10]))
        assert read + 10 * own_bytes <= size <= 1.02 * read
    assert shards.decoded_bytes(shards.columns).tolist() == [10 * own_bytes] * 3
    with pytest.raises(
        ValueError, match=r"row group . of .* has 10 rows of 1\d{5} bytes, 1 MiB; .*loader.memory_mib=1;"
    ):
        loaders(shards, 1, config(memory_mib=1, encode=encode))
    (loader,) = loaders(shards, 1, config(memory_mib=8, encode=encode))
    assert sorted(true_ids(loader)) == list(range(30))


WORDS = [letter * 100_000 for letter in "abcde"]


def few_words(url, rows, group_rows):
    """Texts of 100 kB that stand once in the file; Arrow's own schema, which tells of dictionaries, does not."""
    cells = pa.DictionaryArray.from_arrays(np.arange(rows, dtype=np.int32) % 5, pa.array(WORDS))
    table = pa.table({"x": cells, "id": np.arange(rows)})
    pq.write_table(table, f"{url}/a.parquet", row_group_size=group_rows, store_schema=False)


def words_config(kind, **data):
    encode = {
        "x": {"as": "bytes"} if kind == "bytes" else {"as": "vocabulary", "values": WORDS[1:], "unknown": "error"}
    }
    return config(batch=8, memory_mib=64, encode=encode, **data)


def test_bytes_that_do_not_fit_once_they_are_decoded_are_an_error_with_both_sizes(tmp_path, arrow_peak):
    """6000 texts, 572 MiB, of 1 MiB in the file."""
    few_words(tmp_path, 6000, 6000)
    settings = words_config("bytes")
    shards = open_parquet(str(tmp_path), ["x", "id"], data=settings.data)
    message = (
        r"cannot read row group 0 of .*a.parquet: column 'x': the cells have 0.5 MiB as they are "
        "stored, and 572 MiB once they are decoded, with loader.memory_mib=64; raise loader.memory_mib, or write"
    )
    with pytest.raises(RuntimeError, match=message):
        list(loaders(shards, 1, settings)[0].epoch(0))
    assert arrow_peak() < 20 << 20


def test_rows_that_are_shuffled_together_fit_once_they_are_decoded(tmp_path, arrow_peak):
    """24 row groups of 50 texts, 4.8 MiB each."""
    few_words(tmp_path, 1200, 50)
    settings = words_config("bytes", shuffle_window_rows=10_000)
    shards = open_parquet(str(tmp_path), ["x", "id"], data=settings.data)
    message = "the rows of 4 row groups of .* take 19 MiB once they are decoded.* each stream has 16 MiB of loader.mem"
    with pytest.raises(ValueError, match=message):
        list(loaders(shards, 1, settings)[0].epoch(0))
    found = [
        (int(i), bytes(row[mask]))
        for step in loaders(shards, 1, words_config("bytes", shuffle_window_rows=200))[0].epoch(0)
        for m in step.micro_batches
        for i, row, mask in zip(m["id"], m["x"].numpy(), m["x_mask"].numpy(), strict=True)
    ]
    assert sorted(i for i, _ in found) == list(range(1200))
    assert all(text == WORDS[i % 5].encode() for i, text in found)
    assert arrow_peak() < 64 << 20


@pytest.mark.parametrize("page_index", [False, True])
def test_texts_that_are_looked_up_are_not_decoded(tmp_path, arrow_peak, page_index):
    """4800 texts, 458 MiB; of a word that filters leave out the vocabulary need not know."""
    cells = pa.DictionaryArray.from_arrays(np.arange(6000, dtype=np.int32) * 5 // 6000, pa.array(WORDS))
    table = pa.table({"x": cells, "id": np.arange(6000)})
    pq.write_table(
        table, tmp_path / "a.parquet", store_schema=False, write_page_index=page_index, write_batch_size=100,
        data_page_size=1000, row_group_size=6000,
    )  # fmt: skip
    settings = words_config("vocabulary", filters=[["x", "!=", WORDS[0]], ["id", ">=", 0]])
    shards = open_parquet(str(tmp_path), ["x", "id"], data=settings.data)
    loader = loaders(filter_rows(shards, settings), 1, settings)[0]
    found = torch.cat([torch.stack([b["id"], b["x"]])[:, b["weight"] > 0] for _, _, b in steps(loader)], dim=1)
    assert sorted(found[0].tolist()) == list(range(1200, 6000))
    assert torch.equal(found[1], found[0] // 1200 - 1)
    assert arrow_peak() < 64 << 20
    with pytest.raises(
        RuntimeError, match="'x': found 'aaa.*, expected one of 4 known strings.* first in row 0 of the row"
    ):
        list(loaders(shards, 1, words_config("vocabulary"))[0].epoch(0))


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_streams_whose_row_groups_pass_the_memory_of_a_rank_are_said(tmp_path, caplog, num_ranks):
    """16 row groups of 1 MiB for 16 streams: a rank has 16, 6 or 2 of them at once."""
    rows = {"x": np.zeros((160, 13106), dtype=np.float64), "id": np.arange(160)}
    shards = write_dataset(str(tmp_path / "d"), rows, 10, 80)
    settings = config(batch=16, streams=16, memory_mib=5)
    warn_of_memory(shards, shards.columns, settings.loader, num_ranks)
    streams = {1: 16, 3: 6, 8: 2}[num_ranks]
    said = rf"{streams} streams with at least 1 MiB of a row group in memory, {streams} MiB of .*memory_mib=5; lower"
    assert bool(re.search(said, caplog.text)) == bool(caplog.text) == (streams > 5)
    caplog.clear()
    few = write_dataset(str(tmp_path / "few"), rows, 160, 160)  # one row group, of which each stream has a part
    warn_of_memory(few, few.columns, config(batch=16, streams=16, memory_mib=20).loader, 1)
    assert not caplog.text


@pytest.mark.parametrize(("memory_mib", "threads"), [(4, 1), (9, 2), (64, 4)])
def test_lists_are_decoded_by_as_many_threads_as_there_is_memory_for(tmp_path, memory_mib, threads):
    """Row groups of 1 MiB of lists take 4 MiB each while they are decoded."""
    lists = pa.array(list(np.zeros((40, 13106))))
    pq.write_table(pa.table({"x": lists, "id": np.arange(40)}), tmp_path / "a.parquet", row_group_size=10)
    shards = open_parquet(str(tmp_path / "a.parquet"), ["x", "id"])
    started = []
    loader = loaders(shards, 1, config(memory_mib=memory_mib, reader_threads=4))[0]
    ids = []
    for step in loader.epoch(0):
        started += [t.name for t in threading.enumerate() if t.name.startswith("spark_dl reader")]
        ids += [int(i) for m in step.micro_batches for i in m["id"][m["weight"] > 0]]
    assert sorted(ids) == list(range(40))
    assert len(set(started)) <= threads
    assert loader._memory.threads == threads


def test_a_loader_can_read_epochs_again_and_in_any_order(tmp_path):
    shards = dataset(tmp_path / "d", 50)
    loader = loaders(shards, 1)[0]
    first = steps(loader, epoch=0)
    assert true_ids(loader, epoch=1) != true_ids(loader, epoch=0)
    assert_same(steps(loader, epoch=0), first)


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_micro_batches_are_the_batch_in_pieces(tmp_path, parts):
    shards = dataset(tmp_path / "d", 50)
    whole, pieces = loaders(shards, 2)[1], loaders(shards, 2, micro_batches=parts)[1]
    assert_same(steps(pieces), steps(whole))
    for step in pieces.epoch(0):
        assert [len(m["weight"]) for m in step.micro_batches] == [6 // parts] * parts


@pytest.mark.parametrize(("rows", "streams"), [(50, 1), (50, 4), (3, 4)])
def test_without_shuffle_each_stream_reads_on_in_the_order_of_the_dataset(tmp_path, rows, streams):
    loader = loaders(dataset(tmp_path / "d", rows), 1, config(streams=streams), shuffle=False)[0]
    b = BATCH // streams
    by_stream = [[] for _ in range(streams)]
    for _, _, batch in steps(loader, epoch=4):
        for s in range(streams):
            places = slice(s * b, s * b + b)
            by_stream[s] += batch["id"][places][batch["weight"][places] > 0].tolist()
    assert list(itertools.chain(*by_stream)) == list(range(rows))


@pytest.mark.parametrize("fraction", [0.02, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("world_size", [1, 3])
def test_training_and_validation_rows_are_disjoint_and_complete(tmp_path, fraction, world_size):
    shards, settings = dataset(tmp_path / "d", 101), config(validation_fraction=fraction)
    read = {
        split: [i for loader in loaders(shards, world_size, settings, split=split) for i in true_ids(loader)]
        for split in ("train", "validation", "all")
    }
    assert len(read["validation"]) == round(fraction * 101)
    assert sorted(read["train"] + read["validation"]) == sorted(read["all"]) == list(range(101))


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_row_is_for_validation_in_one_fold(tmp_path, world_size):
    shards, held_out = dataset(tmp_path / "d", 101), []
    for fold in range(4):
        settings = config(validation_fraction=0.25, validation_fold=fold)
        train, validation = (
            [i for loader in loaders(shards, world_size, settings, split=split) for i in true_ids(loader)]
            for split in ("train", "validation")
        )
        assert sorted(train + validation) == list(range(101))
        assert len(validation) in (25, 26)
        held_out += validation
    assert sorted(held_out) == list(range(101))
    assert held_out[:25] != sorted(held_out)[:25]


@pytest.mark.parametrize(("fraction", "message"), [
    (0.004, "train.validation_fraction=0.004 of 101 rows is 0 rows, which leaves none to validate with; raise it"),
    (0.999, "train.validation_fraction=0.999 of 101 rows is 101 rows, which leaves none to train on; lower it"),
])  # fmt: skip
def test_a_fraction_that_leaves_no_rows_is_an_error(tmp_path, fraction, message):
    shards = dataset(tmp_path / "d", 101)
    for split in ("train", "validation"):
        with pytest.raises(ValueError, match=message):
            loaders(shards, 1, config(validation_fraction=fraction), split=split)
    assert len(true_ids(loaders(shards, 1, config(validation_fraction=fraction))[0])) == 101


def test_the_validation_rows_are_the_same_in_every_epoch(tmp_path):
    shards = dataset(tmp_path / "d", 101)
    loader = loaders(shards, 1, config(validation_fraction=0.3), split="validation")[0]
    assert sorted(true_ids(loader, 0)) == sorted(true_ids(loader, 5))


DTYPES = ["bool", "int8", "int16", "int32", "int64", "float32", "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3)])
def test_dtypes_and_shapes_come_out_as_they_were_stored(tmp_path, dtype, shape):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(30, *shape)) * 50).astype(dtype)
    if dtype.startswith("int"):
        x.reshape(-1)[:2] = np.iinfo(dtype).min, np.iinfo(dtype).max
    shards = write_dataset(str(tmp_path / "d"), {"x": x, "id": np.arange(30, dtype=np.int16)}, 7, 14)
    (loader,) = loaders(shards, 1, config(batch=6, streams=2))
    for _, _, batch in steps(loader):
        assert batch["x"].dtype == getattr(torch, dtype)
        assert batch["id"].dtype == torch.int16
        np.testing.assert_array_equal(batch["x"], x[batch["id"].numpy()])


def test_batches_do_not_share_memory_with_each_other(tmp_path):
    loader = loaders(dataset(tmp_path / "d", 50), 1)[0]
    expected = steps(loader)
    for (_, _, batch), step in zip(expected, loader.epoch(0), strict=True):
        assert torch.equal(step.micro_batches[0]["x"], batch["x"])
        step.micro_batches[0]["x"].zero_()


def test_an_unknown_column_is_an_error_that_names_the_nearest(tmp_path):
    shards = dataset(tmp_path / "d", 5)
    with pytest.raises(ValueError, match=r"no column 'iid' .*did you mean 'id'"):
        loaders(shards, 1, config(label="iid"))


def delete(path):
    path.unlink()


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(path):
    """In the values of a data page: the footer stays readable."""
    content = bytearray(path.read_bytes())
    content[pq.ParquetFile(path).metadata.row_group(0).column(0).total_compressed_size // 2] ^= 1
    path.write_bytes(content)


def replace_by_fewer_rows(path):
    """As many row groups as before, each a row short."""
    table = pq.read_table(path)
    pq.write_table(table.slice(0, table.num_rows - 3), path, row_group_size=9)


@pytest.mark.parametrize("damage", [delete, truncate, flip_bit, replace_by_fewer_rows])
def test_a_damaged_shard_is_an_error_that_names_the_file(tmp_path, damage):
    shards = dataset(tmp_path / "d", 100)
    name = shards.shards[1].name
    damage(tmp_path / "d" / name)
    with pytest.raises(RuntimeError, match=rf"cannot read row group \d of .*{name}"):
        steps(loaders(shards, 1)[0])
    assert loader_threads() == []


@pytest.mark.parametrize("damage", [delete, truncate, flip_bit])
def test_a_shard_that_is_damaged_in_the_middle_of_an_epoch_is_an_error_on_all_ranks_that_read_it(tmp_path, damage):
    shards = dataset(tmp_path / "d", 3000, group_rows=50, shard_rows=100)
    batches = [loader.epoch(0) for loader in loaders(shards, 2)]
    for b in batches:
        next(b)
    for shard in shards.shards:
        damage(tmp_path / "d" / shard.name)
    for b in batches:
        with pytest.raises(RuntimeError, match=r"cannot read row group \d of .*part-"):
            list(b)
    assert loader_threads() == []


def test_an_error_of_reading_leaves_no_memory_behind(tmp_path):
    """Without the garbage collector, which may come late: what the error refers to is gone with it."""
    shards = dataset(tmp_path / "d", 500)
    delete(tmp_path / "d" / shards.shards[0].name)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(RuntimeError):
            assert not list(loaders(shards, 1)[0].epoch(0))
        assert not [o for o in gc.get_objects() if type(o).__name__ in ("_Reader", "Arena")]
    finally:
        gc.enable()


LEFT_OPEN = """
import sys
from spark_dl import read_shards
from spark_dl.data.load.loader import ShardLoader
from tests.builders.settings import make_config

config = make_config(features=("x",), label="id", num_streams=2, memory_mib=8, global_batch_size=4)
batches = ShardLoader(read_shards(sys.argv[1]), config, rank=0, world_size=1).epoch(0)
next(batches)
"""


@pytest.mark.slow
def test_a_process_ends_though_an_epoch_was_left_open(tmp_path):
    write_arrays({"x": np.zeros((40_000, 64)), "id": np.arange(40_000)}, str(tmp_path / "d"))
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN, str(tmp_path / "d")], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def loader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("spark_dl")]


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_the_iterator_early_stops_the_thread(tmp_path, taken):
    batches = loaders(dataset(tmp_path / "d", 500), 1, config(prefetch_batches=1))[0].epoch(0)
    for _ in range(taken):
        next(batches)
    assert bool(loader_threads()) == bool(taken)
    batches.close()
    assert loader_threads() == []


def test_reading_ahead_is_bounded():
    made = []
    items = read_ahead((made.append(i) or [i] for i in range(100)), 3)
    assert next(items) == 0
    time.sleep(0.1)
    assert len(made) <= 1 + 3 + 1  # taken, waiting in the queue, in the hand of the thread
    assert list(items) == list(range(1, 100))
    assert made == list(range(100))


def test_an_exception_comes_after_the_items_before_it():
    def broken():
        yield [1]
        raise KeyError("gone")

    items = read_ahead(broken(), 2)
    assert next(items) == 1
    with pytest.raises(KeyError, match="gone"):
        next(items)
    assert loader_threads() == []


MIB = 1 << 20


def memory(**changed):
    usual = {
        "budget": 64 * MIB, "streams": 4, "stream_batch": 8, "row_bytes": 1024.0, "longest_row_bytes": 0.0,
        "is_ragged": False, "group_bytes": 2 * MIB, "thread_bytes": 3 * MIB, "most_threads": 2, "most_prefetched": 4,
        "prepares": False,
    }  # fmt: skip
    return LoaderMemory(**{**usual, **changed})


@pytest.mark.parametrize(("changed", "expected"), [
    # A step has 32 KiB. Row groups take 2 x 3 + 2 x 2 MiB, and bundles (1 + 2) x 2 MiB.
    ({}, {"ready_bytes": 16 * MIB, "prefetch": 4, "bundle_bytes": 2 * MIB, "at_once": 16, "bundle": 16,
          "bundles_ahead": 1, "threads": 2, "slots_bytes": 48 * MIB}),
    # A step has 6.4 MB, more than a bundle: two fit into a quarter of the memory, and two more are in use.
    ({"row_bytes": 200_000.0}, {"prefetch": 2, "at_once": 1, "bundles_ahead": 2,
                                "slots_bytes": 54 * MIB - 4 * 6_400_000}),
    # The longest rows decide how many steps are gathered at once, and the mean how many are prefetched.
    ({"is_ragged": True, "longest_row_bytes": 100_000.0}, {"prefetch": 4, "at_once": 1, "bundles_ahead": 4,
                                                          "slots_bytes": 38 * MIB}),
    ({"is_ragged": True, "longest_row_bytes": 8188.0}, {"at_once": 8, "bundles_ahead": 1, "slots_bytes": 38 * MIB}),
    ({"prepares": True}, {"at_once": 16, "bundle": 1, "bundles_ahead": 4, "slots_bytes": 42 * MIB}),
    ({"most_prefetched": 100}, {"prefetch": 100, "bundles_ahead": 7, "slots_bytes": 36 * MIB}),
    ({"thread_bytes": 40 * MIB}, {"threads": 1, "slots_bytes": 14 * MIB}),
    ({"most_threads": 30}, {"threads": 21, "slots_bytes": 0}),
    ({"group_bytes": 9 * MIB}, {"slots_bytes": 34 * MIB}),
    ({"budget": 8 * MIB}, {"ready_bytes": 2 * MIB, "bundle_bytes": MIB // 4, "at_once": 7, "slots_bytes": 0}),
    ({"budget": MIB}, {"prefetch": 4, "at_once": 1, "bundles_ahead": 4, "threads": 1, "slots_bytes": 0}),
    ({"budget": 1024 * MIB}, {"bundle_bytes": 4 * MIB, "ready_bytes": 256 * MIB}),
], ids=str)  # fmt: skip
def test_the_memory_of_a_loader_is_shared_out(changed, expected):
    shared = memory(**changed)
    assert {name: getattr(shared, name) for name in expected} == expected


@pytest.mark.parametrize(("slot_mib", "num_reads", "slots"), [
    (1, 99, 8), (6, 99, 8), (7, 99, 6), (12, 99, 4), (30, 99, 4), (1, 3, 3), (0, 99, 8),
])  # fmt: skip
def test_each_stream_has_a_slot_and_a_second_one_if_the_memory_allows(slot_mib, num_reads, slots):
    assert memory().num_slots(slot_mib * MIB, num_reads) == slots


@settings(max_examples=300, deadline=None)
@given(
    budget=st.integers(1, 512), streams=st.integers(1, 32), batch=st.integers(1, 64), row_bytes=st.integers(1, 1 << 16),
    group=st.integers(1, 64), factor=st.integers(1, 4), threads=st.integers(1, 16), ahead=st.integers(1, 32),
)  # fmt: skip
def test_what_is_shared_out_is_within_the_budget_where_that_can_be(
    budget, streams, batch, row_bytes, group, factor, threads, ahead
):
    shared = memory(
        budget=budget * MIB, streams=streams, stream_batch=batch, row_bytes=float(row_bytes), group_bytes=group * MIB,
        thread_bytes=factor * group * MIB, most_threads=threads, most_prefetched=ahead,
    )  # fmt: skip
    step = streams * batch * row_bytes
    decoding = shared.threads * factor * group * MIB + HELD_ROW_GROUPS * group * MIB
    assert shared.slots_bytes == 0 or shared.slots_bytes + decoding + (shared.bundles_ahead + 2) * step <= budget * MIB
    assert shared.prefetch == 1 or shared.prefetch * step <= shared.ready_bytes
    assert shared.threads == 1 or shared.threads * factor * group <= budget
    assert shared.at_once == 1 or shared.at_once * step <= shared.bundle_bytes
    assert 1 <= shared.bundles_ahead <= shared.prefetch <= ahead


@pytest.mark.parametrize(("sizes", "most", "most_bytes", "bundles"), [
    ([1] * 5, 2, 99, [(0, 2), (2, 4), (4, 5)]), ([3, 3, 3, 9, 1], 9, 6, [(0, 2), (2, 3), (3, 4), (4, 5)]),
    ([4, 2, 4, 2], 9, 6, [(0, 2), (2, 4)]), ([4, 3], 9, 6, [(0, 1), (1, 2)]), ([7], 1, 1, [(0, 1)]), ([], 3, 3, []),
])  # fmt: skip
def test_steps_are_bundled_up_to_a_number_and_a_size(sizes, most, most_bytes, bundles):
    assert list(_bundles(sizes, most, most_bytes)) == bundles
