"""Lists of others are decoded some rows at a time: the same values, errors that name the row, little memory."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_dl import Data
from spark_dl.data.columns.schema import Column
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.external.files import filter_rows
from spark_dl.data.load.loader import ShardLoader
from spark_dl.data.plan import Segment
from spark_dl.data.read import shard_file
from spark_dl.data.read.rows import Rows
from spark_dl.data.read.shard_file import SLICE_BYTES
from spark_dl.launch.failures.errors import is_retryable
from tests.builders.cells import vectors
from tests.builders.settings import make_config

ROWS, GROUP, WIDTH = 1500, 600, 700  # 1.6 MiB of a row group, 4 slices, and a shorter row group at the end
assert GROUP * WIDTH * 4 > 3 * SLICE_BYTES
FEATURES = ("x", "v", "s.deep")


def lists(values):
    starts = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(starts, pa.array(values.reshape(-1)))


def numbers():
    return np.random.default_rng(3).random((ROWS, WIDTH), dtype=np.float32)


def write(path, x):
    deep = lists(np.arange(2 * len(x)).reshape(-1, 2))
    table = pa.table({
        "id": np.arange(len(x)),
        "x": x if isinstance(x, pa.Array) else lists(x),
        "v": vectors(*[(2, {i % 2: float(i)}) if i % 3 else [float(i), 1.0] for i in range(len(x))]),
        "s": pa.StructArray.from_arrays([deep, pa.array(["a"] * len(x))], ["deep", "word"]),
    })  # fmt: skip
    pq.write_table(table, path / "a.parquet", row_group_size=GROUP)
    return str(path)


def rows_of(shards, config, **options):
    """The rows of an epoch by name, in the order of their ids."""
    loader = ShardLoader(shards, config, rank=0, world_size=1, **options)
    batches = [m for step in loader.epoch(0) for m in step.micro_batches]
    found = {n: np.concatenate([b[n].numpy()[b["weight"].numpy() == 1] for b in batches]) for n in batches[0]}
    order = np.argsort(found["id"])
    return {name: cells[order] for name, cells in found.items()}


def config(**data):
    data = {"num_streams": 4, **data}
    return make_config(features=FEATURES, label="id", **data, global_batch_size=20)


def assert_rows(found, x, ids):
    np.testing.assert_array_equal(found["id"], ids)
    np.testing.assert_array_equal(found["x"], x[ids])
    np.testing.assert_array_equal(found["s.deep"], np.stack([2 * ids, 2 * ids + 1], axis=1))
    second = np.where(ids % 3 == 0, 1, np.where(ids % 2 == 1, ids, 0))
    np.testing.assert_array_equal(found["v"][:, 1], second)


@pytest.mark.parametrize("streams", [1, 2, 4, 10])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_has_its_values(tmp_path, streams, shuffle):
    """With 2 streams and more row groups are met in by several; with 1 they are decoded to where the rows stay."""
    x = numbers()
    shards = open_parquet(write(tmp_path, x), [*FEATURES, "id"])
    assert_rows(rows_of(shards, config(num_streams=streams), shuffle=shuffle), x, np.arange(ROWS))


@pytest.mark.parametrize("streams", [1, 4])
def test_rows_that_are_held_out_and_filters(tmp_path, streams):
    x = numbers()
    shards, settings = (
        open_parquet(write(tmp_path, x), [*FEATURES, "id"]),
        config(num_streams=streams, validation_fraction=0.3),
    )
    train, validation = (rows_of(shards, settings, split=split) for split in ("train", "validation"))
    assert len(validation["id"]) == 450
    assert_rows(train, x, np.setdiff1d(np.arange(ROWS), validation["id"]))
    assert_rows(validation, x, validation["id"])
    settings = config(num_streams=streams, filters=(("id", ">=", 250), ("id", "<", 1300)))
    assert_rows(rows_of(filter_rows(shards, settings), settings), x, np.arange(250, 1300))


RAGGED = {"x": {"ragged": True}, "pairs": {"ragged": True}}


def ragged_rows():
    """Rows of 0 to 700 numbers, some of them without any, and of 0 to 3 pairs."""
    rng = np.random.default_rng(5)
    lengths = np.where(rng.random(ROWS) < 0.1, 0, rng.integers(1, WIDTH, ROWS))
    return [rng.random(n, dtype=np.float32) for n in lengths], [rng.integers(0, 99, (i % 4, 2)) for i in range(ROWS)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("filters", [(), (("id", ">=", 250), ("id", "<", 1300))])
@pytest.mark.parametrize("fraction", [0.0, 0.3])
@pytest.mark.parametrize("streams", [1, 4, 10])
@pytest.mark.parametrize("how", ["offsets", "pad"])
def test_ragged_rows_have_their_values(tmp_path, how, streams, fraction, filters):
    x, pairs = ragged_rows()
    columns = {"x": pa.array(x), "pairs": pa.array([p.tolist() for p in pairs], pa.list_(pa.list_(pa.int64())))}
    pq.write_table(pa.table({"id": np.arange(ROWS), **columns}), tmp_path / "a.parquet", row_group_size=GROUP)
    settings = make_config(
        features=("x", "pairs"), label="id", num_streams=streams, encode=RAGGED, ragged=how,
        validation_fraction=fraction, filters=filters, global_batch_size=20,
    )  # fmt: skip
    shards = filter_rows(open_parquet(str(tmp_path), ["x", "pairs", "id"], data=settings.data), settings)
    found = {}
    for split in ("train", "validation") if fraction else ("all",):
        loader = ShardLoader(shards, settings, rank=0, world_size=1, split=split)
        for step in loader.epoch(0):
            for batch in step.micro_batches:
                for row in np.flatnonzero(batch["weight"].numpy()):
                    cells = [row_of(batch, name, row, how) for name in ("x", "pairs")]
                    assert found.setdefault(int(batch["id"][row]), cells) is cells
    assert sorted(found) == [*range(250, 1300)] if filters else [*range(ROWS)]
    for i, (own_x, own_pairs) in found.items():
        np.testing.assert_array_equal(own_x, x[i])
        np.testing.assert_array_equal(own_pairs, pairs[i])


def test_a_column_may_have_a_name_that_looks_like_a_field_of_a_ragged_one(tmp_path):
    pq.write_table(pa.table({"x.y": [0.5, 1.5], "x": [[1, 2, 3], [4, 5]]}), tmp_path / "a.parquet")
    settings = make_config(
        features=("x",), label=None, num_streams=1, shuffle=False, ragged="offsets", encode={"x": RAGGED["x"]},
        global_batch_size=2,
    )  # fmt: skip
    shards = open_parquet(str(tmp_path), ["x"], data=settings.data)
    (step,) = ShardLoader(shards, settings, rank=0, world_size=1).epoch(0)
    assert step.micro_batches[0]["x"].tolist() == [1, 2, 3, 4, 5]


def row_of(batch, name, row, how):
    if how == "pad":
        return batch[name][row].numpy()[batch[f"{name}_mask"][row].numpy()].copy()
    start, stop = batch[f"{name}_offsets"][row : row + 2].tolist()
    return batch[name][start:stop].numpy().copy()


class Watched(np.ndarray):
    """An array that counts how often all of it is written at once."""

    copies = 0

    def __setitem__(self, key, value):
        Watched.copies += key == slice(None)
        super().__setitem__(key, value)


def test_rows_are_decoded_to_where_they_stay_and_not_copied(tmp_path, monkeypatch):
    x = numbers()
    shards = open_parquet(write(tmp_path, x), ["x"])
    out = np.zeros((GROUP, WIDTH), np.float32).view(Watched)
    monkeypatch.setattr(Watched, "copies", 0)
    Rows(shards, shards.columns, 0.0, 0, "all").read_into([Segment(1, 0, GROUP)], [out])
    np.testing.assert_array_equal(np.asarray(out), x[GROUP : 2 * GROUP])
    assert Watched.copies == 0
    Rows(shards, shards.columns, 0.0, 0, "all").read_into([Segment(1, 7, GROUP)], [out])
    np.testing.assert_array_equal(np.asarray(out[: GROUP - 7]), x[GROUP + 7 : 2 * GROUP])
    assert Watched.copies == 1


def with_null(x, row):
    x = lists(x).to_pylist()
    x[row] = None
    return pa.array(x, pa.list_(pa.float32()))


def with_inner_null(x, row):
    x = lists(x).to_pylist()
    x[row][3] = None
    return pa.array(x, pa.list_(pa.float32()))


def with_other_length(x, row):
    x = lists(x).to_pylist()
    x[row] = x[row][:-1]
    return pa.array(x, pa.list_(pa.float32()))


def with_nan(x, row):
    x[row, 2] = np.nan
    return lists(x)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("damage", "message"), [
    (with_null, r"found 1 null\(s\), expected no nulls"),
    (with_inner_null, "found a null inside an array, expected no nulls"),
    (with_other_length, r"found arrays of lengths \[699, 700\], expected one length"),
    (with_nan, "found NaN or Inf, expected none"),
])  # fmt: skip
@pytest.mark.parametrize("row", [0, 187, 599])
def test_errors_name_the_row_of_the_row_group(tmp_path, damage, message, row):
    shards = open_parquet(write(tmp_path, damage(numbers(), GROUP + row)), [*FEATURES, "id"])
    match = rf"cannot read row group 1 of .*a.parquet: column 'x': {message}.*first in row {row} of the row group"
    with pytest.raises(RuntimeError, match=match) as caught:
        rows_of(shards, config())
    assert not is_retryable(caught.value)  # the cell is the same in another attempt


@pytest.mark.parametrize("first", [200, 500])
def test_errors_name_the_row_though_filters_leave_rows_out(tmp_path, first):
    """Of row group 1 more than half of the rows pass, or fewer."""
    shards = open_parquet(write(tmp_path, with_other_length(numbers(), GROUP + 550)), [*FEATURES, "id"])
    settings = config(filters=(("id", ">=", GROUP + first),))
    message = "cannot read the rows that pass data.filters of row group 1 .*; first in row 550 of the row group"
    with pytest.raises(RuntimeError, match=message):
        rows_of(filter_rows(shards, settings), settings)


def test_lists_that_filters_look_at_are_read_once(tmp_path):
    """As `nonfinite: drop` looks into them; of row group 1 one row is left out."""
    x = numbers()
    shards = open_parquet(write(tmp_path, with_nan(x, GROUP + 9)), [*FEATURES, "id"], data=Data(nonfinite="drop"))
    settings = config(nonfinite="drop")
    shards = filter_rows(shards, settings)
    ids = np.delete(np.arange(ROWS), GROUP + 9)
    assert_rows(rows_of(shards, settings), x, ids)


def test_nan_is_filled_where_the_rows_were_decoded_to(tmp_path):
    x = numbers()
    shards = open_parquet(
        write(tmp_path, with_nan(x, 700)), [*FEATURES, "id"], data=Data(nonfinite="fill", fill={"x": 5.0})
    )
    x[700, 2] = 5
    settings = config(nonfinite="fill", fill={"x": 5.0})
    assert_rows(rows_of(shards, settings), x, np.arange(ROWS))


@pytest.mark.skipif(int(pa.__version__.split(".")[0]) < 20, reason="older versions of pyarrow decode with more memory")
def test_little_memory_is_needed_beside_what_is_decoded(tmp_path, request):
    """A row group of 27 MiB."""
    values = np.random.default_rng(0).random((10_000, 700), dtype=np.float32)
    pq.write_table(pa.table({"x": lists(values), "id": np.arange(10_000)}), tmp_path / "a.parquet")
    del values
    arrow_peak = request.getfixturevalue("arrow_peak")  # of reading alone
    shards = open_parquet(str(tmp_path), ["x", "id"])
    settings = make_config(features=("x",), label="id", num_streams=1, global_batch_size=100)
    assert len(rows_of(shards, settings)["id"]) == 10_000
    assert arrow_peak() < 12 << 20


@pytest.mark.parametrize(("shape", "rows", "most_values", "room"), [
    ((None,), 3, 12, (12,)), ((None, 2, 3), 3, 12, (2, 2, 3)), ((4,), 3, 99, (3, 4)), ((), 3, 99, (3,)),
])  # fmt: skip
def test_the_room_to_decode_into_has_the_values_that_the_footer_gives(shape, rows, most_values, room):
    taken = []

    class Memory:
        def take(self, shape, dtype):
            taken.append((shape, dtype))
            return np.zeros(shape, dtype)

    column = Column("x", "float32", shape, "list" if shape else "scalar")
    target = shard_file._target(column, rows, most_values, None, Memory())
    assert taken == [(room, np.dtype("float32"))]
    assert target.room_bytes == 4 * int(np.prod(room))
    place = np.zeros((5, *column.inner), np.float32)
    assert shard_file._target(column, rows, most_values, place, Memory()).room_bytes == place.nbytes
    assert len(taken) == 1
