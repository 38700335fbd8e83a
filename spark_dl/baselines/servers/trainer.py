"""The work of a trainer between two pauses: receive weights, read a mini-batch, compute a gradient, send it.

Its mini-batches are mostly consecutive steps of its part of the rows.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spark_dl.baselines.servers.flat import FlatModel
from spark_dl.baselines.servers.lead import Roles
from spark_dl.baselines.servers.wire import Message, Transport
from spark_dl.config import Config
from spark_dl.data.load.build import BatchLoader, build_train_loader
from spark_dl.data.load.row_names import name_rows
from spark_dl.gather import gathering
from spark_dl.parallel.loss import Count, count_of, noting_counts
from spark_dl.parallel.stragglers import delay_s
from spark_dl.parallel.trainable import add_gradients
from spark_dl.spec import Batch, ModelSpec, Run
from spark_dl.training.finite import NonFinite, NotFiniteError, find_in_gradients, is_finite


class MiniBatches:
    """The mini-batches of a trainer. Only one loader is open at a time, to limit memory."""

    def __init__(self, run: Run, roles: Roles, *, pin: bool):
        self._roles = roles
        self._build = functools.partial(build_train_loader, run.train, run.spec, run.config, pin=pin)
        self._loader: BatchLoader
        self._part: tuple[int, int] | None = None  # part and number of parts of the loader
        self._steps: Any = None  # a generator
        self._at: tuple[int, int] | None = None  # epoch and step of the last mini-batch
        self._last: Sequence[Batch] = ()

    def loader_of(self, rank: int) -> BatchLoader:
        """Returns a loader for its plan and columns, not to be read. A server gets the last trainer's."""
        trainers = self._roles.trainers
        return self._build(rank=min(rank, trainers[-1]), world_size=len(trainers))

    def read(self, epoch: int, num_parts: int, part: int, step: int) -> Sequence[Batch]:
        """Returns the micro-batches of a mini-batch. The last one is kept, for a second call."""
        if self._part != (part, num_parts):
            self.close()
            self._loader, self._part = self._build(rank=part, world_size=num_parts), (part, num_parts)
        if self._at != (epoch, step):
            if self._steps is None or self._at != (epoch, step - 1):
                self._stop_reading()
                self._steps = self._loader.epoch(epoch, step)
            self._last, self._at = next(self._steps).micro_batches, (epoch, step)
        return self._last

    def name_rows(self, epoch: int, step: int) -> str:
        """Names the rows of the mini-batch that was read last, for messages."""
        return name_rows(self._loader, epoch, step)

    def close(self) -> None:
        """Stops reading ahead."""
        self._stop_reading()
        self._part = self._at = None

    def _stop_reading(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None


def add_gradient(
    spec: ModelSpec, flat: FlatModel, micro_batches: Sequence[Batch], count: Count, config: Config
) -> Tensor:  # fmt: skip
    """Adds the gradient of (sum of losses) / count to the flat gradients. Returns the sum. Not collective."""
    return add_gradients(
        spec, flat.model, micro_batches, config,
        device=flat.weights.device, scale=lambda losses: losses / (count or 1),
    )  # fmt: skip


class Trainer:
    """A trainer's connections to the servers, its model, and the last message of each server."""

    def __init__(self, spec: ModelSpec, config: Config, flat: FlatModel, wire: Transport, servers: range, rank: int):
        self._spec, self._config, self._flat, self._wire = spec, config, flat, wire
        self._servers, self._rank = servers, rank
        self._timeout_s = config.launch.collective_timeout_s
        self._latest: dict[int, Message] = {}  # the last message of each server
        self._heard_at = 0.0  # time of the first server's last message
        self._computed = 0
        """Number of the last assignment that was computed or given up."""
        self._computations = 0

    def work(self, batches: MiniBatches) -> dict[str, Any]:
        """Computes what the first server assigns, until its order to pause. Returns that order.

        Raises RuntimeError with the rank and host of a server that is lost, or sends nothing for too long.
        """
        while True:
            order = self._next_assignment()
            if order["kind"] == "pause":
                self._pause()
                return order
            self._load_weights(order)
            self._computed = order["number"]
            if not self._compute(order, batches):
                self._wire.send(self._servers[0], {"kind": "gave_up", "number": order["number"]})

    def _pause(self) -> None:
        """Sends 'pausing' to the servers after all gradients, as a server may already have used its block of one."""
        for server in self._servers:
            self._wire.send(server, {"kind": "pausing"})
        self._wire.drain(self._timeout_s)

    def _next_assignment(self) -> dict[str, Any]:
        """Returns the next order of the first server, once its weights have arrived from all servers."""
        start, order, order_at = time.monotonic(), None, 0.0
        while True:
            new = self._new_order()
            if new is not None and new["kind"] == "pause":
                del self._latest[self._servers[0]]
                return new
            if new is not None and not (missing := self._missing(new)):
                return new
            if new is not order:
                if order is not None:  # the first server must not wait for an answer to a superseded order
                    self._wire.send(self._servers[0], {"kind": "gave_up", "number": order["number"]})
                order, order_at = new, time.monotonic()
            # Weights arrive at once, so their limit is short. The next order may take longer: the first server waits
            # for other trainers up to the timeout, and sends keepalives meanwhile. With these limits, the rank that
            # waits directly for the failed one times out first, and names it.
            heard_at = max(start, self._heard_at)
            since, limit_s = (heard_at, 2 * self._timeout_s) if order is None else (order_at, self._timeout_s / 2)
            left = since + limit_s - time.monotonic()
            if left <= 0:
                silent = [self._servers[0]] if order is None else missing
                named = ", ".join(f"rank {rank} on host {self._wire.host_of(rank)}" for rank in silent)
                raise RuntimeError(
                    f"no message from {named}, a parameter server, for {limit_s:g} s ({limit_s / self._timeout_s:g} "
                    "times launch.collective_timeout_s): its process or its network hangs, or other trainers take "
                    "that long"
                )
            self._receive(left)

    def _new_order(self) -> dict[str, Any] | None:
        """Returns the first server's order if it is newer than the last computed one, or else None."""
        message = self._latest.get(self._servers[0])
        is_new = message is not None and (message.head["kind"] == "pause" or message.head["number"] > self._computed)
        return message.head if message is not None and is_new else None

    def _missing(self, order: dict[str, Any]) -> list[int]:
        """Returns the servers whose weights for an assignment have not arrived."""
        if not order["sends_weights"]:
            return []
        return [s for s in self._servers if s not in self._latest or self._latest[s].head["number"] != order["number"]]

    def _receive(self, timeout_s: float) -> None:
        """Receives the next message, if one arrives in time. It replaces the last message of its server."""
        message = self._wire.receive(timeout_s)
        if message is not None:
            before = self._latest.get(message.rank)
            self._wire.give_back(before.body if before is not None else None)
            self._latest[message.rank] = message
            if message.rank == self._servers[0]:
                self._heard_at = time.monotonic()

    def _load_weights(self, order: dict[str, Any]) -> None:
        if order["sends_weights"]:
            for server, block in zip(self._servers, self._flat.blocks, strict=True):
                body = self._latest[server].body
                assert body is not None
                self._flat.weights[block].copy_(torch.from_numpy(body))

    def _compute(self, order: dict[str, Any], batches: MiniBatches) -> bool:
        """Computes and sends a gradient. Returns False if a newer order arrived in the meantime."""
        delay = delay_s(self._config, self._rank, self._computations)
        self._computations += 1
        if self._is_superseded(delay):
            return False
        start = time.perf_counter()
        micro_batches = batches.read(order["epoch"], order["num_parts"], order["part"], order["step"])
        data_s = time.perf_counter() - start
        self._wire.drain(self._timeout_s)  # the last gradient is sent from the same memory
        self._flat.gradients.zero_()
        rows = sum(int((batch["weight"] > 0).sum()) for batch in micro_batches)
        count = float(sum(count_of(self._spec, batch, self._config) for batch in micro_batches))
        total = torch.zeros((), device=self._flat.weights.device)
        with gathering(None), noting_counts() as noted:
            for batch in micro_batches:
                if self._is_superseded(0.0):
                    return False
                total += add_gradient(self._spec, self._flat, [batch], count, self._config)
        if (own_count := noted.total()) is not None:
            self._flat.gradients *= (count or 1) / (float(own_count) or 1)
            count = float(own_count)
        if self._is_superseded(0.0):
            return False
        if (finding := self._find(total, order)) is not None:
            named = batches.name_rows(order["epoch"], order["step"])
            raise NotFiniteError(dataclasses.replace(finding, rows=named))  # before any server receives it
        head = {"kind": "gradient", "number": order["number"]}
        gradients = self._flat.gradients.cpu().numpy()
        self._wire.send(
            self._servers[0],
            {**head, "rows": rows, "count": count, "loss": float(total), "data_s": data_s},
            gradients[self._flat.blocks[0]],
        )
        for server, block in zip(self._servers[1:], self._flat.blocks[1:], strict=True):
            self._wire.send(server, head, gradients[block])
        return True

    def _find(self, total: Tensor, order: dict[str, Any]) -> NonFinite | None:
        if is_finite(self._flat.gradients) and is_finite(total):
            return None
        return find_in_gradients(self._flat.model, total, self._rank, order["global_step"])

    def _is_superseded(self, wait_s: float) -> bool:
        """Returns whether the first server has sent a newer order. Waits up to `wait_s` for one."""
        end = time.monotonic() + wait_s
        while self._new_order() is None:
            left = end - time.monotonic()
            self._receive(max(0.0, left))
            if left <= 0:
                return self._new_order() is not None
        return True
