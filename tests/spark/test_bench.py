"""The benchmarks run as their commands say, at a small scale, and end with one JSON object of what they measured."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.peers.loader import PEERS
from benchmarks.peers.predict import _check_same
from tests.spark.conftest import FAST_JVM, REPOSITORY

DATASETS = ("mosaic_streaming", "webdataset", "ray_data")
PEERS_PYTHON = REPOSITORY / ".venv-peers" / "bin" / "python"
PETASTORM = REPOSITORY / ".venv-petastorm" / "bin" / "python"
"""Without it Petastorm's loaders and converter have no figures."""


def bench(what, *args):
    """The last line of standard output, and standard error."""
    done = run("jobs/bench.py", what, *args)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def run(*command):
    env = {"JAVA_TOOL_OPTIONS": FAST_JVM, "OMP_NUM_THREADS": "1", "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=800,
        cwd=REPOSITORY,
        env={**os.environ, **env},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.slow
@pytest.mark.long
def test_training_is_measured_with_tracking_and_without():
    result, log = bench("track", "--repeats", "1", "--epochs", "1")
    assert result["plain_steps_per_s"] > 0
    assert len(result["ratios"]) == 1
    assert result["ratio"] == pytest.approx(result["tracked_steps_per_s"] / result["plain_steps_per_s"])
    assert "with tracking to without" in log


@pytest.mark.slow
@pytest.mark.long
def test_the_loader_is_measured_beside_its_peers():
    peers = [peer for peer in PEERS if peer not in DATASETS]
    result, log = bench("loader", "--scale", "0.02", "--repeats", "1", "--peers", ",".join(peers))
    assert list(result) == ["img", "tab"]
    for name, measured in result.items():
        assert set(measured) == {*peers, "shuffle", "left_out"}
        for peer in ("spark_dl", "spark_dl_parquet", "tensor_dataset", "memory_gather", "arrow"):
            assert measured[peer] > 0, (name, peer)
        for peer in ("petastorm_batched", "petastorm_rows"):
            assert measured[peer] > 0 if PETASTORM.exists() else measured[peer] is None, (name, peer)
            assert (peer in measured["left_out"]) == (not PETASTORM.exists())
        assert set(measured["shuffle"]) == {peer for peer in peers if measured[peer] is not None}
        assert measured["shuffle"]["arrow"]["displacement"] == 0  # it does not shuffle
        for peer in ("spark_dl", "spark_dl_parquet"):
            assert 0.25 < measured["shuffle"][peer]["displacement"] < 0.42  # a perfect shuffle has 1/3
    assert "petastorm" in log


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not PEERS_PYTHON.exists(), reason=f"there is no {PEERS_PYTHON}: make setup-peers")
def test_the_loader_is_measured_beside_loaders_with_formats_of_their_own():
    result, _ = bench("loader", "--scale", "0.01", "--repeats", "1", "--peers", ",".join(("spark_dl", *DATASETS)))
    for measured in result.values():
        assert measured["left_out"] == {}
        for peer in ("spark_dl", *DATASETS):
            assert measured[peer] > 0
            assert 0.25 < measured["shuffle"][peer]["displacement"] < 0.42


@pytest.mark.slow
@pytest.mark.long
def test_writing_shards_is_measured_beside_its_peers():
    result, log = bench("shards", "--scale", "0.02", "--repeats", "1", "--master", "local[2]")
    assert list(result) == ["img", "tab"]
    for measured in result.values():
        assert set(measured) == {"spark_dl_s", "df_write_s", "petastorm_converter_s"}
        converter_s = measured["petastorm_converter_s"]
        assert converter_s > 0 if PETASTORM.exists() else converter_s is None
        assert measured["spark_dl_s"] > 0
        assert measured["df_write_s"] > 0
    assert "petastorm_converter" in log


@pytest.mark.long
@pytest.mark.slow
def test_a_large_dataset_is_measured_before_its_first_row_is_read():
    result, log = bench("scale", "--files", "100", "--repeats", "1")
    assert list(result) == ["open_s", "travels_mib", "ranks"]
    assert list(result["ranks"]) == ["1", "8", "512"]
    assert 0 < result["travels_mib"] < 0.1
    assert result["open_s"] > 0
    for measured in result["ranks"].values():
        assert list(measured) == ["plan_s", "plan_mib"]
        assert measured["plan_s"] > 0
    assert "100 files, 2500 row groups" in log


@pytest.mark.long
@pytest.mark.slow
def test_filters_are_measured_with_a_page_index_and_without():
    result, _ = bench("filters", "--rows", "60000", "--repeats", "1", "--shares", "0.01")
    assert list(result) == ["sorted", "clustered", "shuffled"]
    for layout, by_share in result.items():
        indexed, plain = by_share["0.01"]["page_index"], by_share["0.01"]["footers"]
        assert indexed["rows"] == plain["rows"] == 1200
        assert min(indexed["count_s"], indexed["epoch_s"], plain["count_s"], plain["epoch_s"]) > 0
        if layout == "shuffled":  # every page has a row of them
            assert indexed["epoch_mib"] == pytest.approx(plain["epoch_mib"], rel=0.05)
        else:
            assert indexed["epoch_mib"] < plain["epoch_mib"] / 2


