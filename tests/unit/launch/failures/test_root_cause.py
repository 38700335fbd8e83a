"""Of all that a failed job is told as, the one error that the rest follows from."""

import pickle
import re

import pytest

from spark_dl import RankError
from spark_dl.launch.failures import rank_state
from spark_dl.launch.failures.errors import ScriptError, describe, failed_in_task, failure_in, is_secondary
from spark_dl.launch.failures.rank_state import PLANNED
from spark_dl.launch.failures.root_cause import root_cause

RANKS = {0: 1, 1: 0, 2: 2}
"""The rank of each task: they are dealt by host."""
KNOWN = {
    task: {"kind": "joined", "task": task, "rank": rank, "host": f"host{task}", "pid": 100 + task}
    for task, rank in RANKS.items()
}
TIMED_OUT = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation"
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711"


def failed(task, error, *, follows):
    return {
        **KNOWN[task],
        "kind": "failed",
        "error": error,
        "traceback": f"Traceback of {task}",
        "is_secondary": follows,
    }


IN_VAIN = [failed(0, TIMED_OUT, follows=True), failed(1, CLOSED, follows=True)]


def lost(task):
    return {"kind": "lost", "task": task}


@pytest.mark.parametrize(
    ("failures", "silent", "task", "message"),
    [
        ([failed(0, CLOSED, follows=True), failed(2, "KeyError: 'x'", follows=False)], {}, 2, "failed: KeyError: 'x'"),
        ([failed(0, CLOSED, follows=True), lost(1)], {}, 1, "was killed"),
        ([failed(0, CLOSED, follows=True), failed(1, "KeyError: 'x'", follows=False)], {2: 9.0}, 1, "failed: KeyError"),
        ([lost(1)], {2: 9.0}, 1, "was killed"),
        (
            [failed(0, TIMED_OUT, follows=True), failed(1, CLOSED, follows=True)],
            {2: 9.0},
            2,
            "sent no heartbeat for 9 s",
        ),
        ([failed(0, CLOSED, follows=True)], {2: 9.0}, 2, "sent no heartbeat for 9 s"),
        ([], {1: 9.0}, 1, "sent no heartbeat for 9 s"),
        (
            [failed(0, TIMED_OUT, follows=True), failed(1, CLOSED, follows=True)],
            {},
            2,
            "never entered a collective operation",
        ),
        ([failed(0, CLOSED, follows=True)], {}, 0, "failed: RuntimeError: [gloo/transport/tcp/pair.cc:547]"),
    ],
)
def test_the_root_cause(failures, silent, task, message):
    error = root_cause(failures, KNOWN, None, silent)
    assert isinstance(error, RankError)
    assert (error.rank, error.host, error.pid) == (RANKS[task], f"host{task}", 100 + task)
    assert str(error).startswith(f"rank {RANKS[task]} on host{task} (pid {100 + task}) {message}")


@pytest.mark.parametrize(("failures", "silent"), [
    ([lost(1)], {}), ([failed(1, "KeyError: 'x'", follows=False)], {}), ([], {1: 9.0}),
])  # fmt: skip
def test_the_executor_and_the_device_of_a_rank_are_in_its_error(failures, silent):
    place = {"executor": "3", "device": "cuda:0"}
    known, failures = {**KNOWN, 1: {**KNOWN[1], **place}}, [{**failure, **place} for failure in failures]
    error = pickle.loads(pickle.dumps(root_cause(failures, known, None, silent)))
    assert (error.rank, error.executor, error.device) == (0, "3", "cuda:0")
    assert error.reason.startswith("rank 0 on host1 (pid 101, executor 3, cuda:0) ")
    again = error.after([], "why").advised("advice")
    assert (again.executor, again.device) == ("3", "cuda:0")
    known[1] |= {"executor": "host1:7001", "device": "cpu"}
    error = root_cause([lost(1)], known, None, {})
    assert (error.executor, error.device) == ("host1:7001", "cpu")
    assert error.reason.startswith("rank 0 on host1 (pid 101) was killed")


def test_a_rank_that_aborts_while_another_is_silent_has_waited_for_it():
    known = {**KNOWN, 1: {**KNOWN[1], "crash": "Fatal Python error: Aborted\n\nThread 0x0 ..."}}
    error = root_cause([lost(1)], known, None, {2: 9.0})
    assert str(error).startswith(f"rank {RANKS[2]} on host2 (pid 102) sent no heartbeat for 9 s")
    assert str(error).endswith(f". As a consequence, rank {RANKS[1]} on host1 failed: its process ended by SIGABRT")
    assert "was ended by SIGABRT" in str(root_cause([lost(1)], known, None, {}))


