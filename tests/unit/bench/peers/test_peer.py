"""A peer that cannot run leaves the others as they are."""

import sys

import numpy as np
import pytest

from spark_dl.bench.peers.peer import Peer, answers


def test_a_peer_that_cannot_be_started_is_left_out_and_said(capsys):
    peer = Peer("theirs", ["/nowhere/python"])
    assert peer.ask("epoch") is None
    peer.close()
    assert "theirs is left out: " in capsys.readouterr().err


def test_so_is_one_that_ends(capsys):
    peer = Peer("theirs", [sys.executable, "-c", "raise SystemExit(3)"])
    assert peer.ask("epoch") is peer.ask("epoch") is None
    assert capsys.readouterr().err == "theirs is left out: ended with exit code 3\n"


def test_what_its_libraries_print_is_no_answer():
    peer = Peer("theirs", [sys.executable, "-c", "print('hello'); print('{\"rows\": 3}', flush=True); input()"])
    assert peer.ask("epoch") == {"rows": 3}
    peer.close()


def test_an_epoch_without_a_row_is_taken_again(tmp_path):
    answer = answers(lambda number: [[number, number]] if number in (1, 4) else [])
    assert answer("epoch")["rows"] == 2
    assert answer(f"labels {tmp_path}/order.npy")["rows"] == 2
    assert np.load(tmp_path / "order.npy").tolist() == [4, 4]
    with pytest.raises(RuntimeError, match="epochs without a row"):
        answer("epoch")
