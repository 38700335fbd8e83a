"""Executors whose Python lacks what ranks need: one error that says what to install, whichever job meets it first."""

import json
import re
import subprocess
import sys
import sysconfig

import pytest

from tests.builders.datasets import write_dataset
from tests.builders.models import blobs
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
config = small_config(1)
reduced = small_config(1, parallel=spark_dl.TreeReduce())
local = small_config(1, data={{"storage": "local"}})
for name, work in (
    ("write_shards", lambda: spark_dl.write_shards(df, "data")),
    ("train", lambda: spark_dl.train(df, MLP, config, run_dir="run")),
    ("train by url", lambda: spark_dl.train("dataset", MLP, config, run_dir="run")),
    ("train locally", lambda: spark_dl.train(df, MLP, local, run_dir="local")),
    ("tree_reduce", lambda: spark_dl.train("dataset", MLP, reduced, run_dir="reduced")),
    ("launch", lambda: spark_dl.launch(print, num_ranks=1)),
    ("run_on_dataframe", lambda: spark_dl.run_on_dataframe(print, df, num_ranks=1)),
    ("diagnose", lambda: found.update(diagnose=spark_dl.diagnose(config).text)),
):
    try:
        work()
    except Exception as error:
        found[name] = f"{{type(error).__name__}}: {{error}}"
spark.stop()
print(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.parametrize("daemon", [
    pytest.param("pyspark.daemon", marks=pytest.mark.long), "spark_dl.launch.daemon",
])  # fmt: skip
@pytest.mark.slow
def test_B18_a_python_without_the_package_is_an_error_that_says_what_to_install(tmp_path, daemon):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    paths = sysconfig.get_paths(vars={"base": str(venv), "platbase": str(venv)})
    (tmp_path / "venv" / paths["purelib"] / "others.pth").write_text(sysconfig.get_path("purelib"))  # all but ours
    (tmp_path / "script.py").write_text(SCRIPT)
    write_dataset(str(tmp_path / "dataset"), blobs(60))
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
    assert len(found) == 8
    for name, message in found.items():
        assert re.search("executor('s|s') Python has no spark_dl", message), (name, message)
        assert "set PYSPARK_PYTHON to an interpreter that has spark_dl (of this version) and torch" in message
        assert name == "diagnose" or message.startswith("UnfitPythonError: "), (name, message)