def test_several_silent_ranks_are_all_named_the_longest_silent_first():
    error = root_cause([failed(0, TIMED_OUT, follows=True)], KNOWN, None, {1: 8.0, 2: 9.4})
    assert str(error).startswith("rank 2 on host2 (pid 102), rank 0 on host1 (pid 101) sent no heartbeat for 9 s: ")
    assert str(error).endswith(f". As a consequence, rank 1 on host0 failed: {TIMED_OUT}")
    assert error.host == "host2"


def test_the_hosts_of_all_ranks_are_in_the_error_of_one():
    assert root_cause([lost(1)], KNOWN, None, {}).hosts == {"host0", "host1", "host2"}
    assert root_cause([lost(1)], {}, None, {}).hosts == frozenset()


def test_a_rank_that_is_done_is_not_missed():
    known = {**KNOWN, 2: {**KNOWN[2], "is_done": True}}
    both = [failed(0, TIMED_OUT, follows=True), failed(1, TIMED_OUT, follows=True)]
    assert root_cause(both, known, None, {}).host == "host0"


def test_a_silent_task_without_a_rank_is_named_by_its_task():
    known = {0: {"kind": "started", "task": 0, "host": "host0", "pid": 100}}
    error = root_cause([], known, None, {0: 20.0})
    assert str(error).startswith("task 0 (which has no rank yet) on host0 (pid 100) sent no heartbeat for 20 s")


@pytest.mark.parametrize("text", ["Connection closed by peer", "Application timeout caused pair closure"])
def test_an_error_of_a_lost_connection_follows_from_another_also_of_a_script(text):
    assert is_secondary(RuntimeError(text))
    wrapped = RuntimeError("Failed to run stage backward")  # as torch's pipelines have it
    wrapped.__cause__ = RuntimeError(text)
    assert is_secondary(wrapped)
    wrapped.__cause__ = RuntimeError("an error of the stage itself")
    assert not is_secondary(wrapped)
    me = {"task": 0, "host": "a", "pid": 1}
    error = ScriptError("train.py ended with exit code 1")
    assert describe(error, me, [("stderr", f"RuntimeError: {text}")])["is_secondary"]
    own = describe(error, me, [("stdout", "step 1"), ("stderr", "KeyError: 'x'")])
    assert (own["is_secondary"], own["output"]) == (False, "step 1\nKeyError: 'x'")


def test_the_last_lines_of_a_rank_are_in_its_error_unless_the_driver_has_shown_them():
    me, lines = {"task": 0, "host": "a", "pid": 1}, [("stdout", "the last line")]
    shown, hidden = (describe(KeyError("x"), me, lines, is_shown=is_shown) for is_shown in (True, False))
    assert (shown["output"], hidden["output"]) == ("", "the last line")
    error = root_cause([{"kind": "failed", **hidden}], {}, None, {})
    assert str(error).endswith("Last output of the rank:\nthe last line")


def test_the_error_of_a_hang_has_the_place_and_the_stacks_of_all_ranks():
    known = {
        task: {**who, "phase": "training", "step": 7 - task, "stack": f"Thread MainThread:\n  line {task}\n"}
        for task, who in KNOWN.items()
    }
    del known[2]["stack"]
    error = root_cause([failed(0, TIMED_OUT, follows=True)], known, None, {2: 9.0})
    assert (error.rank, error.step, error.phase) == (2, 5, "training")
    assert "sent no heartbeat for 9 s" in error.reason
    assert " in step 5 (training). As a consequence, rank 1 on host0 failed" in error.reason
    assert "\n\nrank 0 on host1 (pid 101) in step 6 (training):\nThread MainThread:\n  line 1\n\n" in error.stacks
    assert "rank 2 on host2 (pid 102) in step 5 (training):\n  no stacks: the process does not answer" in error.stacks
    assert f"What the ranks did:\n{error.stacks}" in str(error)


