"""A driver on a host of a testbed, which trains the small network whenever it is told to.

`python -m tests.hosts.train_job MASTER`: each line of its input is {"dataset", "run_dir", "num_ranks", "epochs"}, with
{"strategy", "straggler_s"} if they are not the usual ones, and each of its output says how that training ended. Each
rank leaves a file `RUN_DIR.HOST` with its process id.
"""

import functools
import json
import os
import pathlib
import socket
import sys
import time

import spark_dl
from spark_dl import ModelSpec
from spark_dl.launch.session import build_session
from tests.builders.models import build_mlp, small_config
from tests.builders.settings import parallel
from tests.hosts.conftest import REPOSITORY
from tests.spark.conftest import FAST_JVM

TIMEOUT_S = 8
CONF = {
    "spark.log.level": "OFF",  # faults are injected here: Spark's own account of them would hide ours
    "spark.ui.enabled": "false",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": FAST_JVM,
    "spark.executorEnv.PYTHONPATH": str(REPOSITORY),
}


def config(num_ranks, epochs, strategy="ddp", straggler_s=0.0):
    slow = {"straggler": "constant", "straggler_s": straggler_s} if straggler_s else {}
    return small_config(
        num_ranks, train={"epochs": epochs}, launch={"collective_timeout_s": TIMEOUT_S, "start_timeout_s": 100},
        parallel=parallel(strategy), **slow,
    )  # fmt: skip


def build_and_sign(run_dir):
    pathlib.Path(f"{run_dir}.{socket.gethostname()}").write_text(str(os.getpid()))
    return build_mlp()


def train(dataset, run_dir, **settings):
    spec = ModelSpec(build=functools.partial(build_and_sign, run_dir))
    try:
        result = spark_dl.train(dataset, spec, config(**settings), run_dir=run_dir, progress=False)
        end = {"steps": result.steps}
    except spark_dl.RankError as error:
        end = {"error": str(error), "rank": error.rank, "host": error.host, "pid": error.pid}
    return {**end, "time": time.time()}


if __name__ == "__main__":
    session = build_session("train", master=sys.argv[1], conf=CONF)
    for line in sys.stdin:
        print(json.dumps(train(**json.loads(line))), flush=True)
    session.stop()
