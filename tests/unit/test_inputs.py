"""Datasets that are there already: what is asked of them, and which settings would do nothing for them."""

import contextlib
import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_dl import Data, Shards, inputs, read_shards
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.ragged import Ragged
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.manifest import crc32_of
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.load.loader import ShardLoader
from spark_dl.data.write.arrays import write_arrays
from spark_dl.inputs import (
    as_source,
    as_written,
    check_mixture,
    check_rank_rows,
    check_storage,
    shards_of,
    warn_of_few_rows,
)
from tests.builders.models import small_config

X = {"x": np.arange(64, dtype=np.float32)}
CITY = {"as": "vocabulary", "values": ["Rome", "Oslo"]}


def asked(data=None, **more):
    return small_config(1, data={"features": ["x"], "label": None, **(data or {}), **more})


def opened(source, config, reference_columns=()):
    with contextlib.ExitStack() as stack:
        return shards_of(source, "", config, stack, reference_columns, reuse=False)


def with_rules(url, **rules):
    """As `write_shards` leaves a dataset that was written by other rules."""
    path = f"{url}/_manifest.json"
    with open(path) as file:
        manifest = json.load(file)
    del manifest["crc32"]
    manifest["rules"].update(rules)
    with open(path, "w") as file:
        json.dump({**manifest, "crc32": crc32_of(manifest)}, file)


def without_rules(url):
    """As a version before rules and checksums were kept left a dataset."""
    path = f"{url}/_manifest.json"
    with open(path) as file:
        manifest = json.load(file)
    del manifest["rules"], manifest["crc32"]
    with open(path, "w") as file:
        json.dump({**manifest, "version": 2}, file)


SETTINGS = [
    ("data.nulls", {"nulls": "drop"}),
    ("data.nulls", {"nulls": "fill"}),
    ("data.nonfinite", {"nonfinite": "drop"}),
    ("data.nonfinite", {"nonfinite": "fill"}),
    ("data.encode.x.min_count", {"encode": {"x": {**CITY, "min_count": 2}}}),
    ("data.encode.x.max_size", {"encode": {"x": {**CITY, "max_size": 9}}}),
]


@pytest.mark.parametrize("kind", ["url", "shards", "old"])
@pytest.mark.parametrize(("key", "settings"), SETTINGS)
def test_settings_of_writing_are_refused_for_a_dataset_that_was_written_without_them(tmp_path, key, settings, kind):
    url = str(tmp_path / "d")
    shards = write_arrays(X, url)
    if kind == "old":
        without_rules(url)
    match = rf"^{key}: found .* for the dataset {url}, which (was|does not).* remove the setting"
    with pytest.raises(ValueError, match=match):
        opened(shards if kind == "shards" else url, asked(settings))


def test_those_with_which_it_was_written_are_accepted_and_so_are_defaults(tmp_path):
    url = str(tmp_path / "d")
    write_arrays(X, url)
    assert opened(url, asked(nulls="error", nonfinite="error", fill={})).rows == 64
    assert opened(url, asked(nonfinite="allow")).rows == 64
    with_rules(url, nulls="fill", nonfinite="drop", fill={"x": 0.5}, counts={"city": {"min_count": 2}})
    settings = {"nulls": "fill", "nonfinite": "drop", "fill": {"x": 0.5}}
    encode = {"city": {"as": "vocabulary", "min_count": 2, "max_size": 100_000}}
    assert opened(url, asked(settings, encode=encode)).rows == 64
    with pytest.raises(ValueError, match=r"^data.fill: found \{'x': 1\} .* was written or opened with \{'x': 0.5\}"):
        opened(url, asked(settings, fill={"x": 1}))
    with pytest.raises(ValueError, match="^data.encode.city.min_count: found 3 .* was written or opened with 2"):
        opened(url, asked(settings, encode={"city": {"as": "vocabulary", "min_count": 3}}))


def test_for_datasets_of_others_too_but_for_words_that_another_dataset_has(tmp_path):
    pq.write_table(pa.table({"x": ["Oslo", "Rome"] * 8}), tmp_path / "a.parquet")
    counted = {"encode": {"x": {"as": "vocabulary", "min_count": 2}}}
    with pytest.raises(ValueError, match="^data.encode.x.min_count: found 2 for the dataset"):
        opened(str(tmp_path), asked(encode={"x": {**CITY, "min_count": 2}}))
    reference_columns = opened(str(tmp_path), asked(encode={"x": CITY})).columns
    assert opened(str(tmp_path), asked(counted), reference_columns).columns[0].encoding.vocabulary == ("Rome", "Oslo")


