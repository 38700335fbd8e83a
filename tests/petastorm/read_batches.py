"""Reads a dataset that Petastorm wrote through `loader.reader: petastorm`. Runs in Petastorm's environment.

The request is `{url, columns}`, the answer the batches of each of two ranks.
"""

import json
import sys
from pathlib import Path

from spark_dl.data.external.dataset import open_parquet
from tests.builders.models import small_config
from tests.petastorm.train_ranks import batches_of

if __name__ == "__main__":
    request, answer = map(Path, sys.argv[1:3])
    asked = json.loads(request.read_text())
    config = small_config(2, data={"reader": "petastorm", "features": asked["columns"], "label": None})
    shards = open_parquet(asked["url"], asked["columns"])
    answer.write_text(json.dumps([batches_of(shards, config, rank, shuffle=False) for rank in range(2)]))
