"""Ports that ranks publish in the run's store: real sockets, in one process."""

import datetime
import json
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from spark_dl.channel import Port, connect_to_rank
from spark_dl.world import World
from tests.builders import rogues


def world(rank, store):
    return World(rank, 4, rank, 4, "127.0.0.1", torch.device("cpu"), store)


def come(found, rank, store):
    coming = threading.Thread(target=lambda: found.append(connect_to_rank(world(rank, store), "server/2", 2, 5.0)))
    coming.start()
    return coming


def framed(**said):
    data = json.dumps(said).encode()
    return len(data).to_bytes(4, "big") + data


def test_S18_only_ranks_that_know_the_token_are_let_in_and_nobody_waits_for_the_others():
    store, found, strangers = dist.HashStore(), [], []
    with Port(world(2, store), "server/2", "the server") as port:
        about = json.loads(store.get("server/2"))
        said = [
            b"", b"GET / HTTP/1.1\r\n\r\n", (2**31 - 1).to_bytes(4, "big"), b"\xff" * 4096,
            framed(token="0" * 64, rank=0, host="x"), framed(token=about["token"], rank=0, host="x"),
        ]  # fmt: skip
        for each in said:
            strangers.append(socket.create_connection((about["address"], about["port"])))
            strangers[-1].sendall(each)
        ours, start = come(found, 0, store), time.monotonic()
        accepted = port.accept([0], 10)
        ours.join(10)
        assert time.monotonic() - start < 3, "a stranger kept the rank waiting"
    assert [(peer.rank, peer.host) for peer in accepted + found] == [(0, "127.0.0.1"), (2, "127.0.0.1")]
    accepted[0].sock.sendall(b"a")
    found[0].sock.sendall(b"b")
    assert (found[0].sock.recv(1), accepted[0].sock.recv(1)) == (b"a", b"b")
    for stranger in strangers:
        rogues.ends(stranger)
    for sock in (*strangers, accepted[0].sock, found[0].sock):
        sock.close()


def test_S18_what_was_overheard_lets_nobody_in():
    store, found, accepted = dist.HashStore(), [], []
    with Port(world(2, store), "server/2", "the server") as port:
        about = json.loads(store.get("server/2"))
        between = rogues.Eavesdropper((about["address"], about["port"]))
        store.set("server/2", json.dumps({**about, "port": between.port}))
        accepting = threading.Thread(target=lambda: accepted.extend(port.accept([0, 1], 10)))
        accepting.start()
        comings = [come(found, 0, store)]
        end = time.monotonic() + 5
        while b"rank" not in between.heard and time.monotonic() < end:
            time.sleep(0.01)
        assert about["token"].encode() not in between.heard
        rogue = between.heard.replace(b'"rank": 0', b'"rank": 1')
        assert rogues.tried((about["address"], about["port"]), rogue) < 4
        assert not accepted
        store.set("server/2", json.dumps(about))
        comings.append(come(found, 1, store))
        for thread in (*comings, accepting):
            thread.join(10)
    assert sorted(peer.rank for peer in accepted) == [0, 1]
    for peer in (*accepted, *found):
        peer.sock.close()
    between.close()


def test_a_client_without_the_token_is_told_so():
    store, errors = dist.HashStore(), []

    def come_with_another():
        try:
            connect_to_rank(world(0, store), "server/2", 2, 5.0)
        except RuntimeError as error:
            errors.append(str(error))

    with Port(world(2, store), "server/2", "the server") as port:
        about = json.loads(store.get("server/2"))
        store.set("server/2", json.dumps({**about, "token": "0" * 64}))
        coming = threading.Thread(target=come_with_another)
        coming.start()
        with pytest.raises(RuntimeError, match=r"ranks \[0\] did not connect"):
            port.accept([0], 1.0)
    coming.join(10)
    assert "cannot reach the server, rank 2 on host 127.0.0.1" in errors[0]
    assert "the other side has another secret" in errors[0]


def test_B38_ranks_that_do_not_come_are_named_and_those_that_came_are_let_go():
    store, errors = dist.HashStore(), []

    def come():
        try:
            connect_to_rank(world(0, store), "server/2", 2, 5.0)
        except RuntimeError as error:
            errors.append(str(error))

    with Port(world(2, store), "server/2", "the server") as port:
        coming = threading.Thread(target=come)
        coming.start()
        with pytest.raises(RuntimeError, match=r"ranks \[1\] did not connect to the server within 0.5 s"):
            port.accept([0, 1], 0.5)
    coming.join(10)
    assert "closed by peer before all ranks had connected" in errors[0]


def test_B38_a_port_that_cannot_be_reached_is_named():
    store = dist.HashStore()
    with Port(world(2, store), "server/2", "the server"):
        pass
    with pytest.raises(
        RuntimeError, match=r"rank 0 on host 127.0.0.1 cannot reach the server, rank 2 on host 127.0.0.1"
    ):
        connect_to_rank(world(0, store), "server/2", 2, 2.0)


def test_a_port_that_is_not_opened_in_time_is_named_with_the_setting():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=0.5))
    with pytest.raises(RuntimeError, match=r"rank 0 on host .* waited for rank 2 to open .*launch\.start_timeout_s"):
        connect_to_rank(world(0, store), "server/2", 2, 2.0)
