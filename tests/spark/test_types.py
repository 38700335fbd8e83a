"""Every type of a DataFrame as tensors: what Spark itself must be there for."""

import contextlib
import datetime
import io
import json
import os
import uuid
import zlib
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from pyspark.ml.linalg import Vectors
from pyspark.sql import Row
from pyspark.sql import functions as F
from torch import nn

import spark_dl
from spark_dl import Config, Data, ModelSpec, Shards, read_shards, write_shards
from spark_dl.data.columns import cell_codec
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.images import read_image
from spark_dl.data.columns.policies import Changes
from spark_dl.data.columns.ragged import Ragged, concatenate
from spark_dl.data.load import local
from spark_dl.data.write.shards import first_row_columns, read_once
from tests.builders.images import other, pixels, png, turned
from tests.builders.models import CityModel, small_config
from tests.builders.settings import make_config

pytestmark = pytest.mark.modes("local")


def read_all(shards):
    """All columns, in the order of the dataset."""
    files = [pq.ParquetFile(f"{shards.url}/{s.name}") for s in shards.shards]
    groups = [f.read_row_group(g) for f in files for g in range(f.num_row_groups)]
    return {c.name: concatenate([cell_codec.decode(c, g.column(c.name)) for g in groups]) for c in shards.columns}


def rows_of(cells):
    if isinstance(cells, Ragged):
        return [cells.values[a:b].tolist() for a, b in zip(cells.offsets[:-1], cells.offsets[1:], strict=True)]
    return cells.tolist()


def write(df, tmp_path, reference_columns=(), name="d", **settings):
    config = make_config(features=df.columns, label=None, **settings)
    return write_shards(
        df, str(tmp_path / name), config.data, shards=config.shards, reference_columns=reference_columns
    )


@pytest.fixture(params=["UTC", "America/Los_Angeles"])
def zone(spark, request):
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", request.param)
    yield request.param
    spark.conf.set("spark.sql.session.timeZone", before)


@pytest.mark.modes("local", "connect")
def test_times_do_not_depend_on_the_session_s_time_zone(spark, tmp_path, zone):
    df = spark.sql("""SELECT DATE'1969-12-31' AS day, TIMESTAMP'2024-02-29 12:00:00.123456Z' AS at,
                      TIMESTAMP_NTZ'1969-12-31 23:59:59.5' AS local, INTERVAL '1 02:00:00' DAY TO SECOND AS took,
                      array(DATE'1970-01-02', DATE'1970-01-03') AS days""")
    units = {"at": {"as": "timestamp", "unit": "ms"}, "local": {"as": "timestamp", "unit": "s"}}
    found = {name: cells.tolist() for name, cells in read_all(write(df, tmp_path, encode=units)).items()}
    at = datetime.datetime(2024, 2, 29, 12, 0, 0, 123000, datetime.timezone.utc)
    assert found == {
        "day": [-1], "at": [round(at.timestamp() * 1000)], "local": [-1], "took": [26 * 3600 * 10**6], "days": [[1, 2]],
    }  # fmt: skip


def test_B02_decimals_are_exact_or_an_error(spark, tmp_path):
    df = spark.sql("SELECT CAST(id - 1 AS DECIMAL(10,2)) / 8 AS a, CAST(id AS DECIMAL(38,0)) AS b FROM range(4)")
    shards = write(df, tmp_path, encode={"a": {"as": "decimal"}, "b": {"as": "float"}})
    scale = shards.columns[0].encoding.scale
    order = np.argsort(read_all(shards)["b"])
    expected = [int(Decimal(i - 1) / 8 * 10**scale) for i in range(4)]
    assert read_all(shards)["a"][order].tolist() == expected
    with pytest.raises(ValueError, match=r"column 'a': found 10{19}, expected unscaled values within 64 bits.*row 0"):
        write(spark.sql("SELECT CAST('10000000000000000000' AS DECIMAL(38,0)) AS a"), tmp_path, name="e")


