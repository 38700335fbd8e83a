"""Trains and evaluates through Petastorm's readers, as torchrun would start it. Runs in Petastorm's environment.

The request is `{run_dir, datasets, num_ranks}`; the answer has, by dataset, what each rank returned and logged, what it
read with and without shuffling, and the error of a loader for too many ranks. The ranks are processes with gloo between
them.
"""

import json
import logging
import sys
from pathlib import Path

from spark_dl import storage, worker
from spark_dl.data.dataset.manifest import MANIFEST, read_shards
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.load.petastorm_reader import PetastormLoader
from spark_dl.spec import Run
from tests.builders.models import MLP, small_config
from tests.petastorm.exchange import plain
from tests.ranks.launcher import kill_ranks, run_ranks

COLUMNS = ("features", "label")


def open_dataset(url):
    return read_shards(url) if storage.exists(f"{url}/{MANIFEST}") else open_parquet(url, COLUMNS)


def on_rank(url, run_dir, config):
    """What training and evaluation return on this rank, and the warnings."""
    warnings = []
    logging.getLogger("spark_dl").addHandler(handler := logging.Handler())
    handler.emit = lambda record: warnings.append(record.getMessage())
    shards = open_dataset(url)
    trained = worker.main(Run(spec=MLP, config=config, train=shards, run_dir=run_dir, validation=shards)).result
    run = Run(spec=MLP, config=config, train=shards, run_dir=run_dir, checkpoint=trained["checkpoint"])
    evaluated = worker.main(run, task="evaluate").result
    logging.getLogger("spark_dl").removeHandler(handler)
    return {"trained": trained, "evaluated": evaluated, "warnings": warnings}


def batches_of(shards, config, rank, **arguments):
    """The cells of a rank's epoch, by step: true ones and fillers, and the true rows over all ranks."""
    loader = PetastormLoader(shards, config, rank=rank, world_size=config.launch.num_ranks, **arguments)
    found = []
    for step in loader.epoch(0):
        (batch,) = step.micro_batches
        found.append({"step": step.step, "rows": step.rows} | {n: plain(t.numpy()) for n, t in batch.items()})
    return found


def error_of(shards, config):
    try:
        PetastormLoader(shards, config, rank=0, world_size=12)
    except ValueError as error:
        return str(error)


def work(num_ranks, run_dir, url):
    config, shards = small_config(num_ranks, data={"reader": "petastorm"}), open_dataset(url)
    return {
        "ranks": run_ranks(on_rank, num_ranks, url, run_dir, config, timeout_s=60),
        "shuffled": [batches_of(shards, config, rank) for rank in range(num_ranks)],
        "in order": [batches_of(shards, config, rank, shuffle=False) for rank in range(num_ranks)],
        "too many ranks": error_of(shards, config),
    }


if __name__ == "__main__":
    request, answer = map(Path, sys.argv[1:3])
    asked = json.loads(request.read_text())
    run_dir = asked["run_dir"]
    done = {name: work(asked["num_ranks"], f"{run_dir}/{name}", url) for name, url in asked["datasets"].items()}
    kill_ranks()
    answer.write_text(json.dumps(done))
