"""The training loop of one rank. All ranks run it in lockstep, and take the same decisions."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spark_dl.config import Config
from spark_dl.data.columns.batch import StepBatches
from spark_dl.data.load.build import BatchLoader, build_train_loader, build_validation_loader
from spark_dl.data.load.row_names import name_rows
from spark_dl.evaluate import evaluate_model
from spark_dl.gather import gathering, sum_over_ranks
from spark_dl.generators import generators_kept
from spark_dl.hooks import HOOKS, StepInfo, build_hooks
from spark_dl.launch.failures import rank_state
from spark_dl.launch.failures.errors import OtherRankError
from spark_dl.optimization import trained_by
from spark_dl.parallel.loss import Count, NotedCounts, count_of, counts_elements, noting_counts
from spark_dl.parallel.modules import ModuleState, apply_layout, to_device
from spark_dl.parallel.trainable import Trainable
from spark_dl.rundir.metrics import MetricsLog
from spark_dl.spec import Batch, ModelSpec, Run
from spark_dl.training import finite, preemption, row_metrics
from spark_dl.training.checks import (
    ExpertBalance,
    ReplicaCheck,
    TrainedParameters,
    check_batch_loss,
    check_sparse,
    clear_frames,
)
from spark_dl.training.finite import LOSS, NonFinite, NonFiniteSteps, NotFiniteError, StepCheck
from spark_dl.training.optimizer_settings import RateSchedule, total_steps, with_length
from spark_dl.training.preemption import Preemption
from spark_dl.training.state import Committed, RunState, Saved, TrainingProgress, seed_generators
from spark_dl.training.step_times import StepLog, StepTimer, build_profile
from spark_dl.world import World

_log = logging.getLogger("spark_dl")


def train(
    run: Run,
    world: World,
    parallelize: Callable[[ModelSpec, World, Config], Trainable],
    *,
    build_train_loader: Callable[..., BatchLoader] = build_train_loader,
    num_ranks: int | None = None,
    check_steps: bool = True,
) -> dict[str, Any]:
    """Trains as one rank. Collective; every rank returns the same.

    A rank that gets SIGTERM ends by it after all ranks have saved a checkpoint, at the next log line.

    Args:
        parallelize: function of the strategy.
        build_train_loader, num_ranks: for a driver that trains on behalf of all ranks, the loader, and the number of
            ranks that share a step (`train.lr_scaling`).
        check_steps: whether gradients and weights are checked in each step, and not only losses and checkpoints. For
            benchmarks.

    Raises:
        RuntimeError: If a loss, a gradient or a weight is not finite, with the rank, the step and the first bad
            parameter, and if a checkpoint cannot be written.
        ValueError: If settings or model do not match the data.
    """
    run = dataclasses.replace(run, config=row_metrics.with_mode(run.spec, run.config))
    seed_generators(run.config.train.seed)  # the same weights on all ranks
    loader = build_train_loader(
        run.train, run.spec, run.config, rank=world.data_rank, world_size=world.data_size,
        pin=world.device.type == "cuda",
    )  # fmt: skip
    spec = run.spec.with_total_steps(lambda: total_steps(run.config, loader.plan.steps))
    trainable = parallelize(spec, world, run.config)
    if run.config.faults.straggler != "none":
        from spark_dl.parallel.stragglers import delayed

        trainable = delayed(trainable, run.config, world.rank)
    try:
        apply_layout(trainable.modules[0], run.config)
        with preemption.awaited(run.config, world, on_driver=num_ranks is not None) as preempted:
            return Training(
                run, world, trainable, loader, num_ranks=num_ranks, check_steps=check_steps, preempted=preempted
            ).run()
    except BaseException as error:
        clear_frames(error)  # their local variables would keep DDP alive after `close`
        raise
    finally:
        trainable.close()


class Training:
    """Epochs of steps, with validation, checkpoints and early stopping after each epoch, and between its steps.

    Args:
        num_ranks: number of ranks that share a step, if not the world size.
        steps_per_epoch: number of steps of an epoch, if not that of the loader's plan.
        log_rank: the rank that writes metrics.
        check_steps: whether this object checks that each step is finite.
        preempted: says that a rank has got SIGTERM. By default, SIGTERM ends a rank at once.
    """

    def __init__(
        self,
        run: Run,
        world: World,
        trainable: Trainable,
        loader: BatchLoader,
        *,
        num_ranks: int | None = None,
        steps_per_epoch: int | None = None,
        log_rank: int = 0,
        check_steps: bool = True,
        preempted: Preemption | None = None,
    ):
        self.preempted = preempted or preemption.never(world)
        self.hooks = build_hooks(run.spec)
        if self.hooks is not None:
            trainable = dataclasses.replace(trainable, extra_state={**trainable.extra_state, HOOKS: self.hooks})
        self.spec, self.config, self.world, self.trainable = run.spec, run.config, world, trainable
        self.loader, self.validation = loader, build_validation_loader(run, world)
        steps_per_epoch = steps_per_epoch or loader.plan.steps
        self.total_steps = total_steps(self.config, steps_per_epoch)
        seed_generators(self.config.train.seed + 1 + world.seed_rank)  # different dropout on each rank
        self.losses_count = False
        """Whether losses say what their mean is over, which is known after the first step."""
        of_run = with_length(self.config, self.total_steps, steps_per_epoch)
        self.schedule = RateSchedule(trainable.optimizer, of_run, own=trainable.optimization)
        if self.validation is None:
            self.schedule.check_without_validation()
        self.state = RunState(
            run, world, trainable, self.schedule, loader.columns, num_ranks or world.data_size, self.total_steps
        )
        self.experts = ExpertBalance(trainable, world, self.config)
        fp16 = self.config.train.precision == "fp16-mixed"
        self.step_check: StepCheck | None = None
        if check_steps:
            watch = trainable.watch_buckets
            self.step_check = StepCheck(trainable.modules[0], world.device, gradients=not fp16, watch_buckets=watch)
        self.nonfinite = NonFiniteSteps(trainable, self.step_check, world, self.config, self._name_rows)
        # A driver that trains for all ranks has no batches: its tasks count.
        self.counts_elements = num_ranks is None and counts_elements(self.spec, self.config, loader.columns)
        self.is_first_step = num_ranks is None  # of this process
        self.trained = TrainedParameters(trainable)
        check_sparse(trainable.modules, trainable.optimizer, self.config)
        self.replicas = ReplicaCheck(trainable, world, self.config, self.step_check)
        first_step, writes = self.progress.global_step, world.rank == log_rank
        self.log = MetricsLog(
            run.run_dir, writes=writes, first_step=first_step, report=world.report, generation=run.generation,
            goes_on=self.config.checkpoint.on_error == "warn",
        )  # fmt: skip
        self.profile = build_profile(run, world, first_step)
        self.timer = StepTimer(
            world.rank if num_ranks is None else slice(None), num_ranks or world.world_size,
            log_every=self.config.train.log_every, clock=trainable.clock,
        )  # fmt: skip
        self.steps = StepLog(self.log, self.timer, self.state, total_steps=self.total_steps, device=world.device)

    @property
    def progress(self) -> TrainingProgress:
        """Epochs, steps and rows done so far."""
        return self.state.progress

    def _name_rows(self, global_step: int) -> str:
        """Names the rows of this rank in a step of this epoch."""
        epoch_start = self.progress.global_step - self.progress.step
        return name_rows(self.loader, self.progress.epoch, global_step - 1 - epoch_start)

    def run(self, train_epoch: Callable[[], bool] | None = None) -> dict[str, Any]:
        """Trains until all epochs or `max_steps` are done, or until early stopping. Collective.

        Args:
            train_epoch: replaces `Training.train_epoch`.
        """
        try:
            return self._run_epochs(train_epoch or self.train_epoch)
        except NotFiniteError as error:
            is_own = error.finding.rank == self.world.rank or self.world.world_size == 1
            raise (finite.NotFiniteTrainingError if is_own else OtherRankError)(self._explain(error)) from None
        except Exception as error:  # such as of a loss that takes no NaN, in the step after the one in which it arose
            if hasattr(error, "is_retryable") or (finding := self._earlier_finding()) is None:
                raise
            raise finite.NotFiniteTrainingError(self._explain(NotFiniteError(finding))) from error
        finally:
            self.state.close()
            if self.step_check is not None:
                self.step_check.close()
            if self.profile is not None:
                self.profile.close()

    def _explain(self, error: NotFiniteError) -> str:
        progress = self.progress
        return finite.explain(error, progress.epoch, progress.global_step - progress.step, self.state.saved_url)

    def _earlier_finding(self) -> NonFinite | None:
        """Returns what an earlier step of this rank has found, which the ranks compare at the next log line only."""
        with contextlib.suppress(Exception):  # a device that has failed says no more
            if self.step_check is not None and (finding := self.step_check.finding(self.world.rank)) is not None:
                return dataclasses.replace(finding, rows=self._name_rows(finding.global_step))
        return None

    def _run_epochs(self, train_epoch: Callable[[], bool]) -> dict[str, Any]:
        start, rows_before = time.perf_counter(), self.progress.rows
        metrics: dict[str, Any] = self.progress.metrics or (
            self.progress.history[-1]["metrics"] if self.progress.history else {}
        )
        while self.progress.epoch < self.config.train.epochs and not self.is_over():
            try:
                is_whole = train_epoch()
            except NotFiniteError as error:
                self._go_back(error)
                continue
            validation_start = time.perf_counter()
            metrics = self._validate()
            if is_whole:
                self._end_epoch(metrics, time.perf_counter() - validation_start)
        self._save_this_step(is_last=True)
        seconds = time.perf_counter() - start
        rows = self.progress.rows - rows_before
        return {
            "checkpoint": self.state.saved_url,
            **self.progress.summary(),
            "metrics": metrics,
            "rows_per_s": rows / seconds if rows else 0.0,
            "seconds": seconds,
        }

    def train_epoch(self) -> bool:
        """Trains the remaining steps of the epoch. Returns False if `max_steps` ended it early. Collective."""
        progress, config = self.progress, self.config
        self.timer.reset()
        batches = self.timer.timed(self.loader.epoch(progress.epoch, progress.step))
        if self.profile is not None:
            batches = self.profile.steps(batches)
        try:
            for batch in batches:
                rank_state.enter(rank_state.TRAINING, progress.global_step + 1)
                self._train_step(batch)
                if progress.global_step % config.train.log_every == 0:
                    self._log_steps()
                self.replicas.end_step(progress.global_step, self.state.saved_url)
                if progress.step < self.loader.plan.steps and not self.is_over():
                    self.end_step()
                if self.is_over() or self.preempted.is_due:
                    break
                rank_state.enter(rank_state.READING)
        finally:
            batches.close()
        if self.steps.rows:
            self._log_steps()
        if self.preempted.is_due and not self.is_over():  # a run that is over ends as usual
            self._end_preempted()
        return progress.step == self.loader.plan.steps

    def _train_step(self, batch: StepBatches) -> None:
        """One optimizer step, or none if all ranks leave out the update."""
        trainable, progress, number = self.trainable, self.progress, self.progress.global_step + 1
        if self.nonfinite.leaves_out(number):
            self.nonfinite.leave_out()
            return self._end_left_out(batch)
        self._set_position()
        self.trained.check(number)
        if self.hooks is not None:
            self.hooks.before_step(self._info())
        count = self._count(batch)
        before = ModuleState(trainable.modules[0]) if self.is_first_step else None
        with gathering(trainable.row_ranks, several=self.config.several_micro_batches()):
            if self.is_first_step:
                self._check_batch_loss(batch.micro_batches[0])
            with noting_counts() as noted:
                loss, finding = self.nonfinite.forward_backward(batch.micro_batches, count, number)
        if before is not None:
            self._warn_of_unsaved(before.changed_unsaved())
        if finding is not None:
            return self._end_left_out(batch, finding)
        count = self._divided(count, noted)
        if self.hooks is not None:
            self.hooks.after_gradients(self._info(loss, count))
        if self.config.train.clip_grad_norm is not None:
            trainable.clip_grad_norm(self.config.train.clip_grad_norm)
        with self.schedule.warm(progress.global_step) as self.steps.lr:
            trainable.step()
        if self.state.average is not None:
            self.state.average.update(progress.global_step)
        if self.is_first_step:
            self.state.check()
            self.is_first_step = False
        self.experts.end_step()
        trainable.optimizer.zero_grad()
        self._count_step()
        # What is logged is the mean over the rows of the steps' means.
        self.steps.add(loss if count is batch.rows else loss * (batch.rows / count), batch.rows)
        if self.step_check is not None:
            self.step_check.end_step(progress.global_step, loss)
        if self.hooks is not None:
            self.hooks.after_step(self._info(loss, count))
        self.timer.end_step()

    def _info(self, loss: torch.Tensor | None = None, count: Count | None = None) -> StepInfo:
        """Returns what a hook gets. loss: sum of the losses of this rank."""
        return StepInfo(
            self.trainable.modules[0], self.trainable.optimizer, self.progress.position, self.config.train.seed,
            self.world.rank, self.world.world_size, None if loss is None else loss.detach(), count,
        )  # fmt: skip

    def _count(self, batch: StepBatches) -> Count:
        """Returns what the mean loss of a step is over. Collective if that is not the rows of the global batch."""
        if not self.counts_elements:
            return batch.rows
        own = torch.stack([count_of(self.spec, each, self.config) for each in batch.micro_batches]).sum()
        own = own.to(self.world.device)
        (self.trainable.sum_over_data or sum_over_ranks)(own)
        # A GPU keeps it, so that the host need not wait. If nothing counts, the sum of losses is 0.
        return own.clamp_min(torch.finfo(own.dtype).tiny) if own.is_cuda else float(own) or 1.0

    def _divided(self, by: Count, noted: NotedCounts) -> Count:
        """Divides the gradients by what the losses have said that they are over, if they have, and returns that.

        Collective in the first step, and after it if a loss of the first step has said it.

        Args:
            by: what they are divided by already.
        """
        if not (self.is_first_step or self.losses_count):
            return by
        own, trainable = noted.total(), self.trainable
        totals = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        if own is not None and trainable.counts:  # of the copies of a model's rows, one counts
            totals[0], totals[1] = own, 1
        sum_over_ranks(totals)
        if self.is_first_step:
            self.losses_count = bool(totals[1])
            if self.losses_count and not trainable.takes_counts:
                raise ValueError(
                    "parallel.strategy: expected ddp, or another one that can divide the gradients after they are "
                    f"computed, as the loss returns what its mean is over, found {self.config.parallel.strategy!r}; "
                    "say it by ModelSpec(count=...), or set ddp"
                )
        if not self.losses_count:
            return by
        count = float(totals[0]) or 1.0  # if nothing counts, the gradients are 0
        for parameter in trained_by(trainable.optimizer):
            if parameter.grad is not None:
                parameter.grad *= float(by / count)
        return count

    def _check_batch_loss(self, batch: Batch) -> None:
        if self.spec.batch_loss is not None and self.config.train.check_batch_loss:
            model, call = self.trainable.modules[0], self.trainable.call
            check_batch_loss(self.spec, model, to_device(batch, self.world.device, self.config), self.config, call=call)

    def _warn_of_unsaved(self, names: Sequence[str]) -> None:
        if names and self.world.rank == 0:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            _log.warning(
                "a step changes %s%s, which no checkpoint has, so a resumed run begins with other values; make it a "
                "buffer (register_buffer), or save it with get_extra_state", ", ".join(names[:8]), more,
            )  # fmt: skip

    def _count_step(self) -> None:
        self.schedule.end_step(self.progress.step + 1)
        self.progress.step += 1
        self.progress.global_step += 1

    def _end_left_out(self, batch: StepBatches, finding: NonFinite | None = None) -> None:
        """Counts a step without an update. finding: the reason; None if the log has it already."""
        self.experts.forget_step()
        self._count_step()
        self.progress.skipped_steps += 1
        self.progress.skipped_rows += batch.rows
        self.timer.end_step()
        if finding is not None:
            self.steps.write("skip", **finite.as_fields(finding), rows=batch.rows, in_a_row=self.nonfinite.in_a_row)

    def _go_back(self, error: NotFiniteError) -> None:
        """Loads the last checkpoint again, after a step that was not finite. Collective. Or raises the error."""
        self._log_saved(self.state.committed(wait=True))
        self.nonfinite.roll_back(error, self.state.saved_url)
        rank_state.enter(rank_state.LOADING)
        self.state.go_back()
        self.experts.forget()
        if self.profile is not None:
            self.profile.close()
            self.profile = None
        self.steps.forget()
        self.log.go_back(self.progress.global_step)
        about = {"url": self.state.saved_url, "rollbacks": self.progress.rollbacks}
        self.steps.write("rollback", **finite.as_fields(error.finding), **about)

    def _log_steps(self) -> None:
        """Reduces the losses and times since the last log line over the ranks, and writes a log line.

        Raises NotFiniteError on all ranks if any rank has found NaN or Inf since then.
        """
        if not self.steps.rows:  # all these steps were left out
            self.timer.reset()
            return
        losses = self.steps.losses if self.step_check is None else self.step_check.mark(self.steps.losses)
        reduced = self.timer.with_losses(losses, must_end=self.preempted.must_end)
        sum_over_ranks(reduced)
        total, num_ending = reduced[:2].tolist()
        if not math.isfinite(total):
            own = None if self.step_check is None else self.step_check.finding(self.world.rank)
            raise NotFiniteError(
                self.nonfinite.first_of_all(own) or NonFinite(self.progress.global_step, LOSS, self.world.rank)
            )
        self.preempted.is_due = num_ending > 0
        self._log_saved(self.state.committed(wait=False))
        finite.check_loss_scale(self.trainable.extra_state.get("scaler"), self.progress.global_step)
        self.steps.write_steps(total, self.timer.times_of(reduced), **self.experts.take_load())

    def _end_preempted(self) -> None:
        """Saves a checkpoint of this step, if there is none, and ends the ranks. Collective."""
        self._save_this_step()
        self.preempted.end(self.state.saved_url)

    def is_due(self, every: int) -> bool:
        """Whether a step is the last of `every` steps; 0 is never."""
        return every > 0 and self.progress.global_step % every == 0

    def end_step(self) -> None:
        """Validates and saves within an epoch, if the step is due (`validate_every_steps`, `every_steps`). Collective.

        Validation is first: the checkpoint of the same step has its score.
        """
        if self.validation is not None and self.is_due(self.config.train.validate_every_steps):
            if self.steps.rows:  # finds weights that are not finite, and the time of a validation is not that of steps
                self._log_steps()
            start = time.perf_counter()
            metrics = self._validate()
            self.steps.write("validation", metrics=metrics, validation_s=time.perf_counter() - start)
            row_metrics.decide(self.progress, self.config.train, metrics, self.world.device)
            self.timer.reset(time.perf_counter())
        if self.is_due(self.config.checkpoint.every_steps):
            self.save()

    def _validate(self) -> dict[str, Any]:
        """Computes the metrics of the validation rows, unless this step has them already; {} without such rows."""
        progress = self.progress
        if self.validation is None:
            return {}
        if progress.validated_step == progress.global_step:
            return progress.metrics
        rank_state.enter(rank_state.VALIDATING)
        self.trainable.sync_weights()
        self._set_position(is_validation=True)
        model = self.trainable.modules[0]
        # What a validation draws must not change the next steps: one that `max_steps` adds has no other counterpart.
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        average = self.state.average
        weights = contextlib.nullcontext() if average is None else average.in_place()
        several = self.config.several_micro_batches(evaluates=True)
        with generators_kept(devices), gathering(self.trainable.row_ranks, several=several), weights:
            progress.metrics = evaluate_model(
                self.spec, model, self.validation, self.config, self.world, call=self.trainable.call,
                forward=self.trainable.forward, counts=self.trainable.counts,
            )  # fmt: skip
        progress.validated_step = progress.global_step
        if self.hooks is not None:
            self.hooks.after_validation(self._info(), progress.metrics)
        return progress.metrics

    def _set_position(self, *, is_validation: bool = False) -> None:
        if self.spec.set_position is not None:
            position = dataclasses.replace(self.progress.position, is_validation=is_validation)
            self.spec.set_position(self.trainable.modules[0], position)

    def _end_epoch(self, metrics: dict[str, Any], validation_s: float) -> None:
        progress = self.progress
        loss = math.nan if progress.epoch_loss is None else progress.epoch_loss
        entry = {"train_loss": loss, "metrics": metrics}
        self.steps.write("epoch", **entry, **({} if self.validation is None else {"validation_s": validation_s}))
        self.log.flush()
        entry = {"epoch": progress.epoch, **entry}
        progress.history.append(entry)
        progress.epoch, progress.step, progress.epoch_rows, progress.loss_sum = progress.epoch + 1, 0, 0, 0.0
        self.schedule.end_epoch(loss, metrics, epoch=progress.epoch)
        row_metrics.decide(progress, self.config.train, metrics, self.world.device)
        row_metrics.ask(progress, entry, self.world)
        if self.is_due(self.config.checkpoint.every_steps) or progress.epoch % self.config.checkpoint.every_epochs == 0:
            self.save()

    def is_over(self) -> bool:
        """Whether the run ends here: early stopping, or `max_steps` done."""
        limit = self.config.train.max_steps
        return self.progress.stopped_early or (limit is not None and self.progress.global_step >= limit)

    def _save_this_step(self, *, is_last: bool = False) -> None:
        """Waits until there is a checkpoint of the last step, and all lines are written. Collective."""
        self._log_saved(self.state.committed(wait=True))
        if self.state.saved_step != self.progress.global_step:
            self.save(is_last=is_last)
            self._log_saved(self.state.committed(wait=True))
        self.log.flush()

    def save(self, *, is_last: bool = False) -> None:
        """Writes a checkpoint, after synchronizing the weights of all ranks. Collective.

        With `checkpoint.asynchronous` it is written while training goes on, after the one before is committed.

        Args:
            is_last: whether it is the last one of the run, which must be written (`checkpoint.on_error`).
        """
        if self.steps.rows:  # the sum of losses is part of the state
            self._log_steps()
        rank_state.enter(rank_state.SAVING)
        self._log_saved(self.state.committed(wait=True))
        self.trainable.sync_weights()
        self.replicas.check(self.progress.global_step, self.state.saved_url, with_buffers=True)
        self._log_saved(self.state.save(is_last=is_last))
        self.timer.reset(time.perf_counter())

    def _log_saved(self, found: Saved | None) -> None:
        """Writes a log line for a checkpoint."""
        if found is None:
            return
        self.log.write(found.kind, steps=self.total_steps, **found.as_fields())
        if self.hooks is not None and isinstance(found, Committed):
            self.hooks.after_checkpoint(self._info(), found.url)