def test_F04_a_line_for_each_rank_says_what_it_did_and_the_error_by_what_the_silent_one_is_behind():
    called = {"name": "all_reduce", "tensors": "[3, 4] Float", "group": "default_pg", "number": 7, "is_open": False}
    at = {"phase": "training", "step": 3, "silent_s": 0.44}
    known = {
        0: {**KNOWN[0], **at, "stack": 'Thread MainThread:\n  File "/torch/distributed/pipelining/s.py", line 1\n'
            '  File "/model.py", line 2\nThread y:\n  File "/torch/distributed/z.py", line 3',
            "collective": called, "progress": {"number": 7}},
        1: {**KNOWN[1], **at, "stack": "Thread MainThread:\n  x", "collective": {**called, "is_open": True}},
        2: {**KNOWN[2], **at, "silent_s": 9.31, "progress": {"number": 6}},
        3: {"rank": 3, "host": "h", "pid": 3, **at, "phase": "reading rows", "progress": {"number": 6}},
        4: {"rank": 4, "host": "h", "pid": 4, "is_returned": True},
        5: {"rank": 5, "host": "h", "pid": 5, "stack": 'Thread MainThread:\n  File "/torch/distributed/z.py", line 1'},
        6: {"rank": 6, "host": "h", "pid": 6, "progress": {"number": 6}},
        7: {"host": "h", "pid": 7},
        8: {"rank": 8, "host": "h", "pid": 8, "progress": {"number": 0}},
    }  # fmt: skip
    error = root_cause([], known, None, {2: 9.3})
    assert error.reason.endswith(
        "; the others wait in collective number 7, all_reduce [[3, 4] Float], and its last is number 6, by its last "
        "heartbeat in step 3 (training)"
    )
    head, *rows = error.stacks.split("\n\n")[0].splitlines()
    assert re.split("  +", head) == ["rank", "host", "step", "what it did", "last collective", "last heartbeat"]
    assert [re.split("  +", row) for row in rows] == [
        ["0", "host1", "3", "waiting in collective number 7, all_reduce [[3, 4] Float]", "7", "0.4 s ago"],
        ["1", "host0", "3", "computing", "7", "0.4 s ago"],
        ["2", "host2", "3", "no answer", "6", "9.3 s ago"],
        ["3", "h", "3", "reading rows", "6", "0.4 s ago"],
        ["4", "h", "has returned"],
        ["5", "h", "waiting in a collective operation"],
        ["6", "h", "computing, or waiting for other ranks", "6"],
        ["8", "h", "computing", "0"],
        ["task 7", "h", "starting"],
    ]
    known[0] |= {"collective": {**called, "group": "0"}}
    known[1] |= {"collective": {**called, "group": "0"}}
    assert root_cause([], known, None, {2: 9.3}).reason.endswith("all_reduce [[3, 4] Float] in step 3 (training)")
    known[2] |= {"collective": None}
    assert "and its last is none yet in step 3" in root_cause([], known, None, {2: 9.3}).reason
    known[2] |= {"collective": {**called, "number": 5}}
    assert "its last is number 5, all_reduce [[3, 4] Float] in" in root_cause([], known, None, {2: 9.3}).reason
    known[2] |= {"collective": {**called, "number": 7}}
    assert "the others wait" not in root_cause([], known, None, {2: 9.3}).reason


def test_without_stacks_nothing_is_said_about_them():
    assert root_cause([failed(0, TIMED_OUT, follows=True)], KNOWN, None, {2: 9.0}).stacks == ""


def test_an_exception_that_cannot_be_printed_is_named_by_its_type():
    class SilentError(Exception):
        def __str__(self):
            raise ZeroDivisionError

    failure = describe(SilentError(), {"task": 0, "host": "a", "pid": 1})
    assert failure["error"] == "SilentError (its message cannot be printed: ZeroDivisionError)"
    assert failure["is_secondary"] is False


HOSTILE = "\x1b[31mred\x1b[0m {x} %s %(y)s ä\udcff\r\x00\x9b2J\u2028\u202e"
HARMLESS = r"red {x} %s %(y)s ä\udcff\r\x00\x9b2J\u2028\u202e"


def test_B36_control_characters_of_an_error_are_written_out_wherever_they_come_from():
    rank_state.reset()  # of what other tests of this process have done
    me, lines = {"task": 0, "host": "a", "pid": 1}, [("stdout", HOSTILE)]
    failure = describe(ValueError(f"{HOSTILE}\nINFO all is well"), me, lines, is_shown=False)
    assert failure["error"] == f"ValueError: {HARMLESS}\nINFO all is well"
    assert f"ValueError: {HARMLESS}\nINFO all is well\n" in failure["traceback"]
    assert failure["output"] == HARMLESS
    error = root_cause([{"kind": "failed", **failure_in(str(failed_in_task(failure)))}], {}, None, {})
    assert f"failed: ValueError: {HARMLESS}\nINFO" in str(error)
    str(error).encode()
    assert not set(str(error)) & {"\x1b", "\r", "\x00", "\x9b", "\u2028", "\u202e"}
    script = describe(ScriptError(f"{HOSTILE} ended"), me, lines)
    assert (script["error"], script["output"]) == (f"{HARMLESS} ended", HARMLESS)


def test_B31_ranks_that_left_before_a_barrier_are_named():
    known = {**KNOWN, 0: {**KNOWN[0], "is_returned": True}, 2: {**KNOWN[2], "is_returned": True}}
    error = root_cause([failed(1, CLOSED, follows=True)], known, None, {})
    assert error.rank == 0
    assert error.reason == (
        f"rank 0 on host1 (pid 101) failed: {CLOSED}. rank 1 on host0 (pid 100), rank 2 on host2 (pid 102) had "
        "returned from the function before, without an error: all ranks must call the same collective operations, such "
        "as barrier()"
    )
    assert not error.is_retryable
    assert root_cause([failed(1, CLOSED, follows=True)], KNOWN, None, {}).is_retryable  # nobody has left
    own = root_cause([failed(1, "KeyError: 'x'", follows=False)], known, None, {})
    assert own.reason == "rank 0 on host1 (pid 101) failed: KeyError: 'x'"


