"""A driver that looks at its cluster of 3 hosts for each line that it gets, and writes the result as JSON: `MASTER`."""

import json
import sys

import spark_dl
from spark_dl import Config, Launch
from spark_dl.launch.session import build_session
from tests.hosts.train_job import CONF

# Executors take the code of a task from each other, too, and wait for a host that was cut off for 120 s otherwise.
GIVE_UP = {"spark.shuffle.io.connectionTimeout": "5s", "spark.shuffle.io.maxRetries": "0"}

if __name__ == "__main__":
    spark = build_session("doctor", master=sys.argv[1], conf={**CONF, **GIVE_UP})
    config = Config(launch=Launch(num_ranks=3, device="cpu", start_timeout_s=60))
    for _ in sys.stdin:
        print(json.dumps(spark_dl.diagnose(config, spark=spark).to_dict()), flush=True)
    spark.stop()
