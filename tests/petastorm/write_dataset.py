"""Writes a dataset with Petastorm and PySpark, of every codec, and reads it. Runs in Petastorm's environment.

The request is `{url, rows}`, the answer `{written, read}`: the rows before and after, in the order of `id`.
"""

import json
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
from petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec, ScalarCodec
from petastorm.etl.dataset_metadata import materialize_dataset
from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
from pyspark.sql import SparkSession
from pyspark.sql import types as sql

from tests.petastorm.exchange import plain_rows
from tests.petastorm.read_rows import read

SCHEMA = Unischema(
    "Everything",
    [
        UnischemaField("id", np.int64, (), ScalarCodec(sql.LongType()), False),
        UnischemaField("small", np.uint8, (), ScalarCodec(sql.ShortType()), False),
        UnischemaField("ratio", np.float32, (), ScalarCodec(sql.FloatType()), False),
        UnischemaField("wide", np.float64, (), ScalarCodec(sql.DoubleType()), False),
        UnischemaField("flag", np.bool_, (), ScalarCodec(sql.BooleanType()), False),
        UnischemaField("name", np.str_, (), ScalarCodec(sql.StringType()), True),
        UnischemaField("price", Decimal, (), ScalarCodec(sql.DecimalType(10, 3)), False),
        UnischemaField("count", np.int32, (), ScalarCodec(sql.IntegerType()), True),
        UnischemaField("matrix", np.float32, (2, 3), NdarrayCodec(), False),
        UnischemaField("ragged", np.int64, (None,), NdarrayCodec(), False),
        UnischemaField("tags", np.str_, (None,), NdarrayCodec(), False),
        UnischemaField("maybe", np.float64, (3,), NdarrayCodec(), True),
        UnischemaField("packed", np.uint16, (4, 4), CompressedNdarrayCodec(), False),
        UnischemaField("packed_ragged", np.float32, (None, 2), CompressedNdarrayCodec(), True),
        UnischemaField("png", np.uint8, (8, 9, 3), CompressedImageCodec("png"), False),
        UnischemaField("deep_png", np.uint16, (8, 9), CompressedImageCodec("png"), False),
        UnischemaField("any_png", np.uint8, (None, None, 3), CompressedImageCodec("png"), True),
        UnischemaField("jpeg", np.uint8, (16, 24, 3), CompressedImageCodec("jpeg", quality=90), False),
        UnischemaField("year", np.int32, (), ScalarCodec(sql.IntegerType()), False),
        UnischemaField("kind", np.str_, (), ScalarCodec(sql.StringType()), False),
    ],
)


def row(i, rng):
    y, x = np.mgrid[:16, :24]
    return {
        "id": np.int64(i),
        "small": np.uint8(rng.integers(256)),
        "ratio": np.float32(rng.normal()),
        "wide": np.float64(rng.normal()),
        "flag": np.bool_(i % 3 == 0),
        "name": None if i % 5 == 0 else f"größe {i}",
        "price": Decimal(int(rng.integers(-(10**6), 10**6))).scaleb(-3),
        "count": None if i % 4 == 0 else np.int32(rng.integers(-(2**31), 2**31)),
        "matrix": rng.normal(size=(2, 3)).astype(np.float32),
        "ragged": rng.integers(0, 9, i % 4),
        "tags": np.array([f"ü{j}" * (1 + i % 3) for j in range(1 + i % 4)]),
        "maybe": None if i % 2 == 0 else rng.normal(size=3),
        "packed": rng.integers(0, 2**16, (4, 4), np.uint16),
        "packed_ragged": None if i % 7 == 0 else rng.normal(size=(i % 3, 2)).astype(np.float32),
        "png": rng.integers(0, 256, (8, 9, 3), np.uint8),
        "deep_png": rng.integers(0, 2**16, (8, 9), np.uint16),
        "any_png": None if i % 6 == 0 else rng.integers(0, 256, (1 + i % 4, 2 + i % 3, 3), np.uint8),
        "jpeg": np.stack([x * 10, y * 15, (x + y + i) % 256], axis=-1).astype(np.uint8),
        "year": np.int32(2024 + i % 2),
        "kind": f"a b{i % 3}",
    }


def write(spark, url, rows):
    with materialize_dataset(spark, f"file://{url}", SCHEMA, row_group_size_mb=1):
        encoded = [dict_to_spark_row(SCHEMA, r) for r in rows]
        frame = spark.createDataFrame(encoded, SCHEMA.as_spark_schema()).coalesce(1)
        frame.write.partitionBy("year", "kind").parquet(f"file://{url}")


if __name__ == "__main__":
    request, answer = map(Path, sys.argv[1:3])
    asked = json.loads(request.read_text())
    rng = np.random.default_rng(0)
    rows = [row(i, rng) for i in range(asked["rows"])]
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    write(spark, asked["url"], rows)
    spark.stop()
    columns = {name: [r[name] for r in rows] for name in rows[0]}
    found = read(asked["url"], "make_reader", len(rows))
    answer.write_text(json.dumps({"written": plain_rows(columns), "read": found}))
