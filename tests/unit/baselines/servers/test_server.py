"""What servers and trainers say to each other, over real connections in one process."""

import dataclasses
import socket
import threading

import numpy as np
import pytest
import torch

from spark_dl.baselines.servers.flat import FlatModel
from spark_dl.baselines.servers.server import ServerState, follow
from spark_dl.baselines.servers.trainer import Trainer
from spark_dl.baselines.servers.wire import Transport
from tests.builders.models import MLP, small_config

FIRST, OTHER, TRAINERS = 2, 3, (0, 1)


def connected(wires, a, b):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        wires[a].add(b, f"host-{b}", socket.create_connection(listener.getsockname()))
        wires[b].add(a, f"host-{a}", listener.accept()[0])


def gradient(number, value):
    return {"kind": "gradient", "number": number}, np.full(4, value, np.float32)


def test_orders_that_come_before_a_pause_ends_are_carried_out_after_it():
    """The first server may begin the next epoch while a gradient of the last one is still on its way here."""
    wires = {rank: Transport(4) for rank in (*TRAINERS, FIRST, OTHER)}
    for rank in (*TRAINERS, FIRST):
        connected(wires, rank, OTHER)
    weights = np.zeros(4, np.float32)

    def update(gradients, shares, lr_factor):
        weights[:] += sum(share * g for share, g in zip(shares, gradients, strict=True))

    server, told = ServerState(wires[OTHER], update, weights.copy), []

    def two_epochs():
        told.extend(follow(server, FIRST, len(TRAINERS), 10)["why"] for _ in range(2))

    following = threading.Thread(target=two_epochs, daemon=True)
    following.start()
    wires[0].send(OTHER, *gradient(1, 1.0))
    wires[0].send(OTHER, {"kind": "pausing"})
    for order in (
        {"kind": "update", "used": [(0, 1), (1, 1)], "shares": [0.5, 0.5], "lr_factor": 1.0},
        {"kind": "pause", "why": "epoch"},
        {"kind": "give", "given": [(0, 2), (1, 2)]},  # of the next epoch
        {"kind": "pause", "why": "over"},
    ):
        wires[FIRST].send(OTHER, order)
    assert wires[0].receive(0.3) is None  # the other trainer's gradient has not come
    wires[1].send(OTHER, *gradient(1, 3.0))
    wires[1].send(OTHER, {"kind": "pausing"})
    for trainer in TRAINERS:
        message = wires[trainer].receive(10)
        assert (message.head, message.body.tolist()) == ({"kind": "weights", "number": 2}, [2.0] * 4)
        wires[trainer].send(OTHER, {"kind": "pausing"})
    following.join(10)
    assert told == ["epoch", "over"]
    for wire in wires.values():
        wire.close()


def test_F29_a_trainer_that_stopped_between_its_messages_to_two_servers_is_named_by_the_second():
    """Else the other trainer would wait for the weights of this server, and name it."""
    wires = {rank: Transport(4) for rank in (*TRAINERS, FIRST, OTHER)}
    for rank in (*TRAINERS, FIRST):
        connected(wires, rank, OTHER)
    server = ServerState(wires[OTHER], lambda *_: None, lambda: np.zeros(4, np.float32))
    order = {"kind": "update", "used": [(0, 1), (1, 1)], "shares": [0.5, 0.5], "lr_factor": 1.0}
    wires[FIRST].send(OTHER, order)
    wires[0].send(OTHER, *gradient(1, 1.0))
    with pytest.raises(RuntimeError, match=r"no gradient from rank 1 on host host-1 for 0\.4 s \(0\.4 times"):
        follow(server, FIRST, len(TRAINERS), 1.0)
    for wire in wires.values():
        wire.close()


