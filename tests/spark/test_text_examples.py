"""The text examples as a user runs them, with less text and smaller models: each keeps what it promises."""

import re

import pytest

from tests.spark.test_examples import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def numbers(line):
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


SMALL_TEXT = ["--packages", "asyncio,email,http,logging", "--width", "64", "--batch", "16", "--lr", "8e-3"]


@pytest.mark.long
def test_a_transformer_predicts_characters_better_than_bigrams(tmp_path):
    out, _ = run("text_generation", "--run_dir", tmp_path / "run", *SMALL_TEXT)
    last = out.splitlines()[-1]
    loss, bigram = numbers(last)
    assert 1 < loss < bigram < 3
    assert last.endswith(": lower than the bigram")
    assert "\n    def " in out, "no generated text"


@pytest.mark.long
def test_a_bert_classifier_is_better_than_naive_bayes(tmp_path):
    pytest.importorskip("transformers")
    small = ["--layers", "1", "--epochs", "2"]
    out, _ = run("text_classification", "--run_dir", tmp_path / "run", *small)
    found, bayes, most_frequent, margin = numbers(out.splitlines()[-1])
    assert found >= bayes + margin > most_frequent + margin
