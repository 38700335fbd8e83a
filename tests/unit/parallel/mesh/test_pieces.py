"""Layouts of tensors, and what two of them have in common, against the elements themselves."""

import itertools

import pytest
import torch

from spark_dl.parallel.pieces import Layout, Piece, may_overlap, missing_elements, of_boxes, whole
from spark_dl.rundir.checkpoint_files import _copy

SHAPES = [(), (5,), (4, 6), (3, 2, 5)]


def elements(layout):
    """The numbers of a layout's elements in the whole tensor, in its order."""
    numbers = torch.arange(torch.Size(layout.shape).numel()).view(layout.shape)
    found = []
    for piece in layout.pieces:
        box = numbers[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))]
        found += box.reshape(-1)[piece.start : piece.stop].tolist()
    return found


def cut(shape, axis, parts):
    """The boxes of a tensor that is cut along an axis as torch's `chunk` cuts."""
    offset, found = 0, []
    for part in torch.empty(shape).chunk(parts, axis):
        found.append(([offset if i == axis else 0 for i in range(len(shape))], list(part.shape)))
        offset += part.shape[axis]
    return found


def layouts(shape):
    """All ways in which a rank can have a part of a tensor here: boxes along each axis, and ranges of all of these."""
    boxed = [whole(shape)]
    for axis, parts in itertools.product(range(len(shape)), (2, 3)):
        boxes = cut(shape, axis, parts)
        boxed += [of_boxes(shape, [box]) for box in boxes]
        boxed.append(of_boxes(shape, boxes[::2]))  # two boxes apart, as of a packed projection
    found = []
    for layout in boxed:
        half = layout.length // 2
        found += [layout, layout.part(0, half), layout.part(half, layout.length)]
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_part_has_the_elements_of_its_range(shape):
    for layout in layouts(shape):
        for start, stop in itertools.combinations(range(layout.length + 1), 2):
            assert elements(layout.part(start, stop)) == elements(layout)[start:stop]
            assert layout.part(start, stop).length == stop - start


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_that_share_elements_are_found(shape):
    pieces = {piece for layout in layouts(shape) for piece in layout.pieces}
    for one, other in itertools.product(pieces, pieces):
        shared = {*elements(Layout(shape, (one,)))} & {*elements(Layout(shape, (other,)))}
        assert may_overlap(one, other) or not shared
        if (one.offsets, one.sizes) == (other.offsets, other.sizes):
            assert may_overlap(one, other) == bool(shared)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_two_layouts_have_in_common_is_copied(shape):
    tensor = torch.randn(shape)
    for own, other in itertools.product(layouts(shape), layouts(shape)):
        target = torch.full((own.length,), torch.nan)
        source = tensor.reshape(-1)[elements(other)]
        count = _copy(target, own, source, other.pieces)
        shared = [i for i, number in enumerate(elements(own)) if number in elements(other)]
        assert count == len(shared)
        assert torch.equal(target[shared], tensor.reshape(-1)[elements(own)][shared])
        assert int(target.isnan().sum()) == own.length - count


def test_pieces_travel_as_json():
    piece = Piece((0, 2), (3, 2), 1, 5)
    assert Piece.from_plain(piece.to_plain()) == piece
    for plain in ([], [[0], [3], 0], [[0], [3], 0, 4], [[0, 0], [3], 0, 3], [[0], [3], 2, 1], [["a"], [3], 0, 1], None):
        with pytest.raises(ValueError, match="expected"):
            Piece.from_plain(plain)


def test_elements_that_are_missing_are_counted():
    pieces = [piece for box in cut((4, 6), 1, 3) for piece in of_boxes((4, 6), [box]).pieces]
    assert missing_elements((4, 6), pieces) == 0
    assert missing_elements((4, 6), pieces[1:]) == 8
