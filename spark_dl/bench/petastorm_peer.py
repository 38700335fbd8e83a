"""Petastorm's loaders as peers of the loader benchmark. Started in Petastorm's own environment, without spark_dl."""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BATCH, WINDOW_ROWS = 256, 65536


def build(name: str, folder: str) -> Any:
    """The epochs of one of Petastorm's loaders over the plain Parquet files."""
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader, DataLoader

    url = Path(folder, "parquet").as_uri()
    loader_class = BatchedDataLoader if name == "petastorm_batched" else DataLoader

    def epoch(number: int) -> Iterator[Any]:
        reader = make_batch_reader(url, num_epochs=1, shuffle_row_groups=True, seed=number)
        with loader_class(reader, batch_size=BATCH, shuffling_queue_capacity=WINDOW_ROWS) as loader:
            for batch in loader:
                yield batch["label"]

    return epoch


if __name__ == "__main__":
    serve = runpy.run_path(str(Path(__file__).with_name("loader.py")))["serve"]
    serve(build(sys.argv[1], sys.argv[2]))
