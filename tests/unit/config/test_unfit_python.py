"""Which errors of Spark mean that an executor's Python does not fit, and what is said then: host, found, expected."""

import importlib.resources
import json

import pytest

from spark_dl import __version__
from spark_dl.config.checks import unfit_python

WORDS = importlib.resources.files("pyspark.errors").joinpath("error-conditions.json")
TASK = (
    "Job aborted due to stage failure: Task 1 in stage 3.0 failed 4 times, most recent failure: Lost task 1.3 in stage "
    "3.0 (TID 9) (10.0.0.7 executor 2): org.apache.spark.api.python.PythonException: Traceback (most recent call last):"
)


def mismatch(found, expected):
    """Spark's own words for another Python."""
    words = " ".join(json.loads(WORDS.read_text())["PYTHON_VERSION_MISMATCH"]["message"])
    return words.replace("<worker_version>", found).replace("<driver_version>", expected)


@pytest.mark.parametrize(("error", "expected"), [
    ("ModuleNotFoundError: No module named 'torch'", "has no torch; set PYSPARK_PYTHON to an interpreter that"),
    ("No module named 'spark_dl.launch'", "has no spark_dl.launch; set PYSPARK_PYTHON"),
    ("No module named spark_dl", "or install them there (of the files of --py-files, executors take .zip, .egg"),
    ("Can't get attribute 'x' on <module 'spark_dl.spec'", f"than the driver, which has {__version__}; install"),
    ("ImportError: cannot import name 'x' from 'spark_dl.spec'", "has another version of spark_dl than the driver"),
])  # fmt: skip
def test_the_error_names_the_host_and_what_it_lacks(error, expected):
    message = unfit_python(f"{TASK} {error}")
    assert message.startswith("host 10.0.0.7: the executor's Python has ")
    assert expected in message
    assert unfit_python(error).startswith("the executors' Python has "), "Spark does not always name the host"


@pytest.mark.skipif(not WORDS.is_file(), reason="PySpark 3.5 keeps its words elsewhere")
@pytest.mark.parametrize(("found", "said"), [("3.12", "3.12"), ("(3, 12)", "3.12"), ("3.9", "3.9")])
def test_another_python_is_named_with_that_of_the_driver(found, said):
    message = unfit_python(f"{TASK} [PYTHON_VERSION_MISMATCH] {mismatch(found, '3.11')}")
    assert message == (
        f"host 10.0.0.7: the executor's Python is {said}, expected 3.11, which the driver has; set PYSPARK_PYTHON to "
        f"an interpreter of Python 3.11 that all executors have, or start the driver with Python {said}"
    )


@pytest.mark.parametrize("error", ["No module named 'sklearn'", "ValueError: a column", ""])
def test_other_errors_are_not_of_the_python(error):
    assert unfit_python(f"{TASK} {error}") is None
