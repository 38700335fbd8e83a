"""The Spark session of the fuzzer: local, with two slots."""

import contextlib
import logging
import os
import sys

import pytest

from tests.spark.conftest import CONF, FAST_JVM, REPOSITORY


@contextlib.contextmanager
def build_session(folder):
    """A session with the settings of the tests. # folder: for the warehouse"""
    from pyspark.sql import SparkSession

    os.environ.update(PYSPARK_PYTHON=sys.executable, PYTHONPATH=str(REPOSITORY), SPARK_LOCAL_IP="127.0.0.1")
    os.environ["JAVA_TOOL_OPTIONS"] = FAST_JVM
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    builder = SparkSession.builder.master("local[2]").config("spark.sql.warehouse.dir", str(folder))
    for key, value in {**CONF, "spark.sql.shuffle.partitions": "2"}.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    try:
        yield session
    finally:
        session.stop()


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    with build_session(tmp_path_factory.mktemp("warehouse")) as session:
        yield session