@pytest.mark.parametrize("length", [3_000, 10_000, 1_000_000])
def test_B36_a_long_error_is_cut(length):
    failure = describe(ValueError("x" * length), {"task": 0, "host": "a", "pid": 1})
    assert failure["error"] == ("ValueError: " + "x" * length)[:4000]
    assert len(failure["traceback"]) <= 16_000


@pytest.mark.parametrize(("text", "name"), [
    ("Fatal Python error: Segmentation fault\n\nCurrent thread", "SIGSEGV"),
    ("Fatal Python error: Aborted\n", "SIGABRT"), ("Fatal Python error: Stack overflow\n", "Stack overflow"),
    ("Current thread 0x1 (most recent call first):\n", "SIGTERM"),
])  # fmt: skip
def test_a_signal_that_ended_a_rank_is_named_with_the_stacks(text, name):
    known = {**KNOWN, 1: {**KNOWN[1], "crash": text, "phase": "training", "step": 3}}
    error = root_cause([failed(0, CLOSED, follows=True), lost(1)], known, None, {})
    assert error.reason == f"rank 0 on host1 (pid 101) was ended by {name} in step 3 (training)"
    assert (error.error, error.rank_traceback) == (f"ended by {name}", text)


def test_F10_a_rank_that_was_preempted_as_planned_has_no_stacks():
    known = {**KNOWN, 1: {**KNOWN[1], "crash": PLANNED, "phase": "training", "step": 4}}
    error = root_cause([failed(0, CLOSED, follows=True), lost(1)], known, None, {})
    assert error.is_preemption
    assert str(error) == (
        "rank 0 on host1 (pid 101) was ended by SIGTERM in step 4 (training), after a checkpoint of all ranks"
    )


def test_F09_a_cancelled_job_is_the_cause_of_ranks_that_were_killed():
    cancelled = RuntimeError("x: [SPARK_JOB_CANCELLED] Job 1 cancelled by the user SQLSTATE: XXKDA\n\tat org.apache")
    error = root_cause([lost(1)], KNOWN, cancelled, {})
    assert not isinstance(error, RankError)
    assert str(error).startswith("the Spark job of the ranks was cancelled ([SPARK_JOB_CANCELLED] Job 1 cancelled by")
    assert "\n" not in str(error)
    own = root_cause([failed(0, "KeyError: 'x'", follows=False), lost(1)], KNOWN, cancelled, {})
    assert "KeyError" in str(own)
    assert "was killed" in str(root_cause([lost(1)], KNOWN, None, {}))


@pytest.mark.parametrize("where", ["itself", "cause"])
def test_F16_the_signal_of_a_data_worker_is_in_the_error_also_if_it_is_in_the_cause(where):
    error = signalled = RuntimeError("DataLoader worker (pid 71) is killed by signal: Killed. ")
    if where == "cause":
        error = RuntimeError("DataLoader worker (pid(s) 71) exited unexpectedly")
        error.__cause__ = signalled
    text = describe(error, {"task": 1})["error"]
    assert ": a data worker, pid 71, was ended by SIGKILL; " in text
    assert "data worker" not in describe(RuntimeError("Killed"), {"task": 1})["error"]


def test_F19_an_abort_in_a_collective_operation_says_what_the_others_had_called():
    lost = [{"kind": "lost", "task": 1}]
    stacks = 'Fatal Python error: Aborted\n  File ".../torch/distributed/distributed_c10d.py", line 1 in all_reduce'
    known = {1: {"rank": 1, "host": "a", "pid": 7, "crash": stacks}}
    called = {"name": "all_reduce", "tensors": "[300000] Float", "group": "0", "number": 1}
    other = {"kind": "failed", "task": 0, "rank": 0, "host": "a", "pid": 6, "error": "RuntimeError: Connection closed",
             "is_secondary": True, "collective": called}  # fmt: skip
    error = root_cause([*lost, other], known, None, {})
    assert "was ended by SIGABRT; Gloo aborts the process of a rank that gives a smaller tensor" in error.reason
    assert error.reason.endswith("; rank 0 had called all_reduce [[300000] Float]")
    known[1]["crash"] = "Fatal Python error: Aborted\n  File somewhere else"
    assert root_cause(lost, known, None, {}).reason.endswith("(pid 7) was ended by SIGABRT")
