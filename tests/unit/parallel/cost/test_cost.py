"""The cost model, against messages passed one by one, figures of the literature, and networks it must find."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from benchmarks.model.profiles import resnet50
from spark_dl.parallel.cost.cost import (
    BLOCK_BYTES,
    BY_SPARK,
    METHODS,
    ExchangeSize,
    Network,
    Point,
    cost,
    driver_copies,
    fit,
    harmonic,
    server_bytes_per_s,
    tree_levels,
    work,
)  # fmt: skip

N = 720_720  # divisible by 1 ... 16
RANKS = range(1, 17)
NETWORK = Network(alpha_s=1e-4, bytes_per_s=25e6, gamma_s_per_byte=1e-9, overhead_s=1e-3)
COLLECTIVES = ("naive", "reduce_broadcast", "tree", "ring", "halving_doubling")

# A schedule is a list of rounds, a round a list of messages (sender, receiver, blocks, what is sent): `own`, the
# sender's own part, to be added; `sum`, what it has summed up, to be added; `result`, which replaces what was there.


def naive_rounds(ranks):
    return [[(r, (r + i) % ranks, [0], "own") for r in range(ranks)] for i in range(1, ranks)], 1


def star_rounds(ranks):
    return [[(r, 0, [0], "sum")] for r in range(1, ranks)] + [[(0, r, [0], "result")] for r in range(1, ranks)], 1


def tree_rounds(ranks):
    reduce, distance = [], 1
    while distance < ranks:
        reduce.append([(r + distance, r, [0], "sum") for r in range(0, ranks - distance, 2 * distance)])
        distance *= 2
    return reduce + [[(to, of, blocks, "result") for of, to, blocks, _ in step] for step in reversed(reduce)], 1


def ring_rounds(ranks):
    scatter = [[(r, (r + 1) % ranks, [(r - t) % ranks], "sum") for r in range(ranks)] for t in range(ranks - 1)]
    gather = [[(r, (r + 1) % ranks, [(r + 1 - t) % ranks], "result") for r in range(ranks)] for t in range(ranks - 1)]
    return scatter + gather, ranks


def halving_doubling_rounds(ranks):
    core = 1 << (ranks.bit_length() - 1)
    all_blocks, extra = list(range(core)), range(core, ranks)
    before = [[(r, r - core, all_blocks, "sum") for r in extra]] if ranks > core else []
    halving, owned, distance = [], dict.fromkeys(range(core), all_blocks), core // 2
    while distance:
        step = []
        for r in range(core):
            low, high = owned[r][: len(owned[r]) // 2], owned[r][len(owned[r]) // 2 :]
            step.append((r, r ^ distance, low if r & distance else high, "sum"))
        owned = {r: [b for b in owned[r] if b not in blocks] for r, _, blocks, _ in step}
        halving.append(step)
        distance //= 2
    doubling = []
    for step in reversed(halving):
        sent = {of: blocks for of, _, blocks, _ in step}
        doubling.append([(of, to, sent[to], "result") for of, to, _, _ in step])
    after = [[(r - core, r, all_blocks, "result") for r in extra]] if ranks > core else []
    return before + halving + doubling + after, core


SCHEDULES = {
    "naive": naive_rounds, "reduce_broadcast": star_rounds, "tree": tree_rounds, "ring": ring_rounds,
    "halving_doubling": halving_doubling_rounds,
}  # fmt: skip


def pass_messages(rounds, num_blocks, ranks):
    """Passes the messages; every rank must end with every rank's part of every block, once. Returns the counts."""
    held = [[{r} for _ in range(num_blocks)] for r in range(ranks)]
    sent, received, added = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    link_bytes, block_bytes = 0.0, N / num_blocks
    for messages in rounds:
        assert len({of for of, *_ in messages}) == len({to for _, to, *_ in messages}) == len(messages)  # one port
        before = [[set(block) for block in blocks] for blocks in held]
        for of, to, blocks, what in messages:
            size = len(blocks) * block_bytes
            sent[of] += size
            received[to] += size
            added[to] += size * (what != "result")
            for block in blocks:
                coming = {of} if what == "own" else before[of][block]
                assert what == "result" or not held[to][block] & coming, "added twice"
                held[to][block] = coming if what == "result" else held[to][block] | coming
        link_bytes += max(len(blocks) for _, _, blocks, _ in messages) * block_bytes
    assert all(block == set(range(ranks)) for blocks in held for block in blocks)
    return {
        "messages": len(rounds), "link_bytes": link_bytes, "touched_bytes": added.max(), "bytes_per_rank": sent.mean(),
        "busiest_link_bytes": max(sent.max(), received.max()),
    }  # fmt: skip


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("method", COLLECTIVES)
def test_work_is_what_passing_the_messages_takes(method, ranks):
    rounds, num_blocks = SCHEDULES[method](ranks)
    counted = pass_messages(rounds, num_blocks, ranks)
    found = dataclasses.asdict(work(ExchangeSize(method, ranks, N)))
    assert {name: found[name] for name in counted} == pytest.approx(counted)


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 11])
def test_parameter_server_s_work_is_what_passing_its_messages_takes(workers, servers):
    rounds, part = max(workers, servers), N / servers
    at_server, at_worker, num_messages = np.zeros(servers), np.zeros(workers), 0
    for t in range(rounds):
        busy = [(w, (w + t) % rounds) for w in range(workers) if (w + t) % rounds < servers]
        assert len({s for _, s in busy}) == len(busy) > 0  # one port
        for w, s in busy:
            at_server[s] += part
            at_worker[w] += part
            num_messages += 1
    assert set(at_worker) == {N}
    found = work(ExchangeSize("parameter_server", workers + servers, N, servers=servers))
    assert found.messages == 2 * rounds  # gradients one way, weights the other
    assert found.link_bytes == pytest.approx(2 * rounds * part)
    assert found.touched_bytes == pytest.approx(at_server.max())
    assert found.busiest_link_bytes == pytest.approx(max(at_server.max(), at_worker.max()))
    assert found.bytes_per_rank == pytest.approx(2 * num_messages * part / (workers + servers))


