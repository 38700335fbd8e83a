"""A rank of a training whose clock jumps in a step: `python -m tests.ranks.clock_job DATASET RUN_DIR LIBRARY SECONDS`.

As torchrun's environment describes it. Prints the steps, and how far the time of day was off in the end.
"""

import json
import os
import sys
import time
from dataclasses import dataclass

from spark_dl import ModelSpec, worker
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.spec import Run
from tests.builders.clock import jump
from tests.builders.models import build_mlp, small_config


@dataclass(frozen=True)
class Jumps:
    library: str
    seconds: int

    def __call__(self, model, position):
        if self.seconds and position.global_step == 3:
            jump(self.library, self.seconds)


if __name__ == "__main__":
    dataset, run_dir, library, seconds = sys.argv[1:]
    spec = ModelSpec(build=build_mlp, set_position=Jumps(library, int(seconds)))
    config = small_config(int(os.environ["WORLD_SIZE"]), train={"epochs": 4}, launch={"collective_timeout_s": 15})
    run = Run(spec=spec, config=config, train=read_shards(dataset), run_dir=run_dir)
    before = time.time() - time.monotonic()
    steps = worker.main(run).result["steps"]
    print(json.dumps([steps, round(time.time() - time.monotonic() - before)]))
