"""Reads a dataset with Petastorm's NGram. Runs in its environment.

The request is a list of readings `{url, length, max_gap, overlap}`; the answer has the ids of the rows of each
n-gram, of each reading.
"""

import json
import sys
from pathlib import Path

from petastorm import make_reader
from petastorm.ngram import NGram


def read(url, length, max_gap, overlap):
    fields = {step: ["id", "time"] for step in range(length)}
    ngram = NGram(fields, delta_threshold=max_gap, timestamp_field="time", timestamp_overlap=overlap)
    with make_reader(
        f"file://{url}", schema_fields=ngram, reader_pool_type="dummy", shuffle_row_groups=False
    ) as reader:
        return [[int(item[step].id) for step in range(length)] for item in reader]


if __name__ == "__main__":
    request, answer = map(Path, sys.argv[1:3])
    answer.write_text(json.dumps([read(**reading) for reading in json.loads(request.read_text())]))
