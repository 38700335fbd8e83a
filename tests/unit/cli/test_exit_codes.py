"""Which exit code each kind of failure has: whether a scheduler that tries again can succeed."""

import errno
import logging
import signal

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import AnalysisException, PythonException
from pyspark.errors.exceptions.connect import SparkConnectGrpcException

from spark_dl.cli import arguments, exit_codes
from spark_dl.config.checks import SettingError, UnfitPythonError
from spark_dl.launch.failures.errors import RankError
from spark_dl.launch.preflight import TooFewSlotsError
from spark_dl.rundir.generations import SupersededError
from spark_dl.spark_job import SessionEndedError


@pytest.fixture
def process():
    """What a command sets for its process: the log and the handler of SIGTERM."""
    root, level, terminate = logging.getLogger(), logging.getLogger("spark_dl").level, signal.getsignal(signal.SIGTERM)
    handlers = [*root.handlers]
    yield
    root.handlers[:] = handlers
    logging.getLogger("spark_dl").setLevel(level)
    signal.signal(signal.SIGTERM, terminate)


def rank_error(**about):
    return RankError("rank 1 failed", rank=1, host="host", pid=3, **about)


@pytest.mark.parametrize(("error", "code"), [
    (SettingError("train.lr", "expected a number"), 2),
    (ValueError("no column 'x'"), 1),
    (TypeError("cannot pickle"), 1),
    (ModuleNotFoundError("no module matplotlib"), 1),
    (AssertionError("a bug"), 1),
    (RuntimeError("cannot write shards to s3://bucket on host a"), 75),
    (SessionEndedError("the JVM of Spark's driver has ended"), 75),
    (rank_error(), 75),
    (rank_error(error="ended by SIGTERM"), 75),
    (rank_error(error="ValueError: x", is_retryable=False), 1),
    (rank_error(step=3, error="OSError: x").after([rank_error()], "the same error came twice", again=True), 1),
    (UnfitPythonError("host a: the executor's Python has no torch"), 1),
    (SupersededError("attempt 2 has started since"), 1),
    (TooFewSlotsError("3 ranks need 3 task slots", is_retryable=True), 75),
    (TooFewSlotsError("3 ranks need 3 task slots", is_retryable=False), 1),
    (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), 75),
    (TimeoutError("no answer"), 75),
    (OSError(errno.EIO, "disk"), 75),
    (OSError("s3://bucket/x: AWS Error NETWORK_CONNECTION"), 75),
    (OSError(errno.ENOSPC, "disk full"), 1),
    (FileNotFoundError("s3://bucket/x"), 1),
    (PermissionError("no access to s3://bucket/x"), 1),
    (AnalysisException("[PATH_NOT_FOUND] x"), 1),
    (PythonException("An exception was thrown from the Python worker: ValueError ... Connection refused"), 1),
    (Py4JError("Job aborted: ExecutorLostFailure (executor 2 exited caused by one of the running tasks)"), 75),
    (Py4JError("Job aborted: UDF failed"), 1),
    (Py4JNetworkError("Answer from Java side is empty: Connection reset"), 75),
    (SparkConnectGrpcException("<_InactiveRpcError UNAVAILABLE failed to connect>"), 75),
])  # fmt: skip
def test_the_code_says_whether_the_same_command_can_succeed_later(error, code):
    assert exit_codes.of(error) == code


def raising(error):
    def work():
        raise error

    return work


@pytest.mark.parametrize(("error", "code", "said"), [
    (ValueError("no column 'x'"), 1, "error: no column 'x'\n"),
    (KeyError("x"), 1, "error: KeyError: 'x'\n"),
    (arguments.UsageError("output: expected a path"), 2, "error: output: expected a path\n"),
    (RuntimeError("no network"), 75, "error: no network\nThe same command can succeed later (exit code 75).\n"),
    (KeyboardInterrupt(), 130, "error: interrupted\n"),
])  # fmt: skip
def test_a_command_that_fails_says_why_on_standard_error_and_ends_with_its_code(process, capsys, error, code, said):
    with pytest.raises(SystemExit, match=f"^{code}$"):
        arguments.run(raising(error))
    out, err = capsys.readouterr()
    assert (out, err) == ("", said)


@pytest.mark.parametrize("is_good", [True, False])
def test_a_result_is_the_last_line_of_standard_output(process, capsys, is_good):
    with pytest.raises(SystemExit, match=f"^{int(not is_good)}$"):
        arguments.run(lambda: {"rows": 3}, is_success=lambda result: is_good)
    assert capsys.readouterr().out == '{"rows": 3}\n'
