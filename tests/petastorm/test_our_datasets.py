"""Petastorm's readers and loaders open what we write, and give the values that were written."""

import io
import itertools

import numpy as np
import pytest

from spark_dl import storage
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.ragged import from_lengths
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.manifest import commit
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.write.writer import ShardWriter
from tests.builders.datasets import write_dataset
from tests.builders.images import pixels, png
from tests.petastorm.exchange import plain, plain_rows

pytestmark = pytest.mark.slow
SCALARS = ("bool", "int8", "uint8", "int16", "uint16", "int32", "int64", "float32", "float64")
CELLS = (("float32", (3,)), ("uint8", (2, 3, 4)), ("int64", (1,)), ("bool", (2, 2)), ("float16", (5,)),
         ("uint32", (1, 1, 2)), ("float64", (0, 3)))  # fmt: skip
POOLS = ("dummy", "thread", "process")
READERS = ("make_reader", "make_batch_reader")
PROMOTED = {"bool": "uint8", "uint16": "int32", "uint32": "int64"}
"""What Petastorm's loaders make of dtypes that torch did not have when they were written."""


def random_values(rng, dtype, shape):
    if dtype == "bool":
        return rng.random(shape) < 0.5
    values = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), "uint8").view(dtype).reshape(shape)
    if values.dtype.kind == "f":
        values[np.isnan(values)] = np.nan  # of one kind, as processors change the bits of others
    return values


def scalar_columns(rows):
    rng = np.random.default_rng(rows)
    return {"id": np.arange(rows)} | {f"a_{dtype}": random_values(rng, dtype, (rows,)) for dtype in SCALARS}


def tensor_columns(rows):
    rng = np.random.default_rng(rows)
    cells = {f"{dtype}_{len(shape)}": random_values(rng, dtype, (rows, *shape)) for dtype, shape in CELLS}
    return {"id": np.arange(rows), "label": rng.integers(0, 10, rows, "int32"), **cells}


DATASETS = {"scalars": scalar_columns(517), "tensors": tensor_columns(203), "one row": tensor_columns(1)}
ROWS = 37
PHOTOS = [pixels((4, 5, 3), i) for i in range(ROWS)]
CLICKS = [np.arange(i % 4, dtype=np.int16) - i for i in range(ROWS)]
TEXTS = ["ü" * (i % 5) + "x\0" for i in range(ROWS)]


def write_varying(url):
    """Images, bytes and ragged numbers, as a DataFrame's are stored."""
    files = [png((4, 5, 3), i, image_format="PNG") for i in range(ROWS)]
    columns = (
        Column("id", "int64"),
        Column("photo", "uint8", (4, 5, 3), "image", Encoding("image"), mean_size=len(files[0])),
        Column("text", "uint8", (None,), "binary", Encoding("bytes"), mean_size=5),
        Column("clicks", "int16", (None,), "list", mean_size=1.5),
    )
    storage.make_folder(url)
    writer = ShardWriter(url, "part-00000000", columns, 10, 20)
    blobs = [[np.frombuffer(b, np.uint8) for b in found] for found in (files, [t.encode() for t in TEXTS])]
    writer.append([np.arange(ROWS), *(ragged_of(cells) for cells in (*blobs, CLICKS))])
    commit(ShardSet(url, writer.columns, tuple(writer.close())))


def ragged_of(cells):
    return from_lengths(np.concatenate(cells), np.array([len(c) for c in cells]))


def test_make_reader_gives_images_bytes_and_ragged_numbers(run_petastorm, tmp_path):
    write_varying(str(tmp_path / "d"))
    (found,) = run_petastorm("read_rows", [{"url": str(tmp_path / "d"), "rows": ROWS, "reader": "make_reader"}])
    texts = [t.encode() for t in TEXTS]
    assert found == plain_rows({"id": np.arange(ROWS), "photo": PHOTOS, "text": texts, "clicks": CLICKS})


LOADED = [("scalars", "make_batch_reader"), ("scalars", "make_reader"), ("tensors", "make_reader")]
LOADERS = ("DataLoader", "BatchedDataLoader")


@pytest.fixture(scope="module")
def readings(run_petastorm, tmp_path_factory):
    """What Petastorm reads, by (dataset, reader, pool, loader)."""
    root = tmp_path_factory.mktemp("ours")
    for name, columns in DATASETS.items():
        shards = write_dataset(str(root / name), columns, group_rows=50, shard_rows=100, nonfinite="allow")
        assert len(shards.shards) == -(-len(columns["id"]) // 100)
    asked = [(*key, None) for key in itertools.product(DATASETS, READERS, POOLS)]
    asked += [(*key, "dummy", loader) for key, loader in itertools.product(LOADED, LOADERS)]
    request = [{"url": str(root / name), "rows": len(DATASETS[name]["id"]), "reader": reader, "pool": pool,
                "loader": loader} for name, reader, pool, loader in asked]  # fmt: skip
    return dict(zip(asked, run_petastorm("read_rows", request), strict=True))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", DATASETS)
def test_make_reader_gives_our_values(readings, name, pool):
    assert readings[name, "make_reader", pool, None] == plain_rows(DATASETS[name])


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", DATASETS)
def test_make_batch_reader_gives_our_scalars_and_the_bytes_of_our_arrays(readings, name, pool):
    rows = readings[name, "make_batch_reader", pool, None]
    assert [{k: array_of(v) for k, v in row.items()} for row in rows] == plain_rows(DATASETS[name])


def array_of(cell):
    """A cell in NumPy's format, which this reader leaves as it is."""
    return plain(np.load(io.BytesIO(bytes.fromhex(cell["bytes"])), allow_pickle=False)) if "bytes" in cell else cell


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(("name", "reader"), LOADED)
def test_the_loaders_for_torch_give_our_values(readings, name, reader, loader):
    columns = {n: a for n, a in DATASETS[name].items() if a.size}  # the BatchedDataLoader flattens cells of no elements
    for n, a in columns.items():
        is_promoted = a.ndim > 1 or a.dtype == bool or reader == "make_batch_reader"
        columns[n] = a.astype(PROMOTED.get(str(a.dtype), a.dtype)) if is_promoted else a
    found = [{n: row[n] for n in columns} for row in readings[name, reader, "dummy", loader]]
    assert found == plain_rows(columns)
