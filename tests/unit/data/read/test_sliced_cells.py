"""Bytes, images, words and the cells of Petastorm's codecs are decoded some rows at a time, as lists are: the same
values, and errors that name the row."""

import itertools
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_dl import Data
from spark_dl.data.columns import types as lookup_module
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.schema import Column
from spark_dl.data.columns.types import Lookup
from spark_dl.data.dataset.records import Shard
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.external.files import filter_rows
from spark_dl.data.load.loader import ShardLoader
from spark_dl.data.petastorm.metadata import write_common_metadata
from spark_dl.data.petastorm.unischema import Codec, Field, Unischema
from spark_dl.data.plan import Segment
from spark_dl.data.read.rows import Rows
from spark_dl.data.read.shard_file import SLICE_BYTES, ShardFile, slice_rows
from spark_dl.training.checks import clear_frames
from tests.builders.cells import npy_cells, vectors, zipped
from tests.builders.images import pixels, png
from tests.builders.settings import make_config

ROWS, GROUP, WIDTH = 500, 300, 1300  # 1.5 MB of a row group, 3 slices, and a shorter row group at the end
assert GROUP * WIDTH * 4 > 2 * SLICE_BYTES
ID = Field("id", "int64", (), None)
WORDS = [f"w{i}" for i in range(40)]
HASH = {"as": "hash", "buckets": 97}


def array_of(i):
    return np.random.default_rng(i % 50).random(WIDTH, dtype=np.float32)


def some_of(i):
    return array_of(i)[: (i * 37) % WIDTH]


def blob_of(i):
    return np.frombuffer(some_of(i).tobytes(), np.uint8)


def image_of(i):
    return pixels((36, 36, 3), i % 50)


