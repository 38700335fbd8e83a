"""The figures of asynchronous checkpoints, from times that were made by hand."""

import numpy as np
import pytest

from benchmarks.faults import async_saves


def test_a_stall_is_counted_once_and_compared_with_the_same_loop():
    plain = np.arange(21.0)  # 20 steps of a second
    stalled = plain + np.where(np.arange(21) >= 9, 3.0, 0.0) + np.where(np.arange(21) >= 19, 1.0, 0.0)
    times = {"ours": [plain] * 3, "ours_async": [stalled] * 3, "bare": [plain / 2], "bare_dcp_async": [plain]}
    assert async_saves.summary({name: [list(t) for t in of] for name, of in times.items()}) == {
        "ours_async_steps_ratio": pytest.approx(20 / 24), "ours_checkpoint_costs_s": pytest.approx(2.0),
        "ours_longest_stall_s": pytest.approx(3.0), "ours_steps_per_s": pytest.approx(1.0),
        "dcp_async_steps_ratio": pytest.approx(0.5), "dcp_checkpoint_costs_s": pytest.approx(5.0),
        "dcp_longest_stall_s": pytest.approx(0.5), "dcp_steps_per_s": pytest.approx(2.0),
    }  # fmt: skip
