"""build_session in a process of its own: which settings hold, by where they were made."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.conftest import REPOSITORY, SPARK_HOME
from tests.spark.test_jobs import environment

pytestmark = pytest.mark.timeout(300)
LEVEL, PROGRESS, DAEMON = "spark.log.level", "spark.ui.showConsoleProgress", "spark.python.daemon.module"
OURS = {LEVEL: "ERROR", PROGRESS: "false", DAEMON: "spark_dl.launch.daemon"}
SCRIPT = f"""
import json, os, sys, spark_dl
spark = spark_dl.build_session("test", **json.loads(sys.argv[1]))
found = {{key: spark.sparkContext.getConf().get(key) for key in {list(OURS)}}}
python = spark.sparkContext.pythonExec
print(json.dumps({{**found, "python": python, "master": spark.sparkContext.master}}))
spark.stop()
"""


@pytest.fixture
def run(tmp_path):
    """Runs the script by a command, with arguments of build_session and a spark-defaults.conf; returns the settings."""

    def run(*command, defaults="", python=None, **arguments):
        (tmp_path / "conf").mkdir()
        (tmp_path / "conf" / "spark-defaults.conf").write_text(defaults)
        (tmp_path / "script.py").write_text(SCRIPT)
        env = {**environment(), "PYTHONPATH": str(REPOSITORY), "SPARK_CONF_DIR": str(tmp_path / "conf")}
        del env["PYSPARK_PYTHON"]
        if python:
            env["PYSPARK_PYTHON"] = python
        command = [*command, str(tmp_path / "script.py"), json.dumps(arguments)]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


SUBMIT = [f"{SPARK_HOME}/bin/spark-submit", "--master", "local[1]"]


@pytest.mark.slow
@pytest.mark.long
def test_what_spark_submit_is_told_wins_over_our_defaults(run, tmp_path):
    (tmp_path / "own.conf").write_text(f"{DAEMON} pyspark.daemon\n{LEVEL} WARN\n")
    told = ["--properties-file", str(tmp_path / "own.conf"), "--conf", f"{PROGRESS}=true"]
    found = run(*SUBMIT, *told, python=sys.executable)
    expected = {LEVEL: "WARN", PROGRESS: "true", DAEMON: "pyspark.daemon"}
    assert found == {**expected, "python": sys.executable, "master": "local[1]"}


@pytest.mark.long
@pytest.mark.slow
def test_spark_submit_that_is_told_nothing_leaves_our_defaults_and_conf_wins_over_all(run):
    told = ["--conf", f"{LEVEL}=WARN", "--conf", f"spark.pyspark.python={sys.executable}"]
    found = run(*SUBMIT, *told, conf={LEVEL: "INFO"})
    assert found == {**OURS, LEVEL: "INFO", "python": sys.executable, "master": "local[1]"}


@pytest.mark.long
@pytest.mark.slow
def test_spark_defaults_conf_wins_over_our_defaults_in_plain_python(run, tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)
    lines = {LEVEL: "WARN", DAEMON: "pyspark.daemon", "spark.pyspark.python": tmp_path / "python"}
    found = run(sys.executable, defaults="".join(f"{k} {v}\n" for k, v in lines.items()), master="local[1]")
    expected = {LEVEL: "WARN", PROGRESS: "false", DAEMON: "pyspark.daemon"}
    assert found == {**expected, "python": str(tmp_path / "python"), "master": "local[1]"}


@pytest.mark.slow
def test_plain_python_has_our_defaults(run):
    found = run(sys.executable, master="local[2]")
    assert found == {**OURS, "python": sys.executable, "master": "local[2]"}


SECOND = """
import os, sys, spark_dl
before, link = dict(os.environ), sys.argv[1]
spark = spark_dl.build_session("first", master="local[1]")
assert spark.sparkContext.pythonExec == sys.executable
df = spark.range(3)
spark.stop()
try:
    spark_dl.train(df, spark_dl.ModelSpec(build=dict))
except ValueError as error:
    print(error)