def test_decimals_are_their_values_whatever_their_scale(spark, tmp_path):
    """Spark SQL reads a number with a point as a decimal, so that people do not know that they have one."""
    df = spark.sql(
        "SELECT 3.0 AS w, 1.50BD AS price, 12BD AS whole, array(0.5, 1.0) AS x, -0.001 AS small FROM range(3)"
    )
    found = read_all(write(df, tmp_path))
    assert {name: cells[0].tolist() for name, cells in found.items()} == {
        "w": 3.0, "price": 1.5, "whole": 12, "x": [0.5, 1.0], "small": -0.001,
    }  # fmt: skip
    assert str(found["whole"].dtype) == "int64"


def test_the_hash_is_that_of_spark_s_crc32(spark, tmp_path):
    df = spark.range(200).selectExpr("concat('ä', id) AS name")
    df = df.selectExpr("name", "crc32(CAST(name AS BINARY)) % 50 AS hash")
    found = read_all(write(df, tmp_path, encode={"name": {"as": "hash", "buckets": 50}}))
    np.testing.assert_array_equal(found["name"], found["hash"])
    assert found["name"][0] == zlib.crc32("ä0".encode()) % 50


@pytest.mark.modes("local", "connect")
def test_the_hash_of_a_string_that_is_no_utf8_is_that_of_spark(spark, tmp_path):
    """Such as messages of Kafka that are cast to strings."""
    df = spark.sql("SELECT CAST(X'FF41' AS STRING) AS name, crc32(X'FF41') % 1000 AS hash FROM range(3)")
    found = read_all(write(df, tmp_path, encode={"name": {"as": "hash", "buckets": 1000}}))
    np.testing.assert_array_equal(found["name"], found["hash"])
    with pytest.raises(ValueError, match=r"data.encode.name: found the bytes ff 41, which are no UTF-8"):
        write(df, tmp_path, name="words", encode={"name": {"as": "vocabulary"}})


@pytest.mark.modes("local")
def test_words_are_those_of_the_rows_that_are_written_also_of_a_udf_that_changes_its_mind(spark, tmp_path):
    """Every row has a new word each time it is computed."""
    new_word = F.udf(lambda i: f"{i}-{uuid.uuid4().hex}", "string")
    df = spark.range(50).select(new_word("id").alias("word"), F.array(new_word("id")).alias("words"))
    encode = {name: {"as": "vocabulary"} for name in df.columns}
    shards = write(df, tmp_path, encode=encode)
    found = read_all(shards)
    assert sorted(found["word"].tolist()) == list(range(1, 51))  # 0 is an unknown word
    assert sorted(found["words"][:, 0].tolist()) == list(range(1, 51))
    with spark_dl_local_rows(df, encode) as sources:
        assert len(sources[0].encoding.vocabulary) == 50


@contextlib.contextmanager
def spark_dl_local_rows(df, encode):
    with local.dealt_rows(df, Data(features=tuple(df.columns), label=None, encode=encode), Shards(), 2) as (
        dealt,
        sources,
    ):
        words = {row["c0"] for row in dealt.collect()}
        assert words == set(sources[0].encoding.vocabulary)
        yield sources


@pytest.mark.modes("local")
def test_what_decides_its_rows_is_not_kept(spark, tmp_path):
    path = str(tmp_path / "rows")
    spark.range(9).selectExpr("id", "CAST(id AS STRING) AS word").write.parquet(path)
    decided = spark.read.parquet(path).filter("id > 2").selectExpr("upper(word) AS word", "id + 1 AS more")
    cached = spark.range(3).select(F.udf(lambda i: i, "bigint")("id")).cache()
    for df, is_kept in (
        (decided, False), (spark.range(9), False), (cached, False),
        (decided.withColumn("r", F.rand()), True), (decided.withColumn("t", F.current_timestamp()), True),
        (decided.mapInArrow(lambda batches: batches, decided.schema), True),
    ):  # fmt: skip
        with read_once(df, "a test") as rows:
            assert (rows is not df) == is_kept
            assert sorted(map(str, rows.collect())) == sorted(map(str, rows.collect()))
            with read_once(rows.filter("true"), "a test within") as again:
                assert again.count() == rows.count()


@pytest.mark.skipif(not hasattr(F, "collate"), reason="collations came with Spark 4")
def test_strings_with_a_collation_have_a_vocabulary(spark, tmp_path):
    df = words(spark, *CITIES).coalesce(1).selectExpr("city COLLATE UTF8_LCASE AS city", "tags")
    shards = write(df, tmp_path, encode={n: {"as": "vocabulary", "ragged": n == "tags"} for n in df.columns})
    assert read_shards(shards.url).columns[0].encoding.vocabulary == ("Bonn", "Köln", "Aue", "Ulm")


