"""GPUs that Spark assigns to ranks, by a resource profile of their stage. The executor only says that it has GPUs.

Spark takes the word of a discovery script, so its scheduling is real, and the ranks compute on CPUs.
"""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.spark.conftest import FAST_JVM, REPOSITORY, SPARK_HOME

PROGRAM = """
import json, os
import spark_dl
from spark_dl.launch import preflight

spark = spark_dl.build_session("gpus", master="local-cluster[1,4,1024]", conf=CONF)

def addresses(*_):
    from pyspark import TaskContext
    resources = TaskContext.get().resources()
    return {"gpus": resources["gpu"].addresses if "gpu" in resources else [], "local_rank": os.environ["LOCAL_RANK"]}

def of(num_ranks, amount, **settings):
    settings = spark_dl.Launch(**{"device": "cpu", "gpus_per_rank": amount, **settings})
    return spark_dl.launch(addresses, num_ranks=num_ranks, settings=settings)

def error_of(call, *args, **kwargs):
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

preflight.EXECUTORS_WAIT_S = 30.0
found = {str(amount): of(ranks, amount) for ranks, amount in ((4, 1), (2, 2), (4, 0.5), (2, 0), (2, "auto"))}
df = spark.range(64).selectExpr("CAST(id AS FLOAT) AS x")
launch = spark_dl.Launch(num_ranks=2, device="cpu", gpus_per_rank=1)
found["rows"] = spark_dl.run_on_dataframe(addresses, df, settings=launch)
preflight.EXECUTORS_WAIT_S = 0.5
found["too few"] = error_of(of, 4, 2)
found["too many"] = error_of(of, 1, 5)
found["chosen"] = error_of(of, 2, "auto", device="auto")
import torch
spec = spark_dl.ModelSpec(build=lambda: torch.nn.Linear(2, 2))
config = spark_dl.Config(data=spark_dl.Data(features=("x",)))
df = df.selectExpr("array(x, x) AS x")
found["scored"] = {
    str(amount): error_of(lambda: spark_dl.predict(df, spec, config=config, gpus=amount).collect())
    for amount in (1, 5, 0)
}
profiles = {amount: preflight.build_scoring_profile(spark, amount).taskResources for amount in (1, 2, 0.5)}
found["profiles"] = {str(a): {name: r.amount for name, r in of.items()} for a, of in profiles.items()}
print(json.dumps(found))
"""


def run(tmp_path, program):
    """The last line of a program with one executor of four cores and four GPUs, whose addresses are UUIDs."""
    gpus = ", ".join(f'"GPU-{letter}"' for letter in "abcd")
    script = tmp_path / "discover.sh"
    script.write_text(f"""#!/bin/sh\necho '{{"name": "gpu", "addresses": [{gpus}]}}'\n""")
    script.chmod(0o755)
    conf = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    for part in ("worker", "executor"):
        conf |= {f"spark.{part}.resource.gpu.amount": "4", f"spark.{part}.resource.gpu.discoveryScript": str(script)}
    (tmp_path / "program.py").write_text(program.replace("CONF", repr(conf)))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_"))}
    env |= {
        "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY), "JAVA_TOOL_OPTIONS": FAST_JVM,
        "SPARK_HOME": SPARK_HOME, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def gpus_of(ranks):
    return [rank["gpus"] for rank in ranks]


ALL = [f"GPU-{letter}" for letter in "abcd"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(220)
def test_ranks_get_the_gpus_that_they_need_from_executors_whose_tasks_have_none(tmp_path):
    found = run(tmp_path, PROGRAM)
    assert sorted(gpus_of(found["1"])) == [[gpu] for gpu in ALL]
    one, other = gpus_of(found["2"])
    assert sorted([*one, *other]) == ALL
    assert len(one) == len(other)
    shared = gpus_of(found["0.5"])
    assert [len(gpus) for gpus in shared] == [1] * 4
    assert max(Counter(gpu for [gpu] in shared).values()) == 2
    assert gpus_of(found["0"]) == gpus_of(found["auto"]) == [[], []]  # ranks on CPUs do not ask for GPUs
    [one], [other] = gpus_of(found["rows"])
    assert one != other
    assert [rank["local_rank"] for rank in found["1"]] == ["0", "1", "2", "3"]
    assert "TooFewSlotsError: 4 ranks need 4 task slots at the same time, and the cluster has 2 " in found["too few"]
    assert "launch.gpus_per_rank=2, spark.executor.resource.gpu.amount=4" in found["too few"]
    assert found["too many"].startswith(
        "ValueError: launch.gpus_per_rank: expected at most spark.executor.resource.gpu"
    )
    assert "RankError" in found["chosen"]  # without being told, each rank gets a GPU, which torch does not find here
    assert "Spark gave this task GPU GPU-" in found["chosen"]
    assert "finds no CUDA here" in found["chosen"]
    assert "Spark gave this task GPU GPU-" in found["scored"]["1"]
    assert "gpus: expected at most spark.executor.resource.gpu.amount, 4, the GPUs of an" in found["scored"]["5"]
    assert found["scored"]["0"] == "ValueError: gpus: expected a number above 0, the GPUs of a task, found 0"
    # An executor has four cores and four GPUs.
    assert found["profiles"] == {
        "1": {"cpus": 1, "gpu": 1}, "2": {"cpus": 2, "gpu": 2}, "0.5": {"cpus": 1, "gpu": 0.5},
    }  # fmt: skip
