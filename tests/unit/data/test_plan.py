"""The plan: every row once, whatever the number of ranks."""

import itertools

import numpy as np
import pytest

from spark_dl.data.plan import FILLER, Plan, rows_held_out, split_rows, streams_of_rank, windows_from

STREAMS = [1, 2, 3, 8, 16]
WINDOWS = [1, 7, 40, 1_000_000]


def cut(rows, seed=0):
    """Uneven row groups, some without rows, at the ends too."""
    rng = np.random.default_rng((seed, rows))
    inner = rng.integers(0, rows + 1, size=min(8, rows))
    points = np.sort(np.concatenate([[0, 0, 0], inner, inner[:2], [rows, rows]]))
    return tuple(int(n) for n in np.diff(points))


def sizes(batch, streams):
    """Numbers of rows at, just below and just above whole batches and streams."""
    near = {k * unit + d for unit in (batch, streams) for k in (1, 3) for d in (-1, 0, 1)}
    return sorted({1, 2, *near} - {0})


def grid_of_plans(streams, window, **settings):
    for batch in (streams, 3 * streams):
        for rows in sizes(batch, streams):
            yield Plan(cut(rows), batch, streams, window_rows=window, **settings)


def numbers(plan, segments):
    """Numbers in the dataset of the rows of some segments."""
    starts = np.cumsum([0, *plan.group_rows])
    return np.concatenate([np.arange(s.start, s.stop) + starts[s.row_group] for s in segments])


