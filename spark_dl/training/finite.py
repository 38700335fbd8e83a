"""NaN and Inf in losses, gradients and weights: found on the rank where they first occur, and what all ranks do then.

Each rank checks its loss and its gradients before the exchange, and its weights after the step. The result stays on
the device, with the number of the step, and makes the rank's sum of losses NaN. The loop reduces this sum over the
ranks before it logs, saves or ends, so all ranks stop at the same step, without another exchange or synchronization.

`train.on_nonfinite: raise` costs nothing in a step. `skip` decides before each update, so it needs a reduction per
step. `rollback` learns of it as `raise` does, when the weights may be bad, too; so it loads a checkpoint, and leaves
out the step when it comes again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spark_dl.gather import gather_json, sum_over_ranks
from spark_dl.parallel.exchange_clock import ExchangeClock
from spark_dl.parallel.loss import Count
from spark_dl.parallel.trainable import Trainable, WatchBuckets
from spark_dl.spec import Batch
from spark_dl.world import World

if TYPE_CHECKING:
    from spark_dl.config import Config

LOSS, GRADIENT, SUM, WEIGHT = range(4)
"""Kinds of findings, in the order of computation in a step. `SUM` is a gradient after the exchange."""
MIN_LOSS_SCALE = 1e-4
"""Smallest loss scale of fp16, as in fairseq. If gradients overflow below it, the scale is not the cause."""
_NEVER = 2**62
_FEW_PARAMETERS = 20
_MOST_PENDING = 64
"""Steps whose norms are looked at together, at most."""
_ADVICE = "Try a lower train.lr, train.clip_grad_norm, train.warmup_steps, or train.precision float32"

_log = logging.getLogger("spark_dl")


@dataclass(frozen=True, order=True)
class NonFinite:
    """NaN or Inf on a rank. The smallest finding is the origin of the others."""

    global_step: int
    """Number of the step, from 1."""
    kind: int
    """`LOSS`, `GRADIENT`, `SUM` or `WEIGHT`."""
    rank: int
    name: str = ""
    """Name of the first bad parameter, in the order of the model; empty for a loss."""
    rows: str = ""
    """Names the rows of the rank in this step (`data/load/row_names.py`); empty if it has none."""

    @property
    def what(self) -> str:
        """What is not finite, such as `the gradient of 'fc.weight'`."""
        return {
            LOSS: "the loss",
            GRADIENT: f"the gradient of {self.name!r}",
            SUM: f"the sum of the ranks' gradients of {self.name!r}",
            WEIGHT: f"the weight {self.name!r}",
        }[self.kind]


class NotFiniteError(RuntimeError):
    """NaN or Inf was found. The training loop adds the details of the run to the message."""

    def __init__(self, finding: NonFinite, why_now: str = "", *, names_checkpoint: bool = False):
        """why_now: why the run ends, if `train.on_nonfinite` let it go on after others. names_checkpoint: whether it
        says already which checkpoint is the last one, or that there is none."""
        super().__init__(f"{finding}")
        self.finding, self.why_now, self.names_checkpoint = finding, why_now, names_checkpoint


class NotFiniteTrainingError(RuntimeError):
    """A training has ended because of NaN or Inf. The text says where they began, as far as it is known."""

    is_retryable = False
    """The same rows and weights give it again."""


def explain(error: NotFiniteError, epoch: int, epoch_start: int, last_checkpoint: str | None) -> str:
    """Returns the error message for a finding. epoch_start: number of steps before the epoch."""
    finding = error.finding
    rows = f"Its rows in that step: {finding.rows}. " if finding.rows else ""
    saved = "" if error.names_checkpoint else f"Nothing has been saved since: {_saved(last_checkpoint)}. "
    why = {
        LOSS: "",
        GRADIENT: "; the loss was finite",
        SUM: "; the rank's own gradients were finite, so they overflowed in the exchange (parallel.compression)",
        WEIGHT: "; the rank's own gradients were finite, so the step was too large, or the gradients overflowed in the "
        "exchange (parallel.compression)",
    }[finding.kind]
    return (
        f"{finding.what} is not finite (NaN or Inf) on rank {finding.rank} in step {finding.global_step} (step "
        f"{finding.global_step - epoch_start} of epoch {epoch}){why}. {rows}{error.why_now}{saved}{_ADVICE}"
    )


def as_fields(finding: NonFinite) -> dict[str, Any]:
    """Returns a finding as fields of a log line. The driver adds a `rank`, of the one that writes the line."""
    about = {"bad_rank": finding.rank, "bad_step": finding.global_step, "bad_rows": finding.rows or "not known"}
    return {**about, "what": finding.what, "parameter": finding.name}


class StepCheck:
    """Checks the loss, gradients and weights of one rank in every step, without synchronizing a GPU.

    A kernel of a GPU, and a call of torch, takes microseconds, as the step of a small network does. So weights are
    checked together, and gradients by the buckets in which they are sent, if there are any. On a CPU, a hook of DDP for
    its buckets takes longer (45 us) than hooks of a few parameters.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, *, gradients: bool, watch_buckets: WatchBuckets | None = None,
        waits: bool | None = None,
    ):  # fmt: skip
        """gradients: False with fp16, where the scaler skips steps with NaN or Inf in gradients.

        Args:
            watch_buckets: `Trainable.watch_buckets`.
            waits: whether values are read at once. By default, on a CPU; a GPU would stop its stream.
        """
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel()]
        self._names, self._weights = [name for name, _ in named], [p for _, p in named]
        count = 1 + 2 * len(named)
        self._first = torch.full((count,), _NEVER, device=device)  # step of each finding: loss, gradients, weights
        self._waits = device.type == "cpu" if waits is None else waits
        self._bad: list[int] = []
        """Findings of this step, where their values are known at once."""
        self._none = torch.zeros((), device=device)
        self._norms = [self._none] * count
        """Maximum norms in this step, where values are not known yet."""
        self._pending: list[tuple[int, Tensor]] = []
        """The norms of the last steps, with their numbers, which are looked at together. # [count]"""
        self._indices = {id(p): 1 + i for i, p in enumerate(self._weights)}
        fused = [i for i, p in enumerate(self._weights) if type(p) is nn.Parameter and p.dtype == torch.float32]
        self._fused, self._alone = fused, [i for i in range(len(named)) if i not in {*fused}]
        """Weights that one operation checks, and the others, such as shards, by their place."""
        self._found, self._scale = torch.zeros(1, device=device), torch.ones(1, device=device)
        self._handles: list[Any] = []
        if gradients and watch_buckets is not None and not (self._waits and len(named) <= _FEW_PARAMETERS):
            watch_buckets(self._note_bucket)
        elif gradients:
            self._handles = [
                p.register_post_accumulate_grad_hook(self._note_gradient(1 + i)) for i, p in enumerate(self._weights)
            ]

    def _note_gradient(self, index: int) -> Callable[[Tensor], None]:
        # NOTE: hooks of DDP and Horovod run after this one.
        def note(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._note(index, parameter.grad)

        return note

    def _note_bucket(self, bucket: dist.GradBucket) -> None:
        """Called with the gradients of this rank before they are sent."""
        if self._waits and is_finite(bucket.buffer()):
            return
        pairs = [
            (self._indices[id(p)], gradient)
            for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
            if id(p) in self._indices
        ]
        if self._waits or bucket.buffer().is_sparse or bucket.buffer().is_complex():
            for index, gradient in pairs:
                self._note(index, gradient)
            return
        norms = torch._foreach_norm([gradient.detach() for _, gradient in pairs], math.inf)
        for (index, _), norm in zip(pairs, norms, strict=True):
            self._norms[index] = norm

    def _note_end(self, loss: Tensor) -> None:
        """Notes the loss and the weights of a step."""
        first, weights = 1 + len(self._weights), [self._weights[i] for i in self._fused]
        if self._waits:
            self._note(0, loss)
            # Multiplies each weight by 1, which changes none. Of what torch has, it is the fastest on a CPU.
            checked: list[Tensor] = [*weights]
            if checked:
                torch._amp_foreach_non_finite_check_and_unscale_(checked, self._found.zero_(), self._scale)
            if checked and self._found:
                for i, weight in zip(self._fused, weights, strict=True):
                    self._note(first + i, weight)
        else:
            norms = torch._foreach_norm([loss, *weights], math.inf)
            for index, norm in zip([0, *(first + i for i in self._fused)], norms, strict=True):
                self._norms[index] = norm
        for i in self._alone:
            self._note(first + i, self._weights[i])

    def _note(self, index: int, tensor: Tensor) -> None:
        if not self._waits:
            self._norms[index] = _max_norm(tensor)
        elif not is_finite(tensor):
            self._bad.append(index)

    def end_step(self, global_step: int, loss: Tensor) -> None:
        """Checks a step after the optimizer step. # loss: scalar"""
        with torch.no_grad():
            self._note_end(loss)
            if self._bad:
                self._first[self._bad] = self._first[self._bad].clamp(max=global_step)
                self._bad = []
            elif not self._waits:
                self._pending.append((global_step, torch.stack(self._norms)))
                self._norms = [self._none] * len(self._norms)
                if len(self._pending) == _MOST_PENDING:
                    self._look_at_pending()

    def _look_at_pending(self) -> None:
        """Looks at the norms of the last steps, without synchronizing a GPU."""
        if self._pending:
            steps, norms = zip(*self._pending, strict=True)
            self._pending = []
            of_step = torch.tensor(steps, device=self._first.device)[:, None]
            bad_steps = torch.where(torch.stack(norms) < math.inf, _NEVER, of_step)  # [steps, count]
            self._first = torch.minimum(self._first, bad_steps.amin(0))

    def is_bad(self, loss: Tensor) -> Tensor:
        """Returns whether the loss or a gradient of this step is not finite. Called before the optimizer step.

        # returns: () bool on the device
        """
        with torch.no_grad():
            self._note(0, loss)
            if self._waits:
                return torch.tensor(bool(self._bad))
            return ~(torch.stack(self._norms) < math.inf).all()

    def finding_of_step(self, rank: int, global_step: int) -> NonFinite | None:
        """Returns what `is_bad` has found in this step, or None. Synchronizes the device."""
        norms = [] if self._waits else torch.stack(self._norms).tolist()
        bad = min([*self._bad, *(i for i, norm in enumerate(norms) if not norm < math.inf)], default=None)
        if bad is None:
            return None
        return (
            NonFinite(global_step, LOSS, rank)
            if bad == 0
            else NonFinite(global_step, GRADIENT, rank, self._names[bad - 1])
        )

    def forget_step(self) -> None:
        """Forgets the findings of this step, which changes no weights."""
        self._bad = []
        self._norms = [self._none] * len(self._norms)

    def forget(self) -> None:
        """Forgets all findings, as the weights are those of a checkpoint again."""
        self.forget_step()
        self._pending = []
        self._first.fill_(_NEVER)

    @property
    def has_findings(self) -> bool:
        """Whether a step was not finite. Synchronizes the device."""
        self._look_at_pending()
        return bool((self._first < _NEVER).any())

    def mark(self, losses: Tensor) -> Tensor:
        """Returns the losses, or NaN after a finding. # losses: scalar"""
        self._look_at_pending()
        return torch.where((self._first < _NEVER).any(), math.nan, losses)

    def finding(self, rank: int) -> NonFinite | None:
        """Returns the first finding of this rank, or None. Synchronizes the device."""
        self._look_at_pending()
        steps, count = self._first.tolist(), len(self._names)
        kinds = [LOSS, *[GRADIENT] * count, *[WEIGHT] * count]
        step, kind, index = min((step, kind, i) for i, (step, kind) in enumerate(zip(steps, kinds, strict=True)))
        return None if step == _NEVER else NonFinite(step, kind, rank, ["", *self._names, *self._names][index])

    def close(self) -> None:
        """Removes the hooks from the model."""
        for handle in self._handles:
            handle.remove()


def find_in_gradients(model: nn.Module, loss: Tensor, rank: int, global_step: int) -> NonFinite | None:
    """Checks a rank's loss and gradients before they are sent. Synchronizes the device."""
    if not is_finite(loss):
        return NonFinite(global_step, LOSS, rank)
    name = first_not_finite((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    return None if name is None else NonFinite(global_step, GRADIENT, rank, name)


def first_of_all(own: NonFinite | None) -> NonFinite | None:
    """Returns the first finding over all ranks, or None. Collective."""
    findings = [NonFinite(*each) for each in gather_json(own and dataclasses.astuple(own)) if each is not None]
    return min(findings, default=None)


def check_loss_scale(scaler: Any, global_step: int) -> None:
    """Raises NotFiniteTrainingError on all ranks if fp16 gradients overflow in many consecutive steps.

    The scaler skips such steps and lowers the scale. Below `MIN_LOSS_SCALE` the scale is not the cause.

    Args:
        scaler: the GradScaler, or None with another precision.
    """
    if scaler is not None and scaler.get_scale() < MIN_LOSS_SCALE:
        raise NotFiniteTrainingError(
            f"train.precision: with fp16-mixed the gradients are not finite (NaN or Inf) in many consecutive steps, "
            f"until step {global_step}, with the loss scale {scaler.get_scale():g}; the weights did not change in "
            "them. Try train.precision bf16-mixed or float32, or a lower train.lr"
        )


class StateCheck:
    """Checks a run's state for NaN and Inf, except tensors that had them at the start, such as attention masks."""

    def __init__(self, modules: Sequence[nn.Module], checkpoint: str | None):
        """checkpoint: source of the state, if it was restored. Raises ValueError for a bad trained parameter."""
        trained = ((name, p) for module in modules for name, p in module.named_parameters() if p.requires_grad)
        if (bad := first_not_finite(trained)) is not None:
            where = f"the checkpoint {checkpoint}" if checkpoint else "spec.build"
            raise ValueError(
                f"{where}: the parameter {bad!r} is not finite (NaN or Inf) before the first step; resume from "
                "an earlier checkpoint, or build finite weights"
            )
        state = {str(i): module.state_dict() for i, module in enumerate(modules)}
        self._allowed = frozenset(name for name, tensor in named_tensors(state, "model") if not is_finite(tensor))

    def problem(self, state: Mapping[str, Any], rank: int, last_checkpoint: str | None) -> str:
        """Returns why this rank's state must not be saved, or an empty string. state["model"]: of the modules."""
        named = ((name, t) for part, value in state.items() for name, t in named_tensors(value, part))
        bad = first_not_finite((name, tensor) for name, tensor in named if name not in self._allowed)
        if bad is None:
            return ""
        return f"{bad} is not finite (NaN or Inf) on rank {rank}; {_saved(last_checkpoint)}. {_ADVICE}"


def _saved(last_checkpoint: str | None) -> str:
    return f"the last good checkpoint is {last_checkpoint}" if last_checkpoint else "no checkpoint has been saved yet"


def stored_elements(tensor: Tensor) -> Tensor:
    """Returns the stored elements of a tensor, as real numbers."""
    if type(tensor) is Tensor and tensor.is_floating_point() and tensor.layout is torch.strided:
        return tensor.detach() if tensor.requires_grad else tensor  # most gradients: each step asks for all of them
    if (to_local := getattr(tensor, "to_local", None)) is not None:  # a DTensor, whose sum would be collective
        tensor = to_local()
    if tensor.is_sparse:
        tensor = tensor._values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.detach()


def _max_norm(tensor: Tensor) -> Tensor:
    """Returns a scalar that is finite if and only if all elements are. Sums and other norms can overflow."""
    elements = stored_elements(tensor)
    return torch.linalg.vector_norm(elements, math.inf) if elements.numel() else elements.new_zeros(())


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite. Synchronizes the device.

    NOTE: a sum keeps NaN and Inf, and on a CPU it takes a fifth of the time of the minimum and the maximum, and less
    than a fiftieth of that of the maximum norm. If it overflows for finite elements, the minimum and maximum decide.
    """
    elements = stored_elements(tensor)
    if math.isfinite(elements.sum()):
        return True
    return all(math.isfinite(value) for value in elements.aminmax())


def all_finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns whether all elements of tensors on a device are finite, without synchronizing a GPU. # () bool"""
    if device.type == "cpu":
        return torch.tensor(all(is_finite(tensor) for tensor in tensors))
    return (torch.stack([torch.zeros((), device=device), *map(_max_norm, tensors)]) < math.inf).all()


def first_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Returns the name of the first tensor with NaN or Inf, or None. Synchronizes the device."""
    return next((name for name, tensor in named if not is_finite(tensor)), None)


def named_tensors(state: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the floating point tensors of a nested state with their paths."""
    if isinstance(state, Tensor) and (state.is_floating_point() or state.is_complex()):
        yield prefix, state
    elif isinstance(state, Mapping):
        for name, value in state.items():
            yield from named_tensors(value, f"{prefix}.{name}")
    elif isinstance(state, Sequence) and not isinstance(state, str):
        for i, value in enumerate(state):
            yield from named_tensors(value, f"{prefix}.{i}")


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
        self._checks_sums = config.train.precision != "fp16-mixed"  # whose scaler leaves out gradients that overflow
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
    ) -> tuple[Tensor, NonFinite | None]:
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

    def _decide(self, loss: Tensor, global_step: int) -> NonFinite | None:
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
            own = NonFinite(global_step, SUM, self._world.rank, name)
        return self.first_of_all(own)

    def first_of_all(self, own: NonFinite | None) -> NonFinite | None:
        """Returns the first finding over all ranks, with the rows of its rank, or None. Collective."""
        return first_of_all(own and dataclasses.replace(own, rows=self._name_rows(own.global_step)))

    def _sums(self) -> list[tuple[str, Tensor]]:
        """Returns the gradients that the optimizer would apply on this rank, with the names of their parameters."""
        parameters = [p for group in self._trainable.optimizer.param_groups for p in group["params"]]
        return [(self._names.get(id(p), "a shard"), p.grad) for p in parameters if p.grad is not None]

    def roll_back(self, error: NotFiniteError, checkpoint: str | None) -> None:
        """Forgets the steps since a checkpoint, before it is loaded, and notes that the step of the error is left out.

        Args:
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
