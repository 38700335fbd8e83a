"""Runs Spark tasks that write shards, and returns their results and errors."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spark_dl.config.checks import missing_on_executors
from spark_dl.data.dataset.manifest import CANNOT_WRITE
from spark_dl.data.write.partition import PartitionResult
from spark_dl.spark_job import collect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def run_tasks(df: DataFrame, task: Any, description: str) -> list[PartitionResult]:
    """Runs a task over the partitions of a DataFrame. Raises RuntimeError, with its cause, if a task cannot write.

    description: of the job, in Spark's UI.
    """
    try:
        rows = collect(df.mapInArrow(task, "part string"), description)
    except Exception as error:  # Spark Connect and classic Spark have different classes
        if found := re.search(rf"^\s*RuntimeError: ({CANNOT_WRITE}.*)$", str(error), re.MULTILINE):
            raise RuntimeError(found.group(1)) from error
        if missing := missing_on_executors(str(error)):
            raise RuntimeError(missing) from error
        raise
    return sorted((PartitionResult.from_plain(json.loads(row["part"])) for row in rows), key=lambda p: p.partition)


def with_host(url: str, write: Callable[[], PartitionResult]) -> PartitionResult:
    """Calls `write`. Raises RuntimeError with the host for an OSError; Spark then retries the task."""
    try:
        return write()
    except OSError as error:
        raise RuntimeError(
            f"{CANNOT_WRITE} {url} on host {socket.gethostname()}: {error}; all executors must reach the folder, be "
            "allowed to write there, and have free space"
        ) from error