def test_the_settings_of_another_dataset_are_not_meant_for_one_that_is_written(tmp_path):
    data = Data(features=["x"], label=None, nulls="drop", nonfinite="fill", fill={"x": 1}, require_success=False)
    others, url = str(tmp_path / "others.parquet"), str(tmp_path / "d")
    pq.write_table(pa.table(X), others)
    for ours in (write_arrays(X, url), url):
        assert as_written(data, ours) == Data(features=["x"], label=None, require_success=False)
        assert as_written(Data(nonfinite="allow"), ours) == Data(nonfinite="allow")
    for source in (others, open_parquet(others, ["x"], data=data)):
        assert as_written(data, source) == data, "what is read is chosen then"


@pytest.mark.parametrize(("key", "settings"), [
    ("loader.proportions", {"proportions": {"a": 1}}),
    ("shards.store", {"store": "/s"}), ("shards.cache_dir", {"cache_dir": "/c", "cache_mib": 8}),
])  # fmt: skip
def test_a_function_on_rows_refuses_settings_that_mean_nothing_there(key, settings):
    config = asked(settings)
    with pytest.raises(ValueError, match=rf"^{key}: found .* with run_on_dataframe"):
        check_rank_rows(None, config.data, config.shards, config.loader)
    config = asked()
    check_rank_rows(None, config.data, config.shards, config.loader)


# NaN and Inf in our own shards

BAD = np.where(np.arange(64) == 37, np.nan, np.arange(64)).astype(np.float32)


def read(shards, nonfinite="error"):
    loader = ShardLoader(shards, asked(nonfinite=nonfinite, num_streams=1), rank=0, world_size=1, shuffle=False)
    return [batch["x"] for step in loader.epoch(0) for batch in step.micro_batches]


@pytest.mark.parametrize("array", [BAD, np.stack([np.ones(64), BAD], 1), Ragged(BAD, np.arange(65))])
def test_arrays_with_nan_are_written_only_where_that_is_allowed_and_read_likewise(tmp_path, array):
    url = str(tmp_path / "d")
    with pytest.raises(ValueError, match=r"column 'x': found NaN or Inf, first in row 37, .* data.nonfinite to allow"):
        write_arrays({"x": array}, url)
    assert not (tmp_path / "d").exists()
    with pytest.raises(ValueError, match=r"^data.nonfinite: expected error or allow for arrays, found 'drop'"):
        write_arrays({"x": array}, url, Data(nonfinite="drop"))
    shards = write_arrays({"x": array}, url, Data(nonfinite="allow"), shards=Shards(rows_per_row_group=32))
    assert shards == read_shards(url)
    with pytest.raises(RuntimeError, match=r"row group 1 of .*column 'x': found NaN or Inf.* row 5 of the row group"):
        read(shards)
    assert len(read(shards, "allow")) > 0


def test_rows_that_were_checked_when_they_were_written_are_not_checked_again(tmp_path, monkeypatch):
    shards = write_arrays(X, str(tmp_path / "d"))
    assert shards.is_checked
    monkeypatch.setattr("spark_dl.data.columns.policies.first_nonfinite_row", None)
    assert len(read(shards)) > 0


def test_a_dataset_from_before_its_rules_were_kept_is_checked(tmp_path):
    write_arrays({"x": BAD}, str(tmp_path / "d"), Data(nonfinite="allow"))
    without_rules(str(tmp_path / "d"))
    with pytest.raises(RuntimeError, match="found NaN or Inf"):
        read(read_shards(str(tmp_path / "d")))


def test_fewer_rows_than_a_global_batch_are_said_with_their_numbers(caplog):
    config = small_config(2)
    size = config.train.global_batch_size
    warn_of_few_rows(size, config)
    assert not caplog.records
    warn_of_few_rows(size - 3, config)
    assert f"{size - 3} training rows are fewer than a global batch of {size}" in caplog.text
    assert "over 2 ranks: each epoch is one step, with 3 rows of padding" in caplog.text
    caplog.clear()
    warn_of_few_rows(size, small_config(2, data={"validation_fraction": 0.25}))
    assert f"{size - size // 4} training rows are fewer than a global batch of {size}" in caplog.text


