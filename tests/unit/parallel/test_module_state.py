"""What a forward pass changes beside the parameters: restored after a trial pass, and named if no checkpoint has it."""

import numpy as np
import pytest
import torch
from torch import nn

from spark_dl.parallel.modules import CpuSyncBatchNorm, ModuleState, module_state_kept


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls, self.seen, self.history = 0, {"rows": []}, np.zeros(3)
        self.generator = torch.Generator().manual_seed(7)
        self.register_buffer("total", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.calls += 1
        self.seen["rows"].append(len(x))
        self.history += 1
        self.total += x.sum(0)
        self.scratch += 1
        self.last = x
        return self.linear(x + torch.randn(x.shape, generator=self.generator))


class Saving(Counting):
    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


@pytest.mark.parametrize("build", [Counting, lambda: nn.Sequential(Counting())], ids=["alone", "inside"])
def test_all_of_it_is_restored_after_a_trial_pass(build):
    model, x = build(), torch.ones(4, 2)
    inner = model if isinstance(model, Counting) else model[0]
    with module_state_kept(model):
        tried = model(x)
    assert (inner.calls, inner.seen, inner.history.tolist()) == (0, {"rows": []}, [0.0] * 3)
    assert inner.total.tolist() == inner.scratch.tolist() == [0, 0]
    assert not hasattr(inner, "last")
    torch.testing.assert_close(model(x), tried)  # the same random numbers again


def test_what_no_checkpoint_has_is_named():
    model = nn.Sequential(Counting(), Saving())
    state = ModuleState(model)
    assert state.changed_unsaved() == []
    model(torch.ones(4, 2))
    assert state.changed_unsaved() == [
        "'calls' of Counting (0)", "'seen' of Counting (0)", "'history' of Counting (0)",
        "'generator' of Counting (0)", "the buffer 'scratch' of Counting (0)",
    ]  # fmt: skip


def test_modes_and_parameters_are_no_state_of_this_kind():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    state = ModuleState(model)
    model.eval()
    with torch.no_grad():
        model[0].weight.add_(1)
        model[1].running_mean.add_(1)
    assert state.changed_unsaved() == []


def test_a_batchnorm_over_ranks_takes_rows_and_channels():
    norm = CpuSyncBatchNorm(3)
    with pytest.raises(ValueError, match=r"BatchNorm takes \[rows, channels, ...\], found the shape \(3,\)"):
        norm(torch.ones(3))


class Reassigned(nn.Module):
    """Puts new tensors in the place of its buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.mean, self.hidden, self.table = self.mean + 1, self.hidden + 1, torch.zeros(5)
        return x


def test_buffers_that_are_replaced_are_restored_and_named():
    model = Reassigned()
    with module_state_kept(model):
        model(1)
    assert not model.mean.any()
    assert not model.hidden.any()
    assert model.table.shape == (2,)
    state = ModuleState(model)
    model(1)
    assert state.changed_unsaved() == ["the buffer 'hidden' of Reassigned"]