def words_of(i):
    return [WORDS[(i * j + j) % len(WORDS)] for j in range(WIDTH // 2)]


def hashes_of(i):
    return np.array([zlib.crc32(word.encode()) % 97 for word in words_of(i)])


def petastorm(dtype, shape, kind, image_format=None):
    return Field("x", dtype, shape, Codec(kind, image_format))


NDARRAY, ZIPPED = (petastorm("float32", (WIDTH,), kind) for kind in ("ndarray", "compressed_ndarray"))


def vector_of(i):
    return array_of(i).astype(np.float64) if i % 2 else np.where(np.arange(WIDTH) == i % 50, 0.5, 0.0)


def mixed_vectors(n):
    return vectors(*((WIDTH, {i % 50: 0.5}) if i % 2 == 0 else vector_of(i).tolist() for i in n))


KINDS = {  # the cells in the file, what they are, Petastorm's field, and how they are read
    "lists": (lambda n: pa.array([array_of(i) for i in n]), array_of, None, {}),
    "ragged lists": (lambda n: pa.array([some_of(i) for i in n]), some_of, None, {"ragged": True}),
    "vectors": (mixed_vectors, vector_of, None, {}),
    "bytes": (lambda n: pa.array([blob_of(i).tobytes() for i in n]), blob_of, None, {"as": "bytes"}),
    "images": (lambda n: pa.array([png((36, 36, 3), i % 50) for i in n]), image_of, None, {"as": "image"}),
    "words": (lambda n: pa.array([words_of(i) for i in n]), hashes_of, None, HASH),
    "arrays": (lambda n: pa.array(npy_cells(*map(array_of, n))), array_of, NDARRAY, {}),
    "ragged arrays": (
        lambda n: pa.array(npy_cells(*map(some_of, n))), some_of, petastorm("float32", (None,), "ndarray"),
        {"ragged": True},
    ),
    "compressed arrays": (lambda n: pa.array(npy_cells(*map(array_of, n), write=zipped)), array_of, ZIPPED, {}),
    "ragged compressed arrays": (
        lambda n: pa.array(npy_cells(*map(some_of, n), write=zipped)), some_of,
        petastorm("float32", (None,), "compressed_ndarray"), {"ragged": True},
    ),
    "Petastorm's images": (
        lambda n: pa.array([png((36, 36, 3), i % 50) for i in n]), image_of,
        petastorm("uint8", (36, 36, 3), "image", "png"), {},
    ),
}  # fmt: skip


def write(path, cells, field, **layout):
    table = pa.table({"x": cells, "id": np.arange(len(cells))})
    pq.write_table(table, path / "0.parquet", row_group_size=GROUP, **layout)
    if field is not None:
        unischema, groups = Unischema("Schema", (field, ID)), {"0.parquet": -(-len(cells) // GROUP)}
        write_common_metadata(str(path), table.schema, unischema=unischema, row_groups_per_file=groups)
    return str(path)


def rows_of(url, encode, *, split="all", **fields):
    """The cells of an epoch by their ids."""
    encode = {"x": encode} if encode else {}
    config = make_config(features=("x",), label="id", encode=encode, ragged="offsets", global_batch_size=20, **fields)
    shards = filter_rows(open_parquet(url, ["x", "id"], data=config.data), config)
    found = {}
    for step in ShardLoader(shards, config, rank=0, world_size=1, split=split).epoch(0):
        for batch in step.micro_batches:
            for row in np.flatnonzero(batch["weight"].numpy()):
                cell = batch["x"]
                if "x_offsets" in batch:
                    start, stop = batch["x_offsets"][row : row + 2].tolist()
                    cell = cell[start:stop]
                else:
                    cell = cell[row]
                assert found.setdefault(int(batch["id"][row]), cell.numpy().copy()) is not None
    return found


def assert_cells(found, cell_of, ids):
    assert sorted(found) == sorted(ids)
    for i, cell in found.items():
        expected = cell_of(i)
        assert cell.dtype == expected.dtype
        np.testing.assert_array_equal(cell, expected)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("use_dictionary", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_has_its_values(tmp_path, kind, use_dictionary):
    """With one stream they are decoded to where they stay, with two the streams meet in a row group."""
    cells, cell_of, field, encode = KINDS[kind]
    url = write(tmp_path, cells(range(ROWS)), field, use_dictionary=use_dictionary)
    for streams in (1, 2, 4):
        assert_cells(rows_of(url, encode, num_streams=streams), cell_of, range(ROWS))
    part = rows_of(url, encode, num_streams=2, split="train", validation_fraction=0.3)
    assert_cells(part, cell_of, part)
    assert len(part) == 350


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("first", "stop"), [(100, 450), (165, 320)])
@pytest.mark.parametrize("use_dictionary", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_pass_filters_have_their_values(tmp_path, kind, use_dictionary, first, stop):
    """Most rows of both row groups, or few of them, whose pages are read in part."""
    cells, cell_of, field, encode = KINDS[kind]
    url = write(tmp_path, cells(range(ROWS)), field, use_dictionary=use_dictionary)
    found = rows_of(url, encode, num_streams=2, filters=(("id", ">=", first), ("id", "<", stop)))
    assert_cells(found, cell_of, range(first, stop))


@pytest.mark.parametrize("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"])
@pytest.mark.parametrize("kind", ["bytes", "ragged arrays"])
def test_encodings_that_do_not_tell_how_many_bytes_there_are(tmp_path, kind, encoding):
    """Of cells that begin alike the second one stores the ends."""
    _, _, field, encode = KINDS[kind]
    same = np.arange(WIDTH, dtype=np.uint8 if kind == "bytes" else np.float32)
    cells = pa.array([same.tobytes()] * ROWS if kind == "bytes" else npy_cells(*[same] * ROWS))
    layout = {"use_dictionary": False, "column_encoding": {"x": encoding}, "compression": "none"}
    url = write(tmp_path, cells, field, **layout)
    assert_cells(rows_of(url, encode, num_streams=2), lambda i: same, range(ROWS))


BAD = {
    "images": (b"GIF", "column 'x', row {row}: found a cell that cannot be read: not a PNG or JPEG"),
    "Petastorm's images": (b"GIF", "field 'x', row {row}: found a cell that cannot be read .*not a PNG or JPEG"),
    "arrays": (npy_cells(np.zeros(3, "f4"))[0], r"field 'x', row {row}: found a cell of shape \(3,\), .*reads cells"),
    "compressed arrays": (b"PK", "field 'x', row {row}: found a cell that cannot be read .*codec compressed_ndarray"),
}  # fmt: skip


@pytest.mark.sampled(12)
@pytest.mark.parametrize("use_dictionary", [False, True])
@pytest.mark.parametrize("filters", [(), (("id", ">=", 50),), (("id", ">=", 200),)])
@pytest.mark.parametrize("row", [201, 299])
@pytest.mark.parametrize("kind", BAD)
def test_errors_name_the_row_of_the_row_group(tmp_path, kind, row, filters, use_dictionary):
    cells, _, field, encode = KINDS[kind]
    bad, message = BAD[kind]
    good = cells(range(ROWS)).to_pylist()
    url = write(tmp_path, pa.array([*good[:row], bad, *good[row + 1 :]]), field, use_dictionary=use_dictionary)
    with pytest.raises(RuntimeError, match=rf"row group 0 of .*0.parquet: {message.format(row=row)}"):
        rows_of(url, encode, num_streams=1, filters=filters)


def test_nulls_of_petastorms_fields_name_their_row(tmp_path):
    cells = pa.array([None if i == 290 else cell for i, cell in enumerate(npy_cells(*map(array_of, range(ROWS))))])
    url = write(tmp_path, cells, NDARRAY, use_dictionary=False)
    with pytest.raises(RuntimeError, match="row group 0 of .*field 'x', row 290: found null, expected no nulls"):
        rows_of(url, {}, num_streams=1, filters=(("id", ">=", 100),))


@pytest.fixture
def looked_up(monkeypatch):
    """Every word whose hash is computed."""
    words = []

    class Counted:
        @staticmethod
        def crc32(word):
            words.append(word.decode())
            return zlib.crc32(word)

    monkeypatch.setattr(lookup_module, "zlib", Counted)
    return words


def test_words_that_come_in_pieces_are_looked_up_once(tmp_path, looked_up):
    """Each word of the dictionary, which the file has for each of two row groups."""
    cells, cell_of, field, encode = KINDS["words"]
    url = write(tmp_path, cells(range(ROWS)), field)
    open_parquet(url, ["x"], data=Data(encode={"x": encode}))  # which looks at the first row
    opening = len(looked_up)
    assert_cells(rows_of(url, encode, num_streams=1), cell_of, range(ROWS))
    assert len(looked_up) == 2 * (opening + len(WORDS))


@pytest.mark.parametrize("use_dictionary", [True, False])
def test_many_words_are_looked_up_once(tmp_path, looked_up, use_dictionary):
    """More than the dictionary of the file has room for, each three times. Without one, once for each slice at most."""
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(100_000), 3))
    cells = pa.ListArray.from_arrays(np.arange(0, 300_001, 1000, dtype=np.int32), pa.array([f"word {i}" for i in ids]))
    url = write(tmp_path, cells, None, use_dictionary=use_dictionary)
    found = rows_of(url, HASH, num_streams=1)
    assert found[7].tolist() == [zlib.crc32(b"word %d" % i) % 97 for i in ids[7000:8000]]
    opening = 2 * 1000  # as the words of the first row are looked up
    assert len(looked_up) <= opening + (100_000 if use_dictionary else 300_000)


@pytest.mark.parametrize("pieces", [
    [["a", "b"], ["a", "b"]],
    [["a"], ["a", "b"], ["a", "b", "c"]],  # as Arrow has them once a file's dictionary is full
    [["a", "b"], ["b", "a"], ["a"], []],
])  # fmt: skip
def test_a_lookup_knows_the_words_of_the_piece_before(looked_up, pieces):
    lookup = Lookup(Encoding("hash", buckets=1000))
    for words in pieces:
        assert lookup(pa.array(words, pa.string())).tolist() == [zlib.crc32(w.encode()) % 1000 for w in words]
    is_growing = all(a == b[: len(a)] for a, b in itertools.pairwise(pieces))
    assert (len(looked_up) == len(pieces[-1])) == is_growing


def test_words_that_no_vocabulary_has_name_their_row(tmp_path):
    words = pa.array([["a"] * 1000 if i != 288 else [*["a"] * 999, "b"] for i in range(ROWS)])
    url = write(tmp_path, words, None)
    match = (
        "row group 0 of .*column 'x': found 'b' inside an array, expected one of 1 known strings; .*first in row 288 of"
    )
    encode = {"as": "vocabulary", "values": ["a"]}
    with pytest.raises(RuntimeError, match=match):
        rows_of(url, {**encode, "unknown": "error"}, num_streams=1, filters=(("id", ">=", 100),))
    assert rows_of(url, encode, num_streams=1)[288][-2:].tolist() == [1, 0]


def test_words_without_a_dictionary_come_in_slices_of_as_many_as_the_vocabulary_has():
    """As each slice goes through all of the vocabulary."""
    columns = {
        size: Column("x", "int64", (10,), "list", Encoding("vocabulary", vocabulary=tuple(map(str, range(size)))))
        for size in (10, 1_000_000)
    }
    assert slice_rows([columns[10]], 80) == SLICE_BYTES // 80
    assert slice_rows([columns[1_000_000]], 80) == 100_000


@pytest.mark.parametrize("kind", ["arrays", "images"])
def test_a_dictionary_that_is_full_is_not_copied_for_each_slice(tmp_path, request, kind):
    """Arrow's writer tries a dictionary first; read as one, each slice would have all cells so far: here 28 MiB."""
    rng = np.random.default_rng(0)
    if kind == "arrays":
        cells, field, encode = pa.array(npy_cells(*rng.random((9000, 800), dtype=np.float32))), NDARRAY, {}
        field = petastorm("float32", (800,), "ndarray")
    else:
        some = [png((36, 36, 3), i) for i in range(100)]  # each with bytes of its own after its end
        cells, field, encode = (
            pa.array([some[i % 100] + i.to_bytes(4, "big") for i in range(9000)]),
            None,
            KINDS["images"][3],
        )
    table = pa.table({"x": cells, "id": np.arange(9000)})
    pq.write_table(table, tmp_path / "0.parquet")
    if field is not None:
        groups = {"0.parquet": 1}
        write_common_metadata(
            str(tmp_path), table.schema, unischema=Unischema("Schema", (field, ID)), row_groups_per_file=groups
        )
    assert "RLE_DICTIONARY" in pq.read_metadata(tmp_path / "0.parquet").row_group(0).column(0).encodings
    data = Data(features=("x",), label="id", encode={"x": encode} if encode else {})
    shards = open_parquet(str(tmp_path), ["x", "id"], data=data)
    del table, cells
    arrow_peak = request.getfixturevalue("arrow_peak")  # of reading alone
    rows = Rows(shards, shards.columns, 0.0, 0, "all")
    out = [np.empty((9000, *c.shape), c.dtype) for c in shards.columns]
    rows.read_into([Segment(0, 0, 9000)], out)
    assert arrow_peak() < 12 << 20


def causes(error):
    found = []
    while error is not None:
        assert error not in found
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


@pytest.mark.parametrize(("field", "cells", "row"), [
    (Field("x", "int8", (), None), pa.array([1] * 299 + [300]), 299),
    (Field("x", "int8", (8,), None), pa.array([[1] * 8] * 297 + [[1] * 7 + [300]] + [[1] * 8] * 2), 297),
])  # fmt: skip
@pytest.mark.parametrize("filters", [(), (("id", ">=", 290),)])
def test_numbers_that_do_not_fit_name_their_row_and_are_not_their_own_cause(tmp_path, field, cells, row, filters):
    """The worker walks along the causes of an error."""
    url = write(tmp_path, cells, field)
    with pytest.raises(RuntimeError, match=f"field 'x', row {row}: found 300, expected a int8") as error:
        rows_of(url, {}, num_streams=1, filters=filters)
    assert len(causes(error.value)) > 1
    circle = ValueError()
    circle.__cause__ = circle
    clear_frames(circle)


@pytest.mark.parametrize(("use_dictionary", "words", "is_same"), [
    (False, (), True), (True, (), False), (True, ("bytes",), True), (["id"], (), True),
])  # fmt: skip
def test_a_file_is_opened_once_more_only_for_bytes_with_a_dictionary(tmp_path, use_dictionary, words, is_same):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2], "bytes": [b"a", b"b"]}), path, use_dictionary=use_dictionary)
    shard = Shard("a.parquet", (2,), path.stat().st_size)
    with pa.OSFile(str(path)) as source:
        file = ShardFile(source, shard, ["id", "bytes"], words, is_local=True)
        assert (file._sliced is file.parquet) == is_same
        (batch,) = file._sliced.iter_batches(2, [0], ["bytes"])
    assert batch.column(0).to_pylist() == [b"a", b"b"]
    assert pa.types.is_dictionary(batch.column(0).type) == bool(words)