def test_the_column_with_too_many_words_is_named(spark, tmp_path):
    """The limit on all words must not hide those of a small column."""
    df = spark.range(500).selectExpr("CAST(id AS STRING) AS large", "CASE WHEN id < 1 THEN 'a' END AS few")
    encode = {"large": {"as": "vocabulary", "max_size": 3}, "few": {"as": "vocabulary", "max_size": 1}}
    with pytest.raises(ValueError, match=r"^data.encode.large: found more than 3 strings"):
        write(df, tmp_path, encode=encode, nulls="drop")


def words(spark, *cities):
    return spark.createDataFrame([Row(city=c, tags=[c, "all"]) for c in cities])


CITIES = ["Ulm", "Bonn", "Bonn", "Köln", "Köln", "Aue", "Bonn"]


@pytest.mark.modes("local", "connect")
def test_a_vocabulary_is_counted_by_spark_and_kept(spark, tmp_path):
    encode = {"city": {"as": "vocabulary", "min_count": 2}, "tags": {"as": "vocabulary", "ragged": True}}
    shards = write(words(spark, *CITIES).coalesce(1), tmp_path, encode=encode)
    city, tags = (c.encoding for c in read_shards(shards.url).columns)
    assert city.vocabulary == ("Bonn", "Köln")
    assert tags.vocabulary == ("all", "Bonn", "Köln", "Aue", "Ulm")
    found = read_all(shards)
    assert found["city"].tolist() == [0, 1, 1, 2, 2, 0, 1]
    assert rows_of(found["tags"])[0] == [5, 1]
    manifest = json.loads((tmp_path / "d" / "_manifest.json").read_text())
    assert manifest["columns"][0]["encoding"]["vocabulary"] == ["Bonn", "Köln"]
    # another dataset gets the words of this one, and none of its own
    other = write(words(spark, "Aue", "Köln", "Rom"), tmp_path, shards.columns, "e", encode=encode)
    assert sorted(read_all(other)["city"].tolist()) == [0, 0, 2]
    assert other.columns[0].encoding == city


@pytest.mark.parametrize(("settings", "match"), [
    ({"max_size": 3}, "data.encode.city: found more than 3 strings; raise data.encode.city.max_size or"),
    ({"min_count": 9}, r"data.encode.city: found no string that occurs 9 time\(s\) or more"),
    ({"values": ["Bonn", "Ulm", "Aue"], "unknown": "error"}, "found 'Köln', expected one of 3 known strings.*row 3"),
])  # fmt: skip
def test_a_vocabulary_that_does_not_fit_is_an_error(spark, tmp_path, settings, match):
    df = words(spark, *CITIES).coalesce(1).select("city")
    with pytest.raises(ValueError, match=match):
        write(df, tmp_path, encode={"city": {"as": "vocabulary", **settings}})
    assert os.listdir(tmp_path / "d") == []


def test_B08_no_rows_are_an_error_before_words_are_missed(spark, tmp_path):
    df = words(spark, *CITIES).select("city")
    encode = {"city": {"as": "vocabulary"}}
    with pytest.raises(ValueError, match="the DataFrame has no rows; training needs at least one"):
        write(df.filter("city = 'Rom'"), tmp_path, encode=encode)
    with pytest.raises(ValueError, match="data.encode.city: found no string that occurs 1 time"):
        write(df.selectExpr("nullif(city, city) AS city"), tmp_path, encode=encode)


@pytest.mark.modes("local", "connect")
def test_B07_structs_are_flattened_and_vectors_mixed(spark, tmp_path):
    rows = [
        Row(user=Row(age=1, at=Vectors.dense([1, 2])), x=1),
        Row(user=Row(age=2, at=Vectors.sparse(2, [1], [5.0])), x=2),
        Row(user=Row(age=None, at=Vectors.sparse(2, [], [])), x=3), Row(user=None, x=4),
    ]  # fmt: skip
    df = spark.createDataFrame(rows[:2] * 2 + rows).coalesce(1)
    data = Data(features=["user.age", "user.at", "x"], label=None, nulls="drop")
    shards = write_shards(df, str(tmp_path / "d"), data)
    found = read_all(shards)
    assert found["user.age"].tolist() == [1, 2] * 3
    assert found["user.at"].tolist() == [[1, 2], [0, 5]] * 3
    assert shards.changes == Changes(2, {"user.age": 2, "user.at": 1}, {})
    assert spark.read.parquet(shards.url).selectExpr("sum(`user.age`)").first()[0] == 9


