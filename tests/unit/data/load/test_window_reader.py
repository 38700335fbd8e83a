"""The threads that read windows agree on the largest one so far."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from spark_dl.data.load.window_reader import ReadSchedule, WindowReader
from spark_dl.data.plan import Segment, Stream, Windows

_OVERTAKE_S = 0.5


class SlowlyCompared(int):
    """A number of bytes whose comparison gives another thread the time to overtake it."""

    def __radd__(self, other):
        return self

    def __gt__(self, other):
        self.begun.set()
        self.overtaken.wait(_OVERTAKE_S)
        return int(self) > other


@pytest.mark.parametrize("sizes", [(10, 100), (100, 10)])
def test_the_largest_window_is_that_of_all_threads(sizes):
    slow = SlowlyCompared(sizes[0])
    slow.begun, slow.overtaken = threading.Event(), threading.Event()

    class Rows:
        def read_into(self, segments, out):
            if segments[0].row_group:
                assert slow.begun.wait(10)
            size = sizes[1] if segments[0].row_group else slow
            out.append([SimpleNamespace(own_values=SimpleNamespace(nbytes=size))])

        def end_thread(self):
            pass

    groups = [np.array([[group, 0, 1]]) for group in (0, 1)]
    streams = [Stream(Windows(group, np.array([1]), None), Segment(0, 0, 1)) for group in groups]
    arena = SimpleNamespace(num_slots=2, slot=lambda slot: [], clear=lambda slot: None)
    reader = WindowReader(Rows(), ReadSchedule(streams, 1, 0), arena, 2, 1000.0)
    try:
        reader.next(1)
        slow.overtaken.set()
        reader.next(0)
        assert reader._largest == 100
    finally:
        reader.close()
