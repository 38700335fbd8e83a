"""`data.filters`: the rows that pass, and no others, whatever bounds, folders and types decide."""

import dataclasses
import datetime
import itertools
import logging
import operator
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from spark_dl import load_config
from spark_dl.config.load import build_config
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.data.dataset.memory import check_row_groups
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.external.files import filter_rows
from spark_dl.data.load.build import build_loader
from spark_dl.data.load.loader import ShardLoader
from spark_dl.data.parquet.filters import Bounds, Condition, holds_within, simplify
from tests.builders.datasets import write_dataset
from tests.builders.settings import make_config

ROWS = 120
OPS = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
       "in": lambda a, b: a in b, "not in": lambda a, b: a not in b}  # fmt: skip
NAN = float("nan")


def config(filters=(), **settings):
    settings = {"num_streams": 6, "shuffle_window_rows": 30, "global_batch_size": 12, **settings}
    return make_config(features=("id",), label=None, filters=filters, **settings)


def read(shards, world_size=1, split="all", epoch=0, **settings):
    """The ids that are read, on all ranks."""
    loaders = [
        ShardLoader(shards, config(**settings), rank=r, world_size=world_size, split=split) for r in range(world_size)
    ]
    steps = [list(loader.epoch(epoch)) for loader in loaders]
    assert len({len(s) for s in steps}) == 1
    batches = [b for s in steps for step in s for b in step.micro_batches]
    ids = torch.cat([b["id"][b["weight"] > 0] for b in batches]).tolist()
    assert len(ids) == sum(step.rows for step in steps[0])
    return ids


def filtered(shards, *filters, **settings):
    return filter_rows(shards, config(filters, **settings))