@pytest.mark.slow
@pytest.mark.long
def test_strategies_are_compared_on_slow_ranks(tmp_path):
    methods, page = ["ddp", "tree_reduce", "parameter_server async"], tmp_path / "report.html"
    done = run(
        "examples/compare_aggregation.py", "--ranks", "2", "--epochs", "1", "--straggler-s", "0.01",
        "--methods", ",".join(methods), "--report", str(page),
    )  # fmt: skip
    assert "<svg" in page.read_text()
    rows = json.loads(page.with_suffix(".json").read_text())["stragglers"]
    assert [row["method"] for row in rows] == methods
    assert [row["exact"] for row in rows] == [True, True, False]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-4)
    for row in rows:
        assert row["accuracy"] > 0.5
        assert row["update_s"] > 0.5 * row["theory_s"] > 0
        assert row["method"] in done.stdout
    assert [row["staleness"] is None for row in rows] == [True, True, False]


@pytest.mark.slow
@pytest.mark.long
def test_trials_in_one_job_find_the_same_as_one_job_after_another_in_less_time():
    result, _ = bench("trials", "--repeats", "1", "--epochs", "1", "--sleep_s", "0.06")
    assert (result["trials"], result["groups"]) == (8, 2)
    for measured in (result["digits"], result["sleep"]):
        assert measured["same_trials"]
        assert measured["ratio"] == pytest.approx(measured["one_job_s"] / measured["job_by_job_s"])
    assert result["sleep"]["ratio"] < 0.8  # one after another it is 1; the other tests compete for the cores


@pytest.mark.long
@pytest.mark.slow
def test_optimizers_and_batch_sizes_are_compared_in_one_job(tmp_path):
    done = run("examples/compare_optimizers.py", "--epochs", "4", "--folder", str(tmp_path))
    of_optimizers, of_sizes = done.stdout.split("\n\n")[:2]
    losses = {line.split()[0]: float(line.split()[2]) for line in of_optimizers.splitlines()[1:]}
    assert list(losses) == ["SGD", "momentum", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam"]
    assert max(losses.values()) < 1.0  # of ten classes; at the start it is 2.3
    by_size = [(int(line.split()[0]), float(line.split()[3])) for line in of_sizes.splitlines()[1:]]
    constant, scaled = dict(by_size[::2]), dict(by_size[1::2])
    assert constant[64] == scaled[64]
    assert constant[512] > 1.5 * constant[64]  # fewer steps of the same size
    assert scaled[512] < constant[512]
    for name in ("optimizers.png", "batch_sizes.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.long
def test_the_loop_is_measured_beside_bare_ddp_and_without_its_check():
    result, log = bench("step", "--repeats", "2")
    of_ratios = [f"{name}{what}" for name in ("ratio", "check_ratio") for what in ("", "_quartiles", "s")]
    assert list(result) == ["bare_ddp", "spark_dl", "unchecked", *of_ratios]
    for name, peer in (("ratio", "bare_ddp"), ("check_ratio", "unchecked")):
        low, high = sorted(result[f"{name}s"])
        assert low > 0
        assert result[f"{name}_quartiles"] == pytest.approx([low + (high - low) / 4, high - (high - low) / 4])
        assert result[name] == pytest.approx((low + high) / 2)
        assert result[peer] > 0
    assert "worker loop to bare DDP" in log


@pytest.mark.slow
@pytest.mark.long
def test_a_launch_is_measured_in_our_session_in_a_plain_one_and_beside_torchdistributor():
    result, _ = bench("launch", "--repeats", "1")
    assert list(result) == [
        "torch_distributor_s", "new_workers_s", "spark_dl_s", "ratio", "repeats", "plain_session_s",
    ]  # fmt: skip
    assert min(result.values()) > 0
    assert result["ratio"] == pytest.approx(result["spark_dl_s"] / result["torch_distributor_s"])


@pytest.mark.slow
@pytest.mark.long
def test_scoring_is_measured_beside_predict_batch_udf_and_its_limits():
    result, log = bench("predict", "--scale", "0.02", "--repeats", "1")
    ways = ["transform", "predict_batch_udf", "floor", "from_dataset", "bare_forward"]
    ratios = ["transform_to_floor", "transform_to_udf", "from_dataset_to_udf"]
    assert list(result) == [*ways, *ratios, "repeats"]
    assert min(result[way] for way in ways) > 0
    assert result["transform_to_udf"] == pytest.approx(result["transform"] / result["predict_batch_udf"])
    assert all(way in log for way in ways)


def test_a_way_that_predicts_other_values_or_rows_is_not_measured():
    labels, expected = np.array([7, 8]), np.array([1.0, 2.0])
    _check_same({"same": {7: 1.0, 8: 2.0}}, labels, expected)
    with pytest.raises(RuntimeError, match="other: predictions differ"):
        _check_same({"same": {7: 1.0, 8: 2.0}, "other": {7: 1.0, 8: 2.1}}, labels, expected)
    with pytest.raises(RuntimeError, match="fewer: found predictions of 1 rows, expected 2"):
        _check_same({"fewer": {7: 1.0}}, labels, expected)
