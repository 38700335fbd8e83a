import itertools
import random

import pytest

from spark_dl.parallel.mesh.planner.records import GPIPE, ONE_F_ONE_B
from spark_dl.parallel.mesh.planner.search import BACKWARD, FORWARD, SYNC, StageTimes, end_s, timeline

SCHEDULES = pytest.mark.parametrize("schedule", [GPIPE, ONE_F_ONE_B])


@SCHEDULES
@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 4, 8, 16])
def test_equal_stages_take_the_time_of_the_formula(schedule, num_stages, micro_batches):
    passes = timeline([StageTimes(1.0, 2.0)] * num_stages, schedule, micro_batches)
    assert end_s(passes) == pytest.approx(3 * (micro_batches + num_stages - 1))


@SCHEDULES
@pytest.mark.parametrize("seed", range(10))
def test_every_pass_is_done_once_in_its_stage_and_after_what_it_needs(schedule, seed):
    rng = random.Random(seed)
    num_stages, micro_batches = rng.randint(1, 6), rng.randint(1, 12)
    stages = [StageTimes(*(rng.uniform(0.1, 2) for _ in range(4))) for _ in range(num_stages)]
    passes = timeline(stages, schedule, micro_batches)
    at = {(each.stage, each.kind, each.micro_batch): each for each in passes}
    assert len(at) == len(passes) == num_stages * (2 * micro_batches + 1)
    for stage, times in enumerate(stages):
        own = [each for each in passes if each.stage == stage]
        assert all(before.end_s <= after.start_s + 1e-9 for before, after in itertools.pairwise(own))
        assert own[-1].kind == SYNC
        for i in range(micro_batches):
            forward, backward = at[stage, FORWARD, i], at[stage, BACKWARD, i]
            assert forward.end_s - forward.start_s == pytest.approx(times.forward_s)
            assert backward.start_s >= forward.end_s
            if stage < num_stages - 1:
                assert at[stage + 1, FORWARD, i].start_s >= forward.end_s + times.send_s - 1e-9
                assert backward.start_s >= at[stage + 1, BACKWARD, i].end_s + times.send_s - 1e-9


@SCHEDULES
@pytest.mark.parametrize("seed", range(20))
def test_unequal_stages_take_the_time_that_cuts_are_chosen_by_or_less(schedule, seed):
    """sum t + (m - 1) max T: for GPipe exact if all stages have equal ratios; for 1F1B at most an eighth too long."""
    rng = random.Random(seed)
    num_stages, micro_batches = rng.randint(2, 6), rng.randint(8, 32)
    stages = [StageTimes(each, 2 * each, send_s=0.1) for each in (rng.uniform(0.6, 1.4) for _ in range(num_stages))]
    sends = [(0.1 if i else 0.0) + (0.1 if i < num_stages - 1 else 0.0) for i in range(num_stages)]
    once = [3 * stage.forward_s + send for stage, send in zip(stages, sends, strict=True)]
    period = [3 * stage.forward_s for stage in stages] if schedule == GPIPE else once
    formula = sum(once) + (micro_batches - 1) * max(period)
    found = end_s(timeline(stages, schedule, micro_batches))
    assert found == pytest.approx(formula) if schedule == GPIPE else 0.87 * formula < found < formula
