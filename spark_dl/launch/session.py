"""The Spark session of a job that starts its own."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

_log = logging.getLogger("spark_dl")


def build_session(name: str, *, master: str | None = None, conf: Mapping[str, str] | None = None) -> Any:
    """A Spark session; the one of `spark-submit` or the notebook where there is one. Called on the driver.

    `master` is a master URL, or `sc://host:port` for Spark Connect. Without it, Spark's own settings decide, and
    `local[*]` where they say nothing. Executors run the driver's Python unless PYSPARK_PYTHON or
    `spark.pyspark.python` names another one. A Spark Connect server has its own settings: `conf` is left out there,
    with a warning.
    """
    from pyspark.sql import SparkSession

    conf = dict(conf or {})
    if "PYSPARK_PYTHON" not in os.environ:
        os.environ["PYSPARK_PYTHON"] = conf.get("spark.pyspark.python", sys.executable)
    builder = SparkSession.builder.appName(name)
    if master and master.startswith("sc://"):
        if ignored := sorted({*conf} - {"spark.pyspark.python"}):
            _log.warning("%s are left out: a Spark Connect server has its own settings", ", ".join(ignored))
        return builder.remote(master).getOrCreate()
    if master:
        builder = builder.master(master)
        if master.startswith("local-cluster"):
            os.environ.setdefault("SPARK_HOME", _pyspark_home())
    for key, value in {**_DEFAULTS, **conf}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


_DEFAULTS = {
    "spark.log.level": "ERROR",
    "spark.ui.showConsoleProgress": "false",  # the jobs show their own
    "spark.python.daemon.module": "spark_dl.launch.daemon",  # new ranks have torch at once
}


def _pyspark_home() -> str:
    import pyspark

    return os.path.dirname(str(pyspark.__file__))
