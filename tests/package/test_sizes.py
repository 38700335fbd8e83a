"""What an installation has on disk, and how long the import takes: the figures of docs/install.md and of the README."""

import configparser
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
CPU_TORCH_MB = 870


def closure(*lines):
    """The names of the packages that these requirements need, with themselves, as they are installed here."""
    found, todo = set(), [Requirement(line) for line in lines]
    while todo:
        wanted = todo.pop()
        name, extras = re.sub(r"[-_.]+", "-", wanted.name).lower(), {"", *wanted.extras}
        if (name, *sorted(extras)) in found:
            continue
        found.add((name, *sorted(extras)))
        for line in importlib.metadata.distribution(name).requires or []:
            inner = Requirement(line)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(inner)
    return {name for name, *_ in found}


def mb(names):
    """The size of the files of packages in MB."""
    files = [file.locate() for name in names for file in importlib.metadata.distribution(name).files or []]
    return sum(path.stat().st_size for path in map(Path, files) if path.exists()) / 1e6


def declared():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return settings


def lines_of(text):
    return [line for line in (line.partition("#")[0].strip() for line in text.splitlines()) if line]


def sizes():
    base = closure(*lines_of(declared()["options"]["install_requires"]))
    torch, spark, rows = closure("torch"), closure("pyspark"), closure("pyspark[sql]")
    return {"all": mb(base), "torch": mb(torch), "pyspark": mb(spark), "rows": mb(rows - spark - torch),
            "added": mb(base - torch - rows)}  # fmt: skip


def of_page(page, row):
    return int(
        re.search(rf"^\| {row}[^|]*\| ([\d,]+) \|$", (ROOT / page).read_text(), re.MULTILINE)[1].replace(",", "")
    )


@pytest.fixture(scope="module")
def found():
    sizes_here = sizes()
    if sizes_here["torch"] > 1.5 * CPU_TORCH_MB:
        pytest.skip(f"torch is not the build for CPUs: {sizes_here['torch']:.0f} MB")
    return sizes_here


@pytest.mark.parametrize(("row", "part"), [
    ("spark_dl with PySpark", "all"), ("of these PySpark", "pyspark"), ("of these torch", "torch"),
    ("of these pandas", "rows"), ("of these what spark_dl adds", "added"),
])  # fmt: skip
def test_the_page_says_the_size(found, row, part):
    assert of_page("docs/install.md", row) == pytest.approx(found[part], rel=0.1, abs=10)


def test_what_spark_dl_adds_to_spark_and_torch_is_small(found):
    assert found["added"] < 60


def test_make_train_installs_what_the_package_and_its_plots_need_and_no_more(found):
    demo = closure(*lines_of((ROOT / "conf/requirements/main.txt").read_text()))
    settings = declared()
    needed = [settings["options"]["install_requires"], settings["options.extras_require"]["plot"]]
    assert demo == closure(*lines_of("\n".join(needed)), "setuptools")
    said = re.search(r"makes `\.venv` with ([\d.]+) GB", (ROOT / "docs/install.md").read_text())[1]
    assert float(said) == pytest.approx(mb(demo) / 1000, abs=0.1)
    assert f"{said} GB" in (ROOT / "README.md").read_text()


def test_the_import_of_the_package_takes_no_time_beside_torch_and_pyspark():
    """Modules are counted, not seconds: none but its own, which load what they need when a name is used."""
    code = "import sys, torch, pyspark; before = {*sys.modules}; import spark_dl; print(*({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert {*done.stdout.split()} == {"spark_dl", "spark_dl._version"}
