"""Every code block of README and docs is run or checked, or says why it cannot be.

    ```python     run; the blocks of a page share their names
    ```yaml       read as the `--config` of a job, which knows the settings, `input` and `model`
    ```bash       read, never run: programs, make targets and files exist, and spark-dl's own parser takes the arguments
                  (that of docs/quickstart.md is run as a whole: package/test_wheel.py)
    ```text       shown only, as are `diff`, `toml`, `properties` and `dockerfile`

The set-up of a page is a block that is folded. Checks stand in `<!--- invisible-code-block: python ... -->`. A block of
Python that cannot be run has a comment right above it, `<!-- not run: reason -->`; it is compiled all the same. A block
of bash may have one for readers of the source.
"""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import CodeBlockParser

import spark_dl
import spark_dl.ml
import spark_dl.nn
from jobs import bench
from spark_dl.cli import arguments
from spark_dl.cli.main import COMMANDS
from spark_dl.config.load import read_file

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
PAGES.remove("docs/tutorial.md") if "docs/tutorial.md" in PAGES else None  # written by the build of the documentation
MARKS = {
    "slow": (
        "migration", "data", "external", "clusters", "model-parallel",
        "streams", "pictures",
    ),
    "long": (
        "lines-of-code", "experts", "lightning", "launch", "own-loop", "resume", "train", "huggingface",
        "use-elsewhere", "spark-ml", "tracking", "trials",
    ),
}  # fmt: skip
"""Of pages whose blocks take longest."""
SHOWN = ("text", "diff", "toml", "properties", "dockerfile", "{toctree}", "{image}", "{eval-rst}")
PROGRAMS = (
    "make",
    "git",
    "python",
    "python3",
    "spark-submit",
    "torchrun",
    "tensorboard",
    "cd",
    "build_horovod.sh",
    "tar",
    "export",
    "docker",
    "kubectl",
    "spark-dl",
    "pip",
    "venv-pack",
    "conda",
    "conda-pack",
    "cp",
)
OF_READER = ("train.yaml",)
"""Settings that the reader of a page has made."""  # fmt: skip
NOT_RUN = re.compile(r"<!-- not run: \S.* -->\n\Z")
IN_IMAGE = re.compile(r"(local://)?/opt/spark_dl/")
"""Where the container image of docs/clusters.md has this repository."""

pytestmark = pytest.mark.timeout(240)


def run_python(example):
    code = compile(
        "\n" * (example.line + example.parsed.line_offset) + example.parsed, example.path, "exec", dont_inherit=True
    )
    if not NOT_RUN.search(example.document.text[: example.start]):
        exec(code, example.namespace)


def read_yaml(example):
    path = Path("settings.yaml")
    path.write_text(example.parsed)
    parse_arguments("train", ["--config", str(path.absolute())])


def check_bash(example):
    check_shell(example.parsed)


RUN = {"python": run_python, "yaml": read_yaml, "bash": check_bash}
SYBIL = Sybil([CodeBlockParser(language, run) for language, run in RUN.items()])