NULLS = "SELECT IF(id % 10 = 3, NULL, id) AS a, IF(id % 10 = 4, double('NaN'), id) AS b, id FROM range(0, 100, 1, 3)"


@pytest.mark.modes("local", "connect")
def test_B03_dropped_and_filled_rows_are_counted_logged_and_kept(spark, tmp_path, caplog):
    shards = write(spark.sql(NULLS), tmp_path, nulls="drop", nonfinite="drop")
    assert shards.rows == 80
    assert shards.changes == Changes(20, {"a": 10, "b": 10}, {}) == read_shards(shards.url).changes
    assert "20 rows dropped for nulls, NaN, Inf or bad images in {'a': 10, 'b': 10}" in caplog.text
    assert sorted(read_all(shards)["id"].tolist()) == [i for i in range(100) if i % 10 not in (3, 4)]
    shards = write(spark.sql(NULLS), tmp_path, name="e", nulls="fill", nonfinite="fill", fill={"a": -1, "b": 0.5})
    found = read_all(shards)
    assert shards.rows == 100
    assert shards.changes == Changes(0, {}, {"a": 10, "b": 10})
    assert sorted(found["id"][found["a"] == -1].tolist()) == [*range(3, 100, 10)]
    assert sorted(found["id"][found["b"] == 0.5].tolist()) == [*range(4, 100, 10)]
    with pytest.raises(
        ValueError, match="the DataFrame has no rows: 100 were dropped for nulls, NaN, Inf or bad images"
    ):
        write(spark.range(100).selectExpr("nullif(id, id) AS a"), tmp_path, name="f", nulls="drop")


def test_ragged_columns_are_lists_for_everybody(spark, tmp_path):
    df = spark.range(0, 50, 1, 3).selectExpr(
        "id", "IF(id = 0, array(), sequence(1L, id % 4 + 1)) AS clicks", "repeat('ü', CAST(id % 3 AS INT)) AS text",
        "transform(sequence(1L, id % 2 + 1), i -> array(i, 7L)) AS pairs", "CAST(id AS STRING) AS name",
        "IF(id < 30, array(), array(array(id, 1L, 2L))) AS late",
    )  # fmt: skip
    ragged = {"ragged": True}
    encode = {"clicks": ragged, "pairs": ragged, "late": ragged, "text": {"as": "bytes"}, "name": {"as": "bytes"}}
    shards = write(df, tmp_path, encode=encode, rows_per_row_group=8)
    shapes = {c.name: c.shape for c in shards.columns}
    assert (shapes["clicks"], shapes["text"], shapes["pairs"], shapes["late"]) == (
        (None,),
        (None,),
        (None, 2),
        (None, 3),
    )
    expected = {r["id"]: r for r in df.collect()}
    found = {name: rows_of(cells) for name, cells in read_all(shards).items()}
    by_spark = {r["id"]: r for r in spark.read.parquet(shards.url).collect()}
    by_arrow = {r["id"]: r for r in pq.read_table(shards.url).to_pylist()}
    assert sorted(found["id"]) == list(range(50))
    for i, number in enumerate(found["id"]):
        for name in ("clicks", "pairs", "late"):
            assert found[name][i] == expected[number][name] == by_spark[number][name] == by_arrow[number][name]
        assert bytes(found["text"][i]).decode() == expected[number]["text"]
    means = {c.name: c.mean_size for c in shards.columns if c.is_ragged}
    assert means["clicks"] == sum(len(r["clicks"]) for r in expected.values()) / 50
    assert means["pairs"] == 3
    assert means["late"] == 20 * 3 / 50


