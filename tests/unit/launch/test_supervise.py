"""Which failures are worth another attempt, how long the driver waits, and what it raises at the end."""

import logging
import pickle
from pathlib import Path

import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.errors import AnalysisException

from spark_dl import Launch, RankError
from spark_dl.launch import supervise
from spark_dl.launch.failures.errors import describe, is_retryable
from spark_dl.launch.supervise import backoff_s, failing_hosts, reason_to_stop, run_attempts
from spark_dl.rundir.saving import BadStateError, NotWrittenError
from spark_dl.training.finite import NotFiniteTrainingError

QUICK = Launch(restart_wait_s=0)


def killed(step=None, **about):
    return RankError("rank 1 on a (pid 7) was killed", rank=1, host="a", pid=7, step=step, phase="training", **about)


def raised(text, step, **about):
    return RankError(f"rank 1 on a failed: {text}", rank=1, host="a", pid=7, step=step, error=text, **about)


def attempts_of(errors, launch=QUICK, **options):
    """Runs attempts that fail with these errors, one after another. Returns the numbers of the attempts."""
    numbers, left = [], list(errors)

    def attempt(this):
        numbers.append(this.number)
        if left:
            raise left.pop(0)
        return numbers

    return run_attempts(attempt, launch, **options)


@pytest.mark.parametrize("failures", [0, 1, 3])
def test_ranks_are_started_again_until_an_attempt_succeeds(failures):
    seen = []
    numbers = attempts_of([killed(step) for step in range(failures)], on_restart=lambda *about: seen.append(about))
    assert numbers == list(range(failures + 1))
    assert [(error.step, restarts) for error, restarts in seen] == [(n, n + 1) for n in range(failures)]


@pytest.mark.parametrize(("setting", "default", "expected"), [("auto", 3, 4), ("auto", 0, 1), (0, 3, 1), (2, 0, 3)])
def test_the_last_error_is_raised_when_the_restarts_are_done(setting, default, expected):
    errors = [killed(step) for step in range(9)]
    launch = Launch(restart_wait_s=0, max_restarts=setting)
    seen = []
    with pytest.raises(RankError) as caught:
        attempts_of(errors, launch, default_restarts=default, on_restart=lambda *about: seen.append(about))
    assert caught.value.step == expected - 1 == len(seen)
    assert len(caught.value.earlier) == expected - 1
    assert (f"after {expected} attempts; launch.max_restarts is" in str(caught.value)) == (expected > 1)


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_the_last_error_ends_with_what_to_do(max_restarts):
    errors = [killed(rank_traceback="Traceback"), killed(stacks="Stacks")]
    launch, asked = Launch(restart_wait_s=0, max_restarts=max_restarts), []
    with pytest.raises(RankError) as caught:
        attempts_of(errors, launch, advice=lambda: asked.append(1) or "Resume it.")
    assert str(caught.value).endswith("\n\nResume it.")
    assert pickle.loads(pickle.dumps(caught.value)).advice == "Resume it."
    assert asked == [1]
    assert "attempt" in [entry.name for entry in caught.traceback]  # where the attempt has failed
    assert attempts_of([killed()], advice=lambda: asked.append(2)) == [0, 1]
    assert asked == [1]


def preempted():
    return RankError("rank 1 on a was ended by SIGTERM", rank=1, host="a", pid=7, step=2, error="ended by SIGTERM")


def test_F10_ranks_whose_host_is_taken_away_do_not_count_up_to_the_restarts():
    errors = [preempted(), killed(1), preempted(), preempted(), killed(2)]
    assert attempts_of(errors, Launch(restart_wait_s=0, max_restarts=2)) == list(range(6))
    with pytest.raises(RankError, match="was ended by SIGTERM"):  # no restart was asked for
        attempts_of([preempted()], Launch(restart_wait_s=0, max_restarts=0))
    reason = reason_to_stop([preempted()] * (supervise.PREEMPTIONS + 1), 3)
    assert reason == f"ranks were ended by SIGTERM {supervise.PREEMPTIONS + 1} times"


