"""Measures rows per second of one shuffled epoch in one process: spark_dl and its peers on the same rows, in one run.

Each peer is a process that is started once. Peers run epochs in turn, so that all see the same machine load. Peers:
Petastorm's BatchedDataLoader and DataLoader (in a separate environment), Mosaic StreamingDataset, WebDataset and Ray
Data (in another environment, each with its own format), HF datasets, and a DataLoader over tensors in memory. Limits:
Arrow decoding list columns without a shuffle, and one thread that gathers shuffled rows of arrays in memory.
`spark_dl_parquet` is our loader on the plain Parquet files (lists, snappy, dictionary) that the other peers read.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.peers.peer import Epoch, Peer, absent, answers, dataset_command, petastorm_command, serve

BATCH = 256
WINDOW_ROWS = 1 << 17
"""Rows of our shuffle window, chosen to separate neighbors as well as Petastorm's buffer does."""
_FILES = 4
_PEER_S, _FEWEST = 60.0, 3
"""A peer whose counted epochs took this long runs no more epochs, if it has run the minimum number."""
_MEMORY_MIB = 1024

PEERS = (
    "spark_dl",
    "spark_dl_parquet",
    "petastorm_batched",
    "petastorm_rows",
    "mosaic_streaming",
    "webdataset",
    "ray_data",
    "hf_datasets",
    "tensor_dataset",
    "memory_gather",
    "arrow",
)
PETASTORM_PYTHON, PEERS_PYTHON = ".venv-petastorm/bin/python", ".venv-peers/bin/python"
_IN_PEERS_ENVIRONMENT = ("mosaic_streaming", "webdataset", "ray_data")


@dataclass(frozen=True)
class Options:
    """What is measured."""

    repeats: int = 7
    scale: float = 1.0
    """Size of the datasets: 60,000 and 1,000,000 rows for 1."""
    peers: tuple[str, ...] = PEERS
    petastorm_python: str = PETASTORM_PYTHON
    peers_python: str = PEERS_PYTHON

    def __post_init__(self) -> None:
        if unknown := [name for name in self.peers if name not in PEERS]:
            raise ValueError(f"--peers: unknown {', '.join(unknown)}; expected some of {', '.join(PEERS)}")


def measure(options: Options) -> dict[str, Any]:
    """Measures median rows per second and shuffle quality of each peer, for `img` and `tab`. Without Spark.

    A peer that cannot run has null, and `left_out` has the reason.
    """
    results: dict[str, Any] = {}
    sizes = {"img": (image_rows, 60_000), "tab": (table_rows, 1_000_000)}
    with tempfile.TemporaryDirectory() as folder:
        for name, (draw, rows) in sizes.items():
            arrays = draw(round(rows * options.scale))
            _write(f"{folder}/{name}", arrays)
            order = np.argsort(arrays.pop("label"))  # position of a row in the files, by its label
            arrays.clear()
            results[name] = _measure_peers(f"{folder}/{name}", order, options)
            _print_table(name, results[name])
    return results


Arrays = dict[str, np.ndarray[Any, Any]]


def image_rows(rows: int) -> Arrays:
    """Returns `img`: 784 random float32 values and a label."""
    rng = np.random.default_rng(0)
    return {"image": rng.random((rows, 784), dtype=np.float32), "label": rng.permutation(rows)}


def table_rows(rows: int) -> Arrays:
    """Returns `tab`: 13 float32 values, 26 int64 values and a label, all random."""
    rng = np.random.default_rng(0)
    dense, sparse = rng.random((rows, 13), dtype=np.float32), rng.integers(0, 1 << 40, (rows, 26))
    return {"dense": dense, "sparse": sparse, "label": rng.permutation(rows)}


