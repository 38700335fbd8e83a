"""The benchmark of loaders: which peers run, which are left out, and how an order is judged."""

import numpy as np
import pytest

from benchmarks.peers import loader


def test_an_unknown_peer_is_named_with_those_that_are_known():
    with pytest.raises(ValueError, match=r"^--peers: unknown dali; expected some of spark_dl, .*ray_data.*, arrow$"):
        loader.Options(peers=("spark_dl", "dali"))


@pytest.mark.long
@pytest.mark.slow
def test_peers_whose_environment_is_not_there_are_left_out_with_the_reason():
    theirs = ("webdataset", "petastorm_rows")
    options = loader.Options(
        repeats=1, scale=0.002, peers=("memory_gather", *theirs), peers_python="/no/python", petastorm_python="/no/p"
    )
    for measured in loader.measure(options).values():
        assert measured["memory_gather"] > 0
        assert 0.2 < measured["shuffle"]["memory_gather"]["displacement"] < 0.45
        assert [measured[name] for name in theirs] == [None, None]
        assert measured["left_out"] == {
            "webdataset": "there is no /no/python; `make setup-peers` makes it",
            "petastorm_rows": "there is no /no/p; `make setup-petastorm` makes it",
        }


@pytest.mark.slow
@pytest.mark.parametrize(("most_s", "epochs"), [(0.0, 3), pytest.param(1e9, 6, marks=pytest.mark.long)])
def test_a_slow_peer_is_measured_less_often(monkeypatch, most_s, epochs):
    asked = []

    class Recorded(loader.Peer):
        def ask(self, what):
            asked.append(what)
            return super().ask(what)

    monkeypatch.setattr(loader, "Peer", Recorded)
    monkeypatch.setattr(loader, "_PEER_S", most_s)
    loader.measure(loader.Options(repeats=6, scale=0.0005, peers=("arrow",)))
    assert asked.count("epoch") == 2 * (1 + epochs)  # of both datasets, and the first one warms up


@pytest.mark.parametrize("rows", [1000, 600])
def test_the_order_of_an_epoch_is_judged_by_the_rows_that_it_has(rows):
    """Of all rows or, where a peer has no more, of the first ones."""
    labels = np.random.default_rng(0).permutation(1000)
    order = np.argsort(labels)
    assert loader._quality(labels[:rows], order) == {
        "displacement": 0, "neighbours": pytest.approx(1 - 3 / 999 if rows == 1000 else 1 - 2 / 599)
    }  # fmt: skip
    shuffled = np.random.default_rng(1).permutation(labels[:rows])
    found = loader._quality(shuffled, order)
    assert found["displacement"] == pytest.approx(1 / 3, abs=0.03)
    assert found["neighbours"] == pytest.approx(loader.BATCH / rows, abs=0.08)
