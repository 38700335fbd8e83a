"""Ports that ranks publish in the run's store: real sockets, in one process."""

import datetime
import json
import socket
import threading

import pytest
import torch
import torch.distributed as dist

from spark_dl.launch import connections
from spark_dl.launch.connections import Port, connect
from spark_dl.world import World


def world(rank, store):
    return World(rank, 4, rank, 4, "127.0.0.1", torch.device("cpu"), store)


def test_only_ranks_with_the_token_of_the_store_are_let_in(monkeypatch):
    monkeypatch.setattr(connections, "_HELLO_S", 0.2)
    store, found = dist.HashStore(), []
    with Port(world(2, store), "server/2", "the server") as port:
        about = json.loads(store.get("server/2"))
        strangers = [socket.create_connection((about["address"], about["port"])) for _ in range(5)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        said = [{"token": "0" * 64, "rank": 0, "host": "x"}, [1], {"token": about["token"], "rank": 3, "host": "x"}]
        for stranger, hello in zip(strangers[1:4], said, strict=True):
            data = json.dumps(hello).encode()
            stranger.sendall(len(data).to_bytes(4, "big") + data)
        # the last one says nothing
        ours = threading.Thread(target=lambda: found.append(connect(world(0, store), "server/2", 2, 5.0)))
        ours.start()
        accepted = port.accept([0], 10)
        ours.join(10)
    assert [(peer.rank, peer.host) for peer in accepted + found] == [(0, "127.0.0.1"), (2, "127.0.0.1")]
    accepted[0].sock.sendall(b"a")
    found[0].sock.sendall(b"b")
    assert (found[0].sock.recv(1), accepted[0].sock.recv(1)) == (b"a", b"b")
    for sock in (*strangers, accepted[0].sock, found[0].sock):
        sock.close()


def test_ranks_that_do_not_come_are_named_and_those_that_came_are_let_go():
    store, errors = dist.HashStore(), []

    def come():
        try:
            connect(world(0, store), "server/2", 2, 5.0)
        except RuntimeError as error:
            errors.append(str(error))

    with Port(world(2, store), "server/2", "the server") as port:
        coming = threading.Thread(target=come)
        coming.start()
        with pytest.raises(RuntimeError, match=r"ranks \[1\] did not connect to the server within 0.5 s"):
            port.accept([0, 1], 0.5)
    coming.join(10)
    assert "closed by peer before all ranks had connected" in errors[0]


def test_a_port_that_cannot_be_reached_is_named():
    store = dist.HashStore()
    with Port(world(2, store), "server/2", "the server"):
        pass
    with pytest.raises(
        RuntimeError, match=r"rank 0 on host 127.0.0.1 cannot reach the server, rank 2 on host 127.0.0.1"
    ):
        connect(world(0, store), "server/2", 2, 2.0)


def test_a_port_that_is_not_opened_in_time_is_named_with_the_setting():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=0.5))
    with pytest.raises(RuntimeError, match=r"rank 0 on host .* waited for rank 2 to open .*launch\.start_timeout_s"):
        connect(world(0, store), "server/2", 2, 2.0)
