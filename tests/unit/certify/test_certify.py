"""How weights and metrics are compared: nothing that is missing or not finite passes as the same."""

import math

import pytest
import torch

from spark_dl.certify.certificate import Certificate, Check
from spark_dl.certify.certify import _difference, _relative

START = {"a": torch.zeros(2), "b": torch.zeros(3)}
WEIGHTS = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(3), "calls": torch.tensor(7)}


def test_a_difference_is_the_part_of_what_training_did():
    found = {**WEIGHTS, "a": torch.tensor([3.0, 4.5])}
    assert _difference(found, WEIGHTS, START) == pytest.approx(0.1)
    assert _difference(WEIGHTS, WEIGHTS, START) == 0
    assert _difference(found, WEIGHTS, {}) == pytest.approx(0.1)
    assert _difference({**WEIGHTS, "calls": torch.tensor(8)}, WEIGHTS, START) == 0


@pytest.mark.parametrize("found", [
    {}, {"a": WEIGHTS["a"], "b": WEIGHTS["b"]}, {**WEIGHTS, "b": torch.zeros(4)},
    {**WEIGHTS, "a": torch.tensor([3.0, math.nan])}, {**WEIGHTS, "a": torch.tensor([3.0, math.inf])},
])  # fmt: skip
def test_what_is_missing_or_not_finite_differs(found):
    assert _difference(found, WEIGHTS, START) == math.inf


@pytest.mark.parametrize(("value", "expected", "size"), [
    (1.0, 1.0, 0.0), (1.1, 1.0, 0.1), (math.nan, math.nan, 0.0), (math.nan, 1.0, math.inf), (1.0, math.nan, math.inf),
    (math.inf, math.inf, 0.0), (math.inf, -math.inf, math.inf),
])  # fmt: skip
def test_metrics_that_are_not_finite_must_be_the_same(value, expected, size):
    assert _relative(value, expected) == pytest.approx(size)


def test_a_certificate_says_what_was_not_run_and_groups_what_has_one_cause():
    checks = (
        Check("2 ranks", "differs", 0.5, 1e-5, step=1, tensor="w", causes=("random",), why="draws", change="a setting"),
        Check("2 micro-batches", "differs", 0.4, 1e-5, causes=("random",), why="draws", change="a setting",
              size_with_change=1e-7),
        Check("3 ranks", "not run", why="needs 3 task slots, found 2"),
    )  # fmt: skip
    certificate = Certificate(checks, rows=10, steps=3, seconds=2.0)
    assert not certificate.passed
    assert certificate.summary == (
        "2 of 2 checks of 3 steps on 10 rows, in 2 s (1 not run): the trained weights depend on what they should not "
        "depend on"
    )
    assert certificate.text.count("draws") == 1
    assert "2 ranks; 2 micro-batches: draws\n  change: a setting" in certificate.text
    _, head, _, first, second, *_ = certificate.text.splitlines()[1:]
    assert head.split() == [
        "check",
        "differs",
        "by",
        "limit",
        "from",
        "step",
        "first",
        "tensor",
        "with",
        "the",
        "change",
    ]
    assert first.split() == ["differs", "2", "ranks", "5.0e-01", "1.0e-05", "1", "w"]
    assert second.split()[-1] == "1.0e-07"
    assert Certificate(checks[2:], 10, 3).passed
