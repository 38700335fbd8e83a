"""What the weights of rows say of their uses, and what a checksum tells apart."""

import pytest
import torch

from benchmarks.faults import ledger
from benchmarks.faults.ledger import CountingNetwork, Ledger, count_uses, read_ledger
from benchmarks.faults.state import checksums

STEPS = 60


def train(uses, momentum=ledger.MOMENTUM):
    """Weights of rows after steps in each of which some rows are used. # uses: [steps] lists of rows"""
    train, _ = ledger.settings(epochs=1)
    model = CountingNetwork(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=train.lr, momentum=momentum)
    for rows in uses:
        features, label = torch.randn(len(rows), 8), torch.zeros(len(rows), dtype=torch.int64)
        losses = ledger.loss(model(features, torch.tensor(rows)), label) if rows else model.uses[:0]
        (losses.sum() / train.global_batch_size).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model.uses.detach()


@pytest.mark.parametrize("times", range(ledger.MOST_USES + 1))
def test_uses_are_counted_however_many_steps_follow(times):
    early = train([[0]] * times + [[]] * STEPS)
    late = train([[]] * STEPS + [[0]] * times)
    for weight in (early, late):
        assert count_uses(weight).tolist() == [times, *[0] * 7]


def test_lost_and_repeated_uses_are_those_beside_one_in_each_epoch():
    once = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert read_ledger({"uses": train(once + once)}, 2) == Ledger(lost=0, repeated=0)
    assert read_ledger({"uses": train([*once, [0, 1, 2], [4, 5, 6, 7, 7]])}, 2) == Ledger(lost=1, repeated=1)


def test_more_epochs_than_can_be_counted_are_an_error():
    with pytest.raises(ValueError, match="epochs: expected 1 to 5, so that uses can be counted, found 6"):
        ledger.settings(ledger.MOST_USES)


@pytest.mark.parametrize("other", [
    {"weight": torch.tensor([1.0, 2.0])}, {"weight": torch.tensor([1.0, 3.0], dtype=torch.float64)},
    {"weight": torch.tensor([[1.0, 3.0]])}, {"bias": torch.tensor([1.0, 3.0])}, {"weight": [1.0, 3.0]},
    {"weight": torch.tensor([1.0, 3.0]), "step": 1},
], ids=["value", "dtype", "shape", "name", "type", "more"])  # fmt: skip
def test_states_that_differ_have_other_checksums(other):
    state = {"weight": torch.tensor([1.0, 3.0])}
    assert checksums({"weights": state, "rest": 1}) == checksums({"weights": {**state}, "rest": 1})
    assert checksums({"weights": state})["weights"] != checksums({"weights": other})["weights"]


def test_nesting_is_part_of_a_checksum():
    assert checksums({"a": [[1], [2]]}) != checksums({"a": [[1, 2], []]})
