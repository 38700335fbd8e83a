"""The store of the ranks: what torch's own store does, for those that know the secret alone."""

import contextlib
import datetime
import json
import multiprocessing
import pickle
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import torch.distributed as dist

from spark_dl import channel
from spark_dl.channel import Address, connect
from spark_dl.launch.rank import store as store_module
from spark_dl.launch.rank.store import RankStore, StoreServer
from tests.builders import rogues

SECRET = bytes(range(32))
SHORT = datetime.timedelta(seconds=0.3)
LONG = datetime.timedelta(seconds=20)


@pytest.fixture
def address():
    listener = socket.create_server(("127.0.0.1", 0))
    server = StoreServer(listener, SECRET)
    yield Address("127.0.0.1", listener.getsockname()[1], SECRET)
    server.close()


@pytest.fixture
def store(address):
    found = RankStore(address, LONG)
    yield found
    found.close()


def stores(address):
    """Ours and torch's, which must do the same."""
    return RankStore(address, SHORT), dist.HashStore()


def test_it_does_what_torch_s_own_store_does(address):
    ours, torchs = stores(address)
    torchs.set_timeout(SHORT)
    for each in (ours, torchs):
        each.set("a", "1")
        each.set("b", b"\x00\xff")
        each.multi_set(["m", "n"], ["3", "4"])
        each.append("a", "2")
        assert (each.get("a"), each.get("b")) == (b"12", b"\x00\xff")
        assert each.multi_get(["n", "m"]) == [b"4", b"3"]
        assert [each.add("count", 5), each.add("count", -2)] == [5, 3]
        assert each.get("count") == b"3"
        assert each.compare_set("new", "", "x") == b"x"
        assert each.compare_set("new", "y", "z") == b"x"
        assert each.compare_set("new", "x", "z") == b"z"
        assert each.compare_set("none", "y", "z") == b"y"
        assert (each.check(["a", "b"]), each.check(["a", "none"])) == (True, False)
        assert (each.delete_key("a"), each.delete_key("a")) == (True, False)
        each.wait(["b", "new"])
        with pytest.raises(dist.DistStoreError):
            each.wait(["b", "later"], SHORT)
        with pytest.raises(dist.DistStoreError):
            each.get("later")
    assert ours.num_keys() == 5  # b, m, n, count, new


def test_keys_of_a_prefix_are_apart(store):
    one, two = (dist.PrefixStore(name, store) for name in ("one", "two"))
    one.set("a", "1")
    two.set("a", "2")
    assert (one.get("a"), two.get("a"), store.get("one/a")) == (b"1", b"2", b"1")
    assert two.add("n", 2) == 2
    assert two.multi_get(["a", "n"]) == [b"2", b"2"]
    with pytest.raises(dist.DistStoreError, match="keys are missing, two/none first"):
        two.wait(["a", "none"], SHORT)


def test_threads_use_it_at_the_same_time(store):
    waiting = threading.Thread(target=store.wait, args=(["late"], LONG), daemon=True)
    waiting.start()
    with ThreadPoolExecutor(8) as pool:
        totals = list(pool.map(lambda _: store.add("n", 1), range(200), timeout=60))
    assert sorted(totals) == list(range(1, 201))
    assert waiting.is_alive()
    store.set("late", "")
    waiting.join(10)
    assert not waiting.is_alive()


def all_reduce(rank, address, results):
    torch.set_num_threads(1)
    store = RankStore(address, LONG)
    dist.init_process_group("gloo", store=dist.PrefixStore("g", store), rank=rank, world_size=3, timeout=LONG)
    found = torch.tensor([float(rank + 1)])
    dist.all_reduce(found)
    pairs = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(found, group=pairs)
    dist.barrier()
    dist.destroy_process_group()
    results.put((rank, found.item()))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_gloo_uses_it(address):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=all_reduce, args=(rank, address, results), daemon=True) for rank in range(3)]
    for each in ranks:
        each.start()
    found = dict(results.get(timeout=90) for _ in ranks)
    for each in ranks:
        each.join(20)
    assert found == {0: 12.0, 1: 12.0, 2: 6.0}


def test_a_client_learns_at_once_that_the_server_has_gone(address):
    listener = socket.create_server(("127.0.0.1", 0))
    server = StoreServer(listener, SECRET)
    client = RankStore(Address("127.0.0.1", listener.getsockname()[1], SECRET), LONG)
    threading.Timer(0.3, server.close).start()
    start = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match="the rank that holds the store has ended"):
        client.wait(["never"], LONG)
    assert time.monotonic() - start < 5


def test_an_answer_on_its_way_arrives_though_the_server_closes():
    for _ in range(20):
        listener = socket.create_server(("127.0.0.1", 0))
        server = StoreServer(listener, SECRET)
        own, other = (RankStore(Address("127.0.0.1", listener.getsockname()[1], SECRET), LONG) for _ in range(2))

        def leave(own=own, server=server):
            own.wait(["left"])
            server.close()

        holder = threading.Thread(target=leave)
        holder.start()
        other.set("left", "1")
        holder.join(10)
        own.close()
        other.close()


def test_S05_another_program_cannot_use_the_store(address, store):
    store.set("weights", "mine")
    with pytest.raises(multiprocessing.AuthenticationError):
        RankStore(Address(address.host, address.port, b"x" * 32), SHORT)
    with pytest.raises((RuntimeError, dist.DistError)):
        dist.TCPStore(address.host, address.port, None, False, datetime.timedelta(seconds=1)).get("weights")
    assert store.get("weights") == b"mine"