def test_F31_a_host_on_which_all_attempts_fail_is_named():
    same = [killed(1), raised("RuntimeError: CUDA error", 4, hosts=frozenset("ab")), killed(9)]
    assert reason_to_stop(same, 2) == (
        "launch.max_restarts is 2, and all failures were on host a: take it out of the cluster"
    )
    other = RankError("rank 0 on b was killed", rank=0, host="b", pid=1)
    assert reason_to_stop([*same[:2], other], 2) == "launch.max_restarts is 2"
    assert reason_to_stop(same[:1], 0) == "launch.max_restarts is 0"


@pytest.mark.parametrize("hosts", [frozenset("a"), frozenset()], ids=["known", "unknown"])
def test_F31_the_only_host_of_the_ranks_is_not_to_be_taken_out(hosts):
    assert reason_to_stop([killed(step, hosts=hosts) for step in (1, 4, 9)], 2) == "launch.max_restarts is 2"


@pytest.mark.parametrize(("after", "expected"), [(1, [(), "a", "ab", "ab"]), (2, [(), (), (), "a"]), (None, [()] * 4)])
def test_F31_a_host_that_keeps_failing_is_left_out(after, expected):
    errors = [killed(1), RankError("rank 0 on b was killed", rank=0, host="b", pid=1), killed(2)]
    launch, seen = Launch(restart_wait_s=0, exclude_host_after=after), []

    def attempt(this):
        seen.append(this.left_out)
        if errors:
            raise errors.pop(0)

    run_attempts(attempt, launch)
    assert seen == [frozenset(hosts) for hosts in expected]


def test_F31_hosts_that_are_taken_away_and_unknown_ones_are_not_left_out():
    unknown = RankError("a rank was killed", rank=None, host="", pid=None)
    assert failing_hosts([preempted(), preempted(), unknown, unknown], 2) == frozenset()


def test_F03_the_same_error_twice_in_the_same_step_stops():
    same = [killed(3), raised("RuntimeError: x", 5), raised("RuntimeError: x", 5), killed(9)]
    with pytest.raises(RankError, match=r"after 3 attempts; the same error came twice in step 5") as caught:
        attempts_of(same)
    assert caught.value.earlier == ("rank 1 on a (pid 7) was killed", "rank 1 on a failed: RuntimeError: x")
    assert str(caught.value).count("Attempt ") == 2


@pytest.mark.parametrize("errors", [
    [raised("RuntimeError: x", 5), raised("RuntimeError: x", 6)],
    [raised("RuntimeError: x", 5), raised("RuntimeError: y", 5)],
    [raised("RuntimeError: x", None), raised("RuntimeError: x", None)],
    [killed(5), killed(5)],  # by the last heartbeat, which can be a second old
], ids=["steps", "errors", "no step", "killed"])  # fmt: skip
def test_other_failures_do_not(errors):
    assert reason_to_stop(errors, 3) == ""
    assert len(attempts_of(errors)) == 3


def test_B36_a_reason_of_several_lines_forges_no_line_of_the_log(caplog):
    failures = [RankError("rank 0 failed: OSError: no\n2026-01-01 INFO all is well", rank=0, host="a", pid=1)]

    def attempt(this):
        if failures:
            raise failures.pop()
        return this.number

    assert run_attempts(attempt, Launch(restart_wait_s=0.0)) == 1
    assert "OSError: no\n    2026-01-01 INFO all is well; starting the ranks again" in caplog.text


class UserError(RuntimeError):
    is_retryable = False


