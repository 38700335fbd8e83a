"""Mosaic StreamingDataset, WebDataset and Ray Data as peers of the loader benchmark, in a separate environment.

Each peer first writes the rows in its own format, which is not timed. Then it reads them, shuffled and in batches,
without other processes except those that Ray starts. Run this file by its path; it does not import spark_dl.
"""

from __future__ import annotations

import importlib.util
import logging
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

BATCH, BUFFER_ROWS = 256, 32768
"""Rows of the shuffle buffer, as for the Petastorm peers."""
_FILES = 16
_MOST_ROWS = 60_000
"""Rows for Mosaic and WebDataset, which read row by row: all rows of `img`, and the first rows of `tab`."""

Arrays = dict[str, np.ndarray[Any, Any]]
Epoch = Callable[[int], Iterator[Any]]


def build_mosaic(folder: str, rows: Arrays) -> Epoch:
    """Reads MDS shards, shuffled by the default algorithm in blocks larger than the dataset."""
    # Imports only `streaming.base`: the package also imports vision datasets, and so torchvision, which
    # must be built for this version of torch.
    spec = importlib.util.find_spec("streaming")
    assert spec is not None
    sys.modules["streaming"] = importlib.util.module_from_spec(spec)
    from streaming.base import MDSWriter, StreamingDataLoader, StreamingDataset

    path = f"{folder}/mosaic"
    columns = {name: f"ndarray:{a.dtype}:{a.shape[1]}" if a.ndim > 1 else "int" for name, a in rows.items()}
    with MDSWriter(out=path, columns=columns) as writer:
        for row in _row_by_row(rows):
            writer.write(row)
    dataset = StreamingDataset(local=path, shuffle=True, batch_size=BATCH)
    loader = StreamingDataLoader(dataset, batch_size=BATCH)

    def epoch(number: int) -> Iterator[Any]:
        for batch in loader:
            yield batch["label"]

    return epoch


def build_webdataset(folder: str, rows: Arrays) -> Epoch:
    """Reads tar files of NumPy arrays in shuffled order, and shuffles their rows in a buffer."""
    import webdataset

    names = [name for name in rows if name != "label"]
    shard_rows = -(-min(len(rows["label"]), _MOST_ROWS) // _FILES)
    Path(folder, "webdataset").mkdir()
    with webdataset.ShardWriter(f"{folder}/webdataset/%04d.tar", maxcount=shard_rows, verbose=0) as writer:
        for i, row in enumerate(_row_by_row(rows)):
            arrays = {f"{name}.npy": row[name] for name in names}
            writer.write({"__key__": f"{i:09d}", **arrays, "label.cls": row["label"]})
    shards = sorted(str(path) for path in Path(folder, "webdataset").iterdir())
    loader = (
        webdataset.WebDataset(shards, shardshuffle=len(shards))
        .shuffle(BUFFER_ROWS, initial=BUFFER_ROWS)
        .decode()
        .to_tuple(*(f"{name}.npy" for name in names), "label.cls")
        .batched(BATCH)
    )

    def epoch(number: int) -> Iterator[Any]:
        for *_, labels in loader:
            yield labels

    return epoch


def build_ray(folder: str, rows: Arrays) -> Epoch:
    """Reads Parquet with Ray's tensor type, with shuffled blocks, and shuffles their rows in a buffer."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray
    import ray.data
    from ray.data.extensions import ArrowTensorArray

    ray.init(
        include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=1 << 30,
        _temp_dir=f"{folder}/ray", _node_ip_address="127.0.0.1",
    )  # fmt: skip
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    num_rows, path = len(rows["label"]), Path(folder, "ray_data")
    path.mkdir()
    for i in range(_FILES):
        part = {name: a[i * num_rows // _FILES : (i + 1) * num_rows // _FILES] for name, a in rows.items()}
        table = {name: ArrowTensorArray.from_numpy(a) if a.ndim > 1 else pa.array(a) for name, a in part.items()}
        pq.write_table(pa.table(table), path / f"part-{i:02}.parquet")
    dataset = ray.data.read_parquet(str(path))

    def epoch(number: int) -> Iterator[Any]:
        shuffled = dataset.randomize_block_order(seed=number)
        for batch in shuffled.iter_torch_batches(
            batch_size=BATCH, local_shuffle_buffer_size=BUFFER_ROWS, local_shuffle_seed=number
        ):
            yield batch["label"]

    return epoch


def _row_by_row(rows: Arrays) -> Iterator[dict[str, Any]]:
    for i in range(min(len(rows["label"]), _MOST_ROWS)):
        yield {name: a[i] if a.ndim > 1 else int(a[i]) for name, a in rows.items()}


_BUILD = {"mosaic_streaming": build_mosaic, "webdataset": build_webdataset, "ray_data": build_ray}

if __name__ == "__main__":
    peer = runpy.run_path(str(Path(__file__).with_name("peer.py")))
    name, folder, *columns = sys.argv[1:]
    epoch = _BUILD[name](folder, {column: np.load(f"{folder}/{column}.npy", mmap_mode="r") for column in columns})
    peer["serve"](peer["answers"](epoch, limit_s=float("inf")))  # whole epochs: buffers are filled before the first row
