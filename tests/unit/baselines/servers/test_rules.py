"""Parameter servers without ranks: which gradients make an update, who gets weights, which mini-batches are left."""

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_dl import ParameterServer
from spark_dl.baselines.servers.block import shares_of
from spark_dl.baselines.servers.deal import MiniBatch, MiniBatchQueue, deal_again
from spark_dl.baselines.servers.lead import Roles
from spark_dl.baselines.servers.rules import Coordinator, Gradient, UpdateRules, rules_of

MODES = ("sync", "k_sync", "k_batch_sync", "async", "k_async", "k_batch_async")
ENDLESS = 10**6


def rules(mode, trainers, k=0, max_staleness=None):
    server_k = k if mode.startswith("k_") else 0
    parallel = ParameterServer(server_mode=mode, server_k=server_k, max_staleness=max_staleness)
    return rules_of(parallel, trainers)


# By hand: three trainers A, B, C = 0, 1, 2, which are done in a given order


def play(mode, k, pushes, max_staleness=None):
    """Lets trainers push what they were last given, in this order; a line of what happened for each push."""
    coordinator = Coordinator(rules(mode, 3, k, max_staleness), 3)
    last = {a.trainer: a for a in coordinator.begin(MiniBatchQueue.whole(3, ENDLESS))}
    assert sorted(last) == [0, 1, 2]
    lines = []
    for trainer in pushes:
        outcome = coordinator.push(trainer, last[trainer].number, rows=10)
        last |= {a.trainer: a for a in outcome.assignments}
        used = " ".join(f"{'ABC'[g.trainer]}{g.staleness}" for g in outcome.used)
        given = "".join("ABC"[a.trainer] if a.sends_weights else "abc"[a.trainer] for a in outcome.assignments)
        dropped = "".join("ABC"[trainer] for trainer, _ in outcome.dropped)
        lines.append(f"{used} > {given}" + (f" - {dropped}" if dropped else ""))
    return lines, coordinator


# "B0 C1 > bC - A": an update of B's gradient and of C's, which is 1 behind; B goes on with the weights that it has,
# C is sent those of now; A's gradient is dropped.
@pytest.mark.parametrize(
    ("mode", "k", "pushes", "expected"),
    [
        ("sync", 0, [1, 0, 2, 2, 1, 0], [" > ", " > ", "A0 B0 C0 > ABC", " > ", " > ", "A0 B0 C0 > ABC"]),
        ("k_sync", 3, [2, 0, 1], [" > ", " > ", "A0 B0 C0 > ABC"]),
        ("k_sync", 2, [1, 0, 2, 1], [" > ", "A0 B0 > ABC", " > ", "B0 C0 > ABC"]),
        ("k_sync", 1, [1, 1, 0], ["B0 > ABC", "B0 > ABC", "A0 > ABC"]),
        ("k_batch_sync", 3, [1, 1, 0, 2, 2, 2], [" > b", " > b", "A0 B0 B0 > ABC", " > c", " > c", "C0 C0 C0 > ABC"]),
        ("k_batch_sync", 1, [1, 2], ["B0 > ABC", "C0 > ABC"]),
        ("async", 0, [1, 1, 0, 2, 1], ["B0 > B", "B0 > B", "A2 > A", "C3 > C", "B2 > B"]),
        ("k_async", 2, [1, 0, 0, 1, 2, 0], [" > ", "A0 B0 > AB", " > ", "A0 B0 > AB", " > ", "A0 C2 > AC"]),
        ("k_async", 2, [1, 0, 2, 1], [" > ", "A0 B0 > AB", " > ", "B0 C1 > BC"]),
        ("k_async", 3, [1, 0, 2], [" > ", " > ", "A0 B0 C0 > ABC"]),
        ("k_batch_async", 2, [1, 1, 1, 0, 2], [" > b", "B0 B0 > B", " > b", "A1 B0 > A", " > C"]),
        ("k_batch_async", 3, [2, 0, 2, 1, 0, 1], [" > c", " > a", "A0 C0 C0 > C", " > B", " > A", "A1 B1 B0 > B"]),
        ("k_batch_async", 1, [0, 2], ["A0 > A", "C1 > C"]),
    ],
)
def test_each_mode_by_hand(mode, k, pushes, expected):
    assert play(mode, k, pushes)[0] == expected


