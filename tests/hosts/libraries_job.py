"""Trains with Lightning, transformers and Accelerate on ranks of unequal hosts. `python -m ... MASTER DATASET FOLDER`.

Prints a JSON object with the results of the ranks by library, their weights as a list.
"""

import json
import os
import sys

import spark_dl
from spark_dl.launch.session import build_session
from tests.builders import libraries
from tests.hosts.train_job import CONF

NUM_RANKS = 3
LIBRARIES = ("lightning", "transformers", "accelerate")


def train_and_describe(library, *args):
    found = getattr(libraries, f"train_with_{library}")(*args)
    place = {name: int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")}
    return {**found, **place, "weights": found["weights"].tolist()}


if __name__ == "__main__":
    master, dataset, folder = sys.argv[1:]
    session = build_session("libraries", master=master, conf={**CONF, "spark.executor.memory": "512m"})
    out = {}
    for name in LIBRARIES:
        extra = (folder,) if name == "transformers" else ()
        out[name] = spark_dl.launch(train_and_describe, name, dataset, *extra, num_ranks=NUM_RANKS)
    print(json.dumps({**out, "alone": libraries.train_alone(dataset).tolist()}), flush=True)
    session.stop()