@pytest.mark.parametrize("ranks", RANKS)
def test_figures_of_the_literature(ranks):
    assert work(ExchangeSize("ring", ranks, N)).bytes_per_rank == pytest.approx(2 * N * (ranks - 1) / ranks)
    if ranks > 1:
        assert work(ExchangeSize("parameter_server", ranks, N)).link_bytes == pytest.approx(2 * N * (ranks - 1))


def test_one_server_for_256_workers_needs_73_gigabytes_per_second():
    needed = server_bytes_per_s(256, resnet50().gradient_bytes, 3)
    assert needed / 2**30 == pytest.approx(73.1, abs=0.05)
    assert server_bytes_per_s(256, resnet50().gradient_bytes, 3, servers=8) == needed / 8


@pytest.mark.parametrize(("partitions", "depth", "levels"), [
    (1, 2, [1]), (4, 2, [4]), (5, 2, [5, 1]), (8, 2, [8, 2]), (10, 2, [10, 2]), (16, 2, [16, 4]), (64, 2, [64, 8]),
    (64, 3, [64, 16, 4]), (4096, 2, [4096, 64]), (16, 1, [16]),
])  # fmt: skip
def test_levels_of_tree_reduce(partitions, depth, levels):
    assert tree_levels(partitions, depth) == levels


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 27, 64])
def test_tree_reduce_s_traffic_is_that_of_its_blocks(ranks, depth):
    """Every way to place the reducers, one per host, is counted, and the mean taken."""
    levels = tree_levels(ranks, depth)
    sent, at_busiest = 0.0, []
    for before, after in itertools.pairwise(levels):
        fan_in = np.zeros(after)
        for shift in range(ranks):
            for i in range(before):
                reducer = i % after
                fan_in[reducer] += 1 / ranks
                sent += (i != (reducer + shift) % ranks) / ranks
        at_busiest.append(fan_in.max())
    copies = driver_copies(ranks, N)
    found = work(ExchangeSize("tree_reduce", ranks, N, depth=depth))
    assert found.bytes_per_rank * ranks == pytest.approx((sent + levels[-1] + ranks - copies) * N)
    received = [copies, sum(at_busiest) * (ranks - 1) / ranks, levels[-1]]
    assert found.link_bytes == pytest.approx(sum(received) * N)
    assert found.calls == len(levels)
    # The driver unpickles what it gets; each level unpickles its fan-in and pickles the sum; the weights go out and in.
    assert found.touched_bytes == pytest.approx((1 + sum(at_busiest) + len(at_busiest) + levels[-1] + 2) * N)