def write_parquet(folder: str, arrays: Arrays) -> None:
    """Writes the rows as plain Parquet to `folder/parquet`: lists, snappy, dictionary."""
    Path(folder, "parquet").mkdir(parents=True)
    rows = len(arrays["label"])
    for i in range(_FILES):
        part = {name: a[i * rows // _FILES : (i + 1) * rows // _FILES] for name, a in arrays.items()}
        columns = {n: pa.array(list(a)) if a.ndim > 1 else pa.array(a) for n, a in part.items()}
        pq.write_table(pa.table(columns), f"{folder}/parquet/part-{i}.parquet", row_group_size=len(part["label"]) // 4)


def _write(folder: str, arrays: Arrays) -> None:
    """Writes the rows as plain Parquet, as our shards, and as NumPy files."""
    from spark_dl.data.write.arrays import write_arrays

    write_parquet(folder, arrays)
    write_arrays(arrays, f"{folder}/shards")
    for name, a in arrays.items():
        np.save(f"{folder}/{name}.npy", a)


def _measure_peers(folder: str, order: np.ndarray[Any, Any], options: Options) -> dict[str, Any]:
    peers = {name: _start(name, folder, options) for name in options.peers}
    rates: dict[str, list[float]] = {name: [] for name in peers}
    spent_s = dict.fromkeys(peers, 0.0)
    try:
        for _ in range(options.repeats + 1):
            for name, peer in peers.items():
                is_slow = spent_s[name] > _PEER_S and len(rates[name]) > _FEWEST
                if not is_slow and (done := peer.ask("epoch")) is not None:
                    spent_s[name] += done["seconds"]
                    rates[name].append(done["rows"] / done["seconds"])
        result: dict[str, Any] = {n: statistics.median(r[1:]) if r[1:] else None for n, r in rates.items()}
        result["shuffle"] = {
            name: _quality(np.load(f"{folder}/{name}.npy"), order)
            for name, peer in peers.items()
            if peer.ask(f"labels {folder}/{name}.npy") is not None
        }
        result["left_out"] = {name: peer.reason for name, peer in peers.items() if peer.reason}
    finally:
        for peer in peers.values():
            peer.close()
    return result


def _start(name: str, folder: str, options: Options) -> Peer:
    if name.startswith("petastorm"):
        python = options.petastorm_python
        return Peer(name, petastorm_command(python, name, folder), absent=absent(python, "setup-petastorm"))
    if name in _IN_PEERS_ENVIRONMENT:
        command = dataset_command(options.peers_python, name, folder, (*_names(folder), "label"))
        return Peer(name, command, absent=absent(options.peers_python, "setup-peers"))
    return Peer(name, [sys.executable, "-m", "benchmarks.peers.loader", name, folder])


def _quality(labels: np.ndarray[Any, Any], order: np.ndarray[Any, Any]) -> dict[str, float]:
    """Compares the order of an epoch with the order in the files.

    `displacement`: mean distance between a row's positions in the files and in the epoch, divided by the rows. A
    perfect shuffle has 1/3. `neighbours`: fraction of rows whose next row in the files is in the same batch (the order
    inside a batch does not matter). A perfect shuffle has BATCH / rows.
    """
    places = order[labels]  # of all rows, or of the first rows if a peer reads no more
    batch_of = np.full(len(places), -1)
    batch_of[places] = np.arange(len(places)) // BATCH
    displacement = np.abs(places - np.arange(len(places))).mean() / len(places)
    return {"displacement": float(displacement), "neighbours": float((np.diff(batch_of) == 0).mean())}


def _print_table(name: str, result: dict[str, Any]) -> None:
    ours = result.get("spark_dl")
    print(f"\n{name:18} {'rows/s':>12} {'ours is':>9} {'displacement':>13} {'neighbours':>11}", file=sys.stderr)
    for peer in PEERS:
        if result.get(peer) is not None:
            shuffle = result["shuffle"].get(peer)  # a peer that ended early has no order
            quality = f"{shuffle['displacement']:13.3f} {shuffle['neighbours']:11.2%}" if shuffle else ""
            factor = f"{ours / result[peer]:8.2f}x" if ours else ""
            print(f"{peer:18} {result[peer]:12,.0f} {factor:9} {quality}", file=sys.stderr)


def _names(folder: str) -> Sequence[str]:
    return sorted(p.stem for p in Path(folder).glob("*.npy") if p.stem in ("image", "dense", "sparse"))


def _spark_dl(folder: str, *, plain: bool) -> Epoch:
    from spark_dl.config import Config, Data, Train
    from spark_dl.config import Loader as Loading
    from spark_dl.data.dataset.manifest import read_shards
    from spark_dl.data.external.dataset import open_parquet
    from spark_dl.data.load.loader import ShardLoader

    data = Data(features=tuple(_names(folder)), label="label")
    settings = Config(
        data=data,
        loader=Loading(shuffle_window_rows=WINDOW_ROWS, memory_mib=_MEMORY_MIB),
        train=Train(global_batch_size=BATCH),
    )
    shards = open_parquet(f"{folder}/parquet", data.columns) if plain else read_shards(f"{folder}/shards")
    loader = ShardLoader(shards, settings, rank=0, world_size=1)

    def epoch(number: int) -> Iterator[Any]:
        for step in loader.epoch(number):
            batch = step.micro_batches[0]
            yield batch["label"] if step.rows == BATCH else batch["label"][batch["weight"] > 0]

    return epoch


def _arrow(folder: str) -> Epoch:
    def epoch(number: int) -> Iterator[Any]:
        for path in sorted(Path(folder, "parquet").iterdir()):
            for batch in pq.ParquetFile(path).iter_batches(batch_size=BATCH, use_threads=False):
                for name in _names(folder):
                    batch.column(name).flatten().to_numpy().reshape(batch.num_rows, -1)
                yield batch.column("label").to_numpy()

    return epoch


def _hf_datasets(folder: str) -> Epoch:
    import datasets

    files = [str(p) for p in sorted(Path(folder, "parquet").iterdir())]
    rows = datasets.Dataset.from_parquet(files, cache_dir=f"{folder}/hf").with_format("torch")

    def epoch(number: int) -> Iterator[Any]:
        for batch in rows.shuffle(seed=number).iter(batch_size=BATCH):
            yield batch["label"]

    return epoch


def _tensor_dataset(folder: str) -> Epoch:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    tensors = [torch.from_numpy(np.load(f"{folder}/{name}.npy")) for name in (*_names(folder), "label")]
    loader = DataLoader(TensorDataset(*tensors), batch_size=BATCH, shuffle=True)

    def epoch(number: int) -> Iterator[Any]:
        for *_, labels in loader:
            yield labels

    return epoch


def _memory_gather(folder: str) -> Epoch:
    import torch

    torch.set_num_threads(1)
    tensors = [torch.from_numpy(np.load(f"{folder}/{name}.npy")) for name in (*_names(folder), "label")]

    def epoch(number: int) -> Iterator[Any]:
        order = torch.randperm(len(tensors[0]), generator=torch.Generator().manual_seed(number))
        for places in order.split(BATCH):
            *_, labels = [tensor.index_select(0, places) for tensor in tensors]
            yield labels

    return epoch


_BUILD: dict[str, Callable[[str], Epoch]] = {
    "spark_dl": lambda folder: _spark_dl(folder, plain=False),
    "spark_dl_parquet": lambda folder: _spark_dl(folder, plain=True),
    "hf_datasets": _hf_datasets,
    "tensor_dataset": _tensor_dataset,
    "memory_gather": _memory_gather,
    "arrow": _arrow,
}

if __name__ == "__main__":
    serve(answers(_BUILD[sys.argv[1]](sys.argv[2])))
