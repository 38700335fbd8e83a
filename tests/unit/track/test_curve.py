"""The picture of a loss: of bounded size, exact where it counts, and nothing in it that runs."""

import re
from xml.etree import ElementTree

import pytest

from spark_dl.track.notebook import MAX_POINTS, Line, Points, draw


def points(values, weight=1.0):
    found = Points()
    for x, y in enumerate(values):
        found.add(x, y, weight)
    return found


@pytest.mark.parametrize("number", [0, 1, 2, MAX_POINTS - 1, MAX_POINTS, MAX_POINTS + 1, 20_003])
def test_a_line_has_few_points_in_order_from_the_first_to_the_last(number):
    found = points(range(number)).all()
    assert len(found) <= MAX_POINTS
    assert found == sorted(found)
    assert len(found) >= min(number, MAX_POINTS // 2)
    if number:
        assert found[-1][0] == number - 1


def test_merged_points_are_the_means_of_their_values():
    found = points([float(x % 2) for x in range(1 << 14)]).all()
    assert [y for _, y in found] == pytest.approx([0.5] * len(found))


def test_a_point_of_less_weight_is_merged_with_the_next_one():
    found = Points()
    for x, y, weight in ((10, 1.0, 10), (20, 1.0, 10), (21, 9.0, 1), (30, 2.0, 9)):
        found.add(x, y, weight)
    assert found.all() == [(10, 1.0), (20, 1.0), (30, pytest.approx(2.7))]
    assert found.last == (30, 2.0)


def test_values_that_are_not_finite_are_left_out():
    assert points([1.0, float("nan"), float("inf"), 2.0]).all() == [(0, 1.0), (3, 2.0)]


def drawn(values, **options):
    """The picture as XML, and the places of its first line."""
    page = draw([Line("loss", "#123456", points(values).all())], x_name="step", **options)
    tree = ElementTree.fromstring(page.replace("&#9679;", "*"))
    path = next(p for p in tree.iter("path") if p.get("stroke") == "#123456")
    return tree, [tuple(map(float, at.split())) for at in path.get("d")[1:].split("L")]


def test_the_vertical_axis_is_logarithmic_for_positive_values():
    tree, places = drawn([1.0, 0.1, 0.01])
    heights = [y for _, y in places]
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1])
    assert "".join(tree.itertext()).endswith("logarithmic scale10.10.010step2")
    tree, places = drawn([1.0, 0.0, -1.0])
    assert "logarithmic" not in "".join(tree.itertext())
    assert places[1][1] - places[0][1] == pytest.approx(places[2][1] - places[1][1])


def test_the_horizontal_axis_reaches_to_the_planned_end():
    _, places = drawn([3.0, 2.0], x_end=4)
    assert places[1][0] < 300  # of 1000
    _, places = drawn([3.0, 2.0])
    assert places[1][0] > 900


@pytest.mark.parametrize("values", [[1.0], [0.0], [5.0, 5.0], [-1.0, -1.0], [1e-300], [1e-320, 1e300], [-1e300, 1e300]])
def test_every_finite_line_is_drawn_inside_of_the_picture(values):
    _, places = drawn(values)
    assert all(0 <= x <= 1000 and 0 <= y <= 300 for x, y in places)


def test_the_size_is_bounded_and_nothing_can_run():
    line = Line("<script>alert('1')</script>\"", "#123456", points(range(10_000)).all(), has_dots=True)
    page = draw([line], x_name="<b>step</b>")
    assert len(page) < 20_000
    assert "<script" not in page
    assert "<b>" not in page
    assert not re.search(r"\son\w+=|javascript:|https?:", page)
    assert draw([], x_name="step") == draw([Line("loss", "#123456", [])], x_name="step") == ""