@pytest.mark.parametrize("ranks", RANKS)
def test_shuffle_reduce_s_traffic_is_that_of_its_blocks(ranks):
    block = N / ranks
    sent = sum(block for of in range(ranks) for to in range(ranks) if of != to) + ranks * block  # ... and to the driver
    copies = driver_copies(ranks, N)
    found = work(ExchangeSize("shuffle_reduce", ranks, N))
    assert found.bytes_per_rank * ranks == pytest.approx(sent + (ranks - copies) * N)
    assert found.link_bytes == pytest.approx((ranks - 1) * block + ranks * block + copies * N)


def torrent_copies(num_hosts, num_blocks, rng):
    """How often the driver sends a block where all hosts fetch in orders of their own, from a holder at random."""
    holders = [[0] for _ in range(num_blocks)]
    orders = [rng.permutation(num_blocks) for _ in range(num_hosts)]
    from_driver = 0
    for turn in range(num_blocks):
        fetched = []
        for host, order in enumerate(orders, start=1):
            block = order[turn]
            from_driver += holders[block][rng.integers(len(holders[block]))] == 0
            fetched.append((block, host))
        for block, host in fetched:
            holders[block].append(host)
    return from_driver / num_blocks


@pytest.mark.parametrize("num_blocks", [1, 2, 4, 25])
@pytest.mark.parametrize("num_hosts", [1, 2, 4, 8, 16, 64])
def test_driver_copies_are_near_those_of_simulated_fetches(num_hosts, num_blocks):
    rng = np.random.default_rng(0)
    simulated = np.mean([torrent_copies(num_hosts, num_blocks, rng) for _ in range(1600 // num_hosts)])
    assert driver_copies(num_hosts, num_blocks * BLOCK_BYTES) == pytest.approx(simulated, rel=0.05)


def test_harmonic_numbers():
    assert [harmonic(n) for n in (0, 1, 2, 4)] == pytest.approx([0, 1, 1.5, 25 / 12])
    assert harmonic(1 + 1e-9) == pytest.approx(1, abs=2e-3)
    assert harmonic(100 + 1e-9) == pytest.approx(harmonic(100), abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_known_network_is_found_and_predicts_what_it_was_not_fitted_to(method):
    def points(ranks, sizes, rng):
        exchanges = [ExchangeSize(method, r, size) for r in ranks for size in sizes]
        return [Point(e, cost(e, NETWORK).seconds * (1 + rng.uniform(-0.05, 0.05))) for e in exchanges]

    rng = np.random.default_rng(0)
    fitted = fit(points((2, 4, 8), (1 << 10, 1 << 16, 1 << 20, 1 << 24), rng))
    errors = errors_of(points((3, 5, 16), (1 << 12, 1 << 22, 1 << 26), rng), fitted)
    assert np.median(errors) < 0.06
    assert max(errors) < 0.15


def errors_of(points, network):
    return [abs(cost(point.exchange, network).seconds / point.seconds - 1) for point in points]


@pytest.mark.parametrize("method", METHODS)
def test_points_of_one_number_of_ranks_have_latency_not_overhead_but_in_spark(method):
    exchanges = [ExchangeSize(method, 4, size) for size in (1 << 10, 1 << 26)]
    fitted = fit([Point(e, cost(e, NETWORK).seconds) for e in exchanges])
    one, other = (fitted.overhead_s, fitted.alpha_s) if method in BY_SPARK else (fitted.alpha_s, fitted.overhead_s)
    assert one > 0 == other


@pytest.mark.parametrize("method", METHODS)
def test_exact_points_are_explained_exactly(method):
    points = [
        Point(exchange, cost(exchange, NETWORK).seconds)
        for exchange in (ExchangeSize(method, r, size) for r in (2, 3, 8, 16) for size in (1 << 10, 1 << 18, 1 << 26))
    ]
    fitted = fit(points)
    assert max(errors_of(points, fitted)) < 1e-6
    assert min(fitted.alpha_s, 1 / fitted.bytes_per_s, fitted.gamma_s_per_byte, fitted.overhead_s) >= 0


def test_in_a_ring_bytes_sent_and_added_are_one():
    exchanges = [ExchangeSize("ring", r, size) for r in (2, 4, 8) for size in (1 << 10, 1 << 20, 1 << 24)]
    fitted = fit([Point(e, cost(e, NETWORK).seconds) for e in exchanges])
    assert fitted.gamma_s_per_byte == 0
    assert 1 / fitted.bytes_per_s == pytest.approx(1 / NETWORK.bytes_per_s + NETWORK.gamma_s_per_byte / 2)


def test_no_number_is_negative_where_plain_least_squares_would_have_one():
    points = [Point(ExchangeSize("ring", 2, size), seconds) for size, seconds in ((1e6, 0.9), (2e6, 2.1), (4e6, 4.5))]
    fitted = fit(points)
    assert fitted.overhead_s == fitted.alpha_s == 0
    assert 1e6 / 1.3 < fitted.bytes_per_s < 1e6 / 0.9


def test_fit_says_what_is_wrong():
    ring, tree = Point(ExchangeSize("ring", 2, N), 1.0), Point(ExchangeSize("tree", 2, N), 1.0)
    for points, message in (([], "no points"), ([ring, tree], "ring.*tree"), ([Point(ring.exchange, 0.0)], "> 0")):
        with pytest.raises(ValueError, match=message):
            fit(points)


@pytest.mark.parametrize(("arguments", "message"), [
    (("rings", 2, 1), "unknown 'rings'.*halving_doubling"), (("ring", 0, 1), "at least one rank"),
    (("parameter_server", 1, 1), "expected fewer than"), (("ring", 2, -1), "negative"),
])  # fmt: skip
def test_exchange_says_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        ExchangeSize(*arguments)


def test_costs_add_up():
    exchange = ExchangeSize("ring", 4, 4e6)
    expected = 1e-3 + 6 * 1e-4 + 6e6 / 25e6 + 3e6 * 1e-9
    assert cost(exchange, NETWORK).seconds == pytest.approx(expected)
    assert cost(ExchangeSize("ring", 1, 4e6), NETWORK).seconds == NETWORK.overhead_s
    assert cost(exchange, dataclasses.replace(NETWORK, bytes_per_s=math.inf)).seconds == pytest.approx(expected - 0.24)


@pytest.mark.parametrize("method", METHODS)
def test_buckets_have_their_own_calls_and_messages_and_the_same_bytes(method):
    whole = work(ExchangeSize(method, 4, 64e6))
    for bucket_bytes, buckets in ((64e6, 1), (25e6, 3), (1e6, 64)):
        cut = work(ExchangeSize(method, 4, 64e6, bucket_bytes=bucket_bytes))
        assert cut == dataclasses.replace(whole, calls=buckets * whole.calls, messages=buckets * whole.messages)
    assert work(ExchangeSize(method, 4, 0.0, bucket_bytes=25e6)) == work(ExchangeSize(method, 4, 0.0))
    with pytest.raises(ValueError, match="bucket_bytes: expected more than 0, found 0"):
        ExchangeSize(method, 4, 1e6, bucket_bytes=0)
