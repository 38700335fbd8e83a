"""Settings of Spark in the properties files and on the page about clusters: Spark knows each of them, by this name."""

import re

import pyspark
import pytest

from tests.spark.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(
    pyspark.__version__ < "4", reason="the files are for Spark 4; Spark 3.5 has fewer settings"
)
PLATFORMS = (
    "clusters",
    "standalone",
    "yarn",
    "kubernetes",
    "databricks",
    "emr",
    "dataproc",
    "fabric",
    "gpus",
    "packages",
)
FILES = [*sorted(REPOSITORY.glob("conf/spark/*.conf")), *(REPOSITORY / "docs" / f"{name}.md" for name in PLATFORMS)]
OBJECTS = ("internal.config.package$", "deploy.k8s.Config$", "deploy.yarn.config.package$")
"""Scala objects with entries, which register themselves once the object is there."""
NO_ENTRIES = {"spark.master", "spark.app.name", "spark.local.dir"}
NAME = r"[A-Za-z][\w-]*"
FAMILIES = re.compile(
    rf"spark\.(executor|task|worker)\.resource\.{NAME}\.(amount|discoveryScript|vendor)"
    rf"|spark\.(executorEnv|yarn\.appMasterEnv)\.{NAME}"
    rf"|spark\.kubernetes\.(driver|executor)\.secretKeyRef\.{NAME}"
    rf"|spark\.kubernetes\.(driver|executor)\.volumes\.(persistentVolumeClaim|emptyDir|nfs|hostPath)\.{NAME}"
    r"\.(mount\.(path|readOnly|subPath)|options\.\w+)"
)
"""Settings whose names have a part that the user chooses, in Spark's documentation of 4.x."""
PREFIXES = {
    "spark.kubernetes.driver.volumes", "spark.kubernetes.executor.volumes", "spark.kubernetes.driver.secretKeyRef",
    "spark.kubernetes.executor.secretKeyRef", "spark.yarn.appMasterEnv", "spark.executorEnv",
}  # fmt: skip
"""As the page names all of a family, with `.*`."""


def names(text):
    """All names of settings, also in comments, but no calls, paths and files."""
    return {name.rstrip(".") for name in re.findall(r"(?<![\w./-])spark\.[A-Za-z][\w.-]*(?![\w.(-])", text)}


@pytest.fixture(scope="module")
def knows(spark):
    jvm = spark.sparkContext._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    for name in OBJECTS:
        jvm.java.lang.Class.forName(f"org.apache.spark.{name}", True, loader)
    return lambda name: jvm.org.apache.spark.internal.config.ConfigEntry.findEntry(name) is not None


@pytest.mark.modes("local")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_spark_knows_each_setting(knows, path):
    found = names(path.read_text())
    assert len(found) > 1
    entries = {name for name in found - NO_ENTRIES - PREFIXES if not FAMILIES.fullmatch(name)}
    assert {name for name in entries if not knows(name)} == set()


@pytest.mark.modes("local")
def test_a_wrong_name_is_found(knows):
    assert names("#spark.executor.momory 1g `spark.yarn.queue`.") == {"spark.executor.momory", "spark.yarn.queue"}
    assert knows("spark.yarn.queue")
    assert not knows("spark.executor.momory")
    assert not FAMILIES.fullmatch("spark.task.resource.gpu.amuont")
