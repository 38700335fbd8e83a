"""The files of a whole run: whose they are, and where its rows are."""

import contextlib
import os
import pathlib
import stat
import struct
import types

import pytest

import spark_dl
from spark_dl import Launch, prepare
from spark_dl.rundir import checkpoint
from tests.builders.models import MLP, small_config

ROW = 0.123456789
"""A feature of each row."""


@pytest.fixture(scope="module")
def run_dir(spark, tmp_path_factory):
    """Of a run with all that writes files, of a driver with umask 000."""
    run_dir = tmp_path_factory.mktemp("private") / "a" / "run"
    df = spark.range(64).selectExpr(f"array(CAST({ROW} AS FLOAT), 1F, 2F, CAST(id % 3 AS FLOAT)) AS features",
                                    "id % 3 AS label")  # fmt: skip
    config = small_config(2, train={"epochs": 1, "global_batch_size": 24}, profile_steps=(1, 2),
                          launch={"log_dir": str(run_dir / "logs")})  # fmt: skip
    umask = os.umask(0)
    try:
        spark_dl.train(df, MLP, config, run_dir=str(run_dir), progress=False)
        spark_dl.report(str(run_dir))
    finally:
        os.umask(umask)
    spark_dl.launch(print, "a line", settings=Launch(num_ranks=2, log_dir=str(run_dir / "logs")), spark=spark)
    return run_dir


@pytest.mark.slow
@pytest.mark.modes("local", "local-cluster")
@pytest.mark.long_in("local-cluster")
def test_S13_all_files_of_a_run_are_for_its_user_alone(run_dir):
    found = {path.relative_to(run_dir.parent).as_posix(): path for path in (run_dir.parent, *run_dir.rglob("*"))}
    folders = {name for name in found if found[name].is_dir()}
    assert {"run/checkpoints", "run/shards/train", "run/logs", "run/profile", "run/generations"} <= folders
    assert {name for name in found if stat.S_IMODE(found[name].stat().st_mode) & 0o077} == set()
    assert any(name.endswith(".parquet") for name in found)


@pytest.mark.slow
@pytest.mark.modes("local", "local-cluster")
@pytest.mark.long_in("local-cluster")
def test_S19_rows_are_in_the_shards_alone(run_dir):
    texts = (struct.pack("<f", ROW), b"0.12345")
    holding = {path.suffix for path in run_dir.rglob("*") if path.is_file() and contains(path, texts)}
    assert holding == {".parquet"}


def contains(path, texts):
    content = pathlib.Path(path).read_bytes()
    return any(text in content for text in texts)


def test_S13_rows_that_have_no_place_for_their_user_alone_ask_for_a_run_folder():
    """The run is not the caller's, and the disks of the ranks cannot have rows that data.filters leaves out."""
    spark = types.SimpleNamespace(conf={"spark.master": "spark://host-1:7077"})
    saved = checkpoint.Saved("s3://theirs/run/checkpoints/000001", 1, 1, {})
    with contextlib.ExitStack() as until_done:
        folder, config = prepare._private_place(spark, small_config(2), saved, until_done)
        assert (folder, config.shards.storage) == ("", "local")
        filtered = small_config(2, data={"filters": [["label", ">", 0]]})
        with pytest.raises(
            ValueError, match=r"^run_dir: expected a folder .* s3://theirs/run is not known to be yours,"
        ):
            prepare._private_place(spark, filtered, saved, until_done)
