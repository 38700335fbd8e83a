"""The connections between trainers and servers: real sockets, in one process."""

import contextlib
import socket
import threading
import time

import numpy as np
import pytest

from spark_dl.baselines.servers import wire
from spark_dl.baselines.servers.wire import Transport

BIG = 3_000_000  # 12 MB: more than the buffers of a connection hold


def connected():
    """The two ends of a TCP connection."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


@contextlib.contextmanager
def two_wires(most_numbers=BIG):
    """A trainer's side, whose peer is rank 7, and a server's side, whose peer is rank 3."""
    a, b = connected()
    ours, theirs = Transport(most_numbers), Transport(most_numbers)
    ours.add(7, "host-7", a)
    theirs.add(3, "host-3", b)
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


def numbers(n, seed=0):
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


def test_small_and_large_messages_come_in_order_and_whole():
    with two_wires() as (ours, theirs):
        ours.send(7, {"n": 1})
        ours.send(7, {"n": 2}, numbers(5))
        got = [theirs.receive(5) for _ in range(2)]
        assert [(m.rank, m.head, m.body is None) for m in got] == [(3, {"n": 1}, True), (3, {"n": 2}, False)]
        np.testing.assert_array_equal(got[1].body, numbers(5))
        assert theirs.receive(0) is None


def test_both_sides_send_more_than_fits_at_the_same_time():
    """A side that blocked in its send would stop the other one."""
    with two_wires() as (ours, theirs):
        ours.send(7, {"from": "ours"}, numbers(BIG, 1))
        theirs.send(3, {"from": "theirs"}, numbers(BIG, 2))
        found = {}

        def serve():
            found["theirs"] = theirs.receive(20)
            theirs.drain(20)

        thread = threading.Thread(target=serve)
        thread.start()
        found["ours"] = ours.receive(20)
        ours.drain(20)
        thread.join(20)
        np.testing.assert_array_equal(found["ours"].body, numbers(BIG, 2))
        np.testing.assert_array_equal(found["theirs"].body, numbers(BIG, 1))


def test_of_replaceable_messages_that_wait_only_the_newest_goes_out():
    with two_wires() as (ours, theirs):
        first, kept = numbers(BIG), numbers(4)
        ours.send(7, {"n": 0}, first, replaceable=True)  # begun, so it goes out whole
        ours.send(7, {"n": 1}, kept)
        for n in range(2, 50):
            ours.send(7, {"n": n}, numbers(1000, n), replaceable=True)
        got = []
        thread = threading.Thread(target=lambda: [got.append(theirs.receive(20)) for _ in range(3)])
        thread.start()
        ours.drain(20)
        thread.join(20)
        assert [m.head["n"] for m in got] == [0, 1, 49]
        np.testing.assert_array_equal(got[2].body, numbers(1000, 49))


def test_memory_of_bodies_is_used_again():
    with two_wires() as (ours, theirs):
        places = set()
        for n in range(5):
            ours.send(7, {"n": n}, numbers(1000, n))
            message = theirs.receive(5)
            np.testing.assert_array_equal(message.body, numbers(1000, n))
            places.add(message.body.ctypes.data)
            theirs.give_back(message.body)
        assert len(places) == 1


def test_what_is_not_given_back_stays_as_it_is():
    with two_wires() as (ours, theirs):
        kept = []
        for n in range(4):
            ours.send(7, {"n": n}, numbers(100, n))
            kept.append(theirs.receive(5).body)
        for n, body in enumerate(kept):
            np.testing.assert_array_equal(body, numbers(100, n))


def test_a_peer_that_goes_is_named():
    with two_wires() as (ours, theirs):
        theirs.close()
        with pytest.raises(RuntimeError, match=r"lost the connection to rank 7 on host host-7: Connection closed"):
            ours.receive(5)


def test_a_peer_that_does_not_read_is_named_in_bounded_time():
    with two_wires() as (ours, _):
        ours.send(7, {}, numbers(BIG))
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"rank 7 on host host-7 took no data for 0.3 s"):
            ours.drain(0.3)
        assert time.monotonic() - start < 30  # the default is 300


@pytest.mark.parametrize("sizes", [(5, 4 * 101), (5, 7), (1 << 30, 0), (0, 0)])
def test_sizes_that_cannot_be_are_refused_before_memory_is_taken(sizes):
    a, b = connected()
    reader = Transport(100)
    reader.add(1, "host-1", a)
    b.sendall(wire._SIZES.pack(*sizes))
    with pytest.raises(RuntimeError, match=r"rank 1 on host host-1 sent .* expected at most 1048576 \+ 400"):
        reader.receive(5)
    reader.close()
    b.close()


def test_a_peer_that_goes_while_a_message_is_on_its_way_is_named():
    with two_wires() as (ours, theirs):
        ours.send(7, {}, numbers(BIG))
        theirs.close()
        with pytest.raises(
            RuntimeError, match="lost the connection to rank 7 on host host-7: (Broken|Connection reset)"
        ):
            ours.drain(5)
