"""Random schemas and values, written as shards and read back: what comes out is what went in."""

import datetime
import itertools
import tempfile
import zlib

import hypothesis.extra.numpy as hnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_dl import Data, Shards
from spark_dl.data.columns import cell_codec, schema
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.policies import clean_batch
from spark_dl.data.columns.ragged import Ragged, concatenate, from_lengths
from spark_dl.data.columns.source import SourceColumn
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.data.write.arrays import write_arrays
from spark_dl.data.write.writer import ShardWriter

DTYPES = ["bool", "int8", "uint8", "int16", "int32", "int64", "float32", "float64"]
WORDS = ("a", "b", "ß", "日本")
EPOCH = datetime.datetime(1970, 1, 1)
RUNS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
"""The same examples in every run of the tests."""


def read_back(url, shards, columns):
    """All columns, decoded row group by row group."""
    files = [pq.ParquetFile(f"{url}/{s.name}") for s in shards]
    groups = [f.read_row_group(g) for f in files for g in range(f.num_row_groups)]
    return [concatenate([cell_codec.decode(c, g.column(c.name)) for g in groups]) for c in columns]


def rows_of(cells):
    if isinstance(cells, Ragged):
        return [cells.values[a:b] for a, b in zip(cells.offsets[:-1], cells.offsets[1:], strict=True)]
    return list(cells)


def assert_same_rows(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(rows_of(found), rows_of(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@st.composite
def arrays(draw, rows):
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    if not draw(st.booleans()):
        return draw(hnp.arrays(dtype, (rows, *shape)))
    lengths = np.array(draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows)))
    return from_lengths(draw(hnp.arrays(dtype, (int(lengths.sum()), *shape[:2]))), lengths)


@RUNS
@given(st.data())
def test_arrays_in_memory(data):
    rows = data.draw(st.integers(1, 12))
    columns = {f"c{i}": data.draw(arrays(rows)) for i in range(data.draw(st.integers(1, 4)))}
    sizes = {"rows_per_row_group": data.draw(st.integers(1, 5)), "rows_per_shard": data.draw(st.integers(1, 12))}
    with tempfile.TemporaryDirectory() as folder:
        shards = write_arrays(columns, f"{folder}/d", Data(nonfinite="allow"), shards=Shards(**sizes))
        assert shards == read_shards(f"{folder}/d")
        assert shards.rows == rows
        found = read_back(f"{folder}/d", shards.shards, shards.columns)
    for (name, values), column, cells in zip(columns.items(), shards.columns, found, strict=True):
        plain = values.values if isinstance(values, Ragged) else values
        assert (column.name, column.dtype, column.is_ragged) == (name, plain.dtype, isinstance(values, Ragged))
        assert_same_rows(cells, values)


def times(unit):
    moments = st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2200, 1, 1))
    ticks = {"D": datetime.timedelta(days=1), "s": datetime.timedelta(seconds=1), "us": datetime.timedelta.resolution}
    dtype = "int32" if unit == "D" else "int64"
    return moments, pa.timestamp("us"), ("timestamp", dtype, {"unit": unit}), lambda t: (t - EPOCH) // ticks[unit]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
SCALARS = {
    "int": (st.integers(-(2**31), 2**31 - 1), pa.int32(), ("number", "int32", {}), lambda v: v),
    "float": (st.floats(allow_nan=False, allow_infinity=False), pa.float64(), ("number", "float64", {}), lambda v: v),
    "flag": (st.booleans(), pa.bool_(), ("number", "bool", {}), lambda v: v),
    "days": times("D"),
    "seconds": times("s"),
    "microseconds": times("us"),
    "decimal": (
        st.decimals(-(10**12), 10**12, places=3), pa.decimal128(38, 3), ("decimal", "int64", {"scale": 3}),
        lambda v: int(v.scaleb(3)),
    ),
    "price": (st.decimals(-999, 999, places=2), pa.decimal128(9, 2), ("float", "float64", {}), float),
    "word": (
        st.sampled_from([*WORDS, "other"]), pa.string(), ("vocabulary", "int64", {"vocabulary": WORDS}),
        lambda v: WORDS.index(v) + 1 if v in WORDS else 0,
    ),
    "hash": (TEXT, pa.string(), ("hash", "int64", {"buckets": 97}), lambda v: zlib.crc32(v.encode()) % 97),
}  # fmt: skip


@st.composite
def source_columns(draw, name, rows):
    """A column, its values in Python, their Arrow type, and what each must become."""
    if draw(st.integers(0, 4)) == 0:
        column = SourceColumn(name, "uint8", "scalar", 0, True, Encoding("bytes"))
        values = draw(st.lists(TEXT, min_size=rows, max_size=rows))
        return column, pa.array(values, pa.string()), [list(v.encode()) for v in values]
    value, arrow, (kind, dtype, about), expected = SCALARS[draw(st.sampled_from(sorted(SCALARS)))]
    depth = draw(st.integers(0, 2))
    ragged = depth > 0 and draw(st.booleans())
    size = draw(st.integers(1, 3))
    for level in range(depth):
        at_top = level == depth - 1
        value = st.lists(value, min_size=0 if ragged and at_top else size, max_size=4 if ragged and at_top else size)
        arrow = pa.list_(arrow)
        expected = lambda v, inner=expected: [inner(w) for w in v]  # noqa: E731
    values = draw(st.lists(value, min_size=rows, max_size=rows))
    column = SourceColumn(name, dtype, "array" if depth else "scalar", depth, ragged, Encoding(kind, **about))
    return column, pa.array(values, arrow), [expected(v) for v in values]


@RUNS
@given(st.data())
def test_columns_of_dataframes(data):
    rows = data.draw(st.integers(1, 10))
    drawn = [data.draw(source_columns(f"c{i}", rows)) for i in range(data.draw(st.integers(1, 3)))]
    sources = [column for column, _, _ in drawn]
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=3))})
    writer = None
    with tempfile.TemporaryDirectory() as folder:
        for start, stop in itertools.pairwise(cuts):
            cells, _ = clean_batch(sources, [array[start:stop] for _, array, _ in drawn], Data())
            if writer is None:
                shapes = [
                    schema.cell_shape(schema.codec_of(s), c, s.encoding) for s, c in zip(sources, cells, strict=True)
                ]
                columns = tuple(schema.stored_column(s, shape) for s, shape in zip(sources, shapes, strict=True))
                writer = ShardWriter(
                    folder, "part", columns, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
                )
            writer.append(cells)
        shards = writer.close()
        assert sum(s.rows for s in shards) == rows
        found = read_back(folder, shards, writer.columns)
    for (column, _, expected), cells in zip(drawn, found, strict=True):
        assert (cells.values if column.ragged else cells).dtype == column.dtype
        for row, values in zip(rows_of(cells), expected, strict=True):
            np.testing.assert_array_equal(row, np.array(values).reshape(row.shape))
