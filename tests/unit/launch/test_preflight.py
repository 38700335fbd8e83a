"""Settings of Spark that forbid a launch: each beside a session without it."""

import logging
import types

import pytest

from spark_dl import Launch
from spark_dl.launch import preflight


@pytest.mark.parametrize(("text", "expected"), [
    ("1g", 1 << 30), ("512m", 512 << 20), ("2GB", 2 << 30), ("1024", 1024), ("64k", 64 << 10), ("1t", 1 << 40),
    ("0", 0), ("large", 0),
])  # fmt: skip
def test_sizes_are_read_as_spark_writes_them(text, expected):
    assert preflight._bytes_of(text) == expected


@pytest.mark.parametrize(("limit", "warns"), [
    ("512m", True), ("512", True), ("2g", True), ("3g", False), ("4096", False), (None, False),
])  # fmt: skip
def test_a_limit_of_python_workers_in_which_torch_does_not_start_is_said(caplog, limit, warns):
    key = "spark.executor.pyspark.memory"
    preflight.warn_of_limit(types.SimpleNamespace(conf={} if limit is None else {key: limit}))
    assert [key in record.getMessage() and limit in record.getMessage() for record in caplog.records] == [True] * warns


@pytest.mark.parametrize("key", [
    "spark.network.crypto.enabled", "spark.ssl.enabled", "spark.authenticate.enableSaslEncryption",
])  # fmt: skip
def test_S10_unencrypted_gradients_are_refused_where_spark_encrypts(key):
    spark = types.SimpleNamespace(conf={key: "true"})
    with pytest.raises(ValueError, match=rf"^{key}: found true, .* unencrypted; .* set launch.allow_plaintext"):
        preflight.check_encryption(spark, Launch(num_ranks=2))
    preflight.check_encryption(spark, Launch(num_ranks=2, allow_plaintext=True))
    preflight.check_encryption(spark, Launch(num_ranks=1))  # which sends none
    preflight.check_encryption(types.SimpleNamespace(conf={key: "false"}), Launch(num_ranks=2))
    preflight.check_encryption(types.SimpleNamespace(conf={}), Launch(num_ranks=2))


def test_S10_where_spark_encrypts_its_local_files_rows_on_local_disks_alone_are_refused():
    """The setting is about files, not about what is sent."""
    spark = types.SimpleNamespace(conf={"spark.io.encryption.enabled": "true"})
    preflight.check_encryption(spark, Launch(num_ranks=2))
    with pytest.raises(
        ValueError, match=r"^spark\.io\.encryption\.enabled: found true, expected false, as rows on the"
    ):
        preflight.check_disks(spark)
    preflight.check_disks(types.SimpleNamespace(conf={"spark.io.encryption.enabled": "false"}))
    preflight.check_disks(types.SimpleNamespace(conf={}))


@pytest.mark.parametrize(("left_out", "cores", "num_tasks", "message"), [
    ("a", {"a": 2, "b": 2}, 4, "leaving out a, where ranks keep failing"),
    ("a", {"a": 3, "b": 1}, 2, "ranks keep failing on a; the other hosts have 1 slots for 2 ranks, so it is"),
    ("ab", {"a": 2, "b": 2}, 2, "ranks keep failing on a, b, and no other host has slots, so all of them"),
    ("ab", {"a": 2, "b": 1, "c": 1}, 2, "ranks keep failing on a, b; the other hosts have 1 slots for 2 ranks, so"),
    ("a", {"a": 4}, 2, ""), ("a", {}, 2, ""),
], ids=["enough", "too few", "all hosts", "all but a small one", "one host", "local master"])  # fmt: skip
def test_F31_a_host_is_left_out_or_named_only_if_there_are_others(
    monkeypatch, caplog, left_out, cores, num_tasks, message
):
    monkeypatch.setattr(preflight, "_cores_by_host", lambda spark: cores)
    monkeypatch.setattr(preflight, "num_slots", lambda spark, profile: 4)
    with caplog.at_level(logging.INFO, "spark_dl"):
        assert preflight.num_tasks(object(), 2, None, {*left_out}) == num_tasks
    assert len(caplog.records) == bool(message)
    assert all(record.message.startswith(message) for record in caplog.records)


def test_ranks_that_do_not_start_together_need_gpus_for_tasks_too():
    spark = types.SimpleNamespace(conf={})
    launch = Launch(device="cuda")
    with pytest.raises(
        ValueError, match=r"launch\.device: found 'cuda', but spark\.task\.resource\.gpu\.amount is not"
    ):
        preflight.check(spark, launch, at_once=False)
    spark.conf["spark.task.resource.gpu.amount"] = "1"
    assert preflight.check(spark, launch, at_once=False) is None


def test_more_cores_for_a_task_than_an_executor_has_are_refused(monkeypatch):
    monkeypatch.setattr(preflight, "_executors", lambda spark: [("a", 2), ("b", 4)])
    with pytest.raises(ValueError, match=r"spark\.task\.cpus: found 8, expected at most 4, the cores of an executor"):
        preflight._check_task_cpus(types.SimpleNamespace(conf={"spark.task.cpus": "8"}))
    preflight._check_task_cpus(types.SimpleNamespace(conf={"spark.task.cpus": "4"}))
