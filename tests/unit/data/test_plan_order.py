"""The order of rows is that of the first version of the plan, which is kept here as it was, an object for each row."""

import itertools
import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest

from spark_dl.data.plan import FILLER, Plan, Segment, Window, streams_of_rank


@dataclass(frozen=True)
class ReferencePlan:
    """The algorithm over tuples, which makes the objects of all streams."""

    group_rows: tuple[int, ...]
    num_streams: int
    window_rows: int
    shuffle: bool
    seed: int
    parts: tuple[int, ...]
    row_bytes: tuple[float, ...]
    window_bytes: int

    def bounds(self):
        bounds, first_row, groups = [0], 0, iter(self.group_rows)
        for part, num_groups in enumerate(self.parts):
            rows, streams = sum(itertools.islice(groups, num_groups)), len(self.streams_of_part(part))
            bounds += [first_row + i * rows // streams for i in range(1, streams + 1)]
            first_row += rows
        return bounds

    def streams_of_part(self, part):
        return streams_of_rank(self.num_streams, part, len(self.parts))

    def streams(self, epoch):
        """(Windows, filler) of each stream."""
        groups = np.arange(len(self.group_rows))
        if self.shuffle:
            groups = np.random.default_rng((self.seed, epoch)).permutation(groups)
        part_of_group = np.repeat(np.arange(len(self.parts)), self.parts)
        groups = groups[np.argsort(part_of_group[groups], kind="stable")]
        ends = np.cumsum(np.asarray(self.group_rows, dtype=np.int64)[groups])
        starts = ends - np.asarray(self.group_rows, dtype=np.int64)[groups]
        streams = []
        for part in range(len(self.parts)):
            windows = [
                self.windows(self.segments(groups, starts, ends, s), epoch, s) for s in self.streams_of_part(part)
            ]
            group = next((w[0].segments[0].row_group for w in windows if w), FILLER)
            streams += [(w, Segment(group, 0, 1)) for w in windows]
        return streams

    def segments(self, groups, starts, ends, stream):
        lo, hi = self.bounds()[stream : stream + 2]
        segments = []
        for g in range(int(np.searchsorted(ends, lo, side="right")), len(groups)):
            if starts[g] >= hi:
                break
            start, stop = max(lo, int(starts[g])), min(hi, int(ends[g]))
            if stop > start:
                segments.append(Segment(int(groups[g]), start - int(starts[g]), stop - int(starts[g])))
        return segments

    def windows(self, segments, epoch, stream):
        target = max(1, self.window_rows // self.num_streams)
        windows, held, first, rows, size = [], [], 0, 0, 0.0
        for i, segment in enumerate(segments):
            held.append(segment)
            rows += segment.rows
            size += segment.rows * self.row_bytes[segment.row_group] if self.row_bytes else 0
            is_full = bool(self.row_bytes) and size >= self.window_bytes / self.num_streams
            if rows >= target or is_full or i == len(segments) - 1:
                seed = (self.seed, epoch, stream, len(windows)) if self.shuffle else None
                windows.append(Window(tuple(held), first, seed))
                first += rows
                held, rows, size = [], 0, 0.0
        return tuple(windows)


def drawn(seed):
    """Settings of a plan, drawn at random: row groups without rows, parts, unequal rows, streams without any."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 6))
    streams = ranks * int(rng.integers(1, 5)) + int(rng.integers(0, 3))
    groups = rng.integers(0, rng.choice([2, 12, 300]), int(rng.integers(1, 60))) * (rng.random() < 0.9)
    groups[rng.integers(len(groups))] += 1
    parts = np.bincount(rng.integers(0, ranks, len(groups)), minlength=ranks) if rng.random() < 0.5 else [len(groups)]
    row_bytes = rng.random(len(groups)) * 100 if rng.random() < 0.5 else ()
    return {
        "group_rows": tuple(map(int, groups)), "num_streams": streams, "window_rows": int(rng.choice([1, 30, 500])),
        "shuffle": bool(rng.random() < 0.8), "seed": int(rng.integers(100)), "parts": tuple(map(int, parts)),
        "row_bytes": tuple(map(float, row_bytes)), "window_bytes": int(rng.choice([1, 2000, 20000])),
    }  # fmt: skip


@pytest.mark.sampled(60)
@pytest.mark.parametrize("seed", range(300))
def test_the_order_is_that_of_the_first_version(seed):
    settings = drawn(seed)
    sizes = np.array(settings["row_bytes"]) if settings["row_bytes"] else None
    plan = Plan(global_batch_size=2 * settings["num_streams"], **{**settings, "row_bytes": sizes})
    reference = ReferencePlan(**settings)
    for epoch in (0, 7):
        expected = reference.streams(epoch)
        found = plan.streams(epoch)
        assert [(tuple(s.windows), s.filler) for s in found] == expected
        assert [s.rows for s in found] == [sum(w.rows for w in windows) for windows, _ in expected]
        for rank in range(world_size := min(3, settings["num_streams"])):
            own = streams_of_rank(settings["num_streams"], rank, world_size)
            of_rank = plan.streams(epoch, own)
            assert [(tuple(s.windows), s.filler) for s in of_rank] == expected[own.start : own.stop]


def test_the_grid_has_what_it_is_to_try():
    """Else the comparison above would say little."""
    grid = [drawn(seed) for seed in range(300)]
    streams = [stream for settings in grid for stream in ReferencePlan(**settings).streams(0)]
    assert sum(len(settings["parts"]) > 1 for settings in grid) > 50
    assert sum(not windows for windows, _ in streams) > 50
    assert sum(filler.row_group == FILLER for _, filler in streams) > 20
    assert sum(len(w.segments) > 1 for windows, _ in streams for w in windows) > 300
    by_size = [
        s
        for s in grid
        if s["row_bytes"] and ReferencePlan(**s).streams(0) != ReferencePlan(**{**s, "row_bytes": ()}).streams(0)
    ]
    assert len(by_size) > 30


def test_a_rank_of_many_makes_its_own_streams_alone():
    """Memory of a plan with 400,000 row groups, of which the rank reads one in 512: some arrays of them, no objects."""
    plan = Plan(np.full(400_000, 1024), global_batch_size=512, num_streams=512)
    tracemalloc.start()
    try:
        (stream,) = plan.streams(0, range(7, 8))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert stream.rows == 400_000 * 1024 // 512
    assert peak < 8 * 8 * 400_000  # eight numbers for each row group; an object takes more than that
