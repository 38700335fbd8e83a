"""The Spark session of a job that starts its own."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

_log = logging.getLogger("spark_dl")

_PROGRESS = "spark.ui.showConsoleProgress"
_DAEMON = "spark.python.daemon.module"


def build_session(name: str, *, master: str | None = None, conf: Mapping[str, str] | None = None) -> Any:
    """A Spark session; the one of `spark-submit` or the notebook where there is one. Called on the driver.

    `master` is a master URL, or `sc://host:port` for Spark Connect. Without it, Spark's own settings decide, and
    `local[*]` where they say nothing. Executors run the driver's Python unless PYSPARK_PYTHON or
    `spark.pyspark.python` names another one. `conf` wins over the settings of `spark-submit` and of properties files,
    which win over the few defaults of this function. A Spark Connect server has its own settings: `conf` is left out
    there, with a warning.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    conf = dict(conf or {})
    is_python_set = "PYSPARK_PYTHON" in os.environ
    if not is_python_set:
        os.environ["PYSPARK_PYTHON"] = conf.get("spark.pyspark.python", sys.executable)
    builder = SparkSession.builder.appName(name)
    if master and master.startswith("sc://"):
        if ignored := sorted({*conf} - {"spark.pyspark.python"}):
            _log.warning("%s are left out: a Spark Connect server has its own settings", ", ".join(ignored))
        return builder.remote(master).getOrCreate()
    if master:
        conf["spark.master"] = master
        if master.startswith("local-cluster"):
            os.environ.setdefault("SPARK_HOME", _pyspark_home())
    if "SPARK_REMOTE" not in os.environ and SparkContext._active_spark_context is None:
        said = _said(conf)
        if not is_python_set and "spark.pyspark.python" in said:
            os.environ["PYSPARK_PYTHON"] = said["spark.pyspark.python"]
        # What `--py-files` sends is on the path of a worker, but not yet on that of the daemon that starts it.
        left_out = {*said, _DAEMON} if said.get("spark.submit.pyFiles") else {*said}
        conf = {**{key: value for key, value in _DEFAULTS.items() if key not in left_out}, **conf}
    for key, value in conf.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


_DEFAULTS = {
    "spark.log.level": "ERROR",
    _PROGRESS: "false",  # the jobs show their own
    _DAEMON: "spark_dl.launch.daemon",  # new ranks have torch at once
}


def _said(conf: Mapping[str, str]) -> dict[str, str]:
    """`conf` and what the user has told Spark otherwise: `spark-submit`, properties files, PYSPARK_SUBMIT_ARGS.

    Starts the JVM, which alone knows them. A builder's options would win over them.
    """
    from pyspark import SparkConf, SparkContext

    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    SparkContext._ensure_initialized(conf=SparkConf().setAll(conf.items()))
    said = dict(SparkConf().getAll())
    if not is_submitted and _PROGRESS not in conf and said.get(_PROGRESS) == "true":
        del said[_PROGRESS]  # Spark takes plain Python for a shell, and sets it
    return said


def _pyspark_home() -> str:
    import pyspark

    return os.path.dirname(str(pyspark.__file__))
