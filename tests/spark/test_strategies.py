"""A strategy of another package: installed, chosen by its name, and trained with on Spark's workers."""

import json
import os
import subprocess
import sys

import pytest

from tests.spark.conftest import CONF, FAST_JVM, REPOSITORY

pytestmark = pytest.mark.timeout(300)
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "toy-strategy"
version = "1.0"

[tool.setuptools]
py-modules = ["toy_strategy"]

[project.entry-points."spark_dl.strategies"]
toy = "toy_strategy:STRATEGY"
broken = "toy_strategy:MISSING"
other_name = "toy_strategy:STRATEGY"
no_strategy = "toy_strategy:Toy"
"""
MODULE = '''
import dataclasses
import os
from dataclasses import dataclass
from typing import ClassVar

import spark_dl
from spark_dl.config.checks import check_number
from spark_dl.config.conflicts import Conflict
from spark_dl.parallel import single


@dataclass(frozen=True, kw_only=True)
class Toy(spark_dl.Parallel):
    """A toy: one rank that counts its steps."""

    strategy: ClassVar[str] = "toy"
    has_group: ClassVar[bool] = False
    one_rank: ClassVar[bool] = True
    excludes: ClassVar[tuple[Conflict, ...]] = (
        Conflict("train.precision", lambda c: c.train.precision == "fp16-mixed", "not with {c.parallel.strategy}"),
    )
    folder: str = ""
    """Folder that gets a file for each step."""
    first: int = 1
    """Number of the first step."""

    def __post_init__(self):
        check_number(self, "first", 1, whole=True)


def parallelize(spec, world, config):
    trainable, count = single.parallelize(spec, world, config), config.parallel.first

    def step():
        nonlocal count
        with open(os.path.join(config.parallel.folder, str(count)), "w") as file:
            file.write(str(os.getpid()))
        count += 1
        trainable.step()

    return dataclasses.replace(trainable, step=step)


STRATEGY = spark_dl.Strategy(settings=Toy, parallelize=parallelize)
'''
TRAIN = """
import json, sys
from pyspark.sql import SparkSession
import spark_dl
from spark_dl.rundir import checkpoint
from tests.builders.models import MLP, blobs

config = spark_dl.load_config(sys.argv[1])
builder = SparkSession.builder.master("local[2]")
for name, value in json.loads(sys.argv[3]).items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
rows = [(x.tolist(), int(y)) for x, y in zip(*blobs(200).values())]
df = spark.createDataFrame(rows, "features array<float>, label bigint")
result = spark_dl.train(df, MLP, config, run_dir=sys.argv[2], progress=False)
again = checkpoint.find(result.run_dir).manifest["config"]["parallel"]
print(json.dumps({"steps": result.steps, "saved": again, "loss": result.train_loss}))
spark.stop()
"""
ASK = """
import json, sys
import spark_dl
from spark_dl.config import strategies
from spark_dl.config.load import build_config, describe_settings
errors = {}
for plain in json.loads(sys.argv[1]):
    try:
        build_config(plain)
    except ValueError as error:
        errors[json.dumps(plain)] = str(error)
print(json.dumps({"names": strategies.names(), "errors": errors, "help": describe_settings()}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder that the package was installed to."""
    project, target = tmp_path_factory.mktemp("toy"), tmp_path_factory.mktemp("installed")
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "toy_strategy.py").write_text(MODULE)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    command = [*pip, "--disable-pip-version-check", "--target", str(target), str(project)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return target


def run(installed, script, *args):
    """The last line of output of a script that has the package on its path, as its Spark workers have."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_"))}
    env |= {"PYTHONPATH": f"{REPOSITORY}:{installed}", "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable,
            "JAVA_TOOL_OPTIONS": FAST_JVM}  # fmt: skip
    command = [sys.executable, "-c", script, *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.long
def test_a_strategy_of_another_package_trains(installed, tmp_path):
    (tmp_path / "steps").mkdir()
    settings = {
        "parallel": {"strategy": "toy", "folder": str(tmp_path / "steps"), "first": 5},
        "train": {"epochs": 2, "global_batch_size": 48, "lr": 0.1},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    conf = {name: value for name, value in CONF.items() if name != "spark.python.daemon.module"}
    found = run(installed, TRAIN, str(tmp_path / "run.yaml"), str(tmp_path / "run"), json.dumps(conf))
    assert found["steps"] == 2 * 5
    assert found["saved"] == settings["parallel"]
    assert found["loss"] < 1
    steps = {int(path.name): int(path.read_text()) for path in (tmp_path / "steps").iterdir()}
    assert sorted(steps) == [*range(5, 15)]
    assert len({*steps.values()}) == 1, "one rank"


@pytest.mark.slow
def test_it_is_listed_and_what_cannot_be_loaded_is_an_error_that_names_it(installed):
    toy = {"strategy": "toy"}
    asked = [
        {"parallel": {**toy, "first": 0}}, {"parallel": {**toy, "bucket_mib": 3}}, {"parallel": {"folder": "/x"}},
        {"parallel": toy, "launch": {"num_ranks": 2}}, {"parallel": toy, "train": {"precision": "fp16-mixed"}},
        *({"parallel": {"strategy": name}} for name in ("broken", "other_name", "no_strategy", "tooy")),
        {"parallel": toy},
    ]  # fmt: skip
    found = run(installed, ASK, json.dumps(asked))
    assert found["names"][:2] == ["ddp", "horovod"]
    assert {*found["names"][-4:]} == {"toy", "broken", "other_name", "no_strategy"}
    expected = [
        "parallel.first: expected an integer >= 1, found 0",
        "parallel.bucket_mib: not a setting of parallel.strategy='toy', but of ddp and horovod and mesh;",
        "parallel.folder: not a setting of parallel.strategy='ddp', but of toy;",
        "launch.num_ranks: expected 1 with parallel.strategy='toy', found 2",
        "train.precision: not with toy",
        "parallel.strategy: cannot load 'broken' from toy_strategy:MISSING: ",
        "parallel.strategy: expected a spark_dl.Strategy with settings named 'other_name' at the entry point toy_str",
        "parallel.strategy: expected a spark_dl.Strategy with settings named 'no_strategy' at the entry point toy_str",
        "parallel.strategy: no strategy 'tooy'; did you mean 'toy'?",
    ]
    assert [*found["errors"]] == [json.dumps(plain) for plain in asked[:-1]]
    for error, begin in zip(found["errors"].values(), expected, strict=True):
        assert error.startswith(begin)
    lines = found["help"].splitlines()
    assert "  toy: A toy: one rank that counts its steps." in lines
    assert "    --parallel.first (default: 1)  Number of the first step." in lines
    assert any(line.startswith("  broken: parallel.strategy: cannot load 'broken'") for line in lines)
