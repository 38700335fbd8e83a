"""What all ranks do about a step that is not finite: `train.on_nonfinite`.

`raise` costs nothing in a step: the ranks learn of it where they reduce their losses (`finite.py`). `skip` decides
before each update, so it needs a reduction per step. `rollback` learns of it as `raise` does, when the weights may be
bad, too; so it loads a checkpoint, and leaves out the step when it comes again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spark_dl.gather import sum_over_ranks
from spark_dl.parallel.exchange_clock import ExchangeClock
from spark_dl.parallel.loss import Count
from spark_dl.parallel.trainable import Trainable
from spark_dl.spec import Batch
from spark_dl.training.finite import SUM, Finding, NotFiniteError, StepCheck, all_finite, first_not_finite, first_of_all
from spark_dl.world import World

if TYPE_CHECKING:
    from spark_dl.config import Config

_log = logging.getLogger("spark_dl")


def warn_of_late_checkpoints(config: Config) -> None:
    """Logs that `rollback` cannot help before the end of an epoch. Called on the driver, of a run from the start."""
    if config.train.on_nonfinite == "rollback" and not config.checkpoint.every_steps:
        epochs = config.checkpoint.every_epochs
        _log.warning(
            "train.on_nonfinite: rollback has no checkpoint to go back to before the end of the first %s, so NaN or "
            "Inf before it ends the run; set checkpoint.every_steps", "epoch" if epochs == 1 else f"{epochs} epochs",
        )  # fmt: skip


class NonFiniteSteps:
    """Computes the gradients of steps, and says which updates all ranks leave out."""

    def __init__(
        self,
        trainable: Trainable,
        check: StepCheck | None,
        world: World,
        config: Config,
        name_rows: Callable[[int], str],
    ):
        """check: None for a run whose steps are not checked, which then leaves out none. name_rows: names the rows of
        this rank in a step, given its `Finding.global_step`."""
        self._trainable, self._check, self._world, self._name_rows = trainable, check, world, name_rows
        self._policy, self._most = config.train.on_nonfinite, config.train.max_nonfinite
        self._skips = self._policy == "skip" and check is not None
        self._checks_sums = config.train.precision != "fp16"  # whose scaler leaves out gradients that overflow
        self._buffers = [b for module in trainable.modules for b in module.buffers()]
        self._names = {id(p): name for module in trainable.modules for name, p in module.named_parameters()}
        self._in_a_row = 0
        self._left_out: set[int] = set()
        """Steps that are left out when they come again after a rollback."""
        self._rolled_back_to: tuple[str, int] = ("", 0)
        """The checkpoint that was loaded last, and how often."""

    @property
    def in_a_row(self) -> int:
        """Number of steps in a row that were left out, with the last one."""
        return self._in_a_row

    def leaves_out(self, global_step: int) -> bool:
        """Whether a step is left out without being computed, as it was not finite before a rollback."""
        return global_step in self._left_out

    def forward_backward(
        self, micro_batches: Sequence[Batch], count: Count, global_step: int
    ) -> tuple[Tensor, Finding | None]:
        """Calls `Trainable.forward_backward`. Returns its loss, and why the update is left out, or None. Collective.

        If it is left out, the model is as before the step, apart from the generators of random numbers.
        Raises NotFiniteError on all ranks after `train.max_nonfinite` steps in a row.
        """
        if not self._skips:
            return self._trainable.forward_backward(micro_batches, count), None
        before = [buffer.detach().clone() for buffer in self._buffers]
        try:
            loss = self._trainable.forward_backward(micro_batches, count)
            finding = self._decide(loss, global_step)
        except NotFiniteError as error:  # of a driver that trains for all ranks, and decides alone
            loss, finding = torch.zeros(()), error.finding
        if finding is None:
            self._in_a_row = 0
            return loss, None
        self._in_a_row += 1
        if self._in_a_row > self._most:
            why_now = f"These are {self._in_a_row} steps in a row (train.max_nonfinite={self._most}). "
            raise NotFiniteError(finding, why_now)
        with torch.no_grad():
            for buffer, value in zip(self._buffers, before, strict=True):
                buffer.copy_(value)
        self.leave_out()
        return loss, finding

    def leave_out(self) -> None:
        """Leaves out the update of a step. Collective."""
        if self._check is not None:
            self._check.forget_step()
        self._trainable.skip_step()
        self._trainable.optimizer.zero_grad()
        # NOTE: schedulers of torch warn if they are called before the optimizer, and look at this attribute.
        self._trainable.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _decide(self, loss: Tensor, global_step: int) -> Finding | None:
        assert self._check is not None
        is_bad = self._check.is_bad(loss)
        named = self._sums() if self._checks_sums else []
        is_bad = is_bad | ~all_finite([gradient for _, gradient in named], self._world.device)
        flag = is_bad.float()
        clock = self._trainable.clock
        with clock if isinstance(clock, ExchangeClock) else contextlib.nullcontext():
            sum_over_ranks(flag)
        if not flag:
            return None  # on all ranks
        own = self._check.finding_of_step(self._world.rank, global_step)
        if own is None and (name := first_not_finite(named)) is not None:
            own = Finding(global_step, SUM, self._world.rank, name)
        return self.first_of_all(own)

    def first_of_all(self, own: Finding | None) -> Finding | None:
        """Returns the first finding over all ranks, with the rows of its rank, or None. Collective."""
        return first_of_all(own and dataclasses.replace(own, rows=self._name_rows(own.global_step)))

    def _sums(self) -> list[tuple[str, Tensor]]:
        """Returns the gradients that the optimizer would apply on this rank, with the names of their parameters."""
        parameters = [p for group in self._trainable.optimizer.param_groups for p in group["params"]]
        return [(self._names.get(id(p), "a shard"), p.grad) for p in parameters if p.grad is not None]

    def roll_back(self, error: NotFiniteError, checkpoint: str | None) -> None:
        """Forgets the steps since a checkpoint, before it is loaded, and notes that the step of the error is left out.

        checkpoint: the last one. Raises the error if the run must not go back to it, or cannot.
        """
        if self._policy != "rollback":
            raise error
        if checkpoint is None:
            raise NotFiniteError(
                error.finding, "There is no checkpoint to go back to (train.on_nonfinite, checkpoint.every_steps). ",
                names_checkpoint=True,
            ) from None  # fmt: skip
        last, times = self._rolled_back_to
        times = times + 1 if last == checkpoint else 1
        if times > self._most:
            raise NotFiniteError(
                error.finding,
                f"The run has gone back to this checkpoint {times - 1} times (train.max_nonfinite={self._most}). ",
            ) from None
        self._rolled_back_to = checkpoint, times
        self._left_out.add(error.finding.global_step)
        self._trainable.optimizer.zero_grad()
        if self._check is not None:
            self._check.forget()