def test_a_gradient_that_is_too_old_is_computed_anew_and_counted():
    lines, coordinator = play("async", 0, [0, 0, 1, 1, 2, 0], max_staleness=1)
    assert lines == ["A0 > A", "A0 > A", " > B - B", "B0 > B", " > C - C", "A1 > A"]
    assert coordinator.discarded == 2
    assert coordinator.staleness == {0: 3, 1: 1}


def test_what_is_cancelled_is_counted_and_does_not_count_when_it_comes_all_the_same():
    coordinator = Coordinator(rules("k_sync", 3, 2), 3)
    first = coordinator.begin(MiniBatchQueue.whole(3, ENDLESS))
    coordinator.push(0, first[0].number, 5)
    outcome = coordinator.push(1, first[1].number, 5)
    assert coordinator.discarded == 1
    late = coordinator.push(2, first[2].number, 5)
    assert (late.used, late.dropped, late.assignments) == ((), ((2, first[2].number),), ())
    again = next(a for a in outcome.assignments if a.trainer == 2)
    assert (again.batch, again.sends_weights) == (first[2].batch, True)  # the same mini-batch at the new weights
    assert coordinator.discarded == 1


@pytest.mark.parametrize(("mode", "discarded"), [("sync", 0), ("k_sync", 2), ("async", 2), ("k_batch_async", 2)])
def test_what_a_pause_gives_up_is_counted_and_begun_again(mode, discarded):
    """After one gradient, or all of them, of three trainers: k_sync has cancelled the two others before the pause."""
    coordinator, deal = Coordinator(rules(mode, 3, 1), 3), MiniBatchQueue.whole(3, 5)
    first = coordinator.begin(deal)
    for a in first:
        outcome = coordinator.push(a.trainer, a.number, 5)
        if outcome.used:
            break
    coordinator.stop(outcome.assignments)
    assert coordinator.discarded == discarded
    again = coordinator.begin(deal)
    used = {g.trainer for g in outcome.used}
    assert [a.batch for a in again] == [MiniBatch(a.batch.part, int(a.trainer in used)) for a in first]
    assert all(a.sends_weights and a.number > b.number for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_mini_batches_without_a_true_row_make_no_update(mode):
    coordinator = Coordinator(rules(mode, 2, 1), 2)
    given = {a.trainer: a for a in coordinator.begin(MiniBatchQueue.whole(2, 2))}
    updates = 0
    while given:
        a = given.pop(min(given))
        outcome = coordinator.push(a.trainer, a.number, rows=7 if a.batch.step == 0 else 0)
        given |= {x.trainer: x for x in outcome.assignments}
        updates += bool(outcome.used)
        assert not outcome.used or any(g.rows for g in outcome.used)
    assert coordinator.is_done
    assert updates == coordinator.version == (1 if mode == "sync" else 2)
    assert coordinator.staleness.total() == 2


# Against the definitions, written down once more as a simulation of a clock


def simulate(mode, k, trainers, seconds, updates):
    """The updates as the paper defines them: (end time, [(trainer, its n-th mini-batch, staleness)]).

    `seconds(trainer, n)`: of its n-th computation.
    """
    done, count, found, now = [0] * trainers, [0] * trainers, [], 0.0

    def duration(w):
        count[w] += 1
        return seconds(w, count[w] - 1)

    if mode in ("sync", "k_sync"):
        k = trainers if mode == "sync" else k
        while len(found) < updates:
            ends = sorted((now + duration(w), w) for w in range(trainers))[:k]
            now = ends[-1][0]
            found.append((now, sorted((w, done[w], 0) for _, w in ends)))
            for _, w in ends:
                done[w] += 1
    elif mode == "k_batch_sync":
        while len(found) < updates:
            running = [(now + duration(w), w) for w in range(trainers)]
            used = []
            while len(used) < k:
                now, w = min(running)
                used.append((w, done[w], 0))
                done[w] += 1
                running.remove((now, w))
                if len(used) < k:
                    running.append((now + duration(w), w))
            found.append((now, sorted(used)))
    else:
        k = 1 if mode == "async" else k
        running = [(duration(w), w, 0) for w in range(trainers)]
        gathered = []
        while len(found) < updates:
            now, w, version = min(running)
            running.remove((now, w, version))
            gathered.append((w, done[w], len(found) - version))
            done[w] += 1
            waiting = [w] if mode == "k_batch_async" else []
            if len(gathered) == k:
                found.append((now, sorted(gathered)))
                waiting = waiting or [x for x, _, _ in gathered]
                gathered = []
            running += [(now + duration(x), x, len(found)) for x in sorted(waiting)]
    return found


def run_by_clock(coordinator, deal, seconds, updates, *, late=lambda: False):
    """The coordinator's updates as `simulate` has them, with mini-batches in the place of their numbers.

    Trainers take `seconds`; those that are cancelled push all the same where `late()`.
    """
    count = [0] * coordinator.num_trainers
    current, batches, events, found = {}, {}, [], []

    def assign(now, assignments):
        for a in assignments:
            count[a.trainer] += 1
            current[a.trainer], batches[a.trainer, a.number] = a, a.batch
            heapq.heappush(events, (now + seconds(a.trainer, count[a.trainer] - 1), a.trainer, a.number))

    assign(0.0, coordinator.begin(deal))
    while events and len(found) < updates:
        now, trainer, number = heapq.heappop(events)
        is_current = current[trainer].number == number
        if not is_current and not late():
            continue
        outcome = coordinator.push(trainer, number, rows=3)
        if not is_current:
            assert outcome.used == outcome.assignments == ()
            assert outcome.dropped == ((trainer, number),)
        if outcome.used:
            found.append((now, [(g.trainer, batches[g.trainer, g.number], g.staleness) for g in outcome.used]))
        assign(now, outcome.assignments)
    return found


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(MODES),
    st.integers(1, 5),
    st.integers(1, 7),
    st.sampled_from(["exponential", "constant"]),
    st.integers(0, 10**6),
)
def test_same_updates_at_the_same_times_as_the_definitions(mode, trainers, k, kind, seed):
    k = min(k, trainers) if mode in ("k_sync", "k_async") else k
    rng = np.random.default_rng(seed)
    table = rng.exponential(size=(trainers, 400)) if kind == "exponential" else np.ones((trainers, 400))
    table *= 1 + 1e-6 * rng.random((trainers, 400))  # never two at the same moment
    expected = simulate(mode, k, trainers, lambda w, n: table[w, n], updates=12)
    coordinator = Coordinator(rules(mode, trainers, k), trainers)
    deal, late = MiniBatchQueue.whole(trainers, ENDLESS), lambda: rng.random() < 0.5
    got = run_by_clock(coordinator, deal, lambda w, n: table[w, n], 12, late=late)
    for (end, used), (expected_end, expected_used) in zip(got, expected, strict=True):
        assert end == pytest.approx(expected_end)
        assert used == [(w, MiniBatch(w, n), staleness) for w, n, staleness in expected_used]
    assert coordinator.version == 12
    assert sum(len(used) for _, used in got) == coordinator.staleness.total()


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(MODES),
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(0, 3)),
    st.integers(0, 10**6),
)
def test_an_epoch_uses_every_mini_batch_once_whatever_is_slow(mode, trainers, k, steps, bound, seed):
    k = min(k, trainers) if mode in ("k_sync", "k_async") else k
    bound = bound if "async" in mode else None
    rng = np.random.default_rng(seed)
    pace = rng.choice([0.1, 1.0, 30.0], size=trainers)
    table = pace[:, None] * rng.exponential(size=(trainers, 4000))
    coordinator, deal = Coordinator(rules(mode, trainers, k, bound), trainers), MiniBatchQueue.whole(trainers, steps)
    updates = run_by_clock(coordinator, deal, lambda w, n: table[w, n], ENDLESS)
    used = [batch for _, gradients in updates for _, batch, _ in gradients]
    assert bound is None or max(coordinator.staleness) <= bound
    assert sorted(used) == [MiniBatch(p, s) for p in range(trainers) for s in range(steps)]
    assert coordinator.is_done
    assert deal.num_left == 0