spark = spark_dl.build_session("second", master="local[1]", conf={"spark.pyspark.python": link})
assert spark.sparkContext.pythonExec == link
added = dict(os.environ.items() - before.items())
assert added.keys() <= {"SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE"}, added  # which PySpark sets
print(*spark_dl.launch(lambda: os.environ["OF_PYTHON"]))
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_second_session_has_its_own_python_and_the_driver_its_own_variables(tmp_path):
    """The first one's Python was that of all. A DataFrame of the first session was an error without a reason."""
    (tmp_path / "python").write_text(f'#!/bin/sh\nOF_PYTHON=second exec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    env = {**environment(), "PYTHONPATH": str(REPOSITORY)}
    del env["PYSPARK_PYTHON"]
    command = [sys.executable, "-c", SECOND, str(tmp_path / "python")]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    ended, python = done.stdout.splitlines()
    assert ended.startswith("the Spark session of this call has ended (spark.stop())")
    assert python == "second"


IPV6 = """
import os, sys, torch, torch.distributed as dist, spark_dl
from spark_dl import Config, Launch, ModelSpec, ParameterServer
conf = {"spark.driver.host": sys.argv[1]} if len(sys.argv) > 1 else {}
spark = spark_dl.build_session("test", master="local[2]", conf=conf)

def total():
    dist.init_process_group("gloo")
    dist.all_reduce(ones := torch.ones(1))
    return ones.item(), os.environ["MASTER_ADDR"]

print(spark_dl.launch(total, num_ranks=2))
df = spark.range(64).selectExpr("array(float(id), 1f) AS features", "id % 2 AS label")
spec = ModelSpec(build=lambda: torch.nn.Linear(2, 2), loss="CrossEntropyLoss")
for parallel in (spark_dl.DDP(all_reduce="ring"), ParameterServer()):
    config = Config(launch=Launch(num_ranks=2), parallel=parallel)
    print(spark_dl.train(df, spec, config, run_dir=parallel.strategy, progress=False).rows)
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("driver", ["", *(pytest.param(d, marks=pytest.mark.long) for d in ("[::1]", "a-name"))])
def test_ranks_meet_over_ipv6(tmp_path, driver):
    """With the address of IPv6, as Spark and as people write it, and with a name that has no other one."""
    if not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this host has no IPv6")
    if driver.startswith("a-name"):
        names = [line.split() for line in Path("/etc/hosts").read_text().splitlines()]
        driver = next((line[1] for line in names if line[:1] == ["::1"] and line[1] != "localhost"), "")
        if not driver:
            pytest.skip("/etc/hosts has no name of ::1 beside localhost")
    env = {**environment(), "PYTHONPATH": str(REPOSITORY), "SPARK_LOCAL_IP": "::1"}
    command = [sys.executable, "-c", IPV6, *filter(None, [driver])]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["[(2.0, '::1'), (2.0, '::1')]", "64", "64"]


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_master_that_does_not_answer_is_an_error_without_a_stack(tmp_path):
    """Spark tries for a minute."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        master = f"spark://127.0.0.1:{closed.getsockname()[1]}"
        program = f"import spark_dl; spark_dl.build_session('x', master={master!r})"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"RuntimeError: Spark did not start (master: {master}): java.lang."), done.stderr[-3000:]


HIDDEN = {
    "spark.sql.catalog.polaris.credential": "id:x", "fs.adl.oauth2.credential": "x",
    "spark.executorEnv.GOOGLE_CREDENTIALS": "x",
    "spark.hadoop.fs.s3a.secret.key": "x", "spark.hadoop.fs.azure.account.key.a": "x", "spark.ssl.keyPassword": "x",
    "spark.executorEnv.WANDB_API_KEY": "x", "spark.executorEnv.SNOWFLAKE_PWD": "x", "spark.my.passphrase": "x",
    "spark.executorEnv.AZURE_STORAGE_KEY": "x", "spark.executorEnv.MONGO_CONNECTION_STRING": "x",
}  # fmt: skip
BY_VALUE = {"spark.my.url": "jdbc:x://h/d?user=u&password=MARKER-v", "spark.my.db": "postgresql://u:MARKER-v@h/d"}
SEEN = {"spark.sql.shuffle.partitions": "7", "spark.my.keyword": "seen", "spark.my.url2": "s3://bucket/x?region=y"}
REDACTED = """
import contextlib, glob, json, os, sys, spark_dl
spark = spark_dl.build_session("test", master="local[1]", conf=json.loads(sys.argv[1]))
jvm = spark.sparkContext._jvm
pattern = getattr(getattr(jvm.org.apache.spark.internal.config, "package$"), "MODULE$").SECRET_REDACTION_PATTERN()
regex = jvm.java.util.regex.Pattern.compile(spark.conf.get("spark.redaction.regex"))
found = {key: "hidden" if regex.matcher(key).find() else value for key, value in spark.sparkContext.getConf().getAll()}
commands = []
for path in glob.glob("/proc/[0-9]*/cmdline"):
    with contextlib.suppress(OSError):
        line = open(path, "rb").read().decode(errors="replace")
        if "spark.my.keyword=seen" in line:
            commands.append(line)
print(json.dumps({"shown": found, "commands": commands, "default": pattern.defaultValueString(),
                  "regex": spark.conf.get("spark.redaction.regex")}))
spark.stop()
"""


@pytest.mark.slow
def test_S09_what_spark_hides_stays_hidden_and_more_is(tmp_path):
    (tmp_path / "script.py").write_text(REDACTED)
    conf = {**{key: f"MARKER-{value}" for key, value in HIDDEN.items()}, **BY_VALUE, **SEEN}
    env = {**environment(), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(tmp_path / "script.py"), json.dumps(conf)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["default"] in found["regex"]
    for key in HIDDEN:
        assert found["shown"][key] == "hidden", key
    for key, value in SEEN.items():
        assert found["shown"][key] == value
    assert found["commands"]
    assert not [line for line in found["commands"] if "MARKER" in line]


NOT_STARTED = """
from spark_dl import build_session
from spark_dl.launch.session import find_session
for start in (find_session, lambda: build_session("x", master="spark://nowhere")):
    try:
        start()
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.slow
def test_without_a_session_and_with_a_master_that_is_none_the_error_says_what_to_do(tmp_path):
    command, env = [sys.executable, "-c", NOT_STARTED], {**environment(), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    none, wrong = done.stdout.splitlines()
    assert none.startswith("no active Spark session; create one, with SparkSession.builder.getOrCreate()")
    assert wrong.startswith("Spark did not start (master: spark://nowhere): org.apache.spark.SparkException: ")
    assert "Invalid master URL: spark://nowhere; see the lines above of Spark's log" in wrong
