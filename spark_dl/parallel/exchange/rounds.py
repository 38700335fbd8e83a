"""All-reduce algorithms as lists of rounds: what one rank sends and receives, in order. Pure: nothing is sent here.

Each function takes (rank, world_size, length), `length` in elements, and returns the rounds of that rank. In a round a
rank sends and receives at the same time. Where there are fewer elements than ranks some messages are empty; they are
empty to both sides, and neither sends nor waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple


class Message(NamedTuple):
    """Elements `start` to `stop` (exclusive) of the flat tensor, to or from another rank."""

    peer: int
    start: int
    stop: int


class Round(NamedTuple):
    """One rank's part of a round. What it receives is added to its own elements, or else replaces them."""

    send: Message | None = None
    receive: Message | None = None
    adds: bool = False


class Piece(NamedTuple):
    """A part of a round, small enough that sending, receiving and adding overlap."""

    send: Message | None
    receive: Message | None
    adds: bool
    after: int
    """How many of the rank's receives, counted from its first, must be done before this is sent."""


def reduce_broadcast_rounds(rank: int, world_size: int, length: int) -> list[Round]:
    """Rank 0 adds what the others have, in the order of the ranks, then sends each of them the sum: a star.

    length * (world_size - 1) elements come in at rank 0, and as many go out.
    """
    if rank > 0:
        whole = Message(0, 0, length)
        return [Round(send=whole), Round(receive=whole)]
    others = [Message(peer, 0, length) for peer in range(1, world_size)]
    return [Round(receive=m, adds=True) for m in others] + [Round(send=m) for m in others]


def tree_rounds(rank: int, world_size: int, length: int) -> list[Round]:
    """Reduce up a binomial tree to rank 0, then broadcast down the same tree: 2 * ceil(log2(world_size)) rounds.

    Source: the binomial trees of Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations
    in MPICH", IJHPCA 19(1).
    """
    up, down = [], []
    distance = 1
    while distance < world_size:
        if rank & distance:
            parent = Message(rank - distance, 0, length)
            up.append(Round(send=parent))
            down.append(Round(receive=parent))
            break
        if rank + distance < world_size:
            child = Message(rank + distance, 0, length)
            up.append(Round(receive=child, adds=True))
            down.append(Round(send=child))
        distance *= 2
    return up + down[::-1]


def ring_rounds(rank: int, world_size: int, length: int) -> list[Round]:
    """Scatter-reduce, then all-gather, round a ring: each rank sends about 2 * length * (world_size - 1) / world_size.

    The tensor is cut into one chunk per rank. In each round a rank sends to the next rank the chunk that it received in
    the round before. After world_size - 1 rounds it has the sum of one chunk, and the sums go round in the same way.

    Source: Patarasuk, Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2).
    """
    cuts = [i * length // world_size for i in range(world_size + 1)]
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    rounds = []
    for i in range(2 * (world_size - 1)):
        out, into = (rank - i) % world_size, (rank - i - 1) % world_size
        rounds.append(
            Round(
                send=Message(right, cuts[out], cuts[out + 1]),
                receive=Message(left, cuts[into], cuts[into + 1]),
                adds=i < world_size - 1,
            )
        )
    return rounds


def halving_doubling_rounds(rank: int, world_size: int, length: int) -> list[Round]:
    """Reduce-scatter by recursive halving, all-gather by recursive doubling: 2 * log2(world_size) rounds.

    Each rank sends about 2 * length * (world_size - 1) / world_size elements where the number of ranks is a power of
    two. Otherwise the first ranks act in pairs: the even rank gives all that it has to the odd one, which takes part
    for both, and sends it the sum when all is done. That is two rounds more, of `length` elements each.

    Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH", IJHPCA
    19(1), on allreduce; the algorithm is Rabenseifner's.
    """
    power = 1 << (world_size.bit_length() - 1)
    num_pairs = world_size - power
    is_paired = rank < 2 * num_pairs
    if is_paired and rank % 2 == 0:
        whole = Message(rank + 1, 0, length)
        return [Round(send=whole), Round(receive=whole)]
    number = rank // 2 if is_paired else rank - num_pairs  # among those that take part
    halving, doubling = [], []
    start, stop, distance = 0, length, power // 2
    while distance:
        other = number ^ distance
        peer = 2 * other + 1 if other < num_pairs else other + num_pairs
        middle = (start + stop) // 2
        lower, upper = Message(peer, start, middle), Message(peer, middle, stop)
        keep, give = (upper, lower) if number & distance else (lower, upper)
        halving.append(Round(send=give, receive=keep, adds=True))
        doubling.append(Round(send=keep, receive=give))
        start, stop, distance = keep.start, keep.stop, distance // 2
    rounds = halving + doubling[::-1]
    if is_paired:
        whole = Message(rank - 1, 0, length)
        return [Round(receive=whole, adds=True), *rounds, Round(send=whole)]
    return rounds


def cut_rounds(rounds: Sequence[Round], piece_length: int, *, pipelined: bool = False) -> list[Piece]:
    """Rounds in near-equal pieces of at most `piece_length` elements; those of one message are in order.

    A piece is sent when all receives of earlier rounds are done. With `pipelined`, for rounds that each send what the
    round before received (a ring), it is sent as soon as its own elements were received there.
    """
    pieces = []
    earlier = done = 0  # receives up to the round before the last one, and up to the last one
    for i, round_ in enumerate(rounds):
        sends, receives = _cut(round_.send, piece_length), _cut(round_.receive, piece_length)
        for j, (send, receive) in enumerate(zip_longest(sends, receives)):
            after = earlier + j + 1 if pipelined and i and send else done
            pieces.append(Piece(send, receive, round_.adds, after))
        earlier, done = done, done + len(receives)
    return pieces


def _cut(message: Message | None, piece_length: int) -> list[Message]:
    """Depends on the message's length alone, so that sender and receiver cut alike."""
    if message is None:
        return []
    peer, start, stop = message
    length = stop - start
    num = -(-length // piece_length)
    cuts = [start + i * length // num for i in range(num + 1)] if num else []
    return [Message(peer, a, b) for a, b in pairwise(cuts)]


def elements_sent(rounds: Sequence[Round]) -> int:
    """Elements that a rank sends in these rounds."""
    return sum(r.send.stop - r.send.start for r in rounds if r.send)