def test_sync_takes_the_parts_of_one_global_batch_after_another():
    coordinator, seen = Coordinator(rules("sync", 3), 3), []
    given = {a.trainer: a for a in coordinator.begin(MiniBatchQueue.whole(3, 4))}
    while given:
        seen.append({a.batch for a in given.values()})
        for trainer in (1, 2, 0):
            outcome = coordinator.push(trainer, given[trainer].number, rows=2)
        given = {a.trainer: a for a in outcome.assignments}
    assert seen == [{MiniBatch(part, step) for part in range(3)} for step in range(4)]


# What is left of an epoch


def test_who_is_done_takes_over_the_later_half_of_what_another_has_left():
    deal = MiniBatchQueue.whole(2, 8)
    for _ in range(8):
        assert deal.of(0).part == 0
        deal.finish(0)
    assert deal.of(1) == MiniBatch(1, 0)
    assert deal.of(0) == MiniBatch(1, 4)  # trainer 1 keeps steps 0 to 3
    assert deal.num_left == 8
    for trainer, steps in ((1, range(4)), (0, range(4, 7))):
        for step in steps:
            assert deal.of(trainer) == MiniBatch(1, step)
            deal.finish(trainer)
    assert deal.of(1) is None  # the one that is left is trainer 0's
    assert deal.of(0) == MiniBatch(1, 7)


