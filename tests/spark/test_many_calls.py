"""What stays behind after many calls: the threads of the JVM level off."""

import pytest

import spark_dl
from spark_dl import Data, ModelSpec
from tests.builders.models import build_mlp

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.modes("local"), pytest.mark.timeout(900)]


def count(rows):
    return sum(len(batch["weight"]) for batch in rows.batches(8, epoch=0))


def threads_of_jvm(spark):
    return spark._jvm.java.lang.management.ManagementFactory.getThreadMXBean().getThreadCount()


def test_platforms_7_threads_of_the_jvm_level_off_after_100_calls(spark):
    df = spark.createDataFrame([([float(i)] * 4, 0) for i in range(16)], "features array<float>, label bigint").cache()
    spec, config = ModelSpec(build=build_mlp), spark_dl.Config(data=Data(features=("features",), label="label"))
    spark.conf.set("spark.sql.adaptive.enabled", "false")  # it has a thread for each of the queries of the last minute
    counts = []
    try:
        for i in range(100):
            assert spark_dl.predict(df, spec, config=config).count() == 16
            assert sum(spark_dl.run_on_dataframe(count, df, num_ranks=2)) >= 16
            if i % 25 == 24:
                counts.append(threads_of_jvm(spark))
    finally:
        spark.conf.unset("spark.sql.adaptive.enabled")
    assert max(counts[1:]) - counts[0] < 20, counts