def test_datasets_are_named_by_paths_too(tmp_path):
    shards = write_arrays(X, tmp_path / "d")
    assert read_shards(tmp_path / "d") == shards
    assert as_source(tmp_path / "d") == str(tmp_path / "d")
    assert as_source("s3://bucket/d") == "s3://bucket/d"
    for what in (as_source, read_shards):
        with pytest.raises(
            ValueError, match="'s3:/bucket/d': pathlib.Path removes a slash .* pass the URL as a string"
        ):
            what(Path("s3://bucket/d"))
    assert as_source(shards) is shards
    pq.write_table(pa.table(X), tmp_path / "a.parquet")
    assert open_parquet(tmp_path / "a.parquet", ["x"]).rows == 64


@pytest.mark.parametrize("data", [[1, 2], X, pa.table(X), None, b"/data"])
def test_what_is_no_dataset_is_an_error_that_says_what_is(data):
    kind = f"{type(data).__module__}.{type(data).__name__}"
    with pytest.raises(ValueError, match=f"expected a DataFrame of Spark, .*found a {kind}; spark.createDataFrame"):
        as_source(data)


FRAME = type("DataFrame", (), {"sparkSession": None})()


@pytest.mark.parametrize(("fields", "data", "validation", "message"), [
    ({"storage": "local"}, "/data", None, "'local' is for DataFrames, found a dataset"),
    ({"storage": "local"}, FRAME, FRAME, "'local' supports one DataFrame, found a second one for validation"),
    ({"filters": [["x", ">", 1]]}, FRAME, None, "data.filters: expected a dataset, found a DataFrame"),
    ({"filters": [["x", ">", 1]]}, "/data", FRAME, "data.filters: expected a dataset, found a DataFrame"),
    ({"filters": [["x", ">", 1]]}, {"a": "/data", "b": FRAME}, None, "data.filters: expected a dataset, found a Data"),
])  # fmt: skip
def test_data_that_a_setting_does_not_support_is_an_error(fields, data, validation, message):
    with pytest.raises(ValueError, match=message):
        check_storage(asked(**fields), data, validation)


@pytest.mark.parametrize(("fields", "data", "validation"), [
    ({"storage": "local"}, FRAME, None), ({"storage": "local"}, FRAME, "/data"), ({}, "/data", FRAME),
    ({"filters": [["x", ">", 1]]}, "/data", None), ({"filters": [["x", ">", 1]]}, {"a": "/d", "b": "/more"}, "/data"),
])  # fmt: skip
def test_data_that_the_settings_support(fields, data, validation):
    check_storage(asked(**fields), data, validation)


@pytest.mark.parametrize(("proportions", "data", "found"), [
    ({"a": 1.0, "b": 1.0}, "/data", "one dataset"),
    ({"a": 1.0, "b": 1.0}, {"a": "/a", "c": "/c"}, r"datasets \['a', 'c'\]"),
    ({}, {"a": "/a"}, r"datasets \['a'\]"),
])  # fmt: skip
def test_a_mixture_has_a_share_for_each_dataset(proportions, data, found):
    check_mixture(asked(proportions={"a": 1.0, "b": 1.0}), {"a": "/a", "b": "/b"})
    check_mixture(asked(), "/data")
    with pytest.raises(
        ValueError, match=f"loader.proportions: expected a share for each dataset, found .* for {found}"
    ):
        check_mixture(asked(proportions=proportions), data)


def test_weights_that_are_stored_as_integers_of_their_decimals_are_refused():
    column = Column("w", "int64", (), "scalar", Encoding("decimal", scale=2, source_type="decimal(9,2)"))
    inputs._check_weight([column], "x")
    inputs._check_weight([dataclasses.replace(column, encoding=Encoding("decimal", scale=0))], "w")
    with pytest.raises(
        ValueError, match=r"data.weight: the column 'w' is stored as integers, its decimals times 10\^2"
    ):
        inputs._check_weight([column], "w")


def test_a_path_that_cannot_be_looked_up_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ValueError, match="cannot read the dataset .*/x{300}: .*File name too long.*; check its permis"):
        inputs.is_ours(str(tmp_path / ("x" * 300)))
