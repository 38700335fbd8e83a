"""Sequences: every valid sample once, with the rows that a loop over single rows gives, across row groups and files."""

import dataclasses
import itertools
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.ragged import from_lengths
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.load.build import build_loader
from spark_dl.data.load.loader import ShardLoader
from spark_dl.data.load.mixture import Mixture
from spark_dl.data.plan import Segment
from spark_dl.data.read import sequences
from spark_dl.data.read.rows import Rows
from spark_dl.data.read.sequences import SequenceIndex, SequenceRows, with_runs
from tests.builders.batches import assert_same, steps
from tests.builders.datasets import write_dataset
from tests.builders.settings import make_config


def settings(**fields):
    defaults = {"features": ("x", "m"), "label": "id", "num_streams": 4, "shuffle_window_rows": 40}
    return make_config(**{**defaults, "global_batch_size": 12, **fields})


def runs_of(shards, config):
    return with_runs(shards, config.sequences, config.data.columns)


def series(rows, seed=0):
    """Rows of devices that follow each other, some seen once only, with a time that often jumps; ranks 1 to 3."""
    rng = np.random.default_rng(seed)
    ids = np.arange(rows)
    device = np.cumsum(rng.random(rows) < 0.1)
    time = np.cumsum(rng.choice([0, 1, 2, 7], rows, p=[0.1, 0.6, 0.2, 0.1]))
    return {
        "id": ids,
        "device": device,
        "time": time - 1000 * device,  # each device has a clock of its own
        "x": np.stack([ids * 0.5, -ids], axis=1).astype(np.float32),
        "m": (ids[:, None, None] * 7 + np.arange(6).reshape(2, 3)).astype(np.int16),
    }


def expected_starts(columns, length, stride, group=None, order=None, max_gap=None):
    """Where samples begin, by a loop over rows: as far from the start of their run as a multiple of the stride."""
    starts, run_start, rows = [], 0, len(columns["id"])

    def follows(row):
        same = group is None or columns[group][row] == columns[group][row - 1]
        return same and (max_gap is None or columns[order][row] - columns[order][row - 1] <= max_gap)

    for row in range(rows):
        if row and not follows(row):
            run_start = row
        whole = row + length <= rows and all(follows(r) for r in range(row + 1, row + length))
        if whole and (row - run_start) % stride == 0:
            starts.append(row)
    return starts