SENT = {
    "silence": b"", "http": b"GET / HTTP/1.1\r\n\r\n", "2 GiB": (0x7FFFFFFF).to_bytes(4, "big"),
    "8 EiB": b"\xff\xff\xff\xff" + bytes(8), "zeros": bytes(1000), "a pickle": pickle.dumps(print),
    "the answer to no challenge": struct.pack("!i", 9) + b"#WELCOME#",
}  # fmt: skip


@pytest.mark.parametrize("sent", SENT)
def test_S06_garbage_is_closed_and_does_no_harm(address, store, sent, monkeypatch):
    monkeypatch.setattr(channel, "_AUTH_TIMEOUT_S", 0.5)
    assert rogues.tried((address.host, address.port), SENT[sent]) < 4
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_S06_who_sends_a_byte_now_and_then_is_closed_too(address, store, monkeypatch):
    monkeypatch.setattr(channel, "_AUTH_TIMEOUT_S", 0.5)
    assert rogues.dripped((address.host, address.port)) < 4
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_S06_a_silent_and_a_slow_client_are_closed_after_2_s_without_harm(address, store):
    """With the true time limit. The slow one sends its answer to the challenge byte by byte."""
    place = (address.host, address.port)
    with ThreadPoolExecutor(2) as pool:
        silent = pool.submit(rogues.tried, place)
        slow = pool.submit(rogues.dripped, place, first=struct.pack("!i", 32))
        store.set("a", "1")
        assert store.get("a") == b"1"
        assert 1.9 < silent.result(10) < 4
        assert 1.9 < slow.result(10) < 4


def test_a_rank_that_takes_too_long_to_prove_itself_connects_again(address, monkeypatch):
    monkeypatch.setattr(channel, "_AUTH_TIMEOUT_S", 0.3)
    proof, waits = channel._proof, [0.6, 0.6]

    def prove_late(secret, role, question):
        if threading.current_thread() is threading.main_thread() and role == b"client":  # not the server, nor its proof
            time.sleep(waits.pop(0) if waits else 0)
        return proof(secret, role, question)

    monkeypatch.setattr(channel, "_proof", prove_late)
    connect(address).close()
    assert waits == []
    waits += [0.6] * 3
    with pytest.raises(ConnectionError, match="closed by peer"):
        connect(address)


def test_S06_what_a_rank_said_lets_nobody_else_in(address, store):
    between = rogues.Eavesdropper((address.host, address.port))
    rank = RankStore(Address("127.0.0.1", between.port, SECRET), LONG)
    rank.set("weights", "mine")
    assert b"weights" in between.heard
    assert SECRET not in between.heard
    assert rogues.tried((address.host, address.port), between.heard.replace(b"bWluZQ==", b"ZXZpbA==")) < 4
    assert (rank.get("weights"), store.get("weights")) == (b"mine", b"mine")
    rank.close()
    between.close()


def test_S06_many_strangers_take_no_memory_and_keep_no_rank_waiting(address, store):
    """Each announces a message of 2 GiB, and sends as much of it as is taken."""
    process = psutil.Process()
    before, start = process.memory_info().rss, time.monotonic()
    clients = [socket.create_connection((address.host, address.port), 5) for _ in range(100)]
    for client in clients:
        client.setblocking(False)
        with contextlib.suppress(OSError):
            client.send((0x7FFFFFFF).to_bytes(4, "big") + bytes(1 << 20))
    late = RankStore(address, LONG)
    late.set("a", "1")
    assert store.get("a") == b"1"
    assert time.monotonic() - start < 5
    assert process.memory_info().rss - before < 100 << 20
    for client in clients:
        client.setblocking(True)
        rogues.ends(client)
        client.close()
    late.close()


@pytest.mark.parametrize("request_", [
    b"no json", b"[]", b"{}", b'{"method": "close", "arguments": []}', b'{"method": "set", "arguments": [["a"], []]}',
    b'{"method": "_set", "arguments": []}', b'{"method": "get", "arguments": [["none"]]}',
])  # fmt: skip
def test_a_request_that_cannot_be_ends_its_connection_alone(address, store, request_):
    with connect(address) as client:
        client.send_bytes(request_)
        with pytest.raises((EOFError, ConnectionError)):
            client.recv_bytes()
    with connect(address) as client:
        client.send_bytes(json.dumps({"method": "count", "arguments": []}).encode())
        assert json.loads(client.recv_bytes()) == 0


def test_S06_a_rank_with_the_store_that_does_not_answer_ends_the_wait(monkeypatch):
    """As one that stands still: its port is open, and its connections are."""
    monkeypatch.setattr(store_module, "_GRACE_S", 0.1)
    over = threading.Event()
    server = channel.Server(socket.create_server(("127.0.0.1", 0)), SECRET, lambda conn: over.wait(60), "silent")
    port = server._listener.getsockname()[1]
    waiting = RankStore(Address("127.0.0.1", port, SECRET), SHORT)
    with pytest.raises(dist.DistNetworkError, match="the rank that holds the store does not answer"):
        waiting.set("a", "1")
    over.set()
    waiting.close()
    server.close()