def values():
    """By column: sorted ones, shuffled ones, with nulls, NaN, zeros of both signs, and constant row groups."""
    rng = np.random.default_rng(3)
    ids = list(range(ROWS))
    words = ["ant", "bee", "cat", "dog", "élan", "zebra"]
    return {
        "id": ids,
        "sorted": [i // 7 for i in ids],
        "mixed": [int(n) for n in rng.permutation(ROWS)],
        "constant": [5 if i < 60 else i % 11 for i in ids],
        "nulls": [None if i % 3 == 0 or 40 <= i < 60 else i for i in ids],
        "nan": [NAN if i % 5 == 0 or i < 20 else 3.0 for i in ids],
        "zero": [(-0.0, 0.0, 1.5)[i % 3] for i in ids],
        "text": [words[i // 20] if i % 2 else words[int(rng.integers(6))] for i in ids],
        "flag": [i < 50 for i in ids],
    }


TYPES = {"sorted": pa.int16(), "zero": pa.float32(), "nan": pa.float64()}
ASKED = {
    "sorted": (0, 7, 16, 17, -1, 1000),
    "mixed": (0, 60, 119, 500),
    "constant": (5, 4, 6),
    "nulls": (0, 41, 100, 1000),
    "nan": (3, 2.5, 4),
    "zero": (0, 0.0, -0.0, 1.5),
    "text": ("cat", "", "zz", "élan"),
    "flag": (True, False),
}


def write_table(folder, *, row_group_size=20, files=2, **options):
    table = pa.table({n: pa.array(v, TYPES.get(n)) for n, v in values().items()})
    rows = ROWS // files
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        part = table.slice(i * rows, rows)
        pq.write_table(part, folder / f"{i}.parquet", row_group_size=row_group_size, **options)
    return open_parquet(str(folder), ["id"])


def expected(*alternatives):
    """The reference: Python's own operators, row by row."""
    columns = values()

    def holds(row, name, op, value):
        cell = columns[name][row]
        return cell is not None and OPS[op](cell, value)

    return [i for i in range(ROWS) if any(all(holds(i, *c) for c in all_of) for all_of in alternatives)]


@pytest.fixture(scope="module", params=["snappy", "dictionary", "plain", "no statistics"])
def table(request, tmp_path_factory):
    options = {
        "snappy": {"compression": "snappy", "use_dictionary": False},
        "dictionary": {"use_dictionary": True, "data_page_size": 64},
        "plain": {"compression": "none", "use_dictionary": False},
        "no statistics": {"write_statistics": False},
    }[request.param]
    return write_table(tmp_path_factory.mktemp("table"), **options)


@pytest.mark.sampled(32)
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("op", OPS)
def test_every_operator_on_every_column(table, name, op):
    several = op in ("in", "not in")
    for value in [*itertools.combinations(ASKED[name], 2)] if several else ASKED[name]:
        rows = expected([(name, op, value)])
        if not rows:
            with pytest.raises(ValueError, match=r"data.filters: none of the 120 rows of .* passes"):
                filtered(table, [name, op, value])
            continue
        shards = filtered(table, [name, op, value])
        assert shards.rows == len(rows), (name, op, value)
        np.testing.assert_array_equal(np.bincount(np.array(rows) // 20, minlength=6), shards.group_rows)
    if rows:
        assert sorted(read(shards)) == rows


@pytest.mark.sampled(12)
@pytest.mark.parametrize("alternatives", [
    [[("sorted", "<", 5), ("text", "==", "cat")]],
    [[("sorted", "<", 5)], [("text", "==", "cat")]],
    [[("sorted", ">=", 10), ("nulls", "!=", 80)], [("nan", "==", 3), ("mixed", "<", 30)], [("id", "==", 0)]],
    [[("id", "<", 40), ("id", ">=", 20)], [("id", ">", 100)]],
])  # fmt: skip
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_of_some_any_of_others_on_any_number_of_ranks(table, alternatives, world_size):
    shards, rows = filtered(table, *alternatives), expected(*alternatives)
    assert shards.rows == len(rows)
    for epoch in (0, 1):
        ids = read(shards, world_size, epoch=epoch)
        assert sorted(ids) == rows


@pytest.mark.parametrize("rows", [0, 1, 5, 6, 7, 100])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_our_own_shards(tmp_path, rows, world_size):
    shards = read_shards(dataset(tmp_path, 120).url)
    shards = filtered(shards, ["id", "<=", rows])
    assert sorted(read(shards, world_size)) == list(range(rows + 1))


def dataset(tmp_path, rows, **more):
    ids = np.arange(rows, dtype=np.int64)
    return write_dataset(str(tmp_path / "d"), {"id": ids, **more}, group_rows=10, shard_rows=30)


def test_the_order_does_not_depend_on_the_number_of_ranks(tmp_path):
    shards = filtered(dataset(tmp_path, 120), ["id", "not in", [3, 4, 50]])

    def steps(world_size):
        loaders = [ShardLoader(shards, config(), rank=r, world_size=world_size) for r in range(world_size)]
        batches = zip(*(loader.epoch(1) for loader in loaders), strict=True)
        return [torch.cat([s.micro_batches[0]["id"] for s in parts]).tolist() for parts in batches]

    assert steps(1) == steps(2) == steps(3)


def test_validation_rows_are_drawn_from_those_that_pass(tmp_path):
    shards = filtered(dataset(tmp_path, 200), ["id", ">", 32])
    parts = {split: read(shards, 2, split=split, validation_fraction=0.25) for split in ("train", "validation")}
    assert len(parts["validation"]) == round(167 * 0.25)
    assert sorted(parts["train"] + parts["validation"]) == list(range(33, 200))


def corrupt(path, group, columns=None):
    """Zeros in place of the pages of a row group."""
    metadata = pq.ParquetFile(path).metadata.row_group(group)
    with open(path, "r+b") as file:
        for i in range(metadata.num_columns):
            chunk = metadata.column(i)
            if columns is None or chunk.path_in_schema in columns:
                file.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
                file.write(b"\xff" * chunk.total_compressed_size)


def test_row_groups_without_a_row_that_passes_are_not_read(tmp_path):
    shards = write_table(tmp_path / "t")
    for group in (0, 2):
        corrupt(tmp_path / "t" / "0.parquet", group)
    shards = filtered(shards, ["id", "in", [25, 30, 70]])
    assert shards.group_rows.tolist() == [0, 2, 0, 1, 0, 0]
    assert sorted(read(shards)) == [25, 30, 70]
    with pytest.raises(RuntimeError, match=r"row group [02] of .*0.parquet"):
        read(dataclasses.replace(shards, filtered=None))


def test_row_groups_that_bounds_decide_are_not_read_to_count(tmp_path, caplog):
    shards = write_table(tmp_path / "t")
    for file, group in itertools.product("01", range(3)):
        corrupt(tmp_path / "t" / f"{file}.parquet", group, ["id", "mixed"])
    with caplog.at_level(logging.INFO, logger="spark_dl"):
        assert filtered(shards, [["id", ">=", 40]], [["mixed", "<", -1]]).group_rows.tolist() == [0, 0, 20, 20, 20, 20]
    assert "80 of 120 rows, in 4 of 6 row groups, pass" in caplog.text
    assert "0 row groups were read to count" in caplog.text
    with pytest.raises(RuntimeError, match=r"cannot read .*0.parquet for data.filters"):
        filtered(shards, ["id", ">=", 41])


def test_only_columns_that_are_in_question_are_read_to_count(tmp_path):
    shards = write_table(tmp_path / "t")
    corrupt(tmp_path / "t" / "0.parquet", 1, ["id"])
    found = filtered(shards, [["id", ">=", 20], ["mixed", "<", 60]])
    assert found.rows == len(expected([("id", ">=", 20), ("mixed", "<", 60)]))


def test_cells_of_rows_that_do_not_pass_are_not_decoded(tmp_path):
    table = pa.table({"id": pa.array([None if i % 3 == 0 else i for i in range(30)]), "x": [i % 3 for i in range(30)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=10)
    shards = open_parquet(str(tmp_path), ["id"], data=config([["x", "!=", 0]]).data)
    for condition in (["x", "!=", 0], ["id", ">=", 0]):
        assert sorted(read(filtered(shards, condition))) == [i for i in range(30) if i % 3]
    with pytest.raises(RuntimeError, match=r"the rows that pass data.filters of row group \d .*null"):
        read(filtered(shards, ["x", "!=", 1]))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_ragged_columns_and_partitions_keep_to_their_rows(tmp_path, split):
    for half in (0, 1):
        (tmp_path / f"half={half}").mkdir()
        rows = range(half * 50, half * 50 + 50)
        table = pa.table({"id": rows, "list": [[i] * (i % 4) for i in rows], "x": [i % 7 for i in rows]})
        pq.write_table(table, tmp_path / f"half={half}" / "t.parquet", row_group_size=20)
    settings = make_config(
        features=("id", "list", "half"), label=None, num_streams=6, encode={"list": {"ragged": True}}, ragged="offsets",
        validation_fraction=0.3, filters=[["x", "<=", 2]], global_batch_size=12,
    )  # fmt: skip
    shards = filter_rows(open_parquet(str(tmp_path), settings.data.features, data=settings.data), settings)
    found = []
    for step in ShardLoader(shards, settings, rank=0, world_size=1, split=split).epoch(0):
        batch = {name: t.numpy() for name, t in step.micro_batches[0].items()}
        lists = np.split(batch["list"], batch["list_offsets"][1:-1])
        for i, values, half, weight in zip(batch["id"], lists, batch["half"], batch["weight"], strict=True):
            if weight:
                assert (values.tolist(), half) == ([i] * (i % 4), i >= 50)
                found.append(int(i))
    passing = {i for i in range(100) if i % 7 <= 2}
    held_out = round(0.3 * len(passing))
    assert len(found) == len(set(found)) == (held_out if split == "validation" else len(passing) - held_out)
    assert set(found) <= passing


def test_a_file_that_changes_after_it_was_counted(tmp_path):
    shards = filtered(write_table(tmp_path / "t"), ["mixed", "<", 60])
    table = pq.read_table(tmp_path / "t" / "1.parquet")
    changed = table.set_column(table.column_names.index("mixed"), "mixed", pa.array([70] * 59 + [1]))
    pq.write_table(changed, tmp_path / "t" / "1.parquet", row_group_size=20)
    with pytest.raises(RuntimeError, match=r"1.parquet: found \d+ bytes, expected \d+"):
        read(shards)
    size = os.path.getsize(tmp_path / "t" / "1.parquet")  # as of a change that leaves the length
    files = tuple(dataclasses.replace(s, bytes=size) if s.name == "1.parquet" else s for s in shards.shards)
    shards = dataclasses.replace(shards, shards=files)
    with pytest.raises(
        RuntimeError,
        match=r"1.parquet.* rows that pass data.filters, data.nulls and data.nonfinite, expected \d+ .*changed",
    ):
        read(shards)


def test_hive_partitions(tmp_path):
    ids = itertools.count()
    for year, kind in itertools.product(("2023", "2024", "__HIVE_DEFAULT_PARTITION__"), ("a%20b", "c")):
        folder = tmp_path / f"year={year}" / f"kind={kind}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"id": [next(ids) for _ in range(10)]}), folder / "part.parquet")
    shards = open_parquet(str(tmp_path), ["id"])
    (tmp_path / "year=2023" / "kind=c" / "part.parquet").write_bytes(b"not read; the types are those of the first file")
    assert sorted(read(filtered(shards, ["year", ">", 2023]), 2)) == list(range(20, 40))
    assert sorted(read(filtered(shards, [["year", "!=", 2023], ["id", "<", 25]]), 2)) == list(range(20, 25))
    both = filtered(shards, [["kind", "==", "a b"], ["year", "==", 2024]])
    assert sorted(read(both)) == list(range(20, 30))
    partly = filtered(shards, [["year", "==", 2024], ["kind", "==", "c"], ["id", "!=", 33]], [["year", ">", 3000]])
    assert sorted(read(partly)) == [30, 31, 32, *range(34, 40)]
    with pytest.raises(ValueError, match=r"'year'.*int64.*'2024'"):
        filtered(shards, ["year", "==", "2024"])
    with pytest.raises(ValueError, match="no column 'yaer'.*did you mean 'year'"):
        filtered(shards, ["yaer", "==", 2024])


START = datetime.datetime(2024, 3, 1, tzinfo=datetime.timezone.utc)


@pytest.mark.parametrize("arrow", [
    pa.timestamp("us", "UTC"), pa.timestamp("ms"), pa.timestamp("ns"), pa.timestamp("s", "Europe/Oslo"), pa.date32(),
    pa.date64(),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("size", [2, 7])
def test_times_as_texts(tmp_path, arrow, size):
    days = [START + datetime.timedelta(days=i) for i in range(14)]
    cells = [t.date() if pa.types.is_date(arrow) else t.replace(tzinfo=None) if arrow.tz is None else t for t in days]
    table = pa.table({"id": range(14), "when": pa.array(cells, arrow)})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=size)
    shards = open_parquet(str(tmp_path), ["id"])
    assert sorted(read(filtered(shards, [["when", ">=", "2024-03-05"], ["when", "<", "2024-03-08"]]))) == [4, 5, 6]
    assert sorted(read(filtered(shards, ["when", "in", [datetime.date(2024, 3, 2), "2024-03-04"]]))) == [1, 3]
    for wrong in (5, "yesterday", True):
        with pytest.raises(ValueError, match=r"data.filters: expected for column 'when' .* found"):
            filtered(shards, ["when", "<", wrong])
    if pa.types.is_timestamp(arrow):
        assert sorted(read(filtered(shards, ["when", ">", "2024-03-13T23:59:59"]))) == [13]
        if arrow.tz is None:
            with pytest.raises(ValueError, match="no time zone"):
                filtered(shards, ["when", ">", "2024-03-13T23:59:59Z"])
        else:
            assert sorted(read(filtered(shards, ["when", ">=", "2024-03-14T02:00:00+02:00"]))) == [13]


def test_spark_s_old_timestamps_and_nanoseconds(tmp_path):
    when = pa.array([1_709_251_200_000_000_000 + i for i in (1, 2, 3)], pa.timestamp("ns"))
    table = pa.table({"id": range(3), "when": when})
    pq.write_table(table, tmp_path / "t.parquet")
    shards = filtered(open_parquet(str(tmp_path), ["id"]), ["when", ">", "2024-03-01"])
    assert sorted(read(shards)) == [0, 1, 2]
    pq.write_table(table, tmp_path / "t.parquet", use_deprecated_int96_timestamps=True)
    for text in ("2024-03-01", "2024-03-01T02:00:00+02:00"):  # microseconds, and instants, as in Spark
        shards = filtered(open_parquet(str(tmp_path), ["id"]), ["when", ">=", text])
        assert sorted(read(shards)) == [0, 1, 2]


def test_decimals_structs_dictionaries_and_large_strings(tmp_path):
    table = pa.table(
        {
            "id": range(6),
            "price": pa.array([1, 2, 3, 4, None, 6], pa.decimal128(9, 2)),
            "user": [{"age": i * 10, "tag": {"x": str(i)}} if i else None for i in range(6)],
            "word": pa.array(list("aabbcc")).dictionary_encode(),
            "large": pa.array(list("aabbcc"), pa.large_string()),
            "list": [[i] for i in range(6)],
            "bytes": pa.array([b"x"] * 6),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    shards = open_parquet(str(tmp_path), ["id"])
    for condition, ids in [
        (["price", "<=", "3.00"], [0, 1, 2]), (["price", ">", 2.5], [2, 3, 5]), (["price", "!=", 4], [0, 1, 2, 5]),
        (["user.age", ">", 20], [3, 4, 5]), (["user.tag.x", "not in", ["1", "5"]], [2, 3, 4]),
        (["word", "==", "b"], [2, 3]), (["word", ">", "a"], [2, 3, 4, 5]), (["large", "in", ["a", "c"]], [0, 1, 4, 5]),
    ]:  # fmt: skip
        assert sorted(read(filtered(shards, condition))) == ids, condition
    for name, value in (("list", 1), ("bytes", "x"), ("user", 1)):
        with pytest.raises(ValueError, match=f"'{name}'.*cells of this type cannot be compared"):
            filtered(shards, [name, "==", value])
    with pytest.raises(ValueError, match=r"'price' a value that fits its type decimal.*True \(another kind of value"):
        filtered(shards, ["price", "==", True])


@pytest.mark.parametrize(("name", "value"), [
    ("sorted", 1.5), ("sorted", 40_000), ("sorted", "1"), ("sorted", True), ("text", 1), ("flag", 1), ("zero", 1e300),
    ("mixed", 2**70),
])  # fmt: skip
def test_values_that_do_not_fit_the_type(table, name, value):
    with pytest.raises(ValueError, match=f"data.filters: expected for column '{name}' a value that fits its type"):
        filtered(table, [name, "==", value])


def test_what_the_numbers_of_our_own_shards_mean(tmp_path):
    ticks = np.array([1_709_251_200 + 86_400 * i for i in range(40)], dtype=np.int64)
    plain = dataset(tmp_path, 40, when=ticks, word=np.arange(40) % 4, price=np.arange(40) * 50,
                    share=np.arange(40) / 10)  # fmt: skip
    meant = {
        "when": Encoding("timestamp", unit="s"),
        "word": Encoding("vocabulary", vocabulary=("a", "b", "c")),
        "price": Encoding("decimal", scale=2),
        "share": Encoding("float", source_type="decimal(5,2)"),
    }
    columns = tuple(Column(c.name, c.dtype, encoding=meant.get(c.name, Encoding())) for c in plain.columns)
    shards = ShardSet(plain.url, columns, plain.shards)
    assert sorted(read(filtered(shards, ["when", "<", "2024-03-04"]))) == [0, 1, 2]
    assert sorted(read(filtered(shards, [["word", "==", "b"], ["id", "<", 8]]))) == [2, 6]
    assert sorted(read(filtered(shards, ["price", "<=", "1.5"]))) == [0, 1, 2, 3]
    assert sorted(read(filtered(shards, ["share", "in", ["0.30", "1.70", "1.701"]]))) == [3, 17]
    with pytest.raises(ValueError, match="no such word"):
        filtered(shards, ["word", "==", "d"])
    with pytest.raises(ValueError, match="have no order"):
        filtered(shards, ["word", "<", "b"])


def test_files_whose_types_differ_or_that_are_gone(tmp_path):
    for name, array in (("a", pa.array([1, 2])), ("b", pa.array(["1", "2"]))):
        pq.write_table(pa.table({"id": [1, 2], "x": array}), tmp_path / f"{name}.parquet")
    shards = open_parquet(str(tmp_path), ["id"])
    with pytest.raises(ValueError, match=r"'x' has type string in .*b.parquet and int64"):
        filtered(shards, ["x", ">", 1])
    (tmp_path / "b.parquet").unlink()
    with pytest.raises(RuntimeError, match=r"b.parquet"):
        filtered(shards, ["id", ">", 1])


def test_the_memory_of_row_groups_that_are_not_read_is_not_needed(tmp_path):
    rows = (2 << 17) + 10
    pq.write_table(pa.table({"id": range(rows)}), tmp_path / "a.parquet", row_group_size=2 << 17)
    shards = open_parquet(str(tmp_path), ["id"])
    with pytest.raises(ValueError, match="loader.memory_mib=1"):
        check_row_groups(shards, shards.columns, 1)
    check_row_groups(last := filtered(shards, ["id", ">=", 2 << 17]), last.columns, 1)
    with pytest.raises(ValueError, match="loader.memory_mib=1"):  # a row group is read as a whole
        check_row_groups(first := filtered(shards, ["id", "==", 3]), first.columns, 1)


def test_the_driver_counts_rows_within_its_memory(tmp_path):
    for number in range(5):
        rows = np.random.default_rng(number).permutation(90_000)
        pq.write_table(pa.table({"id": rows, "x": -rows}), tmp_path / f"{number}.parquet", use_dictionary=False)
    shards = open_parquet(str(tmp_path), ["id"])
    assert filtered(shards, ["id", "<", 100], memory_mib=1).rows == 500  # one after another
    both = np.tile(rows, 2)
    pq.write_table(pa.table({"id": both, "x": both}), tmp_path / "9.parquet", use_dictionary=False)
    shards = open_parquet(str(tmp_path), ["id"])
    assert filtered(shards, ["id", "==", 3], memory_mib=2).rows == 7
    with pytest.raises(
        ValueError, match=r"row group 0 of .*/9.parquet has 1 MiB in .*, and loader.memory_mib=1: raise"
    ):
        filtered(shards, ["id", "<", 100], memory_mib=1)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("has_nulls", [False, True])
def test_bounds_never_say_more_than_the_rows(op, nan, has_nulls):
    arrow = pa.float64() if nan else pa.int64()
    for low, high in itertools.combinations_with_replacement(range(4), 2):
        bounds = Bounds(pa.scalar(low, arrow), pa.scalar(high, arrow), has_nulls)
        cells = [*range(low, high + 1), *([NAN] if nan else []), *([None] if has_nulls else [])]
        for value in range(-1, 5):
            values = [value, value + 2] if op in ("in", "not in") else [value]
            held = {c is not None and OPS[op](c, values if len(values) > 1 else value) for c in cells}
            said = holds_within(Condition("x", op, pa.array(values, arrow)), bounds)
            assert said is None or held == {said}, (low, high, value)
            if len(held) == 1 and not nan and len(values) == 1:
                assert said is not None, (low, high, value)


def test_what_is_decided_is_not_looked_at_again():
    a, b = (Condition(name, "==", pa.array([1])) for name in "ab")
    answers = {"a": True, "b": None}
    assert simplify(((a, b), (b,)), lambda c: answers[c.column]) == ((b,), (b,))
    assert simplify(((b,), (a,)), lambda c: answers[c.column]) == ((),)
    assert simplify(((b,), (a, b)), lambda c: False) == ()


@pytest.mark.parametrize(("filters", "message"), [
    ("x > 3", "a list of .column, op, value"),
    (["x", ">", 3], "a list of"),
    ([["x", ">"]], "a list of"),
    ([[]], "a list of"),
    ([[["x", ">", 3]], []], "a list of"),
    ([[3, ">", "x"]], "a list of"),
    ([["x", "=>", 3]], "an operator of"),
    ([["x", "in", 3]], "a list of values"),
    ([["x", "in", []]], "a list of values"),
    ([["x", "in", "abc"]], "a list of values"),
    ([["x", "==", None]], "a null never passes"),
    ([["x", "==", [1]]], "finite numbers"),
    ([["x", "<", NAN]], "finite numbers"),
    ([["x", "in", [1, float("inf")]]], "finite numbers"),
])  # fmt: skip
def test_filters_of_another_form(filters, message):
    with pytest.raises(ValueError, match=rf"data.filters.*{message}"):
        config(filters)


def test_filters_are_plain_data(tmp_path):
    day = datetime.date(2024, 1, 2)
    settings = config([["day", ">=", day], ["n", "in", ["1", 2]], ["b", "==", True]])
    full = ((("day", ">=", "2024-01-02"), ("n", "in", ("1", 2)), ("b", "==", True)),)
    assert settings.data.filters == full
    assert build_config(settings.to_dict()) == settings
    (tmp_path / "c.yaml").write_text('data: {filters: [[day, ">=", 2024-01-02], [n, in, ["1", 2]], [b, ==, true]]}')
    assert load_config(tmp_path / "c.yaml").data.filters == full
    assert load_config(overrides=['data.filters=[[["x", ">", 3]], [["s", "==", "12"]]]']).data.filters == (
        (("x", ">", 3),),
        (("s", "==", "12"),),
    )


def test_a_loader_for_rows_that_were_not_counted(tmp_path):
    shards = dataset(tmp_path, 20)
    settings = config([["id", ">", 3]])
    with pytest.raises(ValueError, match=r"data.filters, data.nulls, data.nonfinite: all rows of .* would be read"):
        build_loader(shards, settings, rank=0, world_size=1)
    counted = filter_rows(shards, settings)
    assert build_loader(counted, settings, rank=0, world_size=1).plan.rows == 16


def test_what_filters_do_not_go_with():
    with pytest.raises(ValueError, match=r"data.filters: .* with shards.storage=local.*df.filter"):
        config([["x", ">", 3]], storage="local")
