"""The rounds of each all-reduce, carried out on arrays of one process in any order that a network could bring about."""

import math
import random
from collections import defaultdict, deque

import numpy as np
import pytest

from spark_dl.parallel.exchange.rounds import (
    Round,
    RoundMessage,
    cut_rounds,
    elements_sent,
    halving_doubling_rounds,
    reduce_broadcast_rounds,
    ring_rounds,
    tree_rounds,
)

PLANS = {
    "reduce_broadcast": reduce_broadcast_rounds,
    "tree": tree_rounds,
    "ring": ring_rounds,
    "halving_doubling": halving_doubling_rounds,
}
LENGTHS = [0, 1, 2, 3, 5, 7, 16, 17, 100]


def pieces_of(name, world_size, length, piece_length):
    return [
        cut_rounds(PLANS[name](rank, world_size, length), piece_length, pipelined=name == "ring")
        for rank in range(world_size)
    ]


class Network:
    """Ranks that send as soon as they may, over a network that delivers whenever it likes.

    What is sent is read when it is delivered, as late as can be; a receive that replaces elements is written as early.
    """

    def __init__(self, pieces, tensors, *, ahead, seed):
        self.pieces, self.tensors, self.ahead = pieces, tensors, ahead
        self.random = random.Random(seed)
        self.receives = [[(p.receive, p.adds) for p in mine if p.receive] for mine in pieces]
        self.next, self.done = [0] * len(pieces), [0] * len(pieces)
        self.delivered = [{} for _ in pieces]  # by number of the receive: what is to be added, or None
        self.wires = defaultdict(deque)

    def run(self):
        ranks = range(len(self.pieces))
        while actions := [a for rank in ranks for a in self.actions(rank)]:
            self.random.choice(actions)()
        stuck = [rank for rank in ranks if self.done[rank] < len(self.receives[rank])]
        assert not stuck, f"ranks {stuck} wait for ever"
        assert not any(self.wires.values()), "sent, but never received"

    def actions(self, rank):
        mine, receives, done = self.pieces[rank], self.receives[rank], self.done[rank]
        needed = mine[self.next[rank]].after if self.next[rank] < len(mine) else len(receives)
        if done >= needed and self.next[rank] < len(mine):
            yield lambda: self.send(rank)
        if done < needed and done in self.delivered[rank]:
            yield lambda: self.finish(rank)
        seen = set()
        for number in range(done, min(done + self.ahead, len(receives))):
            peer = receives[number][0].peer
            if number not in self.delivered[rank] and peer not in seen:
                seen.add(peer)  # messages of one peer come in order
                if self.wires[peer, rank]:
                    yield lambda number=number: self.deliver(rank, number)

    def send(self, rank):
        send = self.pieces[rank][self.next[rank]].send
        self.next[rank] += 1
        if send:
            view = self.tensors[rank][send.start : send.stop]
            self.wires[rank, send.peer].append((view, view.copy()))

    def deliver(self, rank, number):
        receive, adds = self.receives[rank][number]
        view, sent = self.wires[receive.peer, rank].popleft()
        np.testing.assert_array_equal(view, sent, "changed while it was being sent")
        assert len(sent) == receive.stop - receive.start
        if not adds:
            self.tensors[rank][receive.start : receive.stop] = sent
        self.delivered[rank][number] = sent if adds else None

    def finish(self, rank):
        number = self.done[rank]
        receive, _ = self.receives[rank][number]
        if (sent := self.delivered[rank].pop(number)) is not None:
            self.tensors[rank][receive.start : receive.stop] += sent
        self.done[rank] += 1


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "world_size", [*range(1, 10), *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 17))]
)
@pytest.mark.parametrize("name", PLANS)
def test_every_rank_has_the_same_sum(name, world_size):
    rng = np.random.default_rng(world_size)
    for length in LENGTHS:
        for piece_length, ahead in ((1000, 1000), (3, 2), (1, 5)) if length < 100 else ((9, 4),):
            values = rng.normal(size=(world_size, length)).astype(np.float32)  # in each order they have another sum
            tensors = list(values.copy())
            Network(pieces_of(name, world_size, length, piece_length), tensors, ahead=ahead, seed=length).run()
            np.testing.assert_allclose(tensors[0], values.sum(axis=0, dtype=np.float64), rtol=0, atol=1e-5)
            for tensor in tensors:
                assert tensor.tobytes() == tensors[0].tobytes()


