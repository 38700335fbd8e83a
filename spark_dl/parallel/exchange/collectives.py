"""All-reduce by send and receive over the process group: `ALGORITHMS` by name, for comparison and training.

With each of them all ranks get the same bits. An element is summed on one rank, in one order, and then copied. With
`naive`, all ranks sum in the same order.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from spark_dl.config.checks import suggestion
from spark_dl.parallel.exchange.rounds import (
    Round,
    RoundMessage,
    RoundPiece,
    cut_rounds,
    halving_doubling_rounds,
    reduce_broadcast_rounds,
    ring_rounds,
    tree_rounds,
)

_PIECES_PER_CHUNK = 2  # in the ring; more pieces overlap better, but cost more wake-ups
_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 128 << 10, 4 << 20
_AHEAD = 8  # most receives that are posted at a time
_TAG = 0x5DA11  # differs from the tags of other messages on the same group

_Op = tuple[Callable[..., dist.Work | None], Tensor, int]  # dist.isend or dist.irecv, tensor, peer


def all_reduce(tensor: Tensor, algorithm: str, group: dist.ProcessGroup | None = None) -> None:
    """Sums a tensor over the ranks of a group, in place. Collective: the same shape and dtype on every rank.

    `tensor`: any shape, numbers of any dtype, on a device of the group's backend.
    Raises ValueError for an unknown algorithm, or a sparse or bool tensor. Raises RuntimeError if a rank is lost, or
    does not answer within the group's timeout.
    """
    check_algorithm(algorithm)
    ALGORITHMS[algorithm](tensor, group)


def average(flat: Tensor, algorithm: str, group: dist.ProcessGroup) -> None:
    """Averages a flat tensor over the ranks, in place. Divides before the sum, so that fp16 does not overflow."""
    for (part,) in _slices(flat):
        part.div_(group.size())
    all_reduce(flat, algorithm, group)


def check_algorithm(algorithm: str) -> None:
    """Raises ValueError for an unknown algorithm."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown all-reduce algorithm {algorithm!r}{suggestion(algorithm, list(ALGORITHMS))}")


def _in_place(
    tensor: Tensor, group: dist.ProcessGroup | None, *, sum_flat: Callable[[Tensor, dist.ProcessGroup], None]
) -> None:
    """Applies `sum_flat`, which needs flat contiguous tensors, to a tensor of any shape and strides."""
    if tensor.layout != torch.strided or tensor.dtype == torch.bool:
        raise ValueError(f"all_reduce: found {tensor.layout} of {tensor.dtype}, expected a dense tensor of numbers")
    group = group or dist.group.WORLD
    assert group is not None, "there is no process group"
    if group.size() == 1:
        return
    tensor = tensor.detach()
    flat = tensor.contiguous().view(-1)
    sum_flat(flat, group)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))


