"""Which file formats and file indexes have keys; the plans of a real Spark are in tests/spark/test_store.py."""

import pytest

from spark_dl.data.write.key import reason_without_key

SOURCES = "org.apache.spark.sql.execution.datasources"
DELTA_INDEX = "org.apache.spark.sql.delta.files.TahoeLogFileIndex"
PARQUET = f"{SOURCES}.parquet.ParquetFileFormat"


@pytest.mark.parametrize(("file_format", "index", "found"), [
    ("org.apache.spark.sql.delta.DeltaParquetFileFormat", DELTA_INDEX, "Delta"),
    (PARQUET, DELTA_INDEX, "TahoeLogFileIndex"),
    (PARQUET, "org.apache.hudi.HoodieFileIndex", "HoodieFileIndex"),
    (f"{SOURCES}.parquet.Spark35LegacyHoodieParquetFileFormat", f"{SOURCES}.InMemoryFileIndex", "Hoodie"),
    (PARQUET, "org.example.InMemoryFileIndex", "org.example"),
    ("org.example.ParquetFileFormat", f"{SOURCES}.InMemoryFileIndex", "org.example"),
])  # fmt: skip
def test_table_formats_have_no_key(file_format, index, found):
    assert found in reason_without_key(file_format, index)


@pytest.mark.parametrize("file_format", [
    PARQUET, f"{SOURCES}.orc.OrcFileFormat", f"{SOURCES}.csv.CSVFileFormat", f"{SOURCES}.json.JsonFileFormat",
    f"{SOURCES}.text.TextFileFormat", "org.apache.spark.sql.avro.AvroFileFormat",
])  # fmt: skip
@pytest.mark.parametrize("index", ["InMemoryFileIndex", "CatalogFileIndex"])
def test_spark_s_own_formats_have_one(file_format, index):
    assert reason_without_key(file_format, f"{SOURCES}.{index}") is None
