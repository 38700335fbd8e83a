"""Every code block of README and docs is run, or says why it cannot be.

    ```python     run; the blocks of a page share their names
    ```yaml       loaded by `load_config`
    ```bash       scripts, their flags and make targets exist; nothing is run
    ```text       shown only, as is a `toml` block, and a diagram in `mermaid`

Blocks that readers do not need to see stand in `<!--- invisible-code-block: python ... -->`. A block that cannot be
run has a comment right above it, `<!-- not run: reason -->`.
"""

import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import CodeBlockParser

import spark_dl

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
SHOWN = ("text", "toml", "properties", "mermaid", "{toctree}", "{eval-rst}")
PROGRAMS = (
    "make",
    "git",
    "pip",
    "python",
    "spark-submit",
    "torchrun",
    "cd",
    "export",
    "sudo",
    "docker",
    "kubectl",
    "ls",
)
NOT_RUN = re.compile(r"<!-- not run: \S.* -->\n\Z")

pytestmark = pytest.mark.timeout(240)


def run_python(example):
    code = "\n" * (example.line + example.parsed.line_offset) + example.parsed
    exec(compile(code, example.path, "exec", dont_inherit=True), example.namespace)


def load_yaml(example):
    path = Path("settings.yaml")
    path.write_text(example.parsed)
    spark_dl.load_config(str(path))


def check_bash(example):
    check_shell(example.parsed)


RUN = {"python": run_python, "yaml": load_yaml, "bash": check_bash}
SYBIL = Sybil([CodeBlockParser(language, run) for language, run in RUN.items()])


def check_shell(text):
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if words:
            check_command(words)


def check_command(words):
    program = Path(words[0]).name
    assert program in PROGRAMS, f"unknown program {program}"
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        unknown = [w for w in words[1:] if re.fullmatch(r"[\w-]+", w) and w not in targets]
        assert not unknown, f"the Makefile has no target {unknown}"
    for at, word in enumerate(words):
        if re.match(r"(jobs|examples|conf|docs)/.*\.(py|sh|yaml)$", word):
            assert (ROOT / word).exists(), f"there is no {word}"
        if re.match(r"jobs/\w+\.py$", word):
            check_flags(word, words[at + 1 :])


def check_flags(script, words):
    command = [words[0]] if script == "jobs/bench.py" and words and not words[0].startswith("-") else []
    known = flags_of(script, *command)
    for word in words:
        if word.startswith("--"):
            assert word.split("=")[0] in known, f"{script} knows no {word}"


@functools.cache
def flags_of(script, *command):
    done = subprocess.run(
        [sys.executable, script, *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return {*re.findall(r"--[\w.-]+", done.stdout)}


@pytest.mark.modes("local")
@pytest.mark.parametrize("page", PAGES)
def test_code_blocks(spark, page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = SYBIL.parse(ROOT / page)
    for example in document.examples():
        if not NOT_RUN.search(document.text[: example.start]):
            example.evaluate()


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language_that_is_run_or_shown(page):
    languages = re.findall(r"^```(.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert {*languages} <= {*RUN, *SHOWN}
    fences = len(re.findall(r"^```", (ROOT / page).read_text(), re.MULTILINE))
    assert fences == 2 * len(languages), "a block has no language"
