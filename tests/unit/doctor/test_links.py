"""Connections between ranks, which are threads here, with real sockets."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from spark_dl.doctor import on_rank

SECRET = bytes(range(32))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_rank_measures_the_rate_to_each_other_one(num_ranks):
    with ThreadPoolExecutor(num_ranks) as pool:
        ready, places = threading.Barrier(num_ranks, timeout=20), [("", 0)] * num_ranks

        def run(rank):
            with on_rank.listening("127.0.0.1", SECRET) as port:
                places[rank] = ("127.0.0.1", port)
                ready.wait()
                found = on_rank.measure(rank, places, SECRET)
                ready.wait()
                return found

        rates = list(pool.map(run, range(num_ranks), timeout=60))
    for rank, row in enumerate(rates):
        for other, (rate, why) in enumerate(row):
            assert why == ""
            assert rate is None if other == rank else rate > 1e6


def test_B38_a_rank_that_cannot_be_reached_is_named_with_the_reason():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ((_, own), (rate, why)) = on_rank.measure(0, [("127.0.0.1", 1), closed.getsockname()], SECRET)
    assert (own, rate) == ("", None)
    assert "refused" in why


def test_B38_a_link_that_was_slow_for_a_moment_is_measured_again_and_one_that_is_slow_stays_slow(monkeypatch):
    places = [("a", 0), ("b", 1), ("c", 2), ("d", 3), ("a", 4)]
    rates = {1: [100.0], 2: [10.0, 20.0, 90.0], 3: [10.0, 11.0, 9.0], 4: [1000.0]}  # 4 is on the own host
    monkeypatch.setattr(on_rank, "_rate", lambda address, port, secret: rates[port].pop(0))
    assert on_rank.measure(0, places, SECRET) == [(None, ""), (100.0, ""), (90.0, ""), (11.0, ""), (1000.0, "")]
    assert not any(rates.values())


@pytest.mark.parametrize("sent", [b"", b"short", bytes(32), b"x" * 100_000])
def test_S17_a_client_without_the_secret_gets_nothing(sent, monkeypatch):
    monkeypatch.setattr(on_rank, "CONNECT_S", 0.5)
    with on_rank.listening("127.0.0.1", SECRET) as port, socket.create_connection(("127.0.0.1", port), 5) as client:
        start = time.monotonic()
        try:
            client.sendall(sent)
            assert client.recv(1) == b""
        except ConnectionError:  # closed while data were under way
            pass
        assert time.monotonic() - start < 5
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1).close()


@pytest.mark.parametrize(("answer", "message"), [
    (None, "the other rank has closed the connection"), (3, r"3 of \d+ bytes arrived"),
])  # fmt: skip
def test_bytes_that_do_not_arrive_are_no_rate(monkeypatch, answer, message):
    monkeypatch.setattr(on_rank, "_SEND_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def serve():
            connection, _ = listener.accept()
            with connection:
                while connection.recv(1 << 20):
                    pass
                if answer is not None:
                    connection.sendall(on_rank._COUNT.pack(answer))

        served = pool.submit(serve)
        with pytest.raises(ConnectionError, match=message):
            on_rank._rate(*listener.getsockname(), SECRET)
        served.result(20)
