"""Runs scripts in Petastorm's environment: each is a process, and JSON files are all that goes in and out."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-petastorm" / "bin" / "python"


@pytest.fixture(scope="session")
def run_petastorm(tmp_path_factory):
    """Calls `python -m tests.petastorm.<script> request.json answer.json` there; returns the answer."""
    if not PYTHON.exists():
        pytest.skip("no .venv-petastorm; `make setup-petastorm` makes it (Python 3.11)")

    def run(script, request, *arguments, timeout_s=100):
        folder = tmp_path_factory.mktemp(script)
        (folder / "request.json").write_text(json.dumps(request))
        command = [PYTHON, "-m", f"tests.petastorm.{script}", folder / "request.json", folder / "answer.json"]
        done = run_there(*command[1:], *arguments, timeout_s=timeout_s)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return json.loads((folder / "answer.json").read_text())

    return run


def run_there(*arguments, timeout_s):
    env = {k: v for k, v in os.environ.items() if k not in ("SPARK_HOME", "SPARK_CONF_DIR", "PYTHONSTARTUP")}
    env |= {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": str(PYTHON), "PYSPARK_DRIVER_PYTHON": str(PYTHON),
            "SPARK_LOCAL_IP": "127.0.0.1", "OMP_NUM_THREADS": "1",
            "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}  # fmt: skip
    return subprocess.run([PYTHON, *arguments], env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
