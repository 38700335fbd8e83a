"""Settings of Spark that forbid or harm a launch, in sessions that have them: the key, what was found, the change."""

import json
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.spark.conftest import CONF, REPOSITORY
from tests.spark.test_elastic import found_in, standalone
from tests.spark.test_jobs import environment

PROGRAM = """
import json, logging, sys
import spark_dl
from pyspark.sql import SparkSession
from tests.builders.models import MLP, small_config
from tests.spark.test_settings import sums_of_ranks

master, conf = sys.argv[1], json.loads(sys.argv[2])
logging.basicConfig(level="WARNING", format="LOG %(message)s")
builder = SparkSession.builder.master(master)
for key, value in conf.items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
found = {}
reduced = small_config(2, parallel=spark_dl.TreeReduce())
for name, work in {
    "launch": lambda: spark_dl.launch(int, num_ranks=2, settings=spark_dl.Launch(start_timeout_s=200)),
    "min_ranks": lambda: spark_dl.train(
        "none", MLP, small_config(2, launch={"min_ranks": 1, "start_timeout_s": 20}), run_dir="run"),
    "tree_reduce": lambda: spark_dl.train("none", MLP, reduced, run_dir="run"),
    "function": lambda: spark_dl.launch(sums_of_ranks, num_ranks=2),
    "script": lambda: spark_dl.launch("script.py", num_ranks=2),
    "diagnose": lambda: [each.found for each in spark_dl.diagnose(small_config(2)).findings if each.level != "ok"],
}.items():
    if name not in sys.argv[3:]:
        continue
    print("LOG", name, file=sys.stderr)
    try:
        found[name] = work()
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
spark.stop()
print(json.dumps(found))
"""


def sums_of_ranks():
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return int(total)


def run(folder, master, conf, *names, env=None):
    """What the functions return or raise in a session with these settings, and what they log."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, program, master, json.dumps({**CONF, **conf}), *names]
    env = {**environment(), "PYTHONPATH": str(REPOSITORY), **(env or {})}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-4000:]
    said = [line.removeprefix("LOG ") for line in done.stderr.splitlines() if line.startswith("LOG ")]
    return json.loads(done.stdout.splitlines()[-1]), said


@pytest.mark.long
def test_F24_an_address_in_the_environment_of_the_driver_is_not_that_of_the_ranks(tmp_path):
    """As of a cluster manager that sets MASTER_ADDR and MASTER_PORT; the port is that of another program."""
    (tmp_path / "script.py").write_text("from tests.spark.test_settings import sums_of_ranks as f; assert f() == 3\n")
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(other.getsockname()[1]), "WORLD_SIZE": "7", "RANK": "6"}
        found, _ = run(tmp_path, "local[2]", {}, "function", "script", env=taken)
        other.settimeout(0.1)
        with pytest.raises(TimeoutError):
            other.accept()
    assert found == {"function": [3, 3], "script": [None, None]}


@pytest.mark.slow
def test_B22_settings_under_which_ranks_cannot_run_are_refused(tmp_path):
    idle = "spark.python.worker.killOnIdleTimeout"
    conf = {"spark.dynamicAllocation.enabled": "true", idle: "true"}
    found, _ = run(tmp_path, "local[2]", conf, "launch", "tree_reduce", "diagnose")
    message = "spark.dynamicAllocation.enabled: found true, expected false for barrier jobs"
    assert found["launch"].startswith(f"ValueError: {message}")
    assert found["launch"].endswith("; set it to false, with enough executors for all ranks")
    assert found["diagnose"][0].startswith(message)
    assert found["tree_reduce"].startswith(f"ValueError: {idle}: found true, expected false")  # it needs no barrier
    assert found["tree_reduce"].endswith("; set it to false")


@pytest.mark.long
def test_B22_speculation_is_said_where_it_copies_tasks_and_ranks_run_without_a_word(tmp_path):
    found, said = run(tmp_path, "local[2]", {"spark.speculation": "true"}, "launch", "tree_reduce", "diagnose")
    text = "spark.speculation: found true: Spark never copies ranks of a barrier job, but the tasks that write shards, "
    assert found["launch"] == [0, 0]
    assert [each for each in found["diagnose"] if each.startswith(text)] == found["diagnose"]
    warned = [line for line in said if line.startswith("spark.speculation")]
    assert len(warned) == 1
    assert warned[0].endswith("; set spark.speculation to false")
    assert said.index("launch") < said.index("tree_reduce") < said.index(warned[0]) < said.index("diagnose")


@pytest.mark.long
def test_B22_tasks_that_need_more_cores_than_an_executor_has_are_an_error(tmp_path):
    """With `spark.executor.cores`, Spark itself refuses them. Without it, an executor has all cores of its host."""
    conf = {"spark.task.cpus": "2", "spark.executor.memory": "512m"}
    with standalone(tmp_path) as (url, start, worker):
        start("one", [*worker, "--work-dir", str(tmp_path / "work-one")])
        found_in(tmp_path / "master.log", "Registering worker", start("none", ["sleep", "600"]))
        found, _ = run(tmp_path, url, conf, "launch", "min_ranks", "diagnose")
    message = "spark.task.cpus: found 2, expected at most 1, the cores of an executor, as no task can run"
    change = "; set it to 1 or less, or give executors 2 cores (spark.executor.cores)"
    assert found["launch"] == found["min_ranks"] == f"ValueError: {message}{change}"
    assert found["diagnose"][0] == message