@pytest.mark.parametrize("world_size", range(1, 17))
@pytest.mark.parametrize("name", PLANS)
def test_no_rank_waits_for_ever_when_pieces_are_done_one_by_one(name, world_size):
    """As on GPUs: a piece begins when the one before is done, and is done when both peers have come to theirs."""
    for length, piece_length in ((1, 1), (5, 1), (33, 4), (100, 1000)):
        left = [deque([p.send, p.receive] for p in mine) for mine in pieces_of(name, world_size, length, piece_length)]
        while any(left):
            moved = [rank for rank in range(world_size) if left[rank] and move_on(left, rank)]
            assert moved, f"ranks {[rank for rank in range(world_size) if left[rank]]} wait for each other"


def move_on(left, rank):
    """Hands over what a rank's first piece sends, if its peer is there to receive it; drops a piece that is done."""
    send, receive = left[rank][0]
    if send is None and receive is None:
        left[rank].popleft()
        return True
    theirs = left[send.peer] if send else None
    if theirs and theirs[0][1] and theirs[0][1].peer == rank:
        assert theirs[0][1][1:] == send[1:], "cut in another way by the receiver"
        left[rank][0][0] = theirs[0][1] = None
        return True
    return False


@pytest.mark.parametrize("name", PLANS)
def test_a_piece_comes_after_receives_that_are_posted_before_it(name):
    """So that a rank which posts receives and sends in order never waits for a receive that it has not posted."""
    for world_size in range(1, 17):
        for mine in pieces_of(name, world_size, 50, 3):
            receives = 0
            for piece in mine:
                assert piece.after <= receives
                receives += piece.receive is not None


@pytest.mark.parametrize("world_size", range(1, 33))
def test_elements_sent(world_size):
    length = 960
    sent = {n: [elements_sent(PLANS[n](r, world_size, length)) for r in range(world_size)] for n in PLANS}
    total = 2 * (world_size - 1) * length
    assert sent["reduce_broadcast"] == [(world_size - 1) * length] + [length] * (world_size - 1)
    assert sum(sent["tree"]) == sum(sent["ring"]) == total
    assert max(abs(n - total / world_size) for n in sent["ring"]) < 2 * world_size
    if world_size & (world_size - 1) == 0:
        assert max(abs(n - total / world_size) for n in sent["halving_doubling"]) < 2 * world_size
    else:
        power = 1 << (world_size.bit_length() - 1)
        assert sum(sent["halving_doubling"]) == 2 * (power - 1) * length + 2 * (world_size - power) * length


@pytest.mark.parametrize("world_size", range(2, 33))
def test_numbers_of_rounds(world_size):
    most = {n: max(len(PLANS[n](r, world_size, 1000)) for r in range(world_size)) for n in PLANS}
    assert most["ring"] == 2 * (world_size - 1)
    assert most["tree"] == 2 * math.ceil(math.log2(world_size))
    assert most["halving_doubling"] == 2 * math.floor(math.log2(world_size)) + 2 * (world_size & (world_size - 1) != 0)


def test_ring_of_three():
    assert ring_rounds(0, 3, 7) == [  # chunks are 0:2, 2:4 and 4:7
        Round(send=RoundMessage(1, 0, 2), receive=RoundMessage(2, 4, 7), adds=True),
        Round(send=RoundMessage(1, 4, 7), receive=RoundMessage(2, 2, 4), adds=True),
        Round(send=RoundMessage(1, 2, 4), receive=RoundMessage(2, 0, 2)),
        Round(send=RoundMessage(1, 0, 2), receive=RoundMessage(2, 4, 7)),
    ]


def test_pieces_of_a_ring_follow_those_received_in_the_round_before():
    pieces = cut_rounds(ring_rounds(0, 2, 8), 2, pipelined=True)
    assert [(p.send[1:], p.receive[1:], p.adds, p.after) for p in pieces] == [
        ((0, 2), (4, 6), True, 0),
        ((2, 4), (6, 8), True, 0),
        ((4, 6), (0, 2), False, 1),
        ((6, 8), (2, 4), False, 2),
    ]