def _piece_length(flat: Tensor, world_size: int) -> int:
    """Returns the number of elements of a piece, the same on all ranks."""
    fair = flat.nbytes // (world_size * _PIECES_PER_CHUNK)
    return min(max(fair, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES) // flat.itemsize


def _sum_naively(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Sends the whole tensor from every rank to every other rank. Each rank sums them in the order of the ranks."""
    rank, world_size = group.rank(), group.size()

    def start(piece: Tensor) -> tuple[Tensor, list[Tensor], list[_Transfer]]:
        parts = [piece if r == rank else torch.empty_like(piece) for r in range(world_size)]
        ops: list[_Op] = []
        for i in range(1, world_size):  # each rank begins with a different peer
            to, source = (rank + i) % world_size, (rank - i) % world_size
            ops += [(dist.irecv, parts[source], source), (dist.isend, piece, to)]
        return piece, parts, _start(ops, group)

    def finish(piece: Tensor, parts: list[Tensor], transfers: list[_Transfer]) -> None:
        for transfer in transfers:
            transfer.wait()
        for target, *addends in _slices(piece, *parts):
            target.copy_(functools.reduce(Tensor.add_, addends[2:], addends[0] + addends[1]))

    under_way: deque[tuple[Tensor, list[Tensor], list[_Transfer]]] = deque()
    for piece in flat.split(_piece_length(flat, world_size)) if len(flat) else ():
        under_way.append(start(piece))
        if len(under_way) > 2:
            finish(*under_way.popleft())
    while under_way:
        finish(*under_way.popleft())


def _sum_by_rounds(
    flat: Tensor,
    group: dist.ProcessGroup,
    *,
    plan: Callable[[int, int, int], list[Round]],
    pipelined: bool = False,
    in_step: bool = False,
    ahead: int = _AHEAD,
) -> None:
    """Runs the rounds that `plan` gives for this rank.

    Over Gloo, receives are posted ahead of time. A Gloo sender waits for its peer's ready message, which on a full link
    queues behind the data. With `in_step`, and always on GPUs, a piece's receive and send are posted together, because
    NCCL runs them in the order of posting, and one alone could wait for a later one.
    """
    length = _piece_length(flat, group.size())
    pieces = cut_rounds(plan(group.rank(), group.size(), flat.numel()), length, pipelined=pipelined)
    exchange = _Exchange(flat, group, pieces, ahead)
    if in_step or flat.is_cuda:
        exchange.run_in_step(pieces)
    else:
        exchange.run(pieces)


class _Exchange:
    """State of one all-reduce on this rank: its posted receives and sends."""

    def __init__(self, flat: Tensor, group: dist.ProcessGroup, pieces: Sequence[RoundPiece], ahead: int):
        self._flat, self._group, self._ahead = flat, group, ahead
        self._receives = [(p.receive, p.adds) for p in pieces if p.receive]
        self._posted: deque[tuple[_Transfer, Tensor, Tensor | None]] = deque()
        self._num_posted = self._num_done = 0
        self._sent: list[_Transfer] = []
        self._scratch: list[Tensor] = []
        """Unused buffers, each with the length of the longest received piece that is added."""
        self._scratch_length = max((m.stop - m.start for m, adds in self._receives if adds), default=0)

    def run(self, pieces: Sequence[RoundPiece]) -> None:
        for piece in pieces:
            self._finish(piece.after)
            # Two receives per piece, so that the first send does not wait until all receives are posted.
            self._post(min(self._num_posted + 2, self._num_done + self._ahead), piece.send)
        self._finish(len(self._receives))
        self._wait_sent()

    def run_in_step(self, pieces: Sequence[RoundPiece]) -> None:
        for piece in pieces:
            while self._num_done < piece.after or len(self._posted) >= self._ahead:
                self._finish_one()
            self._post(self._num_posted + (piece.receive is not None), piece.send)
        while self._posted:
            self._finish_one()
        self._wait_sent()

    def _finish(self, num_receives: int) -> None:
        """Waits until `num_receives` are done. Posts a new receive for each finished one."""
        while self._num_done < num_receives:
            self._finish_one()
            self._post(self._num_done + self._ahead)

    def _finish_one(self) -> None:
        transfer, target, scratch = self._posted.popleft()
        transfer.wait()
        if scratch is not None:
            for part, received in _slices(target, scratch[: len(target)]):
                part.add_(received)
            self._scratch.append(scratch)
        self._num_done += 1

    def _post(self, num_receives: int, send: RoundMessage | None = None) -> None:
        """Posts receives up to a total of `num_receives`, and a send.

        Elements to replace are received in place, even ahead of time. The peer computes them from the elements that
        this rank sends, so they cannot arrive before those are read.
        """
        ops: list[_Op] = []
        targets = []
        for receive, adds in self._receives[self._num_posted : num_receives]:
            target = self._flat[receive.start : receive.stop]
            scratch = None
            if adds:
                scratch = self._scratch.pop() if self._scratch else target.new_empty(self._scratch_length)
            targets.append((target, scratch))
            ops.append((dist.irecv, target if scratch is None else scratch[: len(target)], receive.peer))
        if send:  # last, or this rank's ready message queues behind its data
            ops.append((dist.isend, self._flat[send.start : send.stop], send.peer))
        transfers = _start(ops, self._group)
        if send:
            self._sent.append(transfers.pop())
        self._posted += [(transfer, *to) for transfer, to in zip(transfers, targets, strict=True)]
        self._num_posted += len(targets)

    def _wait_sent(self) -> None:
        for transfer in self._sent:
            transfer.wait()


class _Transfer(NamedTuple):
    """A started send or receive."""

    work: dist.Work
    peer: int
    group: dist.ProcessGroup

    def wait(self) -> None:
        with _named_loss({self.peer}, self.group):
            self.work.wait()


@contextlib.contextmanager
def _named_loss(peers: Set[int], group: dist.ProcessGroup) -> Iterator[None]:
    """Adds the ranks to an error of the backend. `peers`: ranks of the group."""
    try:
        yield
    except RuntimeError as error:
        lost = " or ".join(str(dist.get_global_rank(group, peer)) for peer in sorted(peers))
        raise RuntimeError(f"rank {dist.get_rank()} lost rank {lost} in an all-reduce: {error}") from error


def _slices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Splits tensors of equal length into short parts, to work on one after another.

    NOTE: torch uses several threads for longer parts, which wait for each other. On busy CPUs, as in a backward pass,
    that took up to 40 times as long as the whole exchange. One thread is fast enough for a network.
    """
    length = max(1, len(tensors[0])) if tensors[0].is_cuda else 1 << 14
    return zip(*(t.split(length) for t in tensors), strict=True)


def _start(ops: Sequence[_Op], group: dist.ProcessGroup) -> list[_Transfer]:
    """Starts sends and receives: together on GPUs; on CPUs one by one, so that an error names the one that failed."""
    together = [ops] if ops and ops[0][1].is_cuda else [[op] for op in ops]
    transfers = []
    for batch in together:
        p2p = [dist.P2POp(op, tensor, group=group, tag=_TAG, group_peer=peer) for op, tensor, peer in batch]
        with _named_loss({peer for _, _, peer in batch}, group):
            works = dist.batch_isend_irecv(p2p)
        if len(works) < len(batch):  # NCCL returns one for all of them
            works = works * len(batch)
        transfers += [_Transfer(work, peer, group) for work, (_, _, peer) in zip(works, batch, strict=True)]
    return transfers


def _algorithm(
    plan: Callable[[int, int, int], list[Round]], *, pipelined: bool = False
) -> Callable[[Tensor, dist.ProcessGroup | None], None]:
    return functools.partial(_in_place, sum_flat=functools.partial(_sum_by_rounds, plan=plan, pipelined=pipelined))


ALGORITHMS: dict[str, Callable[[Tensor, dist.ProcessGroup | None], None]] = {
    "naive": functools.partial(_in_place, sum_flat=_sum_naively),
    "reduce_broadcast": _algorithm(reduce_broadcast_rounds),
    "tree": _algorithm(tree_rounds),
    "ring": _algorithm(ring_rounds, pipelined=True),
    "halving_doubling": _algorithm(halving_doubling_rounds),
}
"""(tensor, group or None for the default group): sums the tensor in place. See `all_reduce`."""
