"""A Spark session per mode; the same tests run in all of them."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import pyspark
import pytest

from tests.builders import s3

REPOSITORY = pathlib.Path(__file__).parents[2]
SPARK_HOME = os.path.dirname(pyspark.__file__)
CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "OFF",  # faults are injected here: Spark's own account of them would hide ours
    "spark.sql.shuffle.partitions": "4",
    "spark.task.maxFailures": "1",
    "spark.ui.liveUpdate.period": "0",  # Spark's own count of tasks, else up to a heartbeat (10 s) old
    "spark.python.daemon.module": "spark_dl.launch.daemon",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
CLASS_ARCHIVE = REPOSITORY / ".venv" / "spark.jsa"
# Short jobs: starting counts, not peak speed. A JVM that logs says on standard output why it cannot use an archive.
FAST_JVM = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:SharedArchiveFile={CLASS_ARCHIVE} -Xlog:disable"
MASTERS = {"local": "local[4]", "local-cluster": "local-cluster[2,2,1024]"}


@pytest.fixture(scope="session", params=["local", "local-cluster", "connect"])
def spark(request, tmp_path_factory):
    """Four slots: threads of one process, two executor processes, or a Spark Connect server's."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_HOME"] = SPARK_HOME
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ.update(s3.ENV)  # executors must have the credentials too
    os.environ["JAVA_TOOL_OPTIONS"] = FAST_JVM
    os.environ["PYTHONPATH"] = str(REPOSITORY)  # executors find the functions of these tests by name
    if request.param == "connect":
        with connect_server(tmp_path_factory.mktemp("connect")) as url:
            session = SparkSession.builder.remote(url).getOrCreate()
            yield session
            session.stop()
        return
    warehouse = tmp_path_factory.mktemp("warehouse")
    builder = SparkSession.builder.master(MASTERS[request.param]).config("spark.sql.warehouse.dir", str(warehouse))
    for key, value in CONF.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    yield session
    session.stop()


@pytest.fixture(scope="session")
def mode(spark):
    """The kind of session that `spark` is, by its master."""
    return "connect" if type(spark).__module__.startswith("pyspark.sql.connect") else spark.conf.get("spark.master")


class connect_server:  # noqa: N801 - used like a function
    """A Spark Connect server in a process of its own, with four local slots."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def __enter__(self):
        port = free_port()
        conf = {**CONF, "spark.connect.grpc.binding.port": str(port), "spark.sql.warehouse.dir": str(self.folder)}
        self.log = open(self.folder / "log", "w+")
        self.server = subprocess.Popen(
            [
                f"{SPARK_HOME}/bin/spark-submit", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer",
                "--master", "local[4]", *(f"--conf={k}={v}" for k, v in conf.items()), "spark-internal",
            ],
            stdout=self.log, stderr=subprocess.STDOUT, cwd=self.folder,
        )  # fmt: skip
        wait_for_port(port, self.server, self.folder / "log")
        return f"sc://127.0.0.1:{port}"

    def __exit__(self, *error):
        stop(self.server)
        self.log.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_port(port, process, log, timeout_s=60):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        assert process.poll() is None, f"ended with {process.returncode}: {log.read_text()[-2000:]}"
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"port {port} did not open within {timeout_s} s: {log.read_text()[-2000:]}")


def stop(process, timeout_s=20):
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
