"""A driver on a host of a testbed, whose ranks are killed on one of the hosts: `MASTER HOST DATASET RUN_DIR`."""

import functools
import json
import os
import signal
import socket
import sys

import spark_dl
from spark_dl import ModelSpec
from spark_dl.launch.session import build_session
from tests.builders.models import MLP, small_config
from tests.hosts.train_job import CONF


def config(num_ranks):
    launch = {"min_ranks": 2, "restart_wait_s": 0.1, "max_restarts": 3, "start_timeout_s": 60}
    return small_config(num_ranks, train={"epochs": 2}, launch=launch)


def killed_on(host, model, position):
    if position.global_step == 3 and socket.gethostname() == host:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    master, host, dataset, run_dir = sys.argv[1:]
    spark = build_session("left out", master=master, conf=CONF)
    attempts = [[]]

    def on_event(event):
        if event["kind"] == "restart":
            attempts.append([])
        if event["kind"] == "joined":
            attempts[-1].append(event["host"])

    spec = ModelSpec(build=MLP.build, set_position=functools.partial(killed_on, host))
    result = spark_dl.train(dataset, spec, config(3), run_dir=run_dir, progress=False, on_event=on_event, spark=spark)
    print(json.dumps({"restarts": result.restarts, "attempts": attempts}), flush=True)
    spark.stop()
