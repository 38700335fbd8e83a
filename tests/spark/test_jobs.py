"""The jobs as processes: the last line of output, exit codes, kill and resume, spark-submit, a standalone cluster."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sklearn
import torch
import yaml

from spark_dl.rundir import checkpoint
from tests.builders.models import same_bits
from tests.spark.conftest import CONF, FAST_JVM, REPOSITORY, SPARK_HOME, free_port, stop, wait_for_port

pytestmark = pytest.mark.timeout(900)
"""A job has 200 s, and a test runs up to three, the first one also those of its fixtures."""
PLAIN = [sys.executable]
SUBMIT = [f"{SPARK_HOME}/bin/spark-submit", "--master", "local[2]"]
KEYS = {"run_dir", "checkpoint", "epochs", "steps", "rows", "train_loss", "metrics", "rows_per_s", "seconds"}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    path = tmp_path_factory.mktemp("digits") / "digits.csv.gz"
    shutil.copy(pathlib.Path(sklearn.__file__).parent / "datasets/data/digits.csv.gz", path)
    return ["--config", "conf/train/digits.yaml", "--input.path", str(path)]


def environment():
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_", "VIRTUAL_ENV"))}
    return {**env, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable, "JAVA_TOOL_OPTIONS": FAST_JVM}


def start_job(*command, env=None, **kwargs):
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=REPOSITORY, env={**environment(), **(env or {})}, **out, **kwargs)


def run_job(*command, code=0, timeout_s=200):
    process = start_job(*command)
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    assert process.returncode == code, err[-4000:]
    return out, err


def result_of(out):
    return json.loads(out.splitlines()[-1])


def weights(run_dir):
    saved = checkpoint.find(str(run_dir))
    return {**checkpoint.load(saved, "model.pt")["0"], "step": torch.tensor(saved.step)}


LOCAL = ["--master", "local[2]"]


@pytest.fixture(scope="module")
def prepared(digits, tmp_path_factory):
    """The digits as datasets: the URL and rows of `train` and `test`."""
    out, _ = run_job(*PLAIN, "jobs/prepare.py", *digits, *LOCAL, "--output", str(tmp_path_factory.mktemp("data")))
    datasets = result_of(out)["datasets"]
    assert (datasets["train"]["rows"], datasets["test"]["rows"]) == (1446, 351)
    return datasets


def on_prepared(prepared, *names):
    urls = json.dumps({name: prepared[name]["url"] for name in names})
    return ["--config", "conf/train/digits.yaml", "--input.datasets", urls]


@pytest.mark.slow
@pytest.mark.long
def test_F08_train_killed_half_way_and_resumed_equals_an_uninterrupted_run(prepared, tmp_path):
    settings = [*on_prepared(prepared, "train"), *LOCAL, "--train.epochs=6", "--checkpoint.every_steps=10"]
    args = [*PLAIN, "jobs/train.py", *settings]
    whole, _ = run_job(*args, "--run_dir", str(tmp_path / "whole"))
    result = result_of(whole)
    assert (result["epochs"], result["steps"], result["rows"]) == (6, 138, 6 * 1446)

    (tmp_path / "build.py").write_text(BUILD_WITH_CHILD)
    (tmp_path / "tmp").mkdir()
    shared_memory = set(os.listdir("/dev/shm"))
    process = start_job(
        *args, "--run_dir", str(tmp_path / "cut"), "--model.build", f"{tmp_path}/build.py:build",
        env={"TMPDIR": str(tmp_path / "tmp")}, start_new_session=True,
    )  # fmt: skip
    family = []
    try:
        wait_for_step(tmp_path / "cut", 40, process)
        family = psutil.Process(process.pid).children(recursive=True)
        names = [each.name() for each in family]
    finally:
        for each in (process, *(each for each in family if each.name() == "java")):  # all of the driver
            each.kill()
        process.communicate()
    assert names.count("sleep") == 2, "each rank has started one, in a session of its own"
    assert psutil.wait_procs(family, timeout=10)[1] == [], "processes of the killed driver are still there"
    assert set(os.listdir("/dev/shm")) <= shared_memory
    assert [path for path in (tmp_path / "tmp").rglob("*") if "spark_dl" in path.name] == []
    half = {file.parent for file in (tmp_path / "cut").rglob("*.tmp-*")}  # of a checkpoint at the time of the kill
    assert all(each.parent.name == "checkpoints" and not (each / "MANIFEST.json").exists() for each in half)
    assert checkpoint.latest(str(tmp_path / "cut")).step < 138

    resumed, err = run_job(*args, "--run_dir", str(tmp_path / "cut"), "--resume")
    assert "from step" in err
    assert not [*(tmp_path / "cut").rglob("*.tmp-*"), *(tmp_path / "cut").rglob("UNFINISHED")]
    assert same_bits(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    same = ("epochs", "steps", "rows", "train_loss", "metrics")
    assert {k: result_of(resumed)[k] for k in same} == {k: result[k] for k in same}


BUILD_WITH_CHILD = f"""
import os, subprocess, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from examples.digits import build_cnn
def build():
    if "RANK" in os.environ:  # the driver builds the model, too, to check it
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    return build_cnn()
"""


def wait_for_step(run_dir, step, process, timeout_s=200):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()[1][-3000:]
        saved = checkpoint.latest(str(run_dir))
        if saved is not None and saved.step >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached within {timeout_s} s")


@pytest.fixture(scope="module")
def main_run(digits, tmp_path_factory):
    """The main job, with fewer epochs, through spark-submit: its folder and its result."""
    run_dir = tmp_path_factory.mktemp("main") / "run"
    conf = [f"--conf={k}={v}" for k, v in CONF.items()]
    out, _ = run_job(*SUBMIT, *conf, "jobs/train.py", *digits, "--train.epochs=4", "--run_dir", str(run_dir))
    return run_dir, result_of(out)


@pytest.mark.slow
def test_the_main_job_through_spark_submit(main_run):
    run_dir, result = main_run
    assert result.keys() >= KEYS
    assert (result["steps"], result["run_dir"]) == (92, str(run_dir))
    assert result["metrics"]["accuracy"] > 0.9
    assert {"loss.png", "predictions.png", "predictions"} <= set(os.listdir(run_dir))
    assert result["predictions"] == str(run_dir / "predictions")
    assert (run_dir / "loss.png").stat().st_mode & 0o777 == 0o600


@pytest.mark.long
@pytest.mark.slow
def test_evaluate_its_checkpoint(prepared, main_run):
    run_dir, result = main_run
    arguments = [*on_prepared(prepared, "test"), *LOCAL, "--checkpoint_path", str(run_dir)]
    out, _ = run_job(*PLAIN, "jobs/evaluate.py", *arguments)
    assert result_of(out)["rows"] == 351
    assert result_of(out)["metrics"] == pytest.approx(result["metrics"])


@pytest.mark.slow
@pytest.mark.long
def test_predict_with_its_checkpoint(digits, main_run, tmp_path):
    run_dir, _ = main_run
    paths = ["--checkpoint_path", str(run_dir), "--output", str(tmp_path / "out")]
    out, _ = run_job(*PLAIN, "jobs/predict.py", *digits, *LOCAL, *paths)
    assert result_of(out)["rows"] == 351


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "causes"), [
    (["--train.lr_scaling", "linear"], ["rates"]), pytest.param([], [], marks=pytest.mark.long),
])  # fmt: skip
def test_certify_writes_a_page_and_its_exit_code_says_whether_the_training_passed(digits, tmp_path, settings, causes):
    page = tmp_path / "certificate.html"
    arguments = [*digits, *LOCAL, "--only", "2 ranks", "--page", str(page), "--rows", "149", "--train.random_by=row"]
    out, err = run_job(*PLAIN, "jobs/certify.py", *arguments, *settings, code=int(bool(causes)))
    found = result_of(out)
    assert found["passed"] is not bool(causes)
    assert found["rows"] == 149
    assert [check["name"] for check in found["checks"]] == ["rounding", "2 ranks"]
    assert found["checks"][1]["causes"] == causes
    assert "rounding" in err
    assert ("<h1>Differs</h1>" if causes else "<h1>Passed</h1>") in page.read_text()


@pytest.mark.slow
@pytest.mark.long
def test_datasets_of_others_are_trained_on_and_evaluated(tmp_path):
    """Evaluated on the dataset `test`; jobs/evaluate.py reads datasets in `test_evaluate_its_checkpoint`."""
    rows = {"image": np.random.default_rng(0).random((96, 64), dtype=np.float32), "digit": np.arange(96) % 10}
    table = pa.table({"image": pa.array(list(rows["image"])), "digit": rows["digit"]})
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        pq.write_table(table, tmp_path / name / "a.parquet", row_group_size=32)
    settings = on_prepared({name: {"url": str(tmp_path / name)} for name in ("train", "test")}, "train", "test")
    run = [*settings, *LOCAL, "--train.epochs=1"]
    trained = result_of(run_job(*PLAIN, "jobs/train.py", *run, "--run_dir", str(tmp_path / "run"))[0])
    assert trained["rows"] == 96
    assert trained["metrics"].keys() == {"loss", "accuracy"}
    assert 0 < trained["metrics"]["loss"] < 10


@pytest.mark.slow
def test_datasets_that_are_written_are_not_prepared_again(tmp_path):
    settings = on_prepared({"train": {"url": str(tmp_path / "train")}}, "train")
    out, err = run_job(*PLAIN, "jobs/prepare.py", *settings, "--output", str(tmp_path / "out"), code=2)
    assert out == ""
    assert "error: input.datasets: found ['train'], which are already written" in err


@pytest.mark.slow
@pytest.mark.long
def test_the_datasets_of_a_mixture_are_prepared(digits, tmp_path):
    columns = "transform(slice(array(*), 1, 64), p -> CAST(p AS FLOAT)) AS image, CAST(_c64 AS BIGINT) AS digit"
    sql = {name: f"SELECT {columns} FROM input WHERE _c64 {which}" for name, which in (("many", "< 8"), ("few", "> 7"))}
    mixture = ["--input.sql", json.dumps(sql), "--loader.proportions", '{"many": 3, "few": 1}']
    out, _ = run_job(*PLAIN, "jobs/prepare.py", *digits, *LOCAL, *mixture, "--output", str(tmp_path / "out"))
    rows = {name: found["rows"] for name, found in result_of(out)["datasets"].items()}
    assert rows.keys() == {"many", "few"}
    assert sum(rows.values()) == 1797


@pytest.mark.long
@pytest.mark.slow
def test_standalone_cluster_with_two_workers(prepared, tmp_path):
    spark_class, port = f"{SPARK_HOME}/bin/spark-class", free_port()
    master_url = f"spark://127.0.0.1:{port}"
    deploy = "org.apache.spark.deploy"
    commands = [
        ["master", f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"],
        *(
            [f"worker{i}", f"{deploy}.worker.Worker", "--host", "127.0.0.1", "--cores", "1", "--memory", "1g",
             "--webui-port", "0", "--work-dir", str(tmp_path / f"worker{i}"), master_url]
            for i in range(2)
        ),
    ]  # fmt: skip
    processes = []
    try:
        for name, *command in commands:
            with open(tmp_path / f"{name}.log", "w") as log:
                processes.append(
                    subprocess.Popen([spark_class, *command], stdout=log, stderr=log, env=environment(), cwd=tmp_path)
                )
            if name == "master":
                wait_for_port(port, processes[0], tmp_path / "master.log")
        args = [
            *on_prepared(prepared, "train"),
            "--master",
            master_url,
            "--train.epochs=1",
            "--run_dir",
            str(tmp_path / "run"),
        ]
        out, _ = run_job(*PLAIN, "jobs/train.py", *args, "--spark_conf", json.dumps(CONF))
        assert result_of(out)["steps"] == 23
    finally:
        for process in reversed(processes):
            stop(process)


PLOT_FAILS = """
def plot(rows, path):
    raise OSError("no font")
