"""A packed environment (`--archives`) is all that executors need: the worker does not see the driver's environment.

Packed as in docs/packages.md, by `tar` and by `venv-pack`, except that the packages are taken from the driver's
environment, not from an index: what `pip install .` would install, in the same versions.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.testbed.standalone import start_spark
from tests.hosts.conftest import REPOSITORY
from tests.spark.conftest import FAST_JVM, SPARK_HOME

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
JOB = """
import json, os, sys
import torch
import spark_dl


def build():
    return torch.nn.Linear(4, 2)


def describe(hidden):
    import pyspark

    files = {module.__name__: os.path.realpath(module.__file__) for module in (torch, spark_dl, pyspark)}
    # Tasks run in the folder of their executor.
    return {**files, "environment": os.path.realpath("environment"), "python": sys.executable, "base": sys.base_prefix,
            "hidden": os.listdir(hidden)}


if __name__ == "__main__":
    spark = spark_dl.build_session("packed")
    settings = spark_dl.Launch(num_ranks=2, start_timeout_s=300)
    ranks = spark_dl.launch(describe, sys.prefix, num_ranks=2, settings=settings)
    df = spark.range(100).selectExpr("CAST(array(id, 1, 2, 3) AS ARRAY<FLOAT>) AS features", "id % 2 AS label")
    config = spark_dl.Config(launch=settings, train=spark_dl.Train(global_batch_size=16))
    result = spark_dl.train(df, spark_dl.ModelSpec(build=build), config, run_dir="run", progress=False)
    print(json.dumps({"ranks": ranks, "rows": result.rows}))
    spark.stop()
"""


def requirements(*names):
    """The installed distributions that these need, and they themselves, by canonical name."""
    found, left = {}, [Requirement(name) for name in names]
    while left:
        requirement = left.pop()
        distribution = importlib.metadata.distribution(requirement.name)
        extras = ["", *requirement.extras]
        key = (canonicalize_name(requirement.name), *sorted(extras))
        if key not in found:
            found[key] = distribution
            needed = [Requirement(line) for line in distribution.requires or []]
            left += [r for r in needed if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras)]
    return {key[0]: distribution for key, distribution in found.items()}


def install(distribution, packages):
    source = Path(distribution.locate_file(""))
    for path in distribution.files:
        if ".." not in path.parts:  # no scripts
            (packages / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / path, packages / path)


@pytest.fixture(params=["tar", "venv-pack"])
def archive(tmp_path, request):
    folder = tmp_path / "packed"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name, distribution in requirements("spark_dl").items():
        if name == "spark-dl":
            shutil.copytree(REPOSITORY / "spark_dl", packages / "spark_dl")
        elif name != "pyspark":
            install(distribution, packages)
    path = tmp_path / "environment.tar.gz"
    gzip = f"{sys.executable} -m isal.igzip -1" if importlib.util.find_spec("isal") else "gzip -1"  # fast
    if request.param == "tar":
        command = ["tar", "-I", gzip, "-cf", path, "-C", folder, "."]
    else:
        command = [sys.executable, "-m", "venv_pack", "--prefix", folder, "--output", path, "--compress-level", "1"]
    subprocess.run(command, check=True, timeout=300)
    shutil.rmtree(folder)
    return path


def test_ranks_import_all_from_the_archive(hosts, archive, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)  # workers would find the repository by it
    (tmp_path / "job.py").write_text(JOB)
    with hosts(1) as bed:
        master = start_spark(bed, cores_per_worker=2, hidden=sys.prefix)
        command = [
            f"{SPARK_HOME}/bin/spark-submit", "--master", master, "--archives", f"{archive}#environment",
            "--conf", "spark.pyspark.python=./environment/bin/python",
            "--conf", f"spark.pyspark.driver.python={sys.executable}",
            "--conf", "spark.executor.memory=512m", "--conf", "spark.ui.enabled=false", "job.py",
        ]  # fmt: skip
        env = {"JAVA_TOOL_OPTIONS": FAST_JVM, "PYTHONPATH": str(REPOSITORY), "SPARK_HOME": SPARK_HOME}
        with open(tmp_path / "stdout", "wb") as out, open(tmp_path / "stderr", "wb") as err:
            driver = bed.popen(bed.driver, command, cwd=tmp_path, env=env, stdout=out, stderr=err)
            code = driver.wait(600)
    assert code == 0, (tmp_path / "stderr").read_text()[-4000:]
    found = json.loads((tmp_path / "stdout").read_text().splitlines()[-1])
    assert found["rows"] == 100
    assert len(found["ranks"]) == 2
    for rank in found["ranks"]:
        assert rank["hidden"] == []
        packages = f"{rank['environment']}/lib/"
        assert rank["torch"].startswith(packages), rank
        assert rank["spark_dl"].startswith(packages), rank
        assert not rank["pyspark"].startswith((packages, os.path.realpath(sys.prefix))), "not the cluster's"
        assert rank["base"] == sys.base_prefix
