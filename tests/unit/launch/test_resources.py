"""How many GPUs ranks get, in which kind of session, and what the driver refuses before any task starts."""

import logging
import re

import pytest

from spark_dl import Launch
from spark_dl.launch.preflight import Session, amount_of_profile, read_session, with_all_gpus

STANDALONE = "spark://host:7077"


def amount(gpus_per_rank, executor, task, *, device="auto", master=STANDALONE, version="4.0.1"):
    launch = Launch(gpus_per_rank=gpus_per_rank, device=device)
    return amount_of_profile(launch, Session(executor, task, master, version))


@pytest.mark.parametrize(("gpus_per_rank", "executor", "task", "expected"), [
    ("auto", 0, 0, None),  # no GPUs
    ("auto", 4, 1, None), ("auto", 4, 2, None), ("auto", 1, 0.5, None),  # as the user has set for tasks
    ("auto", 4, 0, 1.0), ("auto", 1, 0, 1.0),  # tasks have none, executors do: one for each rank
    (1, 4, 0, 1.0), (2, 4, 0, 2.0), (0.5, 1, 0, 0.5), (1, 1, 0.25, 1.0), (1, 4, 4, 1.0), (4, 4, 1, 4.0),
    (1, 4, 1, None), (0.5, 1, 0.5, None), (2, 2, 2, None), (0, 0, 0, None), (0, 4, 0, None),  # as it is
    (0, 4, 1, 0.0),  # ranks on CPUs, beside tasks that have GPUs
])  # fmt: skip
def test_ranks_have_a_profile_of_their_own_if_the_session_s_tasks_have_another_amount(
    gpus_per_rank, executor, task, expected
):
    for master in (STANDALONE, "yarn", "k8s://https://host:6443", "local-cluster[2,1,1024]"):
        assert amount(gpus_per_rank, executor, task, master=master) == expected
    if expected:
        assert amount(gpus_per_rank, executor, task, device="cuda") == expected
    if expected is None and gpus_per_rank not in ("auto", 0):  # nothing new is asked of Spark
        assert amount(gpus_per_rank, executor, task, version="3.5.1") is None


def test_ranks_on_cpus_leave_the_session_as_it_is():
    assert amount("auto", 4, 0, device="cpu") is None


@pytest.mark.parametrize(("gpus_per_rank", "executor", "task"), [(1, 0, 0), (2, 1, 1), (1, 0, 0.5), (4, 2, 0)])
def test_B23_more_gpus_than_an_executor_has_is_an_error_that_names_the_keys(gpus_per_rank, executor, task):
    named = rf"at most spark.executor.resource.gpu.amount, {executor}, the GPUs of an executor, found {gpus_per_rank}"
    with pytest.raises(ValueError, match=rf"launch.gpus_per_rank: expected {named}; .*gpu.discoveryScript"):
        amount(gpus_per_rank, executor, task)


@pytest.mark.parametrize(("where", "why"), [
    ({"version": "3.5.6"}, "Spark 3.5.6 cannot give one stage another amount, Spark 4 can"),
    ({"master": "other://host"}, "not of spark.master=other://host"),
])  # fmt: skip
def test_a_session_without_profiles_says_what_to_set_instead(where, why, caplog):
    found = r"launch.gpus_per_rank: expected 0.25, the GPUs of a task in this session, found 1"
    with pytest.raises(ValueError, match=rf"{found}; .*{why}; set spark.task.resource.gpu.amount to 1"):
        amount(1, 1, 0.25, **where)
    with pytest.raises(ValueError, match=rf"launch.device: found 'cuda', but spark.task.resource.gpu.amount .*{why}"):
        amount("auto", 1, 0, device="cuda", **where)
    with caplog.at_level(logging.WARNING, "spark_dl"):
        assert amount("auto", 1, 0, **where) is None  # ranks train, but not on the GPUs that there are
    assert re.search(rf"the ranks use CPUs, as spark.task.resource.gpu.amount is not set; .*{why}", caplog.text)


def test_B23_a_session_without_gpus_is_an_error_for_ranks_that_need_one():
    with pytest.raises(ValueError, match="launch.device: found 'cuda'.* set it to 1, with spark.executor.resource.gpu"):
        amount("auto", 0, 0, device="cuda")


@pytest.mark.parametrize("gpus_per_rank", ["auto", 0.5, 1, 2])
@pytest.mark.parametrize("master", ["local", "local[4]", "local[2,3]"])
def test_with_a_local_master_ranks_take_gpus_by_their_number(gpus_per_rank, master):
    assert amount(gpus_per_rank, 0, 0, device="cuda", master=master) is None


@pytest.mark.parametrize(("session", "chosen"), [
    (Session(4, 0, STANDALONE), 4), (Session(4, 2, STANDALONE), "auto"), (Session(1, 0, STANDALONE), "auto"),
    (Session(0, 0, STANDALONE), "auto"), (Session(4, 0, "local[2]"), "auto"),
    (Session(4, 0, STANDALONE, "3.5.1"), "auto"),
], ids=str)  # fmt: skip
def test_a_rank_that_uses_all_gpus_gets_those_of_an_executor(session, chosen):
    assert with_all_gpus(Launch(), session).gpus_per_rank == chosen
    assert with_all_gpus(Launch(device="cpu"), session) == Launch(device="cpu")
    assert with_all_gpus(Launch(gpus_per_rank=1), session).gpus_per_rank == 1  # the user's choice


def test_a_session_is_read_from_its_settings():
    class Conf(dict):
        def get(self, key, default):
            return super().get(key, default)

    class Spark:
        version = "4.1.0"
        conf = Conf({"spark.executor.resource.gpu.amount": "4", "spark.master": "yarn"})

    assert read_session(Spark) == Session(4.0, 0.0, "yarn", "4.1.0")