def test_all_partitions_have_the_same_layout_whatever_their_lengths_are(spark, tmp_path):
    df = spark.range(0, 4000, 1, 4).selectExpr("id", "sequence(1L, IF(id < 2000, 400, 1)) AS clicks")
    shards = write(df, tmp_path, encode={"clicks": {"ragged": True}})
    groups = [rows for s in shards.shards for rows in s.row_groups]
    assert set(groups[:-1]) == {1024}
    assert sorted(read_all(shards)["id"].tolist()) == list(range(4000))


def test_images_are_checked_stored_as_files_and_decoded(spark, tmp_path):
    df = spark.createDataFrame([Row(id=i, photo=bytearray(png((4, 5, 3), i))) for i in range(20)]).repartition(3)
    encode = {"photo": {"as": "image"}}
    shards = write(df, tmp_path, encode=encode, rows_per_row_group=8, rows_per_shard=16)
    assert (shards.columns[1].shape, shards.columns[1].encoding) == ((4, 5, 3), Encoding.of_image({}))
    found = read_all(shards)
    for number, image in zip(found["id"], found["photo"], strict=True):
        np.testing.assert_array_equal(image, pixels((4, 5, 3), number))
    other = spark.createDataFrame([Row(id=20, photo=bytearray(png((5, 4, 3))))])
    with pytest.raises(ValueError, match=r"'photo': .*shape.*\(5, 4, 3\)"):
        write(df.union(other), tmp_path, name="e", encode=encode)
    with pytest.raises(
        ValueError, match=r"column 'photo': found the shape \(5, 4, 3\), expected \(4, 5, 3\) as in the"
    ):
        write(other, tmp_path, shards.columns, "f", encode=encode)


