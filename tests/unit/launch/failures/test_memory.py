"""The memory of a rank's process, and what the kernel's count of kills says of its end."""

import os

import pytest

from spark_dl.launch.failures import rank_state

MIB = 1 << 20


def of(group="host:1", kills=0, **more):
    return {"peak": 800 * MIB, "limit": 1024 * MIB, "group": group, "events": "/none", "oom_kills": kills, **more}


def test_the_peak_grows_with_what_the_process_uses():
    before = rank_state.memory_now()
    content = bytearray(os.urandom(1) * (rank_state.memory_now()["peak"] + 64 * MIB))
    assert rank_state.memory_now()["peak"] - before["peak"] > 32 * MIB
    assert rank_state.memory_in_words(rank_state.memory_now()).startswith(", with a peak memory of ")
    del content


@pytest.mark.parametrize(("memories", "is_killed"), [
    ({0: of(), 1: of(kills=1)}, True),
    ({0: of(kills=1), 1: of(kills=1)}, False),
    ({0: of(), 1: of(kills=0)}, False),
    ({0: of(), 1: of("host:2", kills=1)}, False),  # of another container
    ({0: of(""), 1: of("", kills=1)}, False),  # neither knows its group
    ({1: of(kills=1)}, False),
])  # fmt: skip
def test_F30_only_a_count_that_has_risen_in_the_same_group_says_that_the_kernel_killed_it(memories, is_killed):
    assert rank_state.killed_by_kernel(0, memories) is is_killed


def test_the_driver_waits_for_a_count_if_another_rank_of_the_group_can_tell():
    assert rank_state.wait_for_count_s(0, {0: of(), 1: of()}) > 1
    assert rank_state.wait_for_count_s(0, {0: of(), 1: of("host:2")}) == 0
    assert rank_state.wait_for_count_s(0, {}) == 0


@pytest.mark.parametrize("name", ["memory.events", "memory.oom_control"])
def test_F30_the_driver_reads_the_count_of_its_own_host(tmp_path, name):
    path = tmp_path / name
    path.write_text("low 0\noom 1\noom_kill 2\n")
    last = of(rank_state._identity(path), kills=2, events=str(path))
    assert not rank_state.killed_by_kernel(0, {0: last})
    assert rank_state.wait_for_count_s(0, {0: last}) == 0
    path.write_text("low 0\noom 1\noom_kill 3\n")
    assert rank_state.killed_by_kernel(0, {0: last})


def test_a_limit_is_in_the_words_where_there_is_one():
    assert rank_state.memory_in_words(of()) == ", with a peak memory of 800 MiB of 1024 MiB"
    assert rank_state.memory_in_words(of(limit=None)) == ", with a peak memory of 800 MiB"
    assert rank_state.memory_in_words(None) == ""
