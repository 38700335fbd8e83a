"""An executor that is killed while Spark sums gradients: Spark computes its part again, to the same weights."""

import json
import os
import subprocess
import sys

import pytest
import torch

from spark_dl.rundir import checkpoint
from tests.builders.datasets import write_dataset
from tests.builders.models import blobs, same_bits
from tests.spark.conftest import CONF, MASTERS, REPOSITORY, SPARK_HOME
from tests.spark.test_jobs import environment

SCRIPT = f"""
import json, os, pathlib, signal, sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
import torch
import spark_dl
from spark_dl import ModelSpec
from tests.builders.models import build_mlp
from tests.spark.test_baselines import config_of

class KillsItsExecutor:
    def __init__(self, sign):
        self.sign, self.calls = sign, 0

    def __call__(self, output, label):
        from pyspark import TaskContext

        self.calls += 1
        if self.sign and TaskContext.get() and TaskContext.get().partitionId() == 1 and self.calls == 3:
            if not os.path.exists(self.sign):
                pathlib.Path(self.sign).touch()
                daemon = pathlib.Path(f"/proc/{{os.getppid()}}/stat").read_text()
                os.kill(int(daemon.rpartition(")")[2].split()[1]), signal.SIGKILL)
                time.sleep(60)
        return torch.nn.functional.cross_entropy(output, label, reduction="none")

if __name__ == "__main__":
    folder, strategy = sys.argv[1:3]
    spark = spark_dl.build_session("test", master={MASTERS["local-cluster"]!r}, conf=json.loads(sys.argv[3]))
    for name, sign in (("twin", ""), ("killed", folder + "/sign")):
        spec = ModelSpec(build=build_mlp, loss=KillsItsExecutor(sign))
        spark_dl.train(
            folder + "/data", spec, config_of(strategy, 2), run_dir=f"{{folder}}/{{name}}", progress=False
        )
    spark.stop()
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["tree_reduce", "shuffle_reduce"])
def test_F29_spark_computes_the_gradients_of_a_lost_executor_again(tmp_path, strategy):
    write_dataset(str(tmp_path / "data"), blobs(245), group_rows=40, shard_rows=120)
    (tmp_path / "script.py").write_text(SCRIPT)
    conf = json.dumps({**CONF, "spark.task.maxFailures": "4"})
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", str(tmp_path), strategy, conf], cwd=tmp_path, timeout=300,
        env={**environment(), "SPARK_HOME": SPARK_HOME, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert os.path.exists(tmp_path / "sign")
    twin, killed = (checkpoint.find(str(tmp_path / name)) for name in ("twin", "killed"))
    assert twin.step == killed.step
    weights, expected = (checkpoint.load(saved, "model.pt")["0"] for saved in (killed, twin))
    assert same_bits(weights, expected)
    assert all(bool(torch.isfinite(values).all()) for values in weights.values())
