"""A peer that cannot run leaves the others as they are."""

import sys

import numpy as np
import pytest

from benchmarks.peers import peer as peer_module
from benchmarks.peers.peer import Peer, absent, answers


def test_a_peer_that_cannot_be_started_is_left_out_and_said(capsys):
    peer = Peer("theirs", ["/nowhere/python"])
    assert peer.ask("epoch") is None
    peer.close()
    assert f"theirs is left out: {peer.reason}\n" == capsys.readouterr().err
    assert "/nowhere/python" in peer.reason


def test_a_peer_without_its_environment_is_not_started_and_says_what_makes_it(tmp_path, capsys):
    reason = absent(f"{tmp_path}/bin/python", "setup-theirs")
    touch = [sys.executable, "-c", f"open({str(tmp_path / 'started')!r}, 'w')"]
    peer = Peer("theirs", touch, absent=reason)
    assert peer.ask("epoch") is None
    assert peer.reason == reason == f"there is no {tmp_path}/bin/python; `make setup-theirs` makes it"
    assert capsys.readouterr().err == f"theirs is left out: {reason}\n"
    assert not (tmp_path / "started").exists()
    assert absent(sys.executable, "setup-theirs") is None


def test_so_is_one_that_ends(capsys):
    peer = Peer("theirs", [sys.executable, "-c", "raise SystemExit(3)"])
    assert peer.ask("epoch") is peer.ask("epoch") is None
    assert peer.reason == "ended with exit code 3"
    assert capsys.readouterr().err == f"theirs is left out: {peer.reason}\n"


def test_so_is_one_that_does_not_answer_in_time(monkeypatch):
    monkeypatch.setattr(peer_module, "_ANSWER_S", 0.2)
    peer = Peer("theirs", [sys.executable, "-c", "import time; time.sleep(600)"])
    assert peer.ask("epoch") is None
    assert peer.reason == "ended with exit code -9"


def test_a_peer_ends_with_its_input_and_tidies_up(tmp_path):
    tidies = f"import sys; print('{{}}', flush=True); sys.stdin.read(); open({str(tmp_path / 'tidy')!r}, 'w')"
    peer = Peer("theirs", [sys.executable, "-c", tidies])
    assert peer.ask("epoch") == {}
    peer.close()
    assert (tmp_path / "tidy").exists()


def test_one_that_does_not_is_killed(monkeypatch):
    monkeypatch.setattr(peer_module, "_LEAVE_S", 0.2)
    peer = Peer("theirs", [sys.executable, "-c", "print('{}', flush=True); import time; time.sleep(600)"])
    assert peer.ask("epoch") == {}
    process = peer._process
    peer.close()
    assert process.returncode == -9


def test_what_its_libraries_print_is_no_answer():
    peer = Peer("theirs", [sys.executable, "-c", "print('hello'); print('{\"rows\": 3}', flush=True); input()"])
    assert peer.ask("epoch") == {"rows": 3}
    peer.close()


def test_of_a_long_epoch_the_first_rows_count_unless_it_is_to_be_whole(tmp_path):
    batches = [[0, 1], [2, 3], [4]]
    assert answers(lambda number: batches, limit_s=0)("epoch")["rows"] == 2
    assert answers(lambda number: batches, limit_s=float("inf"))("epoch")["rows"] == 5
    assert answers(lambda number: batches, limit_s=0)(f"labels {tmp_path}/order.npy")["rows"] == 5


def test_an_epoch_without_a_row_is_taken_again(tmp_path):
    answer = answers(lambda number: [[number, number]] if number in (1, 4) else [])
    assert answer("epoch")["rows"] == 2
    assert answer(f"labels {tmp_path}/order.npy")["rows"] == 2
    assert np.load(tmp_path / "order.npy").tolist() == [4, 4]
    with pytest.raises(RuntimeError, match="epochs without a row"):
        answer("epoch")
