"""The memory of a process that trains: flat over epochs, and within the budget and a row group for each stream."""

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_dl import Data
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.petastorm.metadata import write_common_metadata
from spark_dl.data.petastorm.unischema import Codec, Field, Unischema
from spark_dl.data.write.arrays import write_arrays
from tests.builders.cells import npy_cells, zipped

MEASURE = """
import re, sys
import psutil
from spark_dl import read_shards
from spark_dl.data.external.files import filter_rows
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.load.loader import ShardLoader
from tests.builders.settings import make_config

def opened(url):
    return read_shards(url) if url.endswith("shards") else open_parquet(url, ["x", "id"], data=config.data)

config = make_config(features=("x",), label="id", global_batch_size=64, **eval(sys.argv[4]))
for _ in ShardLoader(opened(sys.argv[1]), config, rank=0, world_size=1).epoch(0):  # a few rows: loads the code
    pass
loader = ShardLoader(filter_rows(opened(sys.argv[2]), config), config, rank=0, world_size=1)
before = psutil.Process().memory_info().rss
epochs = int(sys.argv[3])
for epoch in range(epochs):
    for _ in loader.epoch(epoch):
        pass
    if epoch in (1, epochs - 1):
        print(psutil.Process().memory_info().rss)
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) * 1024 - before)
"""


def measured_memory(few, url, epochs, **data):
    """Bytes after 2 and after all epochs in a process of their own, and the most that it had beyond its start."""
    command = [sys.executable, "-c", MEASURE, few, url, str(epochs), repr(data)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return map(int, done.stdout.split())


@pytest.mark.slow
def test_memory_is_flat_over_epochs_and_within_its_budget(tmp_path):
    x = np.random.default_rng(0).random((40_000, 1024), dtype=np.float32)  # 156 MiB
    shards = write_arrays({"x": x, "id": np.arange(40_000)}, str(tmp_path / "shards"))
    few = write_arrays({"x": x[:100], "id": np.arange(100)}, str(tmp_path / "few shards"))
    after_2, after_20, peak = measured_memory(few.url, shards.url, 20, memory_mib=64)
    assert after_20 <= 1.05 * after_2
    assert peak <= (64 << 20) + 16 * max(shards.group_bytes(shards.columns))  # the budget and a row group per stream


MIB, GROUPS, GROUP_ROWS, WIDTH = 1 << 20, 16, 3600, 784
RAGGED = {"ragged": "offsets"}


def numbers(group, length=WIDTH):
    return np.random.default_rng(group).random((GROUP_ROWS, length), dtype=np.float32)


def lists(group, lengths=None):
    lengths = np.full(GROUP_ROWS, WIDTH) if lengths is None else lengths
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(starts, pa.array(numbers(group, 1168).reshape(-1)[: starts[-1]]))


def unequal(group):
    return np.random.default_rng(group).integers(400, 1169, GROUP_ROWS)


def blobs(group, different=GROUP_ROWS):
    cells = [row.tobytes() for row in numbers(group)[:different]]
    return pa.array(cells * (GROUP_ROWS // different))


def words(group):
    """As many bytes of indices, of 8 bytes each."""
    indices = np.random.default_rng(group).integers(0, 500, GROUP_ROWS * WIDTH // 2)
    starts = np.arange(GROUP_ROWS + 1, dtype=np.int32) * (WIDTH // 2)
    return pa.ListArray.from_arrays(starts, pa.array([f"w{i}" for i in range(500)]).take(pa.array(indices)))


def arrays(group, lengths=None, write=np.save):
    lengths = np.full(GROUP_ROWS, WIDTH) if lengths is None else lengths
    rows = zip(numbers(group, 1168), lengths, strict=True)
    return pa.array(npy_cells(*(row[:length] for row, length in rows), write=write))


def field(kind, length=None):
    return Field("x", "float32", (length,), Codec(kind))


KINDS = {  # the cells of a row group, how they are read, Petastorm's field, and how they are written
    "lists": (lists, {}, None, {}),
    "held out": (lists, {"validation_fraction": 0.05}, None, {}),
    "filtered": (lists, {"filters": (("id", "<", 55_000),)}, None, {}),
    "ragged lists": (lambda i: lists(i, unequal(i)), {"encode": {"x": {"ragged": True}}, **RAGGED}, None, {}),
    "words": (words, {"encode": {"x": {"as": "hash", "buckets": 99}}}, None, {"use_dictionary": True}),
    "bytes": (blobs, {"encode": {"x": {"as": "bytes"}}, **RAGGED}, None, {}),
    "bytes of a dictionary": (
        lambda i: blobs(i, 200), {"encode": {"x": {"as": "bytes"}}, **RAGGED}, None, {"use_dictionary": True}
    ),
    "arrays of Petastorm": (arrays, {}, field("ndarray", WIDTH), {}),
    "ragged arrays of Petastorm": (
        lambda i: arrays(i, unequal(i)), {"encode": {"x": {"ragged": True}}, **RAGGED}, field("ndarray"), {}
    ),
    "compressed arrays of Petastorm": (
        lambda i: arrays(i, write=zipped), {}, field("compressed_ndarray", WIDTH), {}
    ),
}  # fmt: skip


def write(folder, columns, field, group_rows, layout):
    """Snappy; the ids lie in no order."""
    folder.mkdir()
    x = pa.chunked_array(columns)
    table = pa.table({"x": x, "id": np.random.default_rng(0).permutation(len(x))})
    pq.write_table(table, folder / "0.parquet", row_group_size=group_rows, **{"use_dictionary": False, **layout})
    if field is not None:
        unischema, groups = Unischema("Schema", (field, Field("id", "int64", (), None))), -(-len(x) // group_rows)
        write_common_metadata(str(folder), table.schema, unischema=unischema, row_groups_per_file={"0.parquet": groups})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_memory_to_read_data_of_others_is_within_its_budget(tmp_path, kind):
    """16 row groups of 11 MiB, once they are decoded; of compressed arrays the files count, too."""
    cells, data, field, layout = KINDS[kind]
    groups = [cells(i) for i in range(2)] * (GROUPS // 2)
    write(tmp_path / "all", groups, field, GROUP_ROWS, layout)
    write(tmp_path / "few", [groups[0][:100]], field, 50, layout)
    shards = open_parquet(str(tmp_path / "all"), ["x", "id"], data=Data(encode=data.get("encode", {})))
    row_group = max(shards.group_bytes(shards.columns))
    if "dictionary" in kind:  # of which no footer tells how large the cells are
        row_group = GROUP_ROWS * WIDTH * 4
    assert row_group > 10 * MIB
    _, _, peak = measured_memory(f"{tmp_path}/few", f"{tmp_path}/all", 3, memory_mib=64, **data)
    assert peak <= 64 * MIB + 16 * row_group  # the budget and a row group per stream