def check_shell(text):
    """Raises AssertionError, or ends as the job does, for a command that this repository does not know."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        words = [IN_IMAGE.sub("", word) for word in shlex.split(line, comments=True)]
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if words:
            check_command(words)


def check_command(words):
    program = Path(words[0]).name
    assert program in PROGRAMS, f"unknown program {program}"
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        unknown = [w for w in words[1:] if "=" not in w and w not in targets]
        assert not unknown, f"the Makefile has no target {unknown}"
    for at, word in enumerate(words):
        if re.match(r"(jobs|examples|conf|docs)/", word):
            assert (ROOT / word).exists(), f"there is no {word}"
        if job := re.fullmatch(r"jobs/(\w+)\.py", word):
            parse_arguments(job.group(1), words[at + 1 :])
    if program == "spark-dl":
        assert words[1] in COMMANDS or words[1].startswith("-"), f"there is no command {words[1]}"
        parse_arguments(words[1], words[2:])


def parse_arguments(command, words):
    """As the command does it; an argument that it does not take ends with SystemExit, the reason on standard error."""
    if command == "bench":
        bench.build_parser().parse_args(words)
    elif command in COMMANDS and "--help" not in words:
        module = importlib.import_module(f"spark_dl.commands.{command}")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)
            patch.setattr(arguments, "read_file", lambda path: read_file(path) if path not in OF_READER else {})
            has_settings = command not in ("init", "plan", "report", "clean")
            arguments.parse(command, "", module.OPTIONS, words, has_settings=has_settings)


def marks_of(page):
    return [getattr(pytest.mark, mark) for mark, pages in MARKS.items() if Path(page).stem in pages]


@pytest.mark.modes("local")
@pytest.mark.parametrize("page", [pytest.param(page, marks=marks_of(page)) for page in PAGES])
def test_code_blocks(spark, page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for example in SYBIL.parse(ROOT / page).examples():
        example.evaluate()


def examples():
    """The examples in the docstrings of the public names, by name: lines after `>>>` and `...`."""
    found = {}
    for module in (spark_dl, spark_dl.ml, spark_dl.nn):
        for name in module.__all__:
            lines = re.findall(r"^ *(?:>>>|\.\.\.) ?(.*)$", getattr(module, name).__doc__ or "", re.MULTILINE)
            if lines:
                found[name] = "\n".join(lines)
    return found


ORDER = (
    "ModelSpec", "load_config", "train", "evaluate", "predict", "predict_udf", "save_model", "load_model", "export",
    "report", "write_shards", "read_shards", "open_dataset", "store_shards", "clean_store",
)  # fmt: skip
"""Examples that use the files of those before them; the others follow."""


RETURNED = {
    "Checkpoints", "Diagnosis", "Finding", "LoadedCheckpoint", "MeshPlans", "RankRows", "Removed", "SettingError",
    "ShardSet", "StepInfo", "TorchClassificationModel", "TorchModel", "TorchRegressionModel", "TrialResult",
    "TuneResult", "World",
}  # fmt: skip
"""Names of what functions return or raise: the examples of these functions show them."""
BASES = {"Parallel", "Strategy"}
"""What the page of own strategies builds on."""


@pytest.mark.modes("local")
def test_the_examples_of_the_reference_run_as_they_are(spark, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    df = spark.range(200).selectExpr("array(CAST(id AS FLOAT), 1f) AS features", "id % 2 AS label")
    config = spark_dl.Config(
        data=spark_dl.Data(features=("features",), label="label"), launch=spark_dl.Launch(num_ranks=2)
    )
    names = {"spark_dl": spark_dl, "torch": torch, "df": df, "config": config}
    names |= {name: getattr(spark_dl.ml, name) for name in ("TorchEstimator", "TorchClassifier", "TorchRegressor")}
    found = examples()
    public = {*spark_dl.__all__, *spark_dl.ml.__all__, *spark_dl.nn.__all__} - {"nn"}
    assert {*found} == public - RETURNED - BASES
    for name in (*ORDER, *sorted({*found} - {*ORDER})):
        exec(compile(found[name], f"<the example of {name}>", "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language_that_is_run_or_shown(page):
    text = (ROOT / page).read_text()
    languages = re.findall(r"^ *```(\S+)(?: \S+)?$", text, re.MULTILINE)
    assert {*languages} <= {*RUN, *SHOWN}
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(languages), "a block has no language"


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("curl http://host/install", "unknown program curl"),
        ("make trian", "trian"),
        ("python jobs/trian.py", "there is no jobs/trian.py"),
        ("spark-submit --properties-file conf/spark/mesos.conf jobs/train.py", "there is no conf/spark/mesos.conf"),
        ("python jobs/train.py --config digits.yaml", "digits.yaml"),
        ("python jobs/train.py --train.learning_rate 0.1", "train.learning_rate"),
        ("python jobs/train.py --train.lr fast", "train.lr"),
        ("python jobs/train.py --parallel.sync_every_steps 8", "local_sgd"),
        ("python jobs/predict.py --resume", "resume"),
        ("spark-dl trian --resume", "there is no command trian"),
        ("spark-dl train --train.learning_rate 0.1", "train.learning_rate"),
        ("spark-dl clean runs --older 3", "older"),
        ("spark-dl report", "RUN_DIR"),
        ("python jobs/bench.py launch --files 5", "--files"),
    ],
)
def test_a_command_that_is_wrong_is_found(line, fact, capsys):
    with pytest.raises((AssertionError, SystemExit)) as error:
        check_shell(line)
    assert fact in f"{error.value} {capsys.readouterr().err}"