FOUND_BY = [
    {},
    {"group": "device"},
    {"group": "device", "order": "time"},
    {"group": "device", "order": "time", "max_gap": 2},
    {"order": "id"},
    {"order": "id", "max_gap": 0.5},
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("found_by", FOUND_BY)
@pytest.mark.parametrize(("length", "stride"), [(1, 1), (2, 1), (5, 1), (5, 3), (3, 3), (2, 9), (25, 2), (150, 1)])
def test_every_valid_sample_is_read_once_with_its_rows(tmp_path, length, stride, found_by):
    columns = series(157)
    shards = write_dataset(str(tmp_path / "d"), columns, 10, 30)
    starts = expected_starts(columns, length, stride, **found_by)
    asked = {f"sequence_{key}": value for key, value in found_by.items()}
    config = settings(sequence_length=length, sequence_stride=stride, **asked)
    if not starts:
        with pytest.raises(ValueError, match=rf"sequences\.length={length}: .* has no sequence of .*; its 157 rows"):
            runs_of(shards, config)
        return
    loader = ShardLoader(runs_of(shards, config), config, rank=0, world_size=1)
    assert loader.plan.rows == len(starts)
    seen = []
    for _, _, batch in steps(loader, epoch=1):
        assert batch["id"].shape == (12, length)
        assert batch["x"].shape == (12, length, 2)
        assert batch["m"].shape == (12, length, 2, 3)
        for name in ("id", "x", "m"):
            np.testing.assert_array_equal(batch[name], columns[name][batch["id"]])
        assert bool((batch["id"].diff(dim=1) == 1).all())
        seen += batch["id"][batch["weight"] > 0][:, 0].tolist()
    assert sorted(seen) == starts
    in_order = ShardLoader(shards, config, rank=0, world_size=1, shuffle=False)
    b, cuts = 3, [i * len(starts) // 4 for i in range(5)]
    for step, _, batch in steps(in_order):
        places = [cuts[s] + step * b + i for s in range(4) for i in range(b) if cuts[s] + step * b + i < cuts[s + 1]]
        assert batch["id"][batch["weight"] > 0][:, 0].tolist() == [starts[p] for p in places]


@pytest.mark.parametrize("seed", range(20))
def test_samples_are_counted_and_found_by_arithmetic(seed):
    rng = np.random.default_rng(seed)
    rows, length, stride = int(rng.integers(1, 60)), int(rng.integers(1, 8)), int(rng.integers(1, 8))
    device = np.cumsum(rng.random(rows) < rng.random())
    starts = np.array(
        expected_starts({"id": np.arange(rows), "device": device}, length, stride, "device"), dtype=np.int64
    )
    run_starts = np.flatnonzero(np.diff(device, prepend=-1))
    found = SequenceIndex(run_starts, rows, length, stride)
    assert found.samples == len(starts)
    np.testing.assert_array_equal(found.first_rows(np.arange(len(starts))), starts)
    np.testing.assert_array_equal(
        found.samples_before(np.arange(rows + 1)), [(starts < row).sum() for row in range(rows + 1)]
    )


@pytest.mark.parametrize("piece_bytes", [1, 1000, 1 << 22])
def test_a_row_group_of_long_samples_is_cut_into_pieces(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(sequences, "_PIECE_BYTES", piece_bytes)
    shards = write_dataset(str(tmp_path / "d"), {"id": np.arange(100)}, 40, 40)
    rows = SequenceRows(Rows(shards, shards.columns, 0.0, 0, "all"), SequenceIndex(np.zeros(1, np.int64), 100, 7, 1))
    assert sum(rows.group_rows) == 94
    assert max(rows.group_rows) == {1: 1, 1000: 14, 1 << 22: 40}[piece_bytes]
    out = [np.full((94, 7), -1)]
    rows.read_into([Segment(g, 0, n) for g, n in enumerate(rows.group_rows)], out)
    np.testing.assert_array_equal(out[0], np.arange(94)[:, None] + np.arange(7))


def test_a_ledger_over_ranks_and_resumes_is_that_of_one_rank_that_did_not_stop(tmp_path):
    shards = write_dataset(str(tmp_path / "d"), series(500), 10, 30)
    config = settings(sequence_length=4, sequence_group="device", sequence_order="time", seed=7)

    def loaders(world_size):
        return [ShardLoader(shards, config, rank=r, world_size=world_size) for r in range(world_size)]

    whole = steps(loaders(1)[0], epoch=3)
    assert len(whole) > 15
    ledger = []
    for start, world_size in zip(range(0, len(whole), 5), itertools.cycle([2, 3, 1, 4])):
        by_rank = [itertools.islice(steps(ld, epoch=3, start=start), 5) for ld in loaders(world_size)]
        ledger += [
            (parts[0][0], parts[0][1], {name: torch.cat([p[2][name] for p in parts]) for name in parts[0][2]})
            for parts in zip(*by_rank, strict=True)
        ]
    assert_same(ledger, whole)


@pytest.mark.parametrize(("row", "group"), [(5, 0), (10, 1), (47, 4)])
@pytest.mark.parametrize("by_device", [False, True])
def test_rows_that_go_back_are_an_error_that_says_where(tmp_path, row, group, by_device):
    time = np.arange(60) * 1.0
    time[row:] -= 1.5
    shards = write_dataset(str(tmp_path / "d"), {"x": time, "time": time, "device": np.arange(60) // 60}, 10, 30)
    by = {"sequence_group": "device"} if by_device else {}
    config = settings(sequence_length=2, sequence_order="time", features=("x",), label=None, **by)
    name = shards.shards[group // 3].name
    at = rf"row {row - 10 * group} of row group {group % 3} of {name}"
    sort = r"df\.orderBy\('device', 'time'\)" if by_device else r"df\.orderBy\('time'\)"
    with pytest.raises(ValueError, match=rf"'time' goes from {row - 1}\.0 to {row - 1.5} .*{at} .*{sort}"):
        runs_of(shards, config)


def test_the_order_may_be_any_number_and_its_steps_do_not_wrap_round(tmp_path):
    for dtype in ("int8", "uint8", "int64", "uint64", "float32"):
        low, high = (-3e38, 3e38) if dtype == "float32" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        time = np.array([low, low, 1, high, high], dtype=dtype)
        shards = write_dataset(str(tmp_path / dtype), {"time": time}, 2, 4)
        by = {"sequence_order": "time", "sequence_max_gap": 100}
        starts = runs_of(shards, settings(features=("time",), label=None, sequence_length=2, **by)).run_starts.tolist()
        assert starts == ([0, 3] if dtype[0] == "u" else [0, 2, 3]), dtype


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("first", [0.0, -3.0, 1000.0])
def test_steps_of_the_size_of_max_gap_are_no_gap(tmp_path, dtype, first):
    """0.3 - 0.2 is more than 0.1, as numbers are rounded."""
    time = (first + np.arange(60) * 0.1).astype(dtype)
    time[40:] += dtype == "float64" or 0.5
    shards = write_dataset(str(tmp_path / "d"), {"time": time}, 20, 40)
    config = settings(features=("time",), label=None, sequence_length=4, sequence_order="time", sequence_max_gap=0.1)
    assert runs_of(shards, config).run_starts.tolist() == [0, 40]


def device_rows(tmp_path, devices, encoding):
    """A dataset of a device's values, ten rows each, with the devices as they are encoded."""
    device = np.repeat(devices, 10).astype(np.int64)
    shards = write_dataset(str(tmp_path / "d"), {"v": np.arange(len(device)) * 1.0, "device": device}, 7, 14)
    columns = tuple(dataclasses.replace(c, encoding=encoding) if c.name == "device" else c for c in shards.columns)
    return dataclasses.replace(shards, columns=columns)


@pytest.mark.parametrize(("encoding", "devices", "message"), [
    (Encoding("vocabulary", vocabulary=("a", "b", "c")), [1, 2, 0, 3],
     r"words that are not in its vocabulary, .*in rows 0 and 1 of row group \d of .*F\.xxhash64\('device'\)\), with "
     "sequences.group: device_id"),
    (Encoding("hash", buckets=4), [1, 2, 3], r"is encoded as one of 4 hash buckets, which different groups .*xxhash64"),
    (Encoding("vocabulary", vocabulary=("a", "b", "c")), [1, 2, 3, 1], None),
    (Encoding("vocabulary", vocabulary=("a", "b", "c"), unknown="error"), [0, 1, 2], None),
])  # fmt: skip
def test_groups_that_their_encoding_does_not_tell_apart_are_an_error(tmp_path, encoding, devices, message, caplog):
    """Validation on new devices gave 27 samples, 6 of them with rows of two devices."""
    caplog.set_level(logging.INFO, "spark_dl")
    shards = device_rows(tmp_path, devices, encoding)
    config = settings(features=("v",), label=None, sequence_length=4, sequence_group="device")
    if message is None:
        assert len(runs_of(shards, config).run_starts) == len(devices)
        rows, runs = 10 * len(devices), len(devices)
        assert (
            f"the {rows} rows of {shards.url} are {runs} segments, of up to 10 rows, and give {7 * runs} s"
            in caplog.text
        )
    else:
        with pytest.raises(ValueError, match=f"sequences.group: column 'device' .*{message}"):
            runs_of(shards, config)


def test_a_time_that_is_no_number_is_an_error(tmp_path):
    shards = write_dataset(str(tmp_path / "d"), {"time": np.array([1.0, np.nan, 2.0])}, nonfinite="allow")
    with pytest.raises(ValueError, match=r"'time' goes from 1\.0 to nan"):
        runs_of(shards, settings(features=("time",), label=None, sequence_length=2, sequence_order="time"))


@pytest.mark.parametrize(("order", "message"), [
    ("x", r"expected columns of one number per row, found column 'x' of dtype float32 and shape \(2,\)"),
    ("flag", r"found column 'flag' of dtype bool"),
    ("tme", r"no column 'tme' in the dataset .*did you mean 'time'\?"),
])  # fmt: skip
def test_a_column_without_an_order_is_an_error(tmp_path, order, message):
    columns = series(20)
    shards = write_dataset(str(tmp_path / "d"), {**columns, "flag": columns["id"] > 3})
    with pytest.raises(ValueError, match=message):
        runs_of(shards, settings(sequence_length=2, sequence_order=order))


def test_datasets_of_others_have_sequences_in_the_order_of_their_files(tmp_path):
    for number, first in enumerate((0, 10, 17)):
        ids = np.arange(first, (10, 17, 40)[number])
        pq.write_table(pa.table({"id": ids, "device": ids // 20}), tmp_path / f"{number}.parquet", row_group_size=4)
    config = settings(features=("id",), label=None, sequence_length=6, sequence_group="device")
    shards = open_parquet(str(tmp_path), config.stored_columns, data=config.data)
    loader = ShardLoader(shards, config, rank=0, world_size=1)
    seen = [int(i) for _, _, batch in steps(loader) for i in batch["id"][batch["weight"] > 0][:, 0]]
    assert sorted(seen) == [*range(15), *range(20, 35)]


def test_a_ragged_column_has_no_sequences(tmp_path):
    columns = {"id": np.arange(9), "words": from_lengths(np.arange(27), np.full(9, 3))}
    shards = write_dataset(str(tmp_path / "d"), columns)
    with pytest.raises(ValueError, match=r"sequences\.length: column 'words' is ragged"):
        runs_of(shards, settings(features=("words",), label=None, sequence_length=2))
    assert runs_of(shards, settings(features=("id",), label=None, sequence_length=2)).run_starts.tolist() == [0]


def test_datasets_that_are_mixed_have_sequences_each(tmp_path):
    columns = series(100)
    datasets = {name: write_dataset(str(tmp_path / name), columns, 10, 30) for name in "ab"}
    config = settings(sequence_length=3, sequence_group="device", proportions={"a": 1, "b": 2})
    starts = set(expected_starts(columns, 3, 1, "device"))
    seen = set()
    for _, _, batch in steps(build_loader(Mixture(datasets), config, rank=0, world_size=1)):
        seen |= set(batch["id"][batch["weight"] > 0][:, 0].tolist())
        np.testing.assert_array_equal(batch["m"], columns["m"][batch["id"]])
    assert seen == starts
