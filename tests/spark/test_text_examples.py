"""The text examples as a user runs them, with less text and smaller models: each keeps what it promises."""

import re
import subprocess
import sys

import pytest

from tests.spark.conftest import REPOSITORY
from tests.spark.test_jobs import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run_example(name, *arguments):
    command = [sys.executable, f"examples/{name}", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)


def numbers(line):
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


SMALL_TEXT = ["--packages", "asyncio,email,http,logging", "--width", "64", "--batch", "16", "--lr", "8e-3"]


def test_a_transformer_predicts_characters_better_than_bigrams(tmp_path):
    done = run_example("text_generation.py", "--run_dir", str(tmp_path / "run"), *SMALL_TEXT)
    assert done.returncode == 0, done.stderr[-4000:]
    last = done.stdout.splitlines()[-1]
    loss, bigram = numbers(last)
    assert 1 < loss < bigram < 3
    assert last.endswith(": lower than the bigram")
    assert "\n    def " in done.stdout, "no generated text"


def test_a_bert_classifier_is_better_than_naive_bayes(tmp_path):
    pytest.importorskip("transformers")
    small = ["--layers", "1", "--epochs", "2"]
    done = run_example("text_classification.py", "--run_dir", str(tmp_path / "run"), *small)
    assert done.returncode == 0, done.stderr[-4000:]
    found, bayes, most_frequent, margin = numbers(done.stdout.splitlines()[-1])
    assert found >= bayes + margin > most_frequent + margin
