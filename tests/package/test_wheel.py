"""spark_dl as a wheel: built, installed into a clean environment, sent by `--py-files`; and the exit codes of jobs."""

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import pytest
import sklearn

from tests.spark.conftest import SPARK_HOME
from tests.spark.test_jobs import environment

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCRIPT = """
import json, sys
import torch
import spark_dl


def build():
    return torch.nn.Linear(4, 2)


if __name__ == "__main__":
    spark = spark_dl.build_session("wheel", master=sys.argv[1], conf=json.loads(sys.argv[2]))
    df = spark.range(100).selectExpr("CAST(array(id, 1, 2, 3) AS ARRAY<FLOAT>) AS features", "id % 2 AS label")
    config = spark_dl.Config(launch=spark_dl.Launch(num_ranks=2), train=spark_dl.Train(global_batch_size=16))
    result = spark_dl.train(df, spark_dl.ModelSpec(build=build), config, run_dir="run", progress=False)
    print(json.dumps({"rows": result.rows, "package": spark_dl.__file__}))
    spark.stop()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    subprocess.run(["git", "clone", "-q", ROOT, sources], check=True, timeout=60)
    for name in subprocess.check_output(["git", "diff", "--name-only", "HEAD"], cwd=ROOT, text=True).split():
        if (ROOT / name).exists():
            (sources / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, sources]
    subprocess.run(command, check=True, timeout=200)
    (found,) = folder.glob("*.whl")
    return found


def clean_python(folder, *wheels):
    """A Python with all that `.venv` has, except spark_dl; with the wheels, if any."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    packages = Path(sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})["purelib"])
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))  # without the links of its editable installs
    for path in wheels:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", packages, path]
        subprocess.run(command, check=True, timeout=100)
    return folder / "bin" / "python"


def clean_environment(python):
    return {k: v for k, v in environment().items() if k != "PYTHONPATH"} | {"PYSPARK_PYTHON": str(python)}


def test_it_has_every_module_and_nothing_else(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = {
        str(p.relative_to(ROOT)) for p in (ROOT / "spark_dl").rglob("*") if p.suffix in (".py", ".typed", ".html")
    }
    assert names == expected


@pytest.mark.long
def test_installed_in_a_clean_environment_it_trains(wheel, tmp_path):
    python = clean_python(tmp_path / "venv", wheel)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [python, "script.py", "local[2]", '{"spark.ui.enabled": "false"}'],
        cwd=tmp_path, env=clean_environment(python), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"] == 100
    assert found["package"].startswith(str(tmp_path))


@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.long, id="and again")])
def test_the_first_ten_minutes_are_what_the_quickstart_says(wheel, tmp_path, rounds):
    """The commands of docs/quickstart.md, as they are there: from a CSV file to a model, its scores and a report.

    Each can be run again, but for init, which overwrites nothing.
    """
    python = clean_python(tmp_path / "venv")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(command, check=True, timeout=100)
    page = (ROOT / "docs" / "quickstart.md").read_text()
    shell = re.search(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    assert len(shell.splitlines()) <= 12
    (tmp_path / "home").mkdir()
    path = f"{python.parent}:{os.environ['PATH']}"
    for again in range(rounds):
        lines = [line for line in shell.splitlines() if not (again and " init " in line)]
        done = subprocess.run(
            ["bash", "-e", "-c", "\n".join(lines)], cwd=tmp_path / "home", capture_output=True, text=True, timeout=400,
            env=clean_environment(python) | {"PATH": path},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert len(results) == len([line for line in lines if line.startswith("spark-dl")])
        *_, trained, evaluated, predicted, report = results
        assert trained["metrics"]["accuracy"] > 0.9
        assert evaluated["metrics"] == trained["metrics"]
        assert evaluated["rows"] == predicted["rows"] > 100
        assert Path(report["report"]).stat().st_size > 10_000


@pytest.mark.long
def test_spark_submit_sends_it_by_py_files(wheel, tmp_path):
    """Executors' Python has no spark_dl. Spark puts zip files of `--py-files` on their path; a wheel is one."""
    python = clean_python(tmp_path / "venv")
    (tmp_path / "script.py").write_text(SCRIPT)
    packed = tmp_path / "spark_dl.zip"
    packed.write_bytes(wheel.read_bytes())
    master = "local-cluster[2,1,1024]"
    done = subprocess.run(
        [f"{SPARK_HOME}/bin/spark-submit", "--master", master, "--py-files", packed, "script.py", master, "{}"],
        cwd=tmp_path, env=clean_environment(python) | {"SPARK_HOME": SPARK_HOME, "PYSPARK_DRIVER_PYTHON": str(python)},
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["rows"] == 100


JOB = [sys.executable, "jobs/train.py", "--config", "conf/train/digits.yaml", "--master", "local[2]"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("more", "code", "message"), [
    (["--train.learning_rate", "1"], 2, "train.learning_rate"),
    (["--train.lr", "fast"], 2, "train.lr"),
    pytest.param(["--input.path", "/nothing/there"], 1, "/nothing/there", marks=pytest.mark.long),
])  # fmt: skip
def test_exit_codes_are_what_a_scheduler_expects(tmp_path, more, code, message):
    command = [*JOB, "--run_dir", tmp_path / "run", *more]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr[-2000:]
    assert message in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143)])  # SIGINT: spark/test_jobs.py
def test_a_job_that_is_ended_by_a_signal_says_so(tmp_path, number, code):
    data = Path(sklearn.__file__).parent / "datasets/data/digits.csv.gz"
    command = [*JOB, "--input.path", data, "--run_dir", tmp_path / "run", "--train.epochs", "100000"]
    job = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        end = time.monotonic() + 200
        while not (tmp_path / "run" / "checkpoints").exists():
            assert job.poll() is None
            assert time.monotonic() < end, "no checkpoint within 200 s"
            time.sleep(0.2)
        os.kill(job.pid, number)
        job.communicate(timeout=60)
        assert job.returncode == code
    finally:
        if job.poll() is None:
            job.kill()
            job.communicate()
