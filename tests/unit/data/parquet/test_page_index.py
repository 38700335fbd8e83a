"""What is read by the pages of a row group is what reading all of it and filtering gives, with fewer bytes."""

import datetime
import functools
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_dl.data.external.files import type_at
from spark_dl.data.parquet import file as parquet_file
from spark_dl.data.parquet import page_index
from spark_dl.data.parquet.file import table_column
from spark_dl.data.parquet.filters import passing_rows, typed_conditions, without_nulls
from spark_dl.data.parquet.page_index import IndexedFile
from spark_dl.data.parquet.thrift import Many, TField, read_struct, write_struct

pytestmark = pytest.mark.skipif(int(pa.__version__.split(".")[0]) < 15, reason="pyarrow 14 writes no page checksums")

ROWS = 20_000
START = datetime.datetime(2024, 1, 1)


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """Are read by their pages, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_index, "_MIN_CHUNK_BYTES", 0)
        yield


@functools.cache
def table(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(0, rows, rows))
    nulls = rng.random(rows) < 0.1
    lengths = rng.integers(0, 4, rows)
    flat = pa.array(rng.random(int(lengths.sum())).astype(np.float32))
    offsets = pa.array(np.append(0, np.cumsum(lengths)).astype(np.int32))
    return pa.table({
        "id": pa.array(ids.astype(np.int32)),
        "unsigned": pa.array(ids.astype(np.uint32) + np.uint32(2**31)),
        "x": pa.array(rng.random(rows), mask=nulls),
        "word": pa.array([f"word-{i:06d}-{'é' * 40}" for i in ids]),
        "time": pa.array(START + datetime.timedelta(hours=int(i)) for i in ids),
        "second": pa.array((ids * 10**9).astype("datetime64[ns]")).cast(pa.timestamp("s")),
        "day": pa.array(ids.astype(np.int32)).view(pa.date32()),
        "price": pa.array(ids).cast(pa.decimal128(20, 0)),
        "cells": pa.ListArray.from_arrays(offsets, flat),
        "user": pa.StructArray.from_arrays([pa.array(ids), pa.array(rng.random(rows))], ["age", "score"]),
    })  # fmt: skip


class Counting(io.BytesIO):
    """Counts what is read of it."""

    num_read = num_calls = 0

    def read(self, size=-1):
        found = super().read(size)
        self.num_read += len(found)
        self.num_calls += 1
        return found


def open_bytes(content):
    inner = Counting(content)
    source = pa.PythonFile(inner, mode="r")
    return inner, source, parquet_file.open_file(source)


def written(whole, **options):
    sink = io.BytesIO()
    pq.write_table(whole, sink, **{
        "write_page_index": True, "data_page_size": 2048, "row_group_size": ROWS // 2, "use_dictionary": ["word"],
        **options,
    })  # fmt: skip
    return sink.getvalue()


def conditions(whole, filters):
    return typed_conditions(filters, {name: type_at(whole.schema, name) for a in filters for name, _, _ in a})


NAMES = ["id", "x", "word", "cells", "time", "user.score", "user.age", "price"]
FILTERS = [
    ([[("id", "<", 300)]], True),
    ([[("id", ">=", ROWS - 300)]], True),
    ([[("unsigned", "<", 2**31 + 300)]], True),
    ([[("id", ">", 4000), ("id", "<=", 4200)], [("id", "==", 9000)]], True),
    ([[("word", "in", [f"word-{i:06d}-{'é' * 40}" for i in (17, 12_345)])]], True),
    ([[("time", ">", "2024-02-01"), ("time", "<", "2024-02-05T06:00")]], True),
    ([[("second", "<", "1970-01-01T00:05:00")]], True),
    ([[("day", "<", "1970-03-01")]], True),
    ([[("user.age", "<", 200), ("x", ">", 0.5)]], True),
    ([[("price", "<", 200)]], True),  # no bounds are looked at, but those of other columns' pages that do not pass
    ([[("x", ">", 0.9)]], False),
    ([[("id", "!=", 5)]], False),
    ([[("id", "<", -1)]], True),
]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("options", [
    {}, {"use_dictionary": True}, {"data_page_version": "2.0", "compression": "zstd"},
    {"use_dictionary": False, "compression": "none"}, {"store_schema": False},
], ids=["v1", "dictionaries", "v2", "plain", "no_arrow_schema"])  # fmt: skip
@pytest.mark.parametrize(("filters", "saves"), FILTERS)
def test_filtered_rows_are_those_of_the_whole_row_group(options, filters, saves):
    whole = table()
    if not options.get("store_schema", True):
        whole = whole.drop_columns(["second"])
        if filters[0][0][0] == "second":
            pytest.skip("a type that is Arrow's own")
    content = written(whole, write_page_checksum=True, **options)
    any_of = conditions(whole, filters)
    plain, _, reader = open_bytes(content)
    expected = [reader.read_row_group(group) for group in range(2)]
    inner, source, file = open_bytes(content)
    indexed = IndexedFile(source, file)
    for group, stored in enumerate(expected):
        passes = passing_rows(any_of, lambda name, stored=stored: table_column(stored, name), len(stored))
        found, rows = indexed.read_passing(group, NAMES, any_of)
        np.testing.assert_array_equal(rows, passes)
        for name in NAMES:
            assert found[name].combine_chunks() == table_column(stored, name).filter(pa.array(passes)).combine_chunks()
    if saves and not options.get("use_dictionary"):  # a dictionary is read as a whole
        assert inner.num_read < plain.num_read * 0.6


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_rows_of_any_pages(data):
    """Masks of long and short runs, pages of any size, one row group of any length.

    Lists have no dictionary here: those with pages of one value pyarrow 26 does not read back itself.
    """
    rows = data.draw(st.integers(1, 3000))
    content = written(
        table(rows, seed=rows),
        row_group_size=rows,
        data_page_size=data.draw(st.integers(1, 4096)),
        write_batch_size=data.draw(st.sampled_from([1, 7, 64])),
        use_dictionary=data.draw(st.sampled_from([False, ["word", "id", "x", "time"]])),
    )
    runs = data.draw(st.lists(st.integers(1, 900), min_size=1, max_size=12))
    mask = np.resize(np.repeat(np.arange(len(runs)) % 2 == data.draw(st.integers(0, 1)), runs), rows)
    _, source, file = open_bytes(content)
    found = IndexedFile(source, file).read(0, NAMES, mask)
    stored = pq.read_table(io.BytesIO(content))
    for name in NAMES:
        assert found[name].combine_chunks() == table_column(stored, name).filter(pa.array(mask)).combine_chunks()


def test_without_a_page_index_the_row_group_is_read_as_a_whole():
    whole = table(500)
    _, source, file = open_bytes(written(whole, write_page_index=False))
    found, rows = IndexedFile(source, file).read_passing(0, ["word"], conditions(whole, [[("id", "<", 50)]]))
    assert found["word"].combine_chunks() == whole["word"].filter(pa.array(rows)).combine_chunks()
    assert 0 < rows.sum() < 500


def test_over_a_network_each_read_takes_its_time():
    inner, source, file = open_bytes(written(table()))
    indexed, before = IndexedFile(source, file), inner.num_calls
    mask = np.zeros(ROWS // 2, dtype=np.bool_)
    mask[5000:5100] = True
    names = ["id", "x", "time", "user.score"]
    indexed.read(0, names, mask)
    assert inner.num_calls - before == 3 + len(names)  # the footer's length, itself, the indexes; a run of pages each
    before = inner.num_calls
    indexed.read(1, names, mask)
    assert inner.num_calls - before == len(names)


@pytest.mark.parametrize(("chosen", "spans"), [
    ([1, 1, 1, 1, 1], [[0, 1, 2], [3, 4]]), ([1, 0, 1, 0, 0], [[0, 2]]), ([0, 0, 1, 1, 0], [[2], [3]]),
    ([0, 0, 0, 0, 1], [[4]]), ([0, 0, 0, 0, 0], []), ([1, 0, 0, 0, 1], [[0], [4]]),
])  # fmt: skip
def test_pages_with_small_gaps_between_them_are_one_read(chosen, spans):
    gap = page_index._GAP_BYTES
    sizes = np.array([100, gap, 50, 7, 9])
    offsets = np.array([1000, 1100, 1100 + gap, 1150 + 2 * gap + 1, 1157 + 2 * gap + 1])
    pages = page_index._Pages(offsets, sizes, np.arange(6) * 10)
    assert pages.rows.tolist() == [10] * 5
    assert (pages.ends[:2] == offsets[1:3]).all()
    assert [span.tolist() for span in pages.spans(np.array(chosen, np.bool_))] == spans


def test_a_page_that_is_all_null_is_ruled_out():
    values = np.arange(4000.0)
    whole = pa.table({"x": pa.array(values, mask=values >= 1000)})
    _, source, file = open_bytes(written(whole, data_page_size=512, write_batch_size=100, use_dictionary=False))
    may = IndexedFile(source, file).rows_that_may_pass(0, conditions(whole, [[("x", ">=", 0.0)]]))
    np.testing.assert_array_equal(may, values < 1000)


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_index_is_an_error_or_leaves_the_rows_of_each_page_as_they_are(seed):
    """Parquet has no checksum of an index; what its offsets and rows say is checked against the pages."""
    whole = table(3000)
    content = bytearray(written(whole, row_group_size=3000, use_dictionary=False, write_page_checksum=True))
    _, source, file = open_bytes(bytes(content))
    chunks = read_struct(footer_of(content))[0][4].value.items[0][1].value.items
    offset, length = (chunks[0][number].value for number in (4, 5))  # of the offset index of `id`
    rng = np.random.default_rng(seed)
    content[offset + int(rng.integers(length))] ^= 1 << int(rng.integers(8))
    mask = np.zeros(3000, dtype=np.bool_)
    mask[1000:1010] = True
    _, source, file = open_bytes(bytes(content))
    try:
        found = IndexedFile(source, file).read(0, ["id"], mask)
    except (OSError, pa.ArrowException):
        return
    assert found["id"].combine_chunks() == whole["id"].filter(pa.array(mask)).combine_chunks()


def with_chunk(content, **fields):
    """The file with other fields of its first chunk: `f5` is the length of the offset index."""
    footer, _ = read_struct(footer_of(content))
    group = footer[4].value.items[0]
    chunk = group[1].value.items[0]
    chunk |= {int(name[1:]): TField(chunk[int(name[1:])].kind, value) for name, value in fields.items()}
    return with_footer(content, footer)


def test_an_index_that_says_what_is_not_in_the_file_is_an_error():
    whole = table(3000)
    content = written(whole, row_group_size=3000, use_dictionary=False)
    chunk = read_struct(footer_of(content))[0][4].value.items[0][1].value.items[0]
    _, source, file = open_bytes(with_chunk(content, f6=len(content)))
    with pytest.raises(OSError, match="bytes, and its page index refers to more"):
        IndexedFile(source, file).rows_that_may_pass(0, conditions(whole, [[("id", "<", 3)]]))
    index, _ = read_struct(content[chunk[6].value :])
    for number in (1, 2, 3, 5):  # whether a page has only nulls, its bounds, and its nulls
        kind, pages = index[number].kind, index[number].value
        index[number] = TField(kind, Many(pages.kind, pages.items[:-1]))
    shorter = write_struct(index)
    _, source, file = open_bytes(content[: chunk[6].value] + shorter + content[chunk[6].value + len(shorter) :])
    with pytest.raises(OSError, match=r"damaged.*bounds of \d+ pages, expected \d+"):
        IndexedFile(source, file).rows_that_may_pass(0, conditions(whole, [[("id", "<", 3)]]))


def footer_of(content):
    return content[-8 - int.from_bytes(content[-8:-4], "little") : -8]


def with_footer(content, struct):
    end = write_struct(struct)
    return content[: -8 - len(footer_of(content))] + end + len(end).to_bytes(4, "little") + b"PAR1"


def test_numbers_that_are_stored_as_bytes_are_not_read_as_texts():
    """Decimals, as parquet-avro writes them: their bytes may look like other numbers."""
    raw = [b"001"] * 2000 + [b"999"] * 2000
    content = written(pa.table({"price": pa.array(raw, pa.binary())}), data_page_size=400, write_batch_size=100)
    footer, _ = read_struct(footer_of(content))
    root, price = footer[2].value.items
    price = {**price, 6: TField(5, 5), 7: TField(5, 2), 8: TField(5, 18)}  # DECIMAL, scale, precision
    content = with_footer(content, {**footer, 2: TField(9, Many(12, [root, price]))})
    _, source, file = open_bytes(content)
    whole = file.read()
    assert float(whole["price"][0].as_py()) == 31580.65
    _, passes = IndexedFile(source, file).read_passing(0, [], conditions(whole, [[("price", "<", 31581)]]))
    assert passes.tolist() == [True] * 2000 + [False] * 2000


def test_empty_lists_of_an_old_kind_are_no_nulls():
    """A repeated field without a group around it, as parquet-protobuf writes lists: its leaf has the column's name."""
    kind = pa.list_(pa.field("element", pa.int32(), nullable=False))
    lists = pa.array([[1] if i < 2000 else [] for i in range(4000)], kind)
    whole = pa.Table.from_arrays([lists], schema=pa.schema([pa.field("r", kind, nullable=False)]))
    content = written(
        whole, data_page_size=200, write_batch_size=100, use_dictionary=False, store_schema=False, row_group_size=4000
    )
    footer, _ = read_struct(footer_of(content))
    root, _, _, element = footer[2].value.items
    element = {**element, 3: TField(5, 2), 4: TField(8, b"r")}  # repeated
    (group,) = footer[4].value.items
    (chunk,) = group[1].value.items
    metadata = {**chunk[3].value, 3: TField(9, Many(8, [b"r"]))}
    group = {**group, 1: TField(9, Many(12, [{**chunk, 3: TField(12, metadata)}]))}
    content = with_footer(content, {**footer, 2: TField(9, Many(12, [root, element])), 4: TField(9, Many(12, [group]))})
    _, source, file = open_bytes(content)
    whole = file.read()
    assert whole["r"].to_pylist() == lists.to_pylist()
    any_of = without_nulls(((),), {"r": whole.schema.field("r").type})
    assert IndexedFile(source, file).read_passing(0, [], any_of)[1].all()


@pytest.mark.parametrize(
    "content", [b"\x19" * 500, b"\x16" + b"\xff" * 500, b"\x1c" * 500], ids=["lists", "number", "structs"]
)
def test_bytes_that_nobody_would_write_are_an_error_at_once(content):
    with pytest.raises(ValueError, match="more than"):
        read_struct(content)


def test_what_thrift_reads_it_writes():
    footer = footer_of(written(table(200)))
    struct, end = read_struct(footer)
    assert end == len(footer)
    assert write_struct(struct) == footer
    odd = {
        1: TField(6, -(2**62)),
        40: TField(9, Many(1, [True, False] * 9)),
        41: TField(3, b"\xff"),
        42: TField(2, False),
    }
    assert read_struct(write_struct(odd))[0] == odd
    for cut in range(len(footer)):
        with pytest.raises((ValueError, IndexError)):
            read_struct(footer[:cut])
