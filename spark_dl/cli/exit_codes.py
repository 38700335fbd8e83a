"""The exit codes of the commands, by which a scheduler knows whether the same command can succeed later.

| code | meaning |
|---|---|
| 0 | done |
| 1 | failed; the same command would fail again: the code, the data, the model or the permissions are the cause |
| 2 | wrong usage: an option or a setting; nothing was started |
| 75 | failed, and the same command can succeed later: the cluster, the network or the storage is the cause |
| 130, 143 | ended by SIGINT or SIGTERM |

75 is EX_TEMPFAIL of `sysexits.h`.
"""

from __future__ import annotations

import errno
import re

DONE, FAILED, USAGE, TEMPORARY = 0, 1, 2, 75

_LASTING = frozenset({
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ENAMETOOLONG,
    errno.ENOSPC, errno.EDQUOT, errno.ELOOP, errno.ENOTEMPTY, errno.EINVAL,
})  # fmt: skip
"""Errors of files that somebody has to mend first."""
_LOST = re.compile(
    r"ExecutorLostFailure|FetchFailed|executor \S+ exited|Connection (refused|reset)|UnknownHost|No route to host|"
    r"All masters are unresponsive|Master removed our application|SparkContext (was|has been) (stopped|shut down)|"
    r"stopped SparkContext|UNAVAILABLE|RETRIES_EXCEEDED|INVALID_HANDLE\.SESSION|Read timed out|Broken pipe"
)
"""What Spark says of a cluster, a session or a server that has gone."""
_OF_FUNCTION = re.compile(r"PythonException|UserCodeException|An exception was thrown from the Python worker")
"""What Spark says of an error that a function of ours or of the user has raised in a task."""


def of(error: BaseException) -> int:
    """Returns the exit code for an error that has ended a command."""
    from spark_dl.config.checks import SettingError

    if isinstance(error, SettingError):
        return USAGE
    return TEMPORARY if is_temporary(error) else FAILED


def is_temporary(error: BaseException) -> bool:
    """Whether the same command can succeed later, without a change of the code, the data or the settings.

    An attribute `is_retryable` of the error decides, as it does between the attempts of a run.
    """
    if (known := getattr(error, "is_retryable", None)) is not None:
        return bool(known)
    if isinstance(error, OSError):
        # Without a number: of an object store, whose files that are missing or forbidden have classes of their own.
        return error.errno not in _LASTING and not isinstance(error, (FileNotFoundError, PermissionError))
    name = type(error).__module__.partition(".")[0]
    if name in ("pyspark", "py4j", "grpc"):
        text = str(error)
        return bool(_LOST.search(text)) and not _OF_FUNCTION.search(text)
    # The package's own, about the cluster, its network or its storage. What is wrong with the caller's code, data or
    # settings is a ValueError; a RuntimeError that would come again has `is_retryable = False`.
    return type(error) is RuntimeError or (name == "spark_dl" and isinstance(error, RuntimeError))
