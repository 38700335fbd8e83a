import pytest

from spark_dl.parallel.mesh.planner.records import GPIPE, ONE_F_ONE_B, STATES, held, micro_batches_kept
from spark_dl.parallel.mesh.planner.search import FORWARD, order


@pytest.mark.parametrize("num_shards", [1, 2, 4, 64])
@pytest.mark.parametrize(
    ("zero_stage", "whole", "cut"), [(0, 16, 0), (1, 8, 8), (2, 4, 12), (3, 0, 16)], ids=["ddp", "1", "2", "3"]
)
def test_bytes_held_are_those_of_zero(zero_stage, whole, cut, num_shards):
    """Adam in float32, as a whole and cut over the ranks."""
    assert held(1000, STATES["adam"], zero_stage, num_shards).total == 1000 * (whole + cut / num_shards)


@pytest.mark.parametrize(("zero_stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_mixed_precision_is_that_of_figure_1_of_the_paper(zero_stage, gigabytes):
    """Rajbhandari et al. 2020: 7.5 billion parameters on 64 devices."""
    assert held(7.5e9, STATES["mixed_adam"], zero_stage, 64).total / 1e9 == pytest.approx(gigabytes, rel=5e-3)


@pytest.mark.parametrize("schedule", [GPIPE, ONE_F_ONE_B])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 7, 16])
def test_activations_kept_are_those_of_the_schedule(schedule, num_stages, micro_batches):
    for stage in range(num_stages):
        kept = most = 0
        for kind, _ in order(schedule, stage, num_stages, micro_batches):
            kept += 1 if kind == FORWARD else -1
            most = max(most, kept)
        assert kept == 0
        assert micro_batches_kept(schedule, micro_batches, num_stages - stage) == most
