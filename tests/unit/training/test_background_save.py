"""Checkpoints beside the training: the copy of the state, and errors that are not lost."""

import threading

import pytest
import torch

from spark_dl.training.state import BackgroundSave, StateCopy


def test_the_copy_does_not_change_with_the_state():
    state = {"a": {"w": torch.arange(4.0)}, "b": [torch.ones(2, dtype=torch.int64), 7, ("x", torch.tensor(1.5))]}
    copy = StateCopy().of(state)
    state["a"]["w"].add_(1)
    state["b"][0].zero_()
    assert copy["a"]["w"].tolist() == [0, 1, 2, 3]
    assert copy["b"][0].tolist() == [1, 1]
    assert copy["b"][1:] == [7, ("x", torch.tensor(1.5))]


def test_the_next_copy_uses_the_memory_of_the_last_one():
    copies, state = StateCopy(), {"w": torch.zeros(8), "grows": torch.zeros(2)}
    first = copies.of(state)
    state["w"] += 1
    state["grows"] = torch.ones(3)
    second = copies.of(state)
    assert second["w"].data_ptr() == first["w"].data_ptr()
    assert second["w"].tolist() == [1] * 8
    assert second["grows"].tolist() == [1] * 3


def test_tied_weights_are_copied_once_and_views_alone():
    base = torch.arange(6.0)
    copy = StateCopy().of({"one": base, "two": base, "view": base[:3], "empty": base[:0], "none": torch.empty(0)})
    assert copy["one"] is copy["two"]
    assert copy["view"].untyped_storage().nbytes() == 12
    assert copy["empty"].shape == copy["none"].shape == (0,)


def test_the_result_is_taken_once_and_an_error_is_raised():
    save, go = BackgroundSave(), threading.Event()
    assert save.take(wait=True) is None
    save.start(lambda: go.wait(10) and "url")
    assert save.take(wait=False) is None
    go.set()
    url, seconds = save.take(wait=True)
    assert (url, seconds > 0, save.take(wait=False)) == ("url", True, None)

    def fails():
        raise OSError("the disk is full")

    save.start(fails)
    with pytest.raises(OSError, match="the disk is full"):
        save.take(wait=True)
    save.start(lambda: "again")
    save.close()
    assert save.take(wait=True) is None
