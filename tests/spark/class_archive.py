"""Writes the classes that Spark loads as one file, which a JVM maps instead of reading and verifying each of them.

With it a session starts in a bit more than half the time (class data sharing, JEP 350); a JVM that cannot use it goes
on without. `make test` calls this once:

    python -m tests.spark.class_archive
"""

import os
import sys
import tempfile

from pyspark import SparkContext
from pyspark.sql import SparkSession

from tests.spark.conftest import CLASS_ARCHIVE

_MASTER = "local-cluster[1,2,1024]"  # in its driver's JVM there are a master and a worker, too


def write_archive(path):
    # Only the driver writes it: an executor's JVM at the same time would write the same file.
    options = f"-XX:ArchiveClassesAtExit={path} -Xlog:disable"
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--driver-java-options '{options}' pyspark-shell"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = SparkSession.builder.master(_MASTER).config("spark.log.level", "OFF")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    df = spark.range(1000).selectExpr("id", "id % 7 AS k", "array(rand()) AS x", "CAST(id AS string) AS s")
    with tempfile.TemporaryDirectory() as folder:
        df.repartition(2).write.parquet(f"{folder}/d")
        read = spark.read.parquet(f"{folder}/d").mapInArrow(lambda batches: batches, df.schema)
        read.groupBy("k").count().sort("k").toArrow()
    df.rdd.barrier().mapPartitions(lambda rows: [sum(1 for _ in rows)]).treeReduce(lambda a, b: a + b)
    spark.stop()
    jvm = SparkContext._gateway.proc
    jvm.stdin.close()  # it ends, and then writes
    jvm.wait(300)


if __name__ == "__main__":
    write_archive(CLASS_ARCHIVE)