def test_a_mini_batch_stays_with_its_trainer_until_it_is_used():
    deal = MiniBatchQueue.whole(2, 3)
    assert deal.of(0) == deal.of(0) == MiniBatch(0, 0)
    deal.finish(0)
    assert deal.of(0) == MiniBatch(0, 1)


def test_what_is_left_goes_on_after_a_checkpoint():
    deal = MiniBatchQueue.whole(2, 6)
    for trainer in (0, 0, 0, 1):
        deal.of(trainer)
        deal.finish(trainer)
    left = deal_again(deal.to_plain(), 3)
    assert (left.num_parts, left.num_left) == (2, 8)
    taken = set()
    for trainer in itertools.cycle(range(3)):
        batch = left.of(trainer)
        if batch is None:
            continue
        taken.add(batch)
        left.finish(trainer)
        if not left.num_left:
            break
    assert taken == {MiniBatch(0, s) for s in (3, 4, 5)} | {MiniBatch(1, s) for s in range(1, 6)}


@pytest.mark.parametrize("trainers", [1, 2, 5])
def test_parts_that_stand_at_the_same_step_are_dealt_anew_for_the_trainers_of_now(trainers):
    deal = MiniBatchQueue.whole(3, 6)
    for _ in range(4):
        for trainer in range(3):
            deal.of(trainer)
            deal.finish(trainer)
    left = deal_again(deal.to_plain(), trainers)
    assert left.to_plain() == {"num_parts": trainers, "ranges": [[part, 4, 6] for part in range(trainers)]}


# How gradients are weighted


def gradients(*rows_and_staleness):
    return [Gradient(i, 1, rows, staleness) for i, (rows, staleness) in enumerate(rows_and_staleness)]


def test_gradients_are_weighted_by_their_true_rows():
    assert shares_of(gradients((30, 0), (10, 5), (0, 1)), [30.0, 10.0, 0.0], by_staleness=False) == (
        [0.75, 0.25, 0.0],
        1.0,
    )


def test_with_a_learning_rate_by_staleness_each_gradient_has_its_own():
    """For plain SGD: lr_factor * share is what each gradient's learning rate is divided into."""
    shares, factor = shares_of(gradients((10, 0), (10, 1), (20, 3)), [10.0, 10.0, 20.0], by_staleness=True)
    assert sum(shares) == pytest.approx(1)
    assert [factor * s for s in shares] == pytest.approx([10 / 40, 10 / 40 / 2, 20 / 40 / 4])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sync", UpdateRules(4, cancels=True, goes_on=False)),
        ("k_sync", UpdateRules(2, cancels=True, goes_on=False)),
        ("k_batch_sync", UpdateRules(2, cancels=True, goes_on=True)),
        ("async", UpdateRules(1, cancels=False, goes_on=False)),
        ("k_async", UpdateRules(2, cancels=False, goes_on=False)),
        ("k_batch_async", UpdateRules(2, cancels=False, goes_on=True)),
    ],
)
def test_the_rules_of_each_mode(mode, expected):
    assert rules(mode, 4, k=2) == expected
    assert rules(mode, 4).k == {"async": 1}.get(mode, 4)


@pytest.mark.parametrize("num_servers", [2, 3])
def test_a_rank_must_be_left_to_train(num_servers):
    with pytest.raises(ValueError, match=f"parallel.num_servers: found {num_servers}, expected fewer than the 2 ranks"):
        Roles(0, 2, num_servers)
    assert Roles(0, 2, 1).num_servers == 1
