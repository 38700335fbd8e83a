"""Reads datasets with Petastorm. Runs in its environment.

The request is a list of readings `{url, rows, reader, pool, loader}`, the answer has the rows of each, in the order of
`id`, or `{"error"}`.
"""

import json
import sys
import time
from collections import defaultdict
from pathlib import Path

from petastorm import make_batch_reader, make_reader

from tests.petastorm.exchange import plain_rows

READERS = {"make_reader": make_reader, "make_batch_reader": make_batch_reader}


def read(url, reader, rows, pool="dummy", loader=None):
    columns = defaultdict(list)
    with READERS[reader](f"file://{url}", reader_pool_type=pool, workers_count=2) as opened:
        if loader is None:
            for item in until(opened, lambda: len(columns["id"]) >= rows):
                for name, value in item._asdict().items():
                    columns[name].extend(value if opened.batched_output else [value])
            assert next(opened, None) is None
        else:
            from petastorm import pytorch

            for batch in getattr(pytorch, loader)(opened, batch_size=7):
                for name, value in batch.items():
                    columns[name].extend(value.numpy())
    return plain_rows(columns)


def until(reader, is_whole):
    """The items of a reader. Its pools of threads and processes can say that they are at the end when they are not."""
    for _ in range(100):
        yield from reader
        if is_whole():
            return
        time.sleep(0.01)


def read_or_error(reading):
    try:
        return read(**reading)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    request, answer = map(Path, sys.argv[1:3])
    answer.write_text(json.dumps([read_or_error(reading) for reading in json.loads(request.read_text())]))