@pytest.mark.parametrize(("error", "expected"), [
    (OSError("disk"), True), (RuntimeError("CUDA error"), True), (MemoryError(), True), (ConnectionError(), True),
    (ValueError("x"), False), (TypeError(), False), (KeyError("x"), False), (ImportError("x"), False),
    (ZeroDivisionError(), False), (AssertionError(), False), (pickle.PicklingError(), False), (SystemExit(3), False),
    (UserError(), False), (NotFiniteTrainingError(), False), (BadStateError(), False),
    (NotWrittenError(4, "/run", "disk"), True),
])  # fmt: skip
def test_F02_an_error_of_the_code_or_the_data_is_not_retried(error, expected):
    assert is_retryable(error) is expected
    failure = describe(error, {"task": 0, "host": "a", "pid": 1})
    assert failure["is_retryable"] is expected
    last = raised("x", 2, is_retryable=failure["is_retryable"])
    assert (reason_to_stop([last], 3) == "") is expected


def test_an_error_that_is_not_of_a_rank_is_raised_at_once():
    for error in (RuntimeError("too few slots"), ValueError("refused"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            attempts_of([error, killed()])


@pytest.mark.parametrize("error", [
    RuntimeError("cannot write to the run_dir /run: [Errno 28] No space left on device"), RuntimeError("too few slots"),
    PermissionError(13, "Permission denied"), Py4JNetworkError("Answer from Java side is empty"),
    AnalysisException("[PATH_NOT_FOUND] no such path"),
], ids=["full", "slots", "denied", "no JVM", "of Spark"])  # fmt: skip
@pytest.mark.parametrize("before", [0, 1])
def test_F12_the_failures_before_a_restart_that_cannot_begin_are_kept(error, before):
    refused = "checkpoint at step 4 not saved: it needs about 9 bytes, and 1 bytes are free"
    with pytest.raises(RankError) as caught:
        attempts_of([*[killed(3)] * before, raised(refused, 4, rank_traceback="File x"), error, killed()])
    first, *others = str(caught.value).split("\n\n")[0].split("\n")
    assert first.startswith(f"rank 1 on a failed: {refused} (after {before + 1} attempt")
    assert first.endswith(f"; the next one ended with {type(error).__name__}: {error})")
    assert others == ["Attempt 1: rank 1 on a (pid 7) was killed"] * before
    assert caught.value.__cause__ is error
    assert (caught.value.step, caught.value.rank_traceback) == (4, "File x")


class StoppedByUserError(Exception):
    """As of a function of `on_event`."""


def test_an_interrupt_and_exceptions_of_the_user_are_raised_as_they_are_after_a_restart():
    for error in (KeyboardInterrupt(), StoppedByUserError()):
        with pytest.raises(type(error)) as caught:
            attempts_of([killed(3), error])
        assert caught.value is error


def test_the_wait_doubles_up_to_a_minute_with_up_to_a_quarter_more():
    page = Path(__file__).parents[3] / "docs" / "configuration.md"
    (row,) = (line for line in page.read_text().splitlines() if line.startswith("| `launch.restart_wait_s`"))
    assert "up to a minute. Up to 25 % more is added at random" in row
    for failures, least in ((1, 0.5), (2, 1.0), (3, 2.0), (7, 32.0), (8, 60.0), (500, 60.0)):
        waits = [backoff_s(failures, 0.5) for _ in range(50)]
        assert all(least <= wait <= least * 1.25 for wait in waits)
        assert len(set(waits)) > 1
    assert backoff_s(3, 0) == 0


def test_a_restart_is_said_with_its_reason(caplog, monkeypatch):
    waited = []
    monkeypatch.setattr(supervise.time, "sleep", waited.append)
    with caplog.at_level(logging.WARNING, "spark_dl"):
        attempts_of([killed(4)], Launch())
    assert [record.message.split(" in ")[0] for record in caplog.records] == [
        "rank 1 on a (pid 7) was killed; starting the ranks again"
    ]
    assert "(restart 1 of 3)" in caplog.text
    assert 1 <= waited[0] <= 1.25


def test_the_error_of_several_attempts_survives_a_pickle():
    error = raised("RuntimeError: x", 5, phase="training", hosts=frozenset("ab")).after([killed(3)], "no more")
    copy = pickle.loads(pickle.dumps(error))
    assert copy.hosts == {"a", "b"}
    assert (str(copy), copy.step, copy.phase, copy.earlier) == (str(error), 5, "training", error.earlier)
