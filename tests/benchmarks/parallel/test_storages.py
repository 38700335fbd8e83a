"""The bytes of tensors are those of their storages, each once, for as long as they exist."""

import torch

from benchmarks.parallel.storages import Storages


def test_a_storage_counts_once_while_a_tensor_uses_it():
    with Storages() as storages:
        whole = torch.zeros(100)
        view = whole[10:20].view(2, 5)
        other = torch.ones(7, dtype=torch.int64)
        assert sorted(storages.now().values()) == [56, 400]
        del whole
        assert sorted(storages.now().values()) == [56, 400]
        del view, other
        assert storages.now() == {}


def test_the_peak_is_the_most_at_one_time():
    with Storages() as storages:
        kept = torch.zeros(10)
        torch.zeros(1000)  # before the start
        storages.start_peak()
        for size in (50, 200, 100):
            torch.zeros(size)
        weights = torch.zeros(20)
    assert sorted(storages.peak.values()) == [40, 800]
    assert storages.by_kind(storages.peak, {"weights": [weights], "kept": [kept]}) == {
        "weights": 0, "kept": 40, "other": 800,
    }  # fmt: skip


def test_a_storage_that_shrinks_is_seen():
    with Storages() as storages:
        gathered = torch.zeros(1000)
        storages.start_peak()
        gathered.untyped_storage().resize_(0)
        torch.zeros(10)
    assert sorted(storages.peak.values()) == [0, 40]


def test_gradients_and_what_autograd_keeps_are_seen():
    with Storages() as storages:
        weight = torch.zeros(30, 30, requires_grad=True)
        x = torch.ones(5, 30)
        storages.start_peak()
        (x @ weight).exp().sum().backward()
    kinds = storages.by_kind(storages.peak, {"weights": [weight.detach()], "gradients": [weight.grad]})
    assert kinds["weights"] == kinds["gradients"] == 3600
    assert kinds["other"] >= 600  # the input, at least