def test_a_gradient_is_late_from_its_order_on_however_long_the_server_had_nothing_to_do():
    """As in steps that take long: the order may come before the last bytes of the gradient."""
    wires = {rank: Transport(4) for rank in (*TRAINERS, FIRST, OTHER)}
    for rank in (*TRAINERS, FIRST):
        connected(wires, rank, OTHER)
    server, told = ServerState(wires[OTHER], lambda *_: None, lambda: np.zeros(4, np.float32)), []
    following = threading.Thread(target=lambda: told.append(follow(server, FIRST, len(TRAINERS), 1.0)), daemon=True)
    following.start()
    following.join(0.6)  # longer than the limit of an ordered gradient
    wires[FIRST].send(OTHER, {"kind": "update", "used": [(0, 1)], "shares": [1.0], "lr_factor": 1.0})
    assert wires[0].receive(0.1) is None
    wires[0].send(OTHER, *gradient(1, 1.0))
    for trainer in TRAINERS:
        wires[trainer].send(OTHER, {"kind": "pausing"})
    wires[FIRST].send(OTHER, {"kind": "pause", "why": "epoch"})
    following.join(10)
    assert [order["why"] for order in told] == ["epoch"]
    for wire in wires.values():
        wire.close()


def test_a_trainer_whose_weights_are_overtaken_on_their_way_says_so():
    """Else the first server would wait for its answer, and name it as one that stands still."""
    flat = FlatModel(MLP, torch.device("cpu"), 2)
    wires = {rank: Transport(len(flat.weights)) for rank in (0, FIRST, OTHER)}
    for server in (FIRST, OTHER):
        connected(wires, 0, server)
    trainer = Trainer(MLP, small_config(2), flat, wires[0], range(FIRST, OTHER + 1), rank=0)
    working = threading.Thread(target=trainer.work, args=(None,), daemon=True)
    working.start()
    block = np.zeros(flat.blocks[0].stop, np.float32)
    for number in (1, 2):  # and none of the other server's
        head = {"kind": "compute", "number": number, "sends_weights": True}
        wires[FIRST].send(0, head, block)
    assert wires[FIRST].receive(10).head == {"kind": "gave_up", "number": 1}
    wires[FIRST].send(0, {"kind": "pause"})
    assert wires[FIRST].receive(10).head == wires[OTHER].receive(10).head == {"kind": "pausing"}
    working.join(10)
    assert not working.is_alive()
    for wire in wires.values():
        wire.close()


def test_F29_trainers_that_do_not_pause_are_named():
    wires = {rank: Transport(4) for rank in (*TRAINERS, OTHER)}
    for rank in TRAINERS:
        connected(wires, rank, OTHER)
    server = ServerState(wires[OTHER], lambda *_: None, lambda: np.zeros(4, np.float32))
    wires[0].send(OTHER, {"kind": "pausing"})
    with pytest.raises(RuntimeError, match=r"no message from rank 1 on host host-1 for 0\.2 s \(launch\.collective_"):
        server.wait_for_pause(len(TRAINERS), 0.2)
    for wire in wires.values():
        wire.close()


@pytest.mark.parametrize(("has_order", "named"), [
    (False, r"no message from rank 2 on host host-2, a parameter server, for 0\.8 s \(2 times"),
    (True, r"no message from rank 3 on host host-3, a parameter server, for 0\.2 s \(0\.5 times"),
], ids=["no order", "no weights of the other server"])  # fmt: skip
def test_F29_a_server_that_says_nothing_to_a_trainer_is_named(has_order, named):
    flat = FlatModel(MLP, torch.device("cpu"), 2)
    wires = {rank: Transport(len(flat.weights)) for rank in (0, FIRST, OTHER)}
    for server in (FIRST, OTHER):
        connected(wires, 0, server)
    config = small_config(2)
    config = dataclasses.replace(config, launch=dataclasses.replace(config.launch, collective_timeout_s=0.4))
    trainer = Trainer(MLP, config, flat, wires[0], range(FIRST, OTHER + 1), rank=0)
    if has_order:
        head = {"kind": "compute", "number": 1, "sends_weights": True}
        wires[FIRST].send(0, head, np.zeros(flat.blocks[0].stop, np.float32))
    with pytest.raises(RuntimeError, match=named):
        trainer.work(None)
    for wire in wires.values():
        wire.close()
