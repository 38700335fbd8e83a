"""What a rank that trains does between two pauses: gets weights and a mini-batch, computes a gradient, sends it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spark_dl.baselines.servers.flat import FlatModel
from spark_dl.baselines.servers.mini_batches import MiniBatches
from spark_dl.baselines.servers.wire import Message, Transport
from spark_dl.config import Config
from spark_dl.parallel.stragglers import delay_s
from spark_dl.parallel.trainable import add_gradients
from spark_dl.spec import Batch, ModelSpec
from spark_dl.training.finite import Finding, NotFiniteError, find_in_gradients, is_finite


def add_gradient(spec: ModelSpec, flat: FlatModel, micro_batches: Sequence[Batch], rows: int, config: Config) -> Tensor:
    """Adds the gradient of (the sum of losses) / rows to the flat gradients; returns the sum. Not collective."""
    return add_gradients(
        spec, flat.model, micro_batches, config,
        device=flat.weights.device, scale=lambda losses: losses / max(1, rows),
    )  # fmt: skip


class Trainer:
    """A trainer's connections to the servers, its model, and what it was told last."""

    def __init__(self, spec: ModelSpec, config: Config, flat: FlatModel, wire: Transport, servers: range, rank: int):
        self._spec, self._config, self._flat, self._wire = spec, config, flat, wire
        self._servers, self._rank = servers, rank
        self._timeout_s = config.launch.collective_timeout_s
        self._told: dict[int, Message] = {}  # the last message of each server
        self._heard_at = 0.0  # when the last word of the first server came
        self._computed = 0
        """Number of the last assignment that was computed or given up."""
        self._computations = 0

    def work(self, batches: MiniBatches) -> dict[str, Any]:
        """Computes what the first server assigns, until it says to pause; returns what it said.

        Raises RuntimeError that names the rank and host of a server that goes, or that says nothing for too long.
        """
        while True:
            told = self._next_assignment()
            if told["kind"] == "pause":
                self._pause()
                return told
            self._load_weights(told)
            self._computed = told["number"]
            if not self._compute(told, batches):
                self._wire.send(self._servers[0], {"kind": "gave_up", "number": told["number"]})

    def _pause(self) -> None:
        """Tells the servers, once all gradients are on their way: one may have used its part of a gradient already."""
        for server in self._servers:
            self._wire.send(server, {"kind": "pausing"})
        self._wire.drain(self._timeout_s)

    def _next_assignment(self) -> dict[str, Any]:
        """What the first server says next, once the weights that go with it have come from all servers."""
        start, told, told_at = time.monotonic(), None, 0.0
        while True:
            news = self._news()
            if news is not None and news["kind"] == "pause":
                del self._told[self._servers[0]]
                return news
            if news is not None and not (missing := self._missing(news)):
                return news
            if news is not told:
                if told is not None:  # the first server is not to wait for an answer to what it has superseded
                    self._wire.send(self._servers[0], {"kind": "gave_up", "number": told["number"]})
                told, told_at = news, time.monotonic()
            # Weights come at once, but for the first server's word it takes the other trainers, for whom it waits for
            # up to the timeout, and says meanwhile that it is there. Whoever waits for what is directly at fault gives
            # up first, and names it.
            heard_at = max(start, self._heard_at)
            since, limit_s = (heard_at, 2 * self._timeout_s) if told is None else (told_at, self._timeout_s / 2)
            left = since + limit_s - time.monotonic()
            if left <= 0:
                silent = [self._servers[0]] if told is None else missing
                named = ", ".join(f"rank {rank} on host {self._wire.host_of(rank)}" for rank in silent)
                raise RuntimeError(
                    f"no word from {named}, a parameter server, for {limit_s:g} s ({limit_s / self._timeout_s:g} times "
                    "launch.collective_timeout_s): its process or its network hangs, or other trainers take "
                    "that long"
                )
            self._hear(left)

    def _news(self) -> dict[str, Any] | None:
        """What the first server said since the last assignment that was worked on."""
        message = self._told.get(self._servers[0])
        is_new = message is not None and (message.head["kind"] == "pause" or message.head["number"] > self._computed)
        return message.head if message is not None and is_new else None

    def _missing(self, told: dict[str, Any]) -> list[int]:
        """The servers whose weights for an assignment have not come."""
        if not told["sends_weights"]:
            return []
        return [s for s in self._servers if s not in self._told or self._told[s].head["number"] != told["number"]]

    def _hear(self, timeout_s: float) -> None:
        """Takes the next message, if one comes in time; it is the only one of its server that counts."""
        message = self._wire.receive(timeout_s)
        if message is not None:
            before = self._told.get(message.rank)
            self._wire.give_back(before.body if before is not None else None)
            self._told[message.rank] = message
            if message.rank == self._servers[0]:
                self._heard_at = time.monotonic()

    def _load_weights(self, told: dict[str, Any]) -> None:
        if told["sends_weights"]:
            for server, block in zip(self._servers, self._flat.blocks, strict=True):
                body = self._told[server].body
                assert body is not None
                self._flat.weights[block].copy_(torch.from_numpy(body))

    def _compute(self, told: dict[str, Any], batches: MiniBatches) -> bool:
        """Computes and sends a gradient; False if the first server said something newer in the meantime."""
        delay = delay_s(self._config, self._rank, self._computations)
        self._computations += 1
        if self._is_superseded(delay):
            return False
        start = time.perf_counter()
        micro_batches = batches.read(told["epoch"], told["num_parts"], told["part"], told["step"])
        data_s = time.perf_counter() - start
        self._wire.drain(self._timeout_s)  # of the gradient before this one, which has the same memory
        self._flat.gradients.zero_()
        rows = sum(int((batch["weight"] > 0).sum()) for batch in micro_batches)
        total = torch.zeros((), device=self._flat.weights.device)
        for batch in micro_batches:
            if self._is_superseded(0.0):
                return False
            total += add_gradient(self._spec, self._flat, [batch], rows, self._config)
        if self._is_superseded(0.0):
            return False
        if (finding := self._find(total, told)) is not None:
            raise NotFiniteError(finding)  # and no server gets any of it
        said = {"kind": "gradient", "number": told["number"]}
        gradients = self._flat.gradients.cpu().numpy()
        self._wire.send(
            self._servers[0],
            {**said, "rows": rows, "loss": float(total), "data_s": data_s},
            gradients[self._flat.blocks[0]],
        )
        for server, block in zip(self._servers[1:], self._flat.blocks[1:], strict=True):
            self._wire.send(server, said, gradients[block])
        return True

    def _find(self, total: Tensor, told: dict[str, Any]) -> Finding | None:
        if is_finite(self._flat.gradients) and is_finite(total):
            return None
        return find_in_gradients(self._flat.model, total, self._rank, told["global_step"])

    def _is_superseded(self, wait_s: float) -> bool:
        """Whether the first server has said something newer; waits for it for a time."""
        end = time.monotonic() + wait_s
        while self._news() is None:
            left = end - time.monotonic()
            self._hear(max(0.0, left))
            if left <= 0:
                return self._news() is not None
        return True
