"""A rank of a training that torchrun's environment describes: `python -m tests.hosts.rank_job DATASET RUN_DIR`."""

import json
import os
import sys

from spark_dl import DDP, worker
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.spec import Run
from tests.builders.models import MLP, small_config

TIMEOUT_S = 8


def config(num_ranks):
    return small_config(
        num_ranks, train={"epochs": 3}, launch={"collective_timeout_s": TIMEOUT_S, "start_timeout_s": 60},
        parallel=DDP(),
    )  # fmt: skip


if __name__ == "__main__":
    dataset, run_dir = sys.argv[1:]
    run = Run(spec=MLP, config=config(int(os.environ["WORLD_SIZE"])), train=read_shards(dataset), run_dir=run_dir)
    print(json.dumps(worker.main(run).result["steps"]))
