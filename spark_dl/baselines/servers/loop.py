"""Parameter servers: a loop on ranks, instead of `loop.train`. The last ranks are servers, the other ranks train.

    trainer        servers/trainer.py   receives weights and a mini-batch, sends a gradient
    server         servers/server.py    receives gradients, updates its block of the weights, sends weights
    first server   servers/lead.py      also decides which gradients make an update, and assigns mini-batches
                   servers/rules.py     the six modes of Dutta et al. 2018
                   servers/deal.py      the mini-batches of an epoch

At the end of an epoch, and for a checkpoint, the first server pauses all ranks. They synchronize the weights and do
what `loop.Training` does for every strategy: validate, save, decide whether to stop. Computations that a checkpoint
interrupts are repeated after it, so a resumed run neither loses nor repeats a row.

A step is one update at the servers. In the mode `sync` it uses the global batch of that step, and the weights are the
same as with DDP. In the other modes an epoch has about (steps of DDP) x (trainers) / K updates. A mini-batch is one
trainer's part of a global batch.

For each update a trainer sends a gradient and receives the weights. With W trainers and weights of N bytes, the servers
together send and receive 2NW bytes, uncompressed (the parameter server of Li et al. 2014, Scaling Distributed Machine
Learning with the Parameter Server, OSDI). Buffers, such as the statistics of BatchNorm, are those of rank 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spark_dl.baselines.servers.block import Block
from spark_dl.baselines.servers.deal import MiniBatchQueue, deal_again
from spark_dl.baselines.servers.flat import FlatModel
from spark_dl.baselines.servers.lead import LeadServer, Roles, connect_all
from spark_dl.baselines.servers.rules import Coordinator, Gradient, rules_of
from spark_dl.baselines.servers.server import ServerState, follow
from spark_dl.baselines.servers.settings import ParameterServer, settings_of
from spark_dl.baselines.servers.trainer import MiniBatches, Trainer, add_gradient
from spark_dl.baselines.servers.wire import Numbers, Transport
from spark_dl.config.strategies import Strategy
from spark_dl.launch.failures import rank_state
from spark_dl.loop import Training
from spark_dl.parallel.modules import check_same_model
from spark_dl.parallel.trainable import OptimizerState, Trainable
from spark_dl.spec import Run
from spark_dl.training import row_metrics
from spark_dl.training.finite import WEIGHT, NonFinite, NotFiniteError, is_finite
from spark_dl.training.state import seed_generators
from spark_dl.world import World

_COUNTS = ("step", "global_step", "rows", "epoch_rows", "loss_sum")
"""Fields of the progress that only the first server knows before a pause."""


def train(run: Run, world: World) -> dict[str, Any]:
    """Trains as one rank, a trainer or a server. Collective. Returns the same on every rank.

    Returns the result of `loop.train` with `staleness`: `mean`, `max` and `counts` of the used gradients' staleness,
    and the number of `discarded` computations, which were cancelled or too old.
    A trainer with NaN or Inf in its gradient, or a server with NaN or Inf in its weights, fails before it sends them.
    Raises as `loop.train` does. Raises RuntimeError with the rank and host of a server or trainer that was lost, or
    sent nothing for `launch.collective_timeout_s`. The limit is half of that for weights, and twice that for the first
    server, which itself waits for trainers.
    """
    roles = Roles(world.rank, world.world_size, run.config.parallel.servers)
    run = dataclasses.replace(run, config=row_metrics.with_mode(run.spec, run.config))
    seed_generators(run.config.train.seed)  # the same weights on all ranks
    flat = FlatModel(run.spec, world.device, len(roles.servers))
    check_same_model(flat.model, world)
    flat.broadcast_from_rank0()
    wire = connect_all(world, roles, run.config, max(block.stop - block.start for block in flat.blocks))
    try:
        return _ServedTraining(run, world, roles, flat, wire).run()
    finally:
        wire.close()


@dataclass
class _ServerState:
    """State of the first server, without the progress. All ranks receive it at a pause."""

    deal: dict[str, Any] | None = None
    """Unused mini-batches of the epoch; None between epochs."""
    staleness: dict[str, int] = field(default_factory=dict)
    """Number of used gradients by staleness."""
    discarded: int = 0

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def summary(self) -> dict[str, Any]:
        """Returns the `staleness` of a run's result."""
        counts = {int(staleness): count for staleness, count in self.staleness.items()}
        gradients = sum(counts.values())
        mean = sum(staleness * count for staleness, count in counts.items()) / gradients if gradients else 0.0
        return {"mean": mean, "max": max(counts, default=0), "counts": self.staleness, "discarded": self.discarded}