def rows_of(plan, stream):
    """Numbers of a stream's rows, in the order of use."""
    parts = [numbers(plan, w.segments)[w.order()] for w in stream.windows]
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def global_batches(plan, epoch, world_size):
    """The rows of every step, put together from what each rank reads."""
    streams, b = plan.streams(epoch), plan.stream_batch
    of_rank = [[rows_of(plan, streams[s]) for s in streams_of_rank(plan.num_streams, r, world_size)] for r in
               range(world_size)]  # fmt: skip
    return [np.concatenate([s[t * b : t * b + b] for s in itertools.chain(*of_rank)]) for t in range(plan.steps)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_comes_exactly_once_per_epoch(streams, window, shuffle):
    for plan in grid_of_plans(streams, window, shuffle=shuffle):
        for epoch in (0, 5):
            rows = np.concatenate([rows_of(plan, s) for s in plan.streams(epoch)])
            np.testing.assert_array_equal(np.sort(rows), np.arange(plan.rows), err_msg=str(plan))


@pytest.mark.parametrize("streams", STREAMS)
def test_streams_are_equal_to_within_one_row(streams):
    for plan in grid_of_plans(streams, 40):
        lengths = [s.rows for s in plan.streams(1)]
        assert len(lengths) == streams
        assert max(lengths) - min(lengths) <= 1, plan


@pytest.mark.parametrize("streams", STREAMS)
def test_every_global_batch_is_full_but_the_last_and_batch_rows_says_how_full(streams):
    for plan in grid_of_plans(streams, 40):
        found = [len(b) for b in global_batches(plan, 0, 1)]
        assert found == [plan.batch_rows(t) for t in range(plan.steps)], plan
        assert found[:-1] == [plan.global_batch_size] * (plan.steps - 1), plan
        assert 1 <= found[-1] <= plan.global_batch_size, plan
        assert sum(found) == plan.rows


@pytest.mark.parametrize("rows", [1, 23, 24, 25, 71, 73, 240])
@pytest.mark.parametrize("world_size", range(2, 9))
def test_the_order_is_the_same_for_every_number_of_ranks(rows, world_size):
    plan = Plan(cut(rows), 24, 8, window_rows=64, seed=1)
    for epoch in (0, 1):
        alone, together = global_batches(plan, epoch, 1), global_batches(plan, epoch, world_size)
        assert len(alone) == len(together) == plan.steps
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("streams", [1, 2, 3, 5, 8, 16, 24])
def test_streams_are_dealt_whole_near_equally_and_in_order(streams):
    for world_size in range(1, streams + 1):
        dealt = [streams_of_rank(streams, r, world_size) for r in range(world_size)]
        assert list(itertools.chain(*dealt)) == list(range(streams))
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
        assert min(map(len, dealt)) >= 1


def test_more_ranks_than_streams_is_an_error_that_says_what_to_raise():
    with pytest.raises(ValueError, match=r"num_streams=4 .*num_ranks=5.*raise loader\.num_streams"):
        streams_of_rank(4, 0, 5)


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else():
    def order(seed, epoch):
        plan = Plan((50,) * 10, 20, 4, window_rows=100, seed=seed)
        return tuple(np.concatenate(global_batches(plan, epoch, 1)))

    orders = {order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert order(1, 2) == order(1, 2)
    assert tuple(range(500)) not in orders


def test_the_row_groups_are_dealt_anew_for_each_seed_and_epoch():
    def dealt(seed, epoch):
        streams = Plan((10,) * 20, 4, 2, seed=seed).streams(epoch)
        return tuple(s.row_group for w in streams[0].windows for s in w.segments)

    assert len({dealt(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


def test_a_single_row_group_is_shuffled_too():
    orders = {tuple(rows_of(p, p.streams(e)[0])) for p in [Plan((100,), 10, 1)] for e in range(4)}
    assert len(orders) == 4


def test_streams_and_windows_have_orders_of_their_own():
    plan = Plan((16,) * 8, 4, 2, window_rows=32, seed=0)  # windows of one row group each
    orders = [tuple(w.order()) for s in plan.streams(0) for w in s.windows]
    assert len(orders) == len(set(orders)) == 8


@pytest.mark.parametrize("streams", STREAMS)
def test_without_shuffle_the_streams_laid_end_to_end_are_the_dataset(streams):
    for plan in grid_of_plans(streams, 40, shuffle=False):
        rows = np.concatenate([rows_of(plan, s) for s in plan.streams(3)])
        np.testing.assert_array_equal(rows, np.arange(plan.rows))


@pytest.mark.parametrize("window", WINDOWS)
def test_rows_are_shuffled_inside_their_window_only(window):
    plan = Plan(cut(300), 24, 3, window_rows=window)
    for stream in plan.streams(2):
        position = 0
        for w in stream.windows:
            assert w.first == position
            used = rows_of(plan, stream)[position : position + w.rows]
            np.testing.assert_array_equal(np.sort(used), np.sort(numbers(plan, w.segments)))
            position += w.rows
        assert position == stream.rows


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_ends_with_the_segment_that_fills_its_part_of_the_memory(window):
    plan = Plan(cut(300), 24, 3, window_rows=window)
    part = max(1, window // 3)
    for stream in plan.streams(0):
        for i, w in enumerate(stream.windows):
            assert w.rows - w.segments[-1].rows < part
            assert w.rows >= part or i == len(stream.windows) - 1


@pytest.mark.parametrize("streams", [1, 3, 8])
def test_a_stream_can_be_taken_up_at_any_row(streams):
    plan = Plan(cut(100), 3 * streams, streams, window_rows=20 * streams)
    for stream in plan.streams(1):
        whole = rows_of(plan, stream)
        for row in range(stream.rows + 2):
            parts = [numbers(plan, w.segments)[w.order()][skip:] for w, skip in windows_from(stream, row)]
            tail = np.concatenate([np.empty(0, dtype=np.int64), *parts])
            np.testing.assert_array_equal(tail, whole[row:])
            assert all(len(p) for p in parts), "a window without a row to use was opened"


@pytest.mark.parametrize("groups", [(0, 0, 1), (0, 3, 0), (5,), cut(2)])
def test_the_filler_is_a_row_that_exists(groups):
    for stream in Plan(groups, 16, 16).streams(0):
        filler = stream.filler
        assert filler.rows == 1
        assert filler.stop <= groups[filler.row_group]


def grid_of_parts():
    """Plans whose row groups lie in parts: of equal and very unequal rows, some without any."""
    for world_size, streams in [(1, 4), (2, 2), (2, 6), (3, 6), (4, 24)]:
        for seed in range(6):
            rng = np.random.default_rng((seed, world_size))
            rows = rng.integers(1, 200, world_size) * rng.integers(0, 2, world_size) if seed else [97] * world_size
            rows[seed % world_size] += 1
            groups = [cut(int(n), seed) if n else () for n in rows]
            sizes = tuple(itertools.chain(*groups))
            yield Plan(sizes, 2 * streams, streams, window_rows=48, parts=tuple(map(len, groups))), rows


def test_with_parts_every_row_comes_once_and_ranks_read_their_own_part_only():
    for plan, rows in grid_of_parts():
        firsts = np.cumsum([0, *rows])
        for epoch in (0, 3):
            streams = plan.streams(epoch)
            for part in range(len(rows)):
                own = [rows_of(plan, streams[s]) for s in plan.streams_of_part(part)]
                np.testing.assert_array_equal(np.sort(np.concatenate(own)), np.arange(firsts[part], firsts[part + 1]))
                lengths = [len(r) for r in own]
                assert max(lengths) - min(lengths) <= 1


def test_F18_with_parts_the_steps_are_those_of_the_longest_and_batch_rows_says_how_full():
    for plan, rows in grid_of_parts():
        found = [len(b) for b in global_batches(plan, 0, len(rows))]
        assert found == [plan.batch_rows(t) for t in range(plan.steps)]
        assert found[-1] > 0
        assert sum(found) == plan.rows == plan.rows_before(plan.steps) == sum(rows)
        assert [plan.rows_before(t) for t in range(plan.steps)] == [sum(found[:t]) for t in range(plan.steps)]
        share = plan.global_batch_size // len(rows)
        assert plan.steps == -(-max(rows) // share)


def test_with_parts_a_filler_is_a_row_of_the_part_where_it_has_one():
    for plan, rows in grid_of_parts():
        groups = np.split(np.arange(len(plan.group_rows)), np.cumsum(plan.parts)[:-1])
        for part in range(len(rows)):
            for stream in plan.streams(1)[slice(plan.streams_of_part(part).start, plan.streams_of_part(part).stop)]:
                assert (stream.filler.row_group == FILLER) == (rows[part] == 0)
                if rows[part]:
                    assert stream.filler.row_group in groups[part]
                    assert plan.group_rows[stream.filler.row_group] >= stream.filler.stop == 1


def test_one_part_is_the_plan_without_parts():
    plain, one = Plan(cut(500), 24, 8), Plan(cut(500), 24, 8, parts=(len(cut(500)),))
    assert plain.streams(3) == one.streams(3)


@pytest.mark.parametrize("groups", [(), (0,), (0, 0)])
def test_no_rows_is_an_error(groups):
    with pytest.raises(ValueError, match="no rows"):
        Plan(groups, 4, 2)


@pytest.mark.parametrize(("batch", "streams"), [(7, 2), (1, 2), (4, 0)])
def test_a_batch_that_is_no_multiple_of_the_streams_is_an_error(batch, streams):
    with pytest.raises(ValueError, match=rf"global_batch_size={batch} .*num_streams={streams}"):
        Plan((10,), batch, streams)


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.1, 1 / 3, 0.5, 0.75, 0.999])
def test_the_held_out_rows_are_the_fraction_and_spread_evenly(fraction):
    for rows in (1, 2, 7, 100, 1001):
        groups = cut(rows, seed=3)
        held = rows_held_out(groups, fraction)
        assert sum(held) == round(fraction * rows)
        assert all(0 <= h <= n for h, n in zip(held, groups, strict=True))
        assert all(abs(h - n * sum(held) / rows) < 1 for h, n in zip(held, groups, strict=True))


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_the_folds_have_equal_numbers_of_rows_and_all_rows_together(folds):
    for rows in (folds, 7, 100, 1001):
        groups = cut(rows, seed=3)
        held = np.stack([rows_held_out(groups, 1 / folds, fold) for fold in range(folds)])
        np.testing.assert_array_equal(held.sum(0), groups)
        assert np.ptp(held.sum(1)) <= 1
        assert (np.ptp(held, axis=0) <= 1).all()


@pytest.mark.parametrize("rows", [1, 2, 13, 64])
def test_a_row_group_is_split_into_two_parts_without_common_rows(rows):
    for held_out in range(rows + 1):
        train, validation = split_rows(rows, slice(held_out), seed=4, row_group=2)
        assert len(validation) == held_out
        np.testing.assert_array_equal(np.sort(np.concatenate([train, validation])), np.arange(rows))
        assert list(train) == sorted(train)
        assert list(validation) == sorted(validation)


def test_the_split_is_drawn_anew_for_each_seed_and_row_group_and_is_repeatable():
    drawn = [tuple(split_rows(64, slice(32), seed, group)[1]) for seed in range(3) for group in range(3)]
    assert len(set(drawn)) == 9
    assert drawn[0] == tuple(split_rows(64, slice(32), 0, 0)[1])
