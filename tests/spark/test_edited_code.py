"""The daily work of a notebook: edit a module, reload it, call again. And a driver that is newer than the executors."""

import json
import subprocess
import sys
import zipfile

import nbformat
import pytest
from nbclient import NotebookClient

from tests.spark.conftest import REPOSITORY, SPARK_HOME, connect_server
from tests.spark.test_jobs import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
FEATURES = """
import torch
SCALE = {scale}

def scale():
    return SCALE

def scaled(batch):
    return {{**batch, "x": SCALE * batch["x"]}}

def build():
    model = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return model
"""
FIRST = """
%load_ext autoreload
%autoreload 2
import json, features, spark_dl
from pyspark.sql import SparkSession
from spark_dl import Config, Data, Launch, ModelSpec, Train
spark = {session}
df = spark.createDataFrame([([float(i)], [0.0]) for i in range(8)], "x array<float>, y array<float>")
data = Data(features=("x",), label="y")
config = Config(data=data, train=Train(lr=1e-12, global_batch_size=16, epochs=1), launch=Launch(num_ranks=2))
places = iter(range(9))
trained = []
"""
CALL = """
spec = ModelSpec(build=features.build, loss="MSELoss", transform=features.scaled)
result = spark_dl.train(df, spec, config, run_dir=f"run{{next(places)}}", progress=False)
trained.append(result.checkpoint)
sums = [
    spark_dl.predict(df, spec, trained[0]).selectExpr("round(sum(prediction[0]), 3)").first()[0],
    df.select(spark_dl.predict_udf(spec, trained[0])("x").alias("p")).selectExpr("round(sum(p[0]), 3)").first()[0],
]
def inside():
    import features
    return features.SCALE
def tuned():
    if not {tunes}:
        return result.history[-1]["train_loss"]
    return spark_dl.tune(
        df, spec, lambda trial: {{}}, config, num_trials=1, metric="train_loss", run_dir=f"tuned{{next(places)}}",
        progress=False,
    ).best.value
print("found", json.dumps([
    spark_dl.launch(features.scale), spark_dl.launch(lambda: features.SCALE), spark_dl.launch(inside),
    round(result.history[-1]["train_loss"], 3),
    round(spark_dl.evaluate(df, spec, trained[0], progress=False)["loss"], 3), *sums, round(tuned(), 3),
]))
"""
EDIT = "open('features.py', 'w').write({text!r})"


@pytest.mark.parametrize("master", [
    "local[2]", *(pytest.param(name, marks=pytest.mark.long) for name in ("local-cluster[2,1,1024]", "connect"))
])  # fmt: skip
def test_an_edited_module_is_what_every_call_runs(tmp_path, monkeypatch, master):
    """In local mode the workers start in the folder of the module, and kept what they had imported from there."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    if master == "connect":
        monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
        (tmp_path / "server").mkdir()
        with connect_server(tmp_path / "server") as url:
            check_edits(tmp_path, f"SparkSession.builder.remote({url!r}).getOrCreate()", tunes=False)
    else:
        check_edits(tmp_path, f"spark_dl.build_session('test', master={master!r})", tunes=True)


def check_edits(tmp_path, session, *, tunes):
    """tunes: whether `tune` is called, too, which Connect does not have."""
    call = CALL.format(tunes=tunes)
    (tmp_path / "features.py").write_text(FEATURES.format(scale=1.0))
    edit = EDIT.format(text=FEATURES.format(scale=3.0))
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(s) for s in (FIRST.format(session=session), call, edit, call)]
    found = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    cells = [c for c in found.execute().cells if c.source == call]
    lines = ["".join(o.get("text", "") for o in cell.outputs) for cell in cells]
    before, after = (json.loads(text.partition("found ")[2].splitlines()[0]) for text in lines)
    assert before == [[1.0], [1.0], [1.0], 17.5, 17.5, 28.0, 28.0, 17.5]
    assert after == [[3.0], [3.0], [3.0], 157.5, 157.5, 84.0, 84.0, 157.5]


JOB = """
import pkg, spark_dl
spark = spark_dl.build_session("test")
print("found", pkg.version(), spark_dl.launch(pkg.version, num_ranks=2))
"""


@pytest.mark.long
@pytest.mark.parametrize("master", ["local[2]", pytest.param("local-cluster[2,1,1024]", marks=pytest.mark.long)])
def test_the_package_beside_the_program_runs_and_not_an_older_one_that_was_sent(tmp_path, master):
    with zipfile.ZipFile(tmp_path / "pkg.zip", "w") as archive:
        archive.writestr("pkg/__init__.py", "def version():\n    return 'old'\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("def version():\n    return 'new'\n")
    (tmp_path / "job.py").write_text(JOB)
    command = [f"{SPARK_HOME}/bin/spark-submit", "--master", master, "--py-files", "pkg.zip", "job.py"]
    env = {**environment(), "PYTHONPATH": str(REPOSITORY), "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "found new ['new', 'new']" in done.stdout
