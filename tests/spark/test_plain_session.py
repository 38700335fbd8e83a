"""A program in a folder of its own, with a session of Spark's builder, outside an activated environment.

Its model is in a module beside it. Nothing is set that a new user does not know of.
"""

import os
import subprocess
import sys

import pytest

from tests.spark.conftest import FAST_JVM, REPOSITORY

MODEL = """
import torch

def build_model():
    return torch.nn.Linear(2, 2)

def rank():
    import os
    return int(os.environ["RANK"])
"""
PROGRAM = """
import shutil, sys
import model, spark_dl
from pyspark.sql import SparkSession

assert shutil.which("python3") != sys.executable
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
df = spark.range(64).selectExpr("array(CAST(id AS FLOAT), 1F) AS x", "id % 2 AS label").repartition(2)
config = spark_dl.Config(data=spark_dl.Data(features=("x",), label="label"), launch=spark_dl.Launch(num_ranks=2),
                         train=spark_dl.Train(global_batch_size=16))
spec = spark_dl.ModelSpec(build=model.build_model)
result = spark_dl.train(df, spec, config, run_dir="run")
print("launch", spark_dl.launch(model.rank, num_ranks=2))
print("evaluate", spark_dl.evaluate(df, spec, result.checkpoint)["rows"])
print("predict", spark_dl.predict(df, spec, result.checkpoint).count())
print("dataset", spark_dl.predict("run/shards/train", spec, result.checkpoint, spark=spark).count())
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_program_with_a_plain_session_and_a_module_beside_it(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text("#!/bin/sh\necho a Python without packages >&2\nexit 1\n")
    (tmp_path / "bin" / "python3").chmod(0o755)
    dropped = ("PYSPARK_PYTHON", "SPARK_HOME", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env |= {
        "PATH": f"{tmp_path / 'bin'}:{env['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "JAVA_TOOL_OPTIONS": FAST_JVM,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["launch [0, 1]", "evaluate 64", "predict 64", "dataset 64"]
