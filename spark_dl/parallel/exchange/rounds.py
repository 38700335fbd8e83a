"""All-reduce algorithms as lists of rounds: the messages of one rank, in order. Pure: nothing is sent here.

Each function takes (rank, world_size, length), with `length` in elements, and returns the rounds of that rank. In a
round a rank sends and receives at the same time. With fewer elements than ranks some messages are empty. Both sides
skip an empty message.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple


class RoundMessage(NamedTuple):
    """Elements `start` to `stop` (exclusive) of the flat tensor, to or from another rank."""

    peer: int
    start: int
    stop: int


class Round(NamedTuple):
    """One rank's part of a round. If `adds`, received elements are added to the rank's; otherwise they replace them."""

    send: RoundMessage | None = None
    receive: RoundMessage | None = None
    adds: bool = False


class RoundPiece(NamedTuple):
    """A part of a round, small enough that sending, receiving and adding overlap."""

    send: RoundMessage | None
    receive: RoundMessage | None
    adds: bool
    after: int
    """Number of the rank's receives that must be done before this piece is sent."""


def reduce_broadcast_rounds(rank: int, world_size: int, length: int) -> list[Round]:
    """Star: rank 0 adds the tensors of all other ranks, in the order of the ranks, then sends the sum to each of them.

    Rank 0 receives length * (world_size - 1) elements, and sends as many.
    """
    if rank > 0:
        whole = RoundMessage(0, 0, length)
        return [Round(send=whole), Round(receive=whole)]
    others = [RoundMessage(peer, 0, length) for peer in range(1, world_size)]
    return [Round(receive=m, adds=True) for m in others] + [Round(send=m) for m in others]


def tree_rounds(rank: int, world_size: int, length: int) -> list[Round]:
    """Tree: reduce up a binomial tree to rank 0, then broadcast down it: 2 * ceil(log2(world_size)) rounds.

    Source: the binomial trees of Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations
    in MPICH", IJHPCA 19(1).
    """
    up, down = [], []
    distance = 1
    while distance < world_size:
        if rank & distance:
            parent = RoundMessage(rank - distance, 0, length)
            up.append(Round(send=parent))
            down.append(Round(receive=parent))
            break
        if rank + distance < world_size:
            child = RoundMessage(rank + distance, 0, length)
            up.append(Round(receive=child, adds=True))
            down.append(Round(send=child))
        distance *= 2
    return up + down[::-1]


def ring_rounds(rank: int, world_size: int, length: int) -> list[Round]:
    """Ring: reduce-scatter, then all-gather. A rank sends about 2 * length * (world_size - 1) / world_size elements.

    The tensor is cut into one chunk per rank. In each round a rank sends the chunk of the last round to the next rank.
    After world_size - 1 rounds each rank has the sum of one chunk. The sums then pass round the ring in the same way.

    Source: Patarasuk, Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2).
    """
    cuts = [i * length // world_size for i in range(world_size + 1)]
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    rounds = []
    for i in range(2 * (world_size - 1)):
        out, into = (rank - i) % world_size, (rank - i - 1) % world_size
        rounds.append(
            Round(
                send=RoundMessage(right, cuts[out], cuts[out + 1]),
                receive=RoundMessage(left, cuts[into], cuts[into + 1]),
                adds=i < world_size - 1,
            )
        )
    return rounds


def halving_doubling_rounds(rank: int, world_size: int, length: int) -> list[Round]:
    """Reduce-scatter by recursive halving, all-gather by recursive doubling: 2 * log2(world_size) rounds.

    Each rank sends about 2 * length * (world_size - 1) / world_size elements if the number of ranks is a power of two.
    Otherwise the first ranks form pairs. The even rank sends its tensor to the odd rank, which takes part for both and
    sends the sum back at the end. These are two more rounds, of `length` elements each.

    Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH", IJHPCA
    19(1), on allreduce; the algorithm is Rabenseifner's.
    """
    power = 1 << (world_size.bit_length() - 1)
    num_pairs = world_size - power
    is_paired = rank < 2 * num_pairs
    if is_paired and rank % 2 == 0:
        whole = RoundMessage(rank + 1, 0, length)
        return [Round(send=whole), Round(receive=whole)]
    number = rank // 2 if is_paired else rank - num_pairs  # among the ranks that take part
    halving, doubling = [], []
    start, stop, distance = 0, length, power // 2
    while distance:
        partner = number ^ distance
        peer = 2 * partner + 1 if partner < num_pairs else partner + num_pairs
        middle = (start + stop) // 2
        lower, upper = RoundMessage(peer, start, middle), RoundMessage(peer, middle, stop)
        keep, give = (upper, lower) if number & distance else (lower, upper)
        halving.append(Round(send=give, receive=keep, adds=True))
        doubling.append(Round(send=keep, receive=give))
        start, stop, distance = keep.start, keep.stop, distance // 2
    rounds = halving + doubling[::-1]
    if is_paired:
        whole = RoundMessage(rank - 1, 0, length)
        return [Round(receive=whole, adds=True), *rounds, Round(send=whole)]
    return rounds


def cut_rounds(rounds: Sequence[Round], piece_length: int, *, pipelined: bool = False) -> list[RoundPiece]:
    """Cuts rounds into near-equal pieces of at most `piece_length` elements. The pieces of a message are in order.

    A piece is sent when all receives of earlier rounds are done. With `pipelined`, it is sent as soon as its elements
    were received. That is for a ring, where each round sends the elements that the last round received.
    """
    pieces = []
    earlier = done = 0  # receives before the previous round, and before this round
    for i, round_ in enumerate(rounds):
        sends, receives = _cut(round_.send, piece_length), _cut(round_.receive, piece_length)
        for j, (send, receive) in enumerate(zip_longest(sends, receives)):
            after = earlier + j + 1 if pipelined and i and send else done
            pieces.append(RoundPiece(send, receive, round_.adds, after))
        earlier, done = done, done + len(receives)
    return pieces


def _cut(message: RoundMessage | None, piece_length: int) -> list[RoundMessage]:
    """Cuts a message by its length alone, so that sender and receiver get the same pieces."""
    if message is None:
        return []
    peer, start, stop = message
    length = stop - start
    num = -(-length // piece_length)
    cuts = [start + i * length // num for i in range(num + 1)] if num else []
    return [RoundMessage(peer, a, b) for a, b in pairwise(cuts)]


def elements_sent(rounds: Sequence[Round]) -> int:
    """Returns the number of elements that a rank sends in these rounds."""
    return sum(r.send.stop - r.send.start for r in rounds if r.send)
