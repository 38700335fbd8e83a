"""Which elements of a tensor a rank has: pieces. Pure arithmetic.

A piece is a box of the tensor, as after a cut along an axis, or a range of the box's elements in row-major order, as in
flat shards. A checkpoint names the pieces in its files, so that a run on any other mesh finds what it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

AVERAGE = "spark_dl.average"
"""In the state of an optimizer, the key of the average of a parameter (`train.ema_decay`)."""


@dataclass(frozen=True)
class Piece:
    """The elements [start, stop) of a box, in row-major order."""

    offsets: tuple[int, ...]
    """First index of the box, per axis."""
    sizes: tuple[int, ...]
    """Number of indices of the box, per axis."""
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def to_plain(self) -> list[Any]:
        """Returns the piece as JSON can hold it."""
        return [list(self.offsets), list(self.sizes), self.start, self.stop]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Piece:
        """Returns the piece of `to_plain`. Raises ValueError for anything else."""
        try:
            offsets, sizes, start, stop = plain
            piece = cls(tuple(map(int, offsets)), tuple(map(int, sizes)), int(start), int(stop))
        except (TypeError, ValueError) as error:
            raise ValueError(f"expected [offsets, sizes, start, stop], found {plain!r:.80}") from error
        if len(piece.offsets) != len(piece.sizes) or not 0 <= piece.start <= piece.stop <= math.prod(piece.sizes):
            raise ValueError(f"expected a range within a box, found {plain!r:.80}")
        return piece


@dataclass(frozen=True)
class Layout:
    """The elements of a tensor that a rank has: those of `pieces`, one after another."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        """Number of elements that the rank has."""
        return sum(piece.length for piece in self.pieces)

    def part(self, start: int, stop: int) -> Layout:
        """Returns the layout of the elements [start, stop) of those that the rank has."""
        pieces, at = [], 0
        for piece in self.pieces:
            low, high = max(start, at), min(stop, at + piece.length)
            if low < high:
                pieces.append(
                    Piece(piece.offsets, piece.sizes, piece.start + low - at, piece.start + high - at)
                )  # fmt: skip
            at += piece.length
        return Layout(self.shape, tuple(pieces))


def whole(shape: Sequence[int]) -> Layout:
    """Returns the layout of a rank that has all elements."""
    return of_boxes(shape, [((0,) * len(shape), tuple(shape))])


def of_boxes(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Layout:
    """Returns the layout of a rank that has boxes of a tensor, given as (offsets, sizes), one after another."""
    pieces = tuple(Piece(tuple(offsets), tuple(sizes), 0, math.prod(sizes)) for offsets, sizes in boxes)
    return Layout(tuple(shape), tuple(piece for piece in pieces if piece.length))


def may_overlap(one: Piece, other: Piece) -> bool:
    """Whether two pieces of a tensor may have elements in common. False only if they have none."""
    if not one.length or not other.length:
        return False
    ends = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    if any(a + n <= b or b + m <= a for a, n, b, m in ends):
        return False
    if (one.offsets, one.sizes) == (other.offsets, other.sizes):
        return one.start < other.stop and other.start < one.stop
    return True


def missing_elements(shape: Sequence[int], pieces: Iterable[Piece]) -> int:
    """Returns how many elements of a tensor are in none of the pieces, which have no element in common."""
    return math.prod(shape) - sum(piece.length for piece in pieces)
