"""Starts the Spark session of a job, and finds the one that is there."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from spark_dl.spark_job import is_connect, refuse_ended
from spark_dl.storage.credentials import HIDDEN_NAMES, is_secret

_log = logging.getLogger("spark_dl")

_PROGRESS = "spark.ui.showConsoleProgress"
_DAEMON = "spark.python.daemon.module"
_REDACTION = "spark.redaction.regex"

_DEFAULTS = {
    "spark.log.level": "ERROR",
    _PROGRESS: "false",  # the jobs show their own progress
    _DAEMON: "spark_dl.launch.daemon",  # new ranks need not import torch
}


_start_seconds: dict[str, float] = {}
"""How long sessions took to start, by the id of the application."""


def build_session(name: str, *, master: str | None = None, conf: Mapping[str, str] | None = None) -> Any:
    """Returns the session of `spark-submit` or the notebook, or starts one. Called on the driver.

    Executors run the driver's Python unless PYSPARK_PYTHON or `spark.pyspark.python` sets another one. The environment
    of the driver is as before when this function returns.

    Args:
        master: a master URL, or `sc://host:port` for Spark Connect. The default is Spark's setting, else `local[*]`.
        conf: Spark settings. They override the settings of `spark-submit` and of properties files, which override the
            defaults of this function. Ignored for Spark Connect, with a warning, as the server has its own settings.

    Example:
        >>> spark = spark_dl.build_session("training", master="local[4]", conf={"spark.driver.memory": "2g"})
    """
    unset = [key for key in ("PYSPARK_PYTHON", "SPARK_HOME") if key not in os.environ]
    since = time.monotonic()
    try:
        session = _build_session(name, master, dict(conf or {}))
        _start_seconds.setdefault(session.conf.get("spark.app.id", ""), time.monotonic() - since)
        return session
    finally:
        for key in unset:
            os.environ.pop(key, None)


def _build_session(name: str, master: str | None, conf: dict[str, str]) -> Any:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    is_python_set = "PYSPARK_PYTHON" in os.environ
    if not is_python_set:
        os.environ["PYSPARK_PYTHON"] = conf.get("spark.pyspark.python", sys.executable)
    builder = SparkSession.builder.appName(name)
    if master and master.startswith("sc://"):
        if ignored := sorted({*conf} - {"spark.pyspark.python"}):
            _log.warning("%s: ignored, as a Spark Connect server has its own settings", ", ".join(ignored))
        return builder.remote(master).getOrCreate()
    if master:
        conf["spark.master"] = master
        if master.startswith("local-cluster"):
            os.environ.setdefault("SPARK_HOME", _pyspark_home())
    if "SPARK_REMOTE" not in os.environ and SparkContext._active_spark_context is None:
        given = _user_settings(conf)
        if not is_python_set and "spark.pyspark.python" in given:
            os.environ["PYSPARK_PYTHON"] = given["spark.pyspark.python"]
        # Files of `--py-files` are on the path of a worker, but not on the path of the daemon that starts it.
        no_default = {*given, _DAEMON} if given.get("spark.submit.pyFiles") else {*given}
        defaults = {**_DEFAULTS, _REDACTION: _redaction()}  # of Spark's UI and event log
        conf = {**{key: value for key, value in defaults.items() if key not in no_default}, **conf}
    for key, value in conf.items():
        builder = builder.config(key, value)
    from py4j.protocol import Py4JJavaError

    try:
        return builder.getOrCreate()
    except Py4JJavaError as error:  # a stack of the JVM, in which the reason is hard to find
        why = str(error.java_exception).partition("\n")[0]
        where = conf.get("spark.master") or "that of Spark's settings"
        raise RuntimeError(
            f"Spark did not start (master: {where}): {why}; see the lines above of Spark's log"
        ) from error


def find_session(data: Any = None, spark: Any = None) -> Any:
    """Returns `spark`, else the session of a DataFrame, else that of this thread, else that of the process.

    Args:
        data: a DataFrame, a mapping of names to data, or other data, which has no session.

    Raises:
        ValueError: If `spark` is no session, and in a task.
        RuntimeError: If there is none.
    """
    if spark is not None:
        if not hasattr(spark, "createDataFrame"):
            raise ValueError(f"spark: expected a SparkSession, found {type(spark).__name__}")
        return _with_own_python(spark)
    for source in data.values() if isinstance(data, Mapping) else [data]:
        if hasattr(source, "sparkSession"):
            return _with_own_python(source.sparkSession)
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    try:
        # NOTE: an active session belongs to a thread of the JVM. Other threads have none, nor has a notebook after the
        # interrupt of a cell, which ends the connection to that thread. `active` then returns the process's session.
        return _with_own_python(SparkSession.active())
    except PySparkRuntimeError as error:
        from pyspark import TaskContext

        if TaskContext.get() is not None:
            raise ValueError(
                "found a task of a Spark job, such as a rank; expected the driver, as a task cannot start jobs; call "
                "it on the driver, and use spark_dl.open_dataset to read rows on a rank"
            ) from error
        raise RuntimeError(
            "no active Spark session; create one, with SparkSession.builder.getOrCreate() or spark_dl.build_session, "
            "or pass it: spark=..."
        ) from error


def describe_session(spark: Any) -> dict[str, str]:
    """Returns the version, master and application of a session, for people."""
    master = str(spark.conf.get("spark.master", ""))
    kind = " over Spark Connect" if is_connect(spark) else ""
    return {"version": f"{spark.version}{kind}", "master": master, "application": spark.conf.get("spark.app.id", "")}


def start_seconds(spark: Any) -> float | None:
    """Returns how long `build_session` took to start a session; None if it did not start this one."""
    return _start_seconds.get(spark.conf.get("spark.app.id", ""))


def _with_own_python(spark: Any) -> Any:
    """Makes a local session run the driver's Python, if the user has not chosen one.

    Spark's default is `python3` of the path, which outside an activated environment is not the driver's Python.
    """
    refuse_ended(spark)
    if is_connect(spark) or "PYSPARK_PYTHON" in os.environ:
        return spark
    conf = spark.sparkContext.getConf()
    if (conf.get("spark.master") or "").startswith("local") and not conf.get("spark.pyspark.python"):
        spark.sparkContext.pythonExec = sys.executable
    return spark


def _user_settings(conf: Mapping[str, str]) -> dict[str, str]:
    """Returns `conf` and the user's other Spark settings: `spark-submit`, properties files, PYSPARK_SUBMIT_ARGS.

    Without the secrets in `conf`. Starts the JVM, as only it has these settings. The options of a session builder would
    override them.
    """
    from pyspark import SparkConf, SparkContext

    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    # PySpark writes this conf to the command line of the JVM, which every user of the host can read. The session gets
    # the secrets from its builder, when the JVM runs.
    shown = {key: v for key, v in conf.items() if not is_secret(key, str(v))}
    SparkContext._ensure_initialized(conf=SparkConf().setAll(shown.items()))
    given = dict(SparkConf().getAll())
    if not is_submitted and _PROGRESS not in conf and given.get(_PROGRESS) == "true":
        del given[_PROGRESS]  # not set by the user: Spark sets it, as it takes plain Python for a shell
    return given


def _redaction() -> str:
    """Returns a pattern for `spark.redaction.regex` that hides what Spark's own hides, and more. The JVM runs."""
    from pyspark import SparkContext

    jvm: Any = SparkContext._jvm
    of_spark = "(?i)secret|password|token|access[.]?key"
    with contextlib.suppress(Exception):  # of another version of Spark
        package = getattr(jvm.org.apache.spark.internal.config, "package$")
        of_spark = getattr(package, "MODULE$").SECRET_REDACTION_PATTERN().defaultValueString()
    return f"(?:{of_spark})|(?:{HIDDEN_NAMES})"


def _pyspark_home() -> str:
    import pyspark

    return os.path.dirname(str(pyspark.__file__))