class _ServedTraining:
    """The training of one rank, with epochs whose steps are updates at the servers."""

    def __init__(self, run: Run, world: World, roles: Roles, flat: FlatModel, wire: Transport):
        self.roles, self.flat, self.server_state = roles, flat, _ServerState()
        self.batches = MiniBatches(run, roles, pin=world.device.type == "cuda")
        self.own_weights = flat.weights[flat.blocks[roles.block] if roles.is_server else slice(0)]
        self.block = Block(self.own_weights, run.config, world.world_size)
        loader = self.batches.loader_of(world.rank)
        self.rules = rules_of(settings_of(run.config), len(roles.trainers))
        self.training = Training(
            run, world, self._trainable(run), loader, log_rank=roles.first, check_steps=False,
            # If every update has K gradients. The last ones of an epoch may have fewer.
            steps_per_epoch=math.ceil(loader.plan.steps * len(roles.trainers) / self.rules.k),
        )  # fmt: skip
        self.pending_staleness: list[int] = []
        self._deal: MiniBatchQueue | None = None
        if roles.is_server:
            self.block.place(self.own_weights)  # may be loaded from a checkpoint
            self._server = ServerState(wire, self._update, self.block.snapshot)
        else:
            self._trainer = Trainer(run.spec, run.config, flat, wire, roles.servers, world.rank)
        if world.rank == roles.first:
            self._coordinator = Coordinator(
                self.rules,
                len(roles.trainers),
                staleness=Counter({int(s): count for s, count in self.server_state.staleness.items()}),
                discarded=self.server_state.discarded,
            )
            self._lead = LeadServer(
                self._server, self._coordinator, roles.servers[1:], run.config,
                first_step=self.training.progress.global_step,
            )  # fmt: skip

    def run(self) -> dict[str, Any]:
        """Calls `Training.run`. Adds the staleness of the gradients to its result."""
        try:
            return {**self.training.run(self._train_epoch), "staleness": self.server_state.summary()}
        finally:
            self.batches.close()

    def _trainable(self, run: Run) -> Trainable:
        return Trainable(
            modules=[self.flat.model],
            optimizer=self.block.optimizer,
            forward_backward=lambda batches, count: add_gradient(run.spec, self.flat, batches, count, run.config),
            clip_grad_norm=self.block.clip_grad_norm,
            step=self.block.optimizer.step,
            extra_state={"servers": self.server_state},
            rank_state={"block": OptimizerState(self.block.optimizer)} if self.roles.is_server else {},
            # With another number of ranks, the server of the same block.
            saved_rank=lambda ranks: ranks - len(self.roles.servers) + self.roles.block,
            sync_weights=self._sync_weights,
        )

    def _sync_weights(self) -> None:
        if self.roles.is_server:
            self.own_weights.copy_(self.block.weights.detach())
        self.flat.bring_together(self.roles.first)

    def _train_epoch(self) -> bool:
        self.training.timer.reset()
        while True:
            pause = self._work_until_pause()
            self._catch_up(pause)
            if pause["why"] != "step":
                return bool(pause["why"] == "epoch")
            self.training.end_step()
            if self.training.is_over():
                return False

    def _work_until_pause(self) -> dict[str, Any]:
        """Works until the next pause. Returns the first server's order to pause."""
        if not self.roles.is_server:
            return self._trainer.work(self.batches)
        if self.roles.rank != self.roles.first:
            timeout_s = self.training.config.launch.collective_timeout_s
            return follow(self._server, self.roles.first, len(self.roles.trainers), timeout_s)
        deal = self._deal_of_epoch()
        why = self._lead.run(deal, self.training.progress.epoch, self._on_update)
        if self.training.steps.rows:
            self._write_updates()
        self._deal, self.server_state.deal = (None, None) if why == "epoch" else (deal, deal.to_plain())
        counts = self._coordinator.staleness
        self.server_state.staleness = {str(staleness): counts[staleness] for staleness in sorted(counts)}
        self.server_state.discarded = self._coordinator.discarded
        progress = {name: getattr(self.training.progress, name) for name in _COUNTS}
        pause = {"why": why, "progress": progress, "server_state": self.server_state.state_dict()}
        self._lead.pause(pause)
        return pause

    def _deal_of_epoch(self) -> MiniBatchQueue:
        """Returns the unused mini-batches: of the whole epoch, or after a pause or a checkpoint."""
        num_trainers = len(self.roles.trainers)
        if self._deal is not None:
            return self._deal
        if self.server_state.deal is not None:
            return deal_again(self.server_state.deal, num_trainers)
        return MiniBatchQueue.whole(num_trainers, self.training.loader.plan.steps)

    def _catch_up(self, pause: Mapping[str, Any]) -> None:
        """Brings this rank's progress, schedule and server state up to those of the first server."""
        progress = self.training.progress
        for _ in range(pause["progress"]["global_step"] - progress.global_step):
            self.block.optimizer.step()  # without weights; PyTorch's schedulers expect the call
            self.training.schedule.end_step()
        for name, count in pause["progress"].items():
            setattr(progress, name, count)
        self.server_state.load_state_dict(pause["server_state"])

    def _update(self, gradients: Sequence[Numbers], shares: Sequence[float], lr_factor: float) -> None:
        """Updates this server's block."""
        training, progress = self.training, self.training.progress
        with training.schedule.warm(progress.global_step) as training.steps.lr:
            self.block.update(gradients, shares, lr_factor, training.config.train.clip_grad_norm)
        if not is_finite(self.block.weights):  # before any trainer receives these weights
            bad = int((~torch.isfinite(self.block.weights)).nonzero()[0])
            name = self.flat.name_of(self.flat.blocks[self.roles.block].start + bad)
            raise NotFiniteError(NonFinite(progress.global_step + 1, WEIGHT, self.roles.rank, name))
        training.schedule.end_step()
        progress.step += 1
        progress.global_step += 1
        rank_state.enter(rank_state.TRAINING, progress.global_step + 1)

    def _on_update(self, gradients: Sequence[Gradient], heads: Sequence[Mapping[str, Any]]) -> str | None:
        """Counts an update, on the first server. Returns the reason to pause, or None."""
        training, rows = self.training, sum(g.rows for g in gradients)
        progress, config = training.progress, training.config
        count = sum(head["count"] for head in heads) or 1.0
        training.steps.add(sum(head["loss"] for head in heads) * (rows / count), rows)
        self.pending_staleness += [g.staleness for g in gradients if g.rows]
        training.timer.data_s += sum(head["data_s"] for head in heads) / len(self.roles.trainers)
        if progress.global_step % config.train.log_every == 0:
            self._write_updates()
        if self._coordinator.is_done:
            return "epoch"
        plan = training.loader.plan
        if progress.epoch_rows == plan.rows_before(plan.steps, progress.epoch):
            return None  # the remaining mini-batches have no true row, and end the epoch without an update
        if training.is_over():
            return "over"
        is_due = training.is_due(config.checkpoint.every_steps) or training.is_due(config.train.validate_every_steps)
        return "step" if is_due else None

    def _write_updates(self) -> None:
        staleness = sum(self.pending_staleness) / len(self.pending_staleness)
        steps = self.training.steps
        steps.write_steps(float(steps.losses), staleness=staleness, discarded=self._coordinator.discarded)
        self.pending_staleness = []


STRATEGY = Strategy(settings=ParameterServer, train_on_ranks=train)
