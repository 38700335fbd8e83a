"""Executors whose Python lacks what ranks need: one error that says what to install, whichever job meets it first."""

import json
import subprocess
import sys
import sysconfig

import pytest

from tests.spark.conftest import CONF, REPOSITORY
from tests.spark.test_jobs import environment

pytestmark = pytest.mark.timeout(300)
SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(REPOSITORY)!r})
import spark_dl
from tests.builders.models import MLP, small_config
spark = spark_dl.build_session("test", master="local[2]", conf=json.loads(sys.argv[1]))
df = spark.createDataFrame([([1.0] * 4, 1)] * 10, "features array<float>, label bigint")
found = {{}}
for name, work in (
    ("write_shards", lambda: spark_dl.write_shards(df, "data")),
    ("train", lambda: spark_dl.train(df, MLP, small_config(1), run_dir="run")),
    ("launch", lambda: spark_dl.launch(print, num_ranks=1)),
):
    try:
        work()
    except RuntimeError as error:
        found[name] = str(error)
spark.stop()
print(json.dumps(found))
"""


@pytest.mark.parametrize("daemon", [
    pytest.param("pyspark.daemon", marks=pytest.mark.long), "spark_dl.launch.daemon",
])  # fmt: skip
@pytest.mark.slow
def test_a_python_without_the_package_is_an_error_that_says_what_to_install(tmp_path, daemon):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    paths = sysconfig.get_paths(vars={"base": str(venv), "platbase": str(venv)})
    (tmp_path / "venv" / paths["purelib"] / "others.pth").write_text(sysconfig.get_path("purelib"))  # all but ours
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {k: v for k, v in environment().items() if k != "PYTHONPATH"} | {"PYSPARK_PYTHON": f"{venv}/bin/python"}
    conf = json.dumps({**CONF, "spark.python.daemon.module": daemon})
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", conf],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {"write_shards", "train", "launch"}
    assert all("executors' Python has no spark_dl; set PYSPARK_PYTHON" in message for message in found.values()), found