@pytest.mark.modes("local")
def test_photos_and_masks_are_the_same_from_shards_files_and_in_predictions(spark, tmp_path):
    """Photos that a turned camera has taken, in several modes, and masks with the classes 0 and 4."""
    rows = []
    for i in range(12):
        mask = np.zeros((40 + i, 30), np.uint8)
        mask[10:20, 5:20] = 4
        Image.fromarray(mask).save(masked := io.BytesIO(), "PNG")
        photo = turned(1 + i % 8)[0] if i % 3 else other(("P", "RGBA", "1", "LA")[i // 3])
        rows.append(Row(id=i, photo=bytearray(photo), mask=bytearray(masked.getvalue())))
    df = spark.createDataFrame(rows).repartition(3)
    encode = {"photo": {"as": "image", "resize": [8, 6], "mode": "RGB"}, "mask": {"as": "image", "resize": [28, 28]}}
    data = Data(features=("id", "photo"), label="mask", encode=encode)
    shards = write_shards(df, str(tmp_path / "d"), data, shards=Shards(rows_per_row_group=4))
    found = read_all(read_shards(shards.url))
    assert {*np.unique(found["mask"])} == {0, 4}
    for number, pixels_ in zip(found["id"], found["photo"], strict=True):
        expected = read_image(bytes(rows[number].photo), (), Encoding.of_image(encode["photo"]))
        np.testing.assert_array_equal(pixels_, expected)
        if number % 3:
            assert pixels_[:, 0].max() < 60 < 160 < pixels_[:, -1].min()
    df.write.parquet(str(tmp_path / "files"))
    (in_place,) = read_in_place(str(tmp_path / "files"), data.columns, encode=data.encode)
    order = np.argsort(in_place["id"].numpy())
    for name in ("photo", "mask"):
        np.testing.assert_array_equal(in_place[name].numpy()[order], found[name][np.argsort(found["id"])])
    spec = ModelSpec(
        build=nn.Identity, loss="MSELoss", predict=lambda sums: {"sum": sums},
        forward=lambda model, batch: model(batch["photo"].double().sum((1, 2, 3))),
    )  # fmt: skip
    config = small_config(1, data={"features": ("photo",), "label": None, "encode": {"photo": encode["photo"]}})
    sums = {row["id"]: row["sum"] for row in spark_dl.predict(df, spec, config=config).select("id", "sum").collect()}
    assert sums == {int(i): float(p.astype(np.float64).sum()) for i, p in zip(found["id"], found["photo"], strict=True)}
    cut = spark.createDataFrame([Row(id=20, photo=bytearray(turned(1)[0][:-250]), mask=rows[0].mask)])
    with pytest.raises(ValueError, match=r"column 'photo': (?i:.*truncated)"):
        write_shards(df.union(cut), str(tmp_path / "cut"), data)


@pytest.mark.modes("local")
def test_files_that_spark_s_image_source_cannot_read_are_nulls(spark, tmp_path):
    """It gives no bytes for them, which were a black image."""
    (tmp_path / "images").mkdir()
    for i in range(3):
        (tmp_path / "images" / f"{i}.png").write_bytes(png((4, 4, 3), i))
    (tmp_path / "images" / "broken.png").write_bytes(b"no image")
    df = spark.read.format("image").load(str(tmp_path / "images"))
    with pytest.raises(ValueError, match=r"column 'image.data': found null\(s\) in 1 row"):
        write_shards(df, str(tmp_path / "refused"), Data(features=("image.data",), label=None))
    shards = write_shards(df, str(tmp_path / "shards"), Data(features=("image.data",), label=None, nulls="drop"))
    assert (shards.rows, shards.changes) == (3, Changes(1, {"image.data": 1}, {}))
    data = Data(features=("image.data",), label=None, encode={"image.data": {"as": "bytes"}})
    spec = ModelSpec(build=nn.Identity, predict=lambda pixels: {"mean": pixels.float().mean(1)})
    with pytest.raises(Exception, match=r"column 'image.data': found .*null"):
        spark_dl.predict(df, spec, None, Config(data=data)).collect()


def test_images_that_are_not_whole_are_dropped_and_counted_if_the_settings_say_so(spark, tmp_path, caplog):
    files = [png((4, 5, 3), i) for i in range(12)]
    files[3], files[7], files[8] = files[3][:-30], b"no image", b""
    rows = [Row(id=i, photo=bytearray(file)) for i, file in enumerate(files)] + [Row(id=12, photo=None)]
    df = spark.createDataFrame(rows, "id bigint, photo binary").repartition(3)

    def written(name, bad, **settings):
        return write(df, tmp_path, name=name, encode={"photo": {"as": "image", "bad": bad}}, **settings)

    shards = written("dropped", "drop", nulls="drop")
    assert sorted(read_all(shards)["id"].tolist()) == [0, 1, 2, 4, 5, 6, 9, 10, 11]
    assert shards.changes == Changes(4, {"photo": 4}, {})
    assert "4 rows dropped for nulls, NaN, Inf or bad images in {'photo': 4}" in caplog.text
    assert sorted(read_all(written("nulls", "null", nulls="drop"))["id"].tolist()) == [0, 1, 2, 4, 5, 6, 9, 10, 11]
    with pytest.raises(ValueError, match=r"column 'photo': found null\(s\) in"):
        written("a null is one still", "null")
    for bad in ("raise", "drop"):
        with pytest.raises(ValueError, match=r"column 'photo': found (null|a cell that is not)"):
            written(f"refused {bad}", bad)
    with pytest.raises(ValueError, match=r"whole 8-bit images \(data.encode.photo.bad: drop leaves the others out\)"):
        write(df.filter("id <> 12"), tmp_path, name="advice", encode={"photo": {"as": "image"}})
    df.write.parquet(str(tmp_path / "files"))
    encode = {"photo": {"as": "image", "bad": "drop"}}
    with pytest.raises(ValueError, match="data.encode.photo.bad: expected raise for files that are read in place"):
        read_in_place(str(tmp_path / "files"), ["id", "photo"], encode=encode, nulls="drop")
    # A model that was trained so gives each row a prediction, or an error.
    spec = ModelSpec(build=nn.Identity, forward=lambda model, batch: model(batch["photo"].float().sum((1, 2, 3))))
    config = small_config(1, data={"features": ("photo",), "label": None, "encode": encode, "nulls": "drop"})
    good = df.filter("id NOT IN (3, 7, 8, 12)")
    assert spark_dl.predict(good, spec, config=config).count() == 9
    good.write.parquet(str(tmp_path / "good"))
    assert spark_dl.predict(str(tmp_path / "good"), spec, config=config, spark=spark).count() == 9
    with pytest.raises(Exception, match="column 'photo': found a cell that is not"):
        spark_dl.predict(df.filter("id <> 12"), spec, config=config).collect()


def test_images_of_several_shapes_are_scaled_when_they_are_read(spark, tmp_path):
    shapes = [(4 + i % 3, 5 + i % 2, 3) for i in range(20)]
    df = spark.createDataFrame([Row(id=i, photo=bytearray(png(s, i))) for i, s in enumerate(shapes)]).repartition(3)
    encode = {"photo": {"as": "image", "resize": [4, 5]}}
    shards = write(df, tmp_path, encode=encode, rows_per_row_group=8)
    assert read_shards(shards.url).columns == shards.columns
    assert (shards.columns[1].shape, shards.columns[1].encoding) == ((4, 5, 3), Encoding.of_image({"resize": [4, 5]}))
    found = read_all(shards)
    assert sorted(found["id"]) == list(range(20))
    for number, image in zip(found["id"], found["photo"], strict=True):
        expected = Image.fromarray(pixels(shapes[number], number)).resize((5, 4), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(image, np.asarray(expected))
    gray = spark.createDataFrame([Row(id=20, photo=bytearray(png((4, 5))))])
    with pytest.raises(ValueError, match=r"'photo': .*shape.*\(4, 5\)"):
        write(df.union(gray), tmp_path, name="e", encode=encode)


def city_rows(spark, *cities):
    rows = [
        Row(city=city, user=Row(age=20 + i % 9), photo=bytearray(png((2, 3), i)), label=i % 3)
        for i, city in enumerate(cities)
    ]
    return spark.createDataFrame(rows).repartition(2)


@pytest.mark.slow
def test_evaluation_and_prediction_use_the_words_of_the_training_dataset(spark, tmp_path):
    features = ("city", "user.age", "photo")
    encode = {"city": {"as": "vocabulary"}, "photo": {"as": "image"}}
    config = small_config(2, data={"features": features, "encode": encode}, train={"epochs": 1})
    spec = ModelSpec(build=CityModel)
    training = city_rows(spark, *["Ulm", "Bonn", "Bonn", "Köln", "Köln", "Köln"] * 10)
    other = city_rows(spark, "Rom", "Köln", "Ulm", "Aue")
    result = spark_dl.train(training, spec, config, validation=other, run_dir=str(tmp_path / "run"))
    known = read_shards(str(tmp_path / "run" / "shards" / "validation")).columns[0].encoding
    assert known.vocabulary == ("Köln", "Bonn", "Ulm")
    assert spark_dl.evaluate(other, spec, result.checkpoint)["loss"] == pytest.approx(result.metrics["loss"])
    model = result.load_model(spec)
    for row in spark_dl.predict(other, spec, result.checkpoint).collect():
        index = {"Köln": 1, "Ulm": 3}.get(row["city"], 0)
        image = torch.from_numpy(read_image(bytes(row["photo"])).copy())
        expected = model(torch.tensor([index]), torch.tensor([row["user"]["age"]]), image[None])[0]
        assert row["prediction"] == pytest.approx(expected.tolist(), abs=1e-5)
    changed = {**encode, "city": {"as": "hash", "buckets": 4}}
    config = small_config(2, data={"features": features, "encode": changed})
    with pytest.raises(ValueError, match="the model was trained on"):
        spark_dl.predict(other, spec, result.checkpoint, config)
    with pytest.raises(ValueError, match=r"column 'city': found the encoding .* as in the training dataset"):
        spark_dl.evaluate(other, spec, result.checkpoint, config)


@pytest.mark.parametrize("dictionary", ["true", "false"])
@pytest.mark.parametrize("kind", ["INT96", "TIMESTAMP_MICROS", "TIMESTAMP_MILLIS"])
def test_files_of_the_old_calendar_have_the_dates_that_spark_reads(spark, tmp_path, kind, dictionary):
    """As Spark 2 writes them, and Spark 3 and 4 with LEGACY. Sentinels such as 0001-01-01 are common."""
    path = str(tmp_path / "old")
    conf = {
        "spark.sql.parquet.datetimeRebaseModeInWrite": "LEGACY", "spark.sql.parquet.int96RebaseModeInWrite": "LEGACY",
        "spark.sql.parquet.outputTimestampType": kind, "spark.sql.session.timeZone": "UTC",
        "parquet.enable.dictionary": dictionary,
    }  # fmt: skip
    before = {key: spark.conf.get(key, None) for key in conf}
    for key, value in conf.items():
        spark.conf.set(key, value)
    try:
        days = ["0001-01-01", "0100-03-01", "1001-01-01", "1582-10-04", "1582-10-15", "1899-12-31", "2026-01-01"]
        rows = [(i, day, f"{day} 12:34:56.789") for i, day in enumerate(days)]
        df = spark.createDataFrame(rows, "id long, day string, at string")
        df = df.selectExpr(
            "id", "CAST(day AS DATE) AS day", "CAST(at AS TIMESTAMP) AS at", "array(CAST(day AS DATE)) AS days"
        )
        df.coalesce(1).sortWithinPartitions("id").write.parquet(path)
        expected = read_all(write(spark.read.parquet(path).coalesce(1).sortWithinPartitions("id"), tmp_path))
        names = ("id", "day", "at", "days")
        units = {"at": {"as": "timestamp", "unit": "us"}}
        found = next(iter(read_in_place(path, names, encode=units)))
        for name in names:
            np.testing.assert_array_equal(found[name].numpy(), expected[name], err_msg=name)
        zone = "" if kind == "INT96" else "Z"  # the type does not say that its times are in UTC
        for condition in (
            ["day", "==", "1001-01-01"],
            ["day", "<", "1001-01-02"],
            ["at", "<=", f"1001-01-01T12:34:56.789{zone}"],
        ):
            sql = f"{condition[0]} {condition[1].replace('==', '=')} '{condition[2]}'"
            ids = sorted(row["id"] for row in spark.read.parquet(path).filter(sql).select("id").collect())
            batches = read_in_place(path, names, filters=[condition])
            assert sorted(i for batch in batches for i in batch["id"].tolist()) == ids, condition
    finally:
        for key, value in before.items():
            spark.conf.unset(key) if value is None else spark.conf.set(key, value)


def read_in_place(path, names, **data):
    rows = spark_dl.open_dataset(path, batch_size=64, data=Data(features=names, label=None, **data), shuffle=False)
    return [{n: t[batch["weight"] > 0] for n, t in batch.items()} for batch in rows]


@pytest.mark.modes("local")
def test_a_fill_for_a_time_is_the_same_from_a_dataframe_its_files_and_files_of_others(spark, tmp_path):
    df = spark.sql("SELECT CAST(id AS DOUBLE) x, IF(id = 1, NULL, TIMESTAMP '2020-01-01 00:00:00') ts FROM range(3)")
    df.write.parquet(str(tmp_path / "spark"))
    (tmp_path / "arrow").mkdir()
    times = pa.array([0, None, 0], pa.timestamp("ns", "UTC"))
    pq.write_table(pa.table({"x": [0.0, 1.0, 2.0], "ts": times}), tmp_path / "arrow" / "a.parquet", version="2.6")
    seconds = {"as": "timestamp", "unit": "s"}
    for fill in (1_700_000_000, "2023-11-14 22:13:20"):
        data = Data(features=("x", "ts"), label=None, encode={"ts": seconds}, nulls="fill", fill={"ts": fill})
        spark_dl.write_shards(df, str(tmp_path / f"shards {fill}"), data)
        for url in (tmp_path / f"shards {fill}", tmp_path / "spark", tmp_path / "arrow"):
            of_file = data if "shards" not in url.name else Data(features=("x", "ts"), label=None)
            (batch,) = spark_dl.open_dataset(str(url), of_file, batch_size=3, shuffle=False)
            found = dict(zip(batch["x"].tolist(), batch["ts"].tolist(), strict=True))
            assert found[1.0] == 1_700_000_000, (url, fill)


@pytest.mark.modes("local")
def test_the_shapes_of_features_need_a_row_that_is_there(spark):
    found = first_row_columns(spark.range(3).selectExpr("array(id, id) AS pair"), ["pair"], Data())
    assert [column.shape for column in found] == [(2,)]
    with pytest.raises(ValueError, match="the DataFrame has no rows; expected one, to know the shapes of the features"):
        first_row_columns(spark.range(0), ["id"], Data())
    with pytest.raises(ValueError, match="data: found a stream, whose first row is not there yet; pass rows with the"):
        first_row_columns(spark.readStream.format("rate").load(), ["value"], Data())
