"""Memory of arrays is used again when nobody has them, and not before."""

import threading

import numpy as np
import pytest
import torch

from spark_dl.data.parquet.buffers import BufferPool


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_once_the_array_is_gone():
    memory = BufferPool()
    first = memory.take((4, 1000), np.dtype(np.float32))
    place = address(first)
    second = memory.take((4, 1000), np.dtype(np.float32))
    assert address(second) != place
    del first
    smaller = memory.take((2, 100), np.dtype(np.int64))
    assert address(smaller) == place
    assert smaller.shape == (2, 100)
    assert smaller.dtype == np.int64
    assert smaller.flags.writeable


VIEWS = {
    "row": lambda array: array[1],
    "view of a view": lambda array: array[1:][:, 2:4][0][:1],
    "other dtype": lambda array: array.view(np.uint8)[0],
    "tensor": lambda array: torch.from_numpy(array)[1][2:],
    "its array again": lambda array: torch.from_numpy(array)[1].numpy(),
    "memoryview": lambda array: memoryview(array)[1:],
    "buffer": lambda array: np.frombuffer(memoryview(array.reshape(-1))[3:], np.float32),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_keeps_the_memory(name):
    memory = BufferPool()
    array = memory.take((4, 100), np.dtype(np.float32))
    array[:] = 7
    place, view = address(array), VIEWS[name](array)
    del array
    for _ in range(3):
        other = memory.take((4, 100), np.dtype(np.float32))
        assert address(other) != place
        other[:] = 0
    assert (np.asarray(view).view(np.float32) == 7).all()
    del view
    found = [memory.take((4, 100), np.dtype(np.float32)) for _ in range(3)]
    assert place in [address(a) for a in found]


def test_arrays_that_grow_and_empty_ones():
    memory = BufferPool()
    assert memory.take((0, 3), np.dtype(np.float32)).shape == (0, 3)
    for rows in (1, 5000, 2, 9000):
        array = memory.take((rows, 3), np.dtype(np.float64))
        array[:] = rows
        assert array.sum() == 3 * rows * rows


def test_threads_never_share_an_array():
    memory, faults = BufferPool(), []

    def work(number):
        for i in range(2000):
            array = memory.take((64,), np.dtype(np.int64))
            array[:] = number * 10_000 + i
            if not (array == number * 10_000 + i).all():
                faults.append(number)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not faults
