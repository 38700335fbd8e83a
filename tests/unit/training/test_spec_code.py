"""Whether the code of a spec has changed since a checkpoint: what counts, and what does not."""

import functools
import subprocess
import sys

import pytest
import torch
from torch import nn

from spark_dl import ModelSpec
from spark_dl.training.initial import code_of, warn_of_changes
from tests.builders.models import MLP, build_mlp


def compiled(source, name="loss"):
    """A function from its source, as of a file that was edited."""
    found = {"torch": torch, "nn": nn, "functools": functools}
    exec(source, found)
    return found[name]


LOSS = "def loss(output, label, power=2):\n    return (output[:, 0] - label).abs() ** power\n"
CLASS = "class loss(nn.Module):\n    def forward(self, output, label):\n        return output[:, 0] - label\n"


def changed(before, after):
    a, b = (code_of(ModelSpec(build=build_mlp, loss=loss)) for loss in (before, after))
    return sorted(name for name in a if a[name] != b[name])


@pytest.mark.parametrize(("before", "after"), [
    (LOSS, LOSS.replace("abs()", "square()")), (LOSS, LOSS.replace("power=2", "power=3")),
    (LOSS, LOSS.replace("[:, 0]", "[:, 1]")), (CLASS, CLASS.replace("- label", "+ label")),
    (LOSS, CLASS),
])  # fmt: skip
def test_B32_other_code_of_the_loss_is_noticed(before, after):
    assert changed(compiled(before), compiled(after)) == ["spec.loss"]


@pytest.mark.parametrize("after", ["# a comment\n\n" + LOSS, LOSS.replace("\n    return", "\n    # why\n    return")])
def test_B32_comments_and_positions_are_no_change(after):
    assert changed(compiled(LOSS), compiled(after)) == []


def test_B32_plain_variables_count_and_other_objects_by_their_class():
    def with_weight(weight):
        return lambda output, label: (output[:, 0] - label).abs() * weight

    assert changed(with_weight(2.0), with_weight(2.0)) == []
    assert changed(with_weight(2.0), with_weight(3.0)) == ["spec.loss"]
    assert changed(with_weight(torch.ones(1)), with_weight(torch.zeros(1))) == []
    assert changed(nn.MSELoss(reduction="none"), nn.L1Loss(reduction="none")) == ["spec.loss"]
    partial = functools.partial(nn.functional.huber_loss, reduction="none", delta=1.0)
    assert changed(partial, functools.partial(partial, delta=2.0)) == ["spec.loss"]


def test_B32_objects_that_refer_to_each_other_are_looked_at_once():
    class Node:
        def __call__(self, output, label):
            return output[:, 0] - label

    nodes = [Node() for _ in range(30)]
    for node in nodes:
        node.others, node.number = nodes, 1
    before = code_of(ModelSpec(build=build_mlp, loss=nodes[0]))
    nodes[7].number = 2
    assert code_of(ModelSpec(build=build_mlp, loss=nodes[0]))["spec.loss"] != before["spec.loss"]


@pytest.mark.slow
def test_B32_checksums_are_the_same_in_another_process():
    script = "from tests.unit.training.test_spec_code import MLP, code_of; print(code_of(MLP))"
    env = {"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    out = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str(code_of(MLP))


def test_B32_changes_are_a_warning_with_the_names_and_the_checkpoint(caplog):
    before = code_of(MLP)
    after = {**before, "spec.loss": "other", "spec.transform": "new"}
    warn_of_changes(before, after, "/runs/1/checkpoints/step-2")
    found = "the code or the variables of spec.loss, spec.transform have changed since the checkpoint"
    assert f"{found} /runs/1/checkpoints/step-2 was saved; the run goes on with the new ones" in caplog.text
    caplog.clear()
    warn_of_changes(before, before, "url")
    warn_of_changes(None, before, "url")
    warn_of_changes({**after, "python": "3.9"}, before, "url")
    assert caplog.text == ""
