"""What a rank holds of a model, of its gradients and of the optimizer's state: as ZeRO says, and nothing else."""

import pytest

from benchmarks.parallel import held
from spark_dl.config import Launch
from spark_dl.launch.rank import rendezvous
from spark_dl.parallel.mesh.planner.records import STATES
from spark_dl.parallel.mesh.planner.records import held as by_formula
from tests.ranks.launcher import run_ranks

WIDTH, LAYERS = 64, 20
UNIT = 4 / LAYERS  # bytes of a layer per parameter, which are those of a bucket
SMALL = 0.01  # the batch, the number of steps of each parameter in Adam, the ranks of a mesh
MOST_UNITS = {"ddp": 2, "zero1": 7, "zero2": 11, "zero3": 8}
"""At the peak: activations and the gradient of a layer, and what at most two buckets in exchange need; with ZeRO-3, the
weights of two layers and the gradients of one, also where they are summed. Gloo's two threads can hold those of
exchanges that have just ended."""


def measure_rank(num_ranks):
    launch = Launch(device="cpu", threads=1, collective_timeout_s=30)
    with rendezvous.join(launch) as world:
        return held.measure(world, width=WIDTH, layers=LAYERS)


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_bytes_are_those_of_zero(num_ranks):
    rows = {(row["form"], row["point"]): row for row in run_ranks(measure_rank, num_ranks, num_ranks)[0]}
    assert len(rows) == 4 * 3
    for stage, form in enumerate(held.FORMS):
        expected = by_formula(1, STATES["adam"], stage, num_ranks)
        built, backward, stepped = (rows[form, point] for point in held.POINTS)
        # DDP and the shards make room for gradients, and the optimizer for its state, when there are some.
        assert built["held"] == pytest.approx(expected.weights, abs=SMALL)
        assert stepped["weights"] == pytest.approx(expected.weights)
        assert stepped["gradients"] == pytest.approx(expected.gradients)
        assert stepped["optimizer"] == pytest.approx(expected.optimizer, abs=SMALL)
        assert stepped["other"] <= UNIT / num_ranks + SMALL
        assert backward["weights"] == stepped["weights"]
        assert backward["held"] <= expected.total + SMALL + MOST_UNITS[form] * UNIT