"""
PREDICTION_FAILS = """
def predict(output):
    raise ValueError("no class has this score")
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("code", "file"), [
    pytest.param(0, PLOT_FAILS, id="picture", marks=pytest.mark.long),
    pytest.param(1, PREDICTION_FAILS, id="predictions"),
])  # fmt: skip
def test_a_job_whose_predictions_failed_says_so_and_one_whose_picture_failed_is_a_success(digits, tmp_path, code, file):
    """A nightly job is watched by its exit code."""
    (tmp_path / "own.py").write_text(file)
    name = "predict" if code else "plot"
    out, err = run_job(
        *PLAIN, "jobs/train.py", *digits, *LOCAL, "--train.epochs=1", "--run_dir", str(tmp_path / "run"),
        f"--model.{name}={tmp_path}/own.py:{name}", "--spark_conf", json.dumps(CONF), code=code,
    )  # fmt: skip
    result = result_of(out)
    assert result["metrics"]["accuracy"] > 0
    assert result["predictions"] == (None if code else str(tmp_path / "run" / "predictions"))
    assert ("no class has this score" in result.get("predictions_failed", "")) == bool(code)
    assert ("the predictions are written, but the picture of model.plot failed: no font" in err) == (not code)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--train.batch_sise=3"],
            2,
            "error: unknown config key 'train.batch_sise'; did you mean 'train.global_batch_size'",
        ),
        (["--train.lr=-1"], 2, "error: train.lr: expected a finite number > 0, found -1"),
        (["--train.global_batch_size=100"], 2, "the nearest is 96"),
        (
            ["--model.build=examples/digits.py:build_cnm"],
            2,
            "error: model.build: examples/digits.py has no 'build_cnm'",
        ),
        pytest.param(["--input.path=/nowhere.csv"], 1, "PATH_NOT_FOUND", marks=pytest.mark.slow),
        pytest.param(
            ["--data.label=digitt"],
            1,
            "no column 'digitt' in the DataFrame; did you mean 'digit'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_wrong_usage_and_failure_have_exit_codes_and_one_message(digits, tmp_path, arguments, code, message):
    run = ["--run_dir", str(tmp_path / "run")]
    out, err = run_job(*PLAIN, "jobs/train.py", *digits, *LOCAL, *run, *arguments, code=code)
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in err


KILLED = """
import os, signal, torch
def build():
    if "RANK" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.Linear(64, 10)
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_is_worth_a_retry_and_too_many_ranks_for_a_machine_are_not(prepared, tmp_path):
    """Exit codes 75 and 1: a scheduler repeats the first, and not the second."""
    (tmp_path / "build.py").write_text(KILLED)
    job = [*PLAIN, "jobs/train.py", *on_prepared(prepared, "train"), *LOCAL, "--run_dir", str(tmp_path / "run")]
    _, err = run_job(*job, f"--model.build={tmp_path}/build.py:build", "--launch.max_restarts=0", code=75)
    assert "error: rank" in err
    assert "The same command can succeed later (exit code 75)." in err
    _, err = run_job(*job, "--launch.num_ranks=3", "--train.global_batch_size=96", code=1)
    assert "3 ranks need 3 task slots at the same time, and the cluster has 2" in err
    assert "exit code 75" not in err


@pytest.mark.slow
def test_print_config_shows_the_result(digits):
    out, _ = run_job(*PLAIN, "jobs/train.py", *digits, "--train.lr=0.5", "--print_config")
    assert yaml.safe_load(out)["train"]["lr"] == 0.5
    assert yaml.safe_load(out)["data"]["features"] == ["image"]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "number", "code"), [
    pytest.param(PLAIN, signal.SIGINT, 130, marks=pytest.mark.long), (SUBMIT, signal.SIGTERM, 143),
], ids=["SIGINT", "SIGTERM of spark-submit"])  # fmt: skip
def test_F09_an_interrupt_ends_the_job_and_its_processes(prepared, tmp_path, launcher, number, code):
    settings = [*on_prepared(prepared, "train"), *(LOCAL if launcher == PLAIN else []), "--train.epochs=500"]
    args = [*launcher, "jobs/train.py", *settings, "--run_dir", str(tmp_path / "run")]
    process = start_job(*args, start_new_session=True)
    try:
        wait_for_step(tmp_path / "run", 23, process)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert process.returncode == code, err[-2000:]
    if launcher == PLAIN:
        assert "error: interrupted" in err
    assert checkpoint.find(str(tmp_path / "run")).step >= 23
