"""Which tasks of a barrier job are ranks."""

import itertools
import threading
import types

import pytest

from spark_dl.launch.failures.errors import OtherRankError
from spark_dl.launch.rank.tasks import all_gather, choose, host_of, own_executor


@pytest.mark.parametrize("num_tasks", [1, 2, 5])
def test_without_hosts_to_leave_out_every_task_is_a_rank(num_tasks):
    executors = [f"host-{index % 2}:70{index}" for index in range(num_tasks)]
    for task in range(num_tasks):
        found = choose(executors, task, num_tasks, ())
        assert (found.own, list(found.executors), found.num_tasks) == (task, executors, num_tasks)
        found.check(num_tasks)


@pytest.mark.parametrize("left_out", [{"a"}, {"b"}, {"a", "c"}, {"d"}])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_F31_hosts_that_are_left_out_get_ranks_only_if_the_others_are_too_few(left_out, num_ranks):
    for hosts in set(itertools.permutations("aabbcc")):
        executors = [f"{host}:70{index}" for index, host in enumerate(hosts)]
        seen = [choose(executors, task, num_ranks, left_out) for task in range(6)]
        ranks = [found.own for found in seen if found.own is not None]
        usable = [executor for executor in executors if host_of(executor) not in left_out]
        assert ranks == list(range(num_ranks))
        (chosen,) = {found.executors for found in seen}
        assert [executor for executor in chosen if executor in usable] == usable[:num_ranks]
        assert list(chosen) == [executor for executor in executors if executor in chosen]
        assert all(executors[task] == found.executors[found.own] for task, found in enumerate(seen)
                   if found.own is not None)  # fmt: skip


def test_another_number_of_tasks_than_of_ranks_is_an_error():
    with pytest.raises(RuntimeError, match="Spark started 2 tasks for 3 ranks; the DataFrame must have one partition"):
        choose(["a:1", "b:1"], 0, 3, ()).check(3)


def test_the_host_of_an_executor_has_no_brackets():
    assert (host_of("[::1]:7077"), host_of("host-1:7077")) == ("::1", "host-1")


@pytest.mark.parametrize(("name", "value", "found"), [
    ("SPARK_EXECUTOR_ID", "3", "3"),
    ("SPARK_LOG_URL_STDERR", "http://a:8081/logPage/?appId=app-1&executorId=12&logType=stderr", "12"),
    ("SPARK_LOG_URL_STDERR", "http://a:8042/node/containerlogs/container_1_2/user/stderr", "host-1:7001"),
    ("OTHER", "3", "host-1:7001"),
])  # fmt: skip
def test_the_executor_of_a_rank_has_the_id_of_spark_or_its_address(monkeypatch, name, value, found):
    for variable in ("SPARK_EXECUTOR_ID", "SPARK_LOG_URL_STDERR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, value)
    assert own_executor("host-1:7001") == found


def test_a_task_that_does_not_come_to_meet_the_others_ends_their_wait():
    """Spark's own limit is a year."""
    over = threading.Event()
    context = types.SimpleNamespace(allGather=lambda message: over.wait(60))
    with pytest.raises(
        OtherRankError, match=r"not all ranks came to meet the others within launch\.start_timeout_s=0\.2"
    ):
        all_gather(context, "", 0.2)
    over.set()
