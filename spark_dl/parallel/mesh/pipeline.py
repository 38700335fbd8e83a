"""Pipelines of `torch.distributed.pipelining`: GPipe, 1F1B, interleaved and zero-bubble schedules.

GPipe: Huang et al. 2019, arXiv:1811.06965. 1F1B and interleaved: Narayanan et al. 2021, arXiv:2104.04473. Zero bubble:
Qi et al. 2023, arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spark_dl.parallel.loss import Count, unused_message
from spark_dl.parallel.mesh.layers import Layer, Tied
from spark_dl.parallel.mesh.settings import SEVERAL_STAGES, SPLIT, Schedule
from spark_dl.parallel.mesh.stage import Boundary, Stage, enter
from spark_dl.parallel.mesh.trial import RankStages
from spark_dl.spec import Batch, ModelSpec, Output

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

    from spark_dl.config import Config


def check_pipeline(spec: ModelSpec, num_ranks: int) -> None:
    """Raises ValueError for functions of a spec that a pipeline of several ranks cannot call. Called on the driver."""
    for name in ("batch_loss", "evaluation"):
        if getattr(spec, name) is not None:
            raise ValueError(
                f"spec.{name}: not supported with parallel.pipeline={num_ranks}: it is called with the whole model, "
                "and each rank of a pipeline has a part of it; use spec.forward and spec.loss"
            )


def ranks_of_stages(num_stages: int, num_ranks: int, schedule: str) -> list[int]:
    """Returns the rank of a pipeline that has each stage. Pure."""
    last = num_stages - 1
    return [min(stage, last - stage) if schedule == "zbv" else stage % num_ranks for stage in range(num_stages)]


class Pipeline:
    """One rank of a synchronous pipeline. After each step, the weights are those of a single process.

    Build the optimizer of `module.parameters()` after this object. Not collective.

    Args:
        model: built on the CPU, on every rank with the same weights. `module` is this object, with only the layers of
            this rank, on `device`. The storage of the others is freed.
        chain: from `build_chain(model, spec.layers)`.
        cut: number of layers of each stage, first stage first, such as from `balance(times, num_ranks *
            stages_per_rank)`.
        group: the ranks of the pipeline, in order. Rank r has the stages r, r + num_ranks ...; with `zbv` the stages r
            and 2 * num_ranks - 1 - r.
    """

    def __init__(
        self, spec: ModelSpec, model: nn.Module, chain: Sequence[Layer], cut: Sequence[int], config: Config, *,
        group: dist.ProcessGroup, device: torch.device, schedule: Schedule = "1f1b", stages_per_rank: int = 1,
    ):  # fmt: skip
        num_ranks = dist.get_world_size(group)
        check_pipeline(spec, num_ranks)
        assert len(cut) == num_ranks * stages_per_rank
        ranks = ranks_of_stages(len(cut), num_ranks, schedule)
        self._stages = RankStages(
            spec, model, chain, cut, config, group=group, device=device, rank_of=ranks.__getitem__
        )
        self._schedule = schedule
        self._micro_batches = config.train.accumulation_steps
        self._step: Callable[[int], None] | None = None
        self._batches: list[Batch] = []
        self._divisor: Count = 0
        self._losses: list[Tensor] = []
        self._error: Exception | None = None
        self._used: list[nn.Parameter] | None = [] if schedule in SPLIT else None
        """In the first step, the parameters that later stages need gradients of; None if they need not be checked."""

    @property
    def module(self) -> nn.Module:
        """The model with only the layers of this rank. Parameters, buffers and state have their names in the model."""
        return self._stages.module

    @property
    def tied(self) -> list[Tied]:
        """The parameters that several ranks have a copy of: their names, and the ranks of the group."""
        return self._stages.tied

    @property
    def runs_hooks(self) -> bool:
        """Whether the hooks of parameters run in the backward pass, as the schedule computes all gradients there."""
        return self._schedule not in SPLIT

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, and so the output and the loss."""
        return self._stages.last_rank == self._stages.rank

    def counted_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that this rank counts in a norm over the model: of tied copies, one counts."""
        return self._stages.counted_parameters()

    def forward_backward(self, micro_batches: Sequence[Batch], count: Count) -> Tensor:
        """Adds the gradients of the sum of the true rows' losses, divided by `count`, to `.grad`. Collective.

        All ranks of the pipeline have the same micro-batches, on the CPU. count: as of `Trainable`.
        Returns the sum of losses, a float32 scalar, on the rank of the last stage, and 0 on the others.
        Raises ValueError if the shapes of micro-batches differ, in a step or between steps.
        """
        assert len(micro_batches) == self._micro_batches
        self._batches, self._divisor = self._stages.take(micro_batches), count
        try:
            if self._step is None:
                self._step = self._build_step()
            self._step(len(micro_batches))
            self._check_gradients()
            self._stages.sum_tied_gradients()
            total = torch.zeros((), device=self._stages.device)
            for loss in self._losses:
                total += loss
            return total
        except Exception:
            if self._error is not None:  # torch has wrapped it, with a text about tensors
                raise self._error from None
            raise
        finally:
            self._batches, self._losses, self._error = [], [], None

    def forward(self, batch: Batch) -> Output | None:
        """Computes the model's output for a batch with any number of rows. Collective over the pipeline.

        Returns it on the rank of the last stage, and None on the others. For evaluations, under `inference_mode`.
        """
        return self._stages.forward(batch)

    def compute(self, stage: Stage, tensors: Sequence[Tensor], index: int, micro_batch: int) -> Any:
        """Runs a stage on what it received for a micro-batch. Called by the schedules.

        Returns the tensors to send, or, on the last stage, the loss to differentiate.
        """
        stages, batch = self._stages, self._batches[micro_batch]
        try:
            received = None
            if not stage.is_first:
                received = stages.boundaries[index - 1].wrap([enter(t) for t in tensors])
            if stage.is_last:
                losses = stage.loss_sum(batch, received)
                self._losses.append(losses.detach())
                outputs: tuple[Tensor, ...] = (losses / self._divisor,)
            else:
                outputs = stages.boundaries[index].unwrap(stage.activation(batch, received))
            if self._schedule in SPLIT:  # such a schedule detaches them, which torch does not do with views
                outputs = tuple(t.clone() if t._is_view() else t for t in outputs)
            if self._used is not None:
                self._used += _parameters_of(outputs)
            return outputs[0] if stage.is_last else outputs
        except Exception as error:
            self._error = error
            raise

    def _check_gradients(self) -> None:
        """Raises RuntimeError if a schedule has left out the gradient of a parameter, in the first step.

        Raises ValueError for parameters that no loss depends on.
        """
        if self._used is None:
            return
        used, self._used = self._used, None
        known = {id(parameter) for parameter in used}
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        if unused := [name for name, parameter in trained if id(parameter) not in known]:
            raise ValueError(unused_message(unused))
        missing = {id(parameter) for parameter in used if parameter.grad is None}
        names = [name for name, parameter in self.module.named_parameters() if id(parameter) in missing]
        if names:
            raise RuntimeError(
                f"parallel.schedule: {self._schedule!r} cannot compute the gradient of {', '.join(names)}, which "
                "reaches an output of its stage beside the input of the stage; use '1f1b' or 'interleaved'"
            )

    def _build_step(self) -> Callable[[int], None]:
        """Returns a function of the number of micro-batches that runs the schedule."""
        from torch.distributed import pipelining

        classes: dict[str, Any] = {
            "naive": pipelining.ScheduleGPipe,
            "gpipe": pipelining.ScheduleGPipe,
            "1f1b": pipelining.Schedule1F1B,
            "interleaved": pipelining.ScheduleInterleaved1F1B,
            "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
            "zbv": pipelining.ScheduleZBVZeroBubble,
        }
        stages = [self._torch_stage(i, stage) for i, stage in sorted(self._stages.stages.items())]
        count = 1 if self._schedule == "naive" else self._micro_batches
        schedule = classes[self._schedule](
            stages if self._schedule in SEVERAL_STAGES else stages[0], count,
            loss_fn=lambda loss, _: loss, scale_grads=False,
        )  # fmt: skip

        def step(micro_batches: int) -> None:
            # The schedules cut tensors into micro-batches, and batches are dicts: they get the numbers alone.
            for numbers in torch.arange(micro_batches).split(count):
                schedule.step(micro_batch=numbers, target=numbers, return_outputs=False)

        return step

    def _torch_stage(self, index: int, stage: Stage) -> PipelineStage:
        from torch.distributed.pipelining import PipelineStage

        sent = {i: self._sent(boundary) for i, boundary in self._stages.boundaries.items()}
        loss = torch.empty((), device="meta", requires_grad=True)
        return PipelineStage(
            _StageModule(self, stage, index), index, self._stages.num_stages, self._stages.device,
            input_args=() if stage.is_first else sent[index - 1],
            output_args=loss if stage.is_last else sent[index],
            group=self._stages.group,
        )  # fmt: skip

    def _sent(self, boundary: Boundary) -> tuple[Tensor, ...]:
        """Returns what the schedules know of a boundary.

        NOTE: a schedule that computes the gradients of inputs and weights apart finds weights by the way from them to
        an input with a gradient. Without one, as behind stages with frozen parameters, torch would leave their
        gradients out, silently. So the input gets a gradient, which is sent for nothing.
        """
        tensors = boundary.tensors
        if self._schedule not in SPLIT or any(t.requires_grad for t in tensors):
            return tensors
        buffers = tuple(torch.empty_like(t, requires_grad=t.is_floating_point()) for t in tensors)
        if not any(t.requires_grad for t in buffers):
            raise ValueError(
                f"parallel.schedule: {self._schedule!r} needs a tensor of floating-point numbers at the end of each "
                f"stage, found none after the layer {boundary.layer!r}; use '1f1b' or 'interleaved', or cut the model "
                "elsewhere (parallel.stages)"
            )
        return buffers


def _parameters_of(outputs: Sequence[Tensor]) -> list[nn.Parameter]:
    """Returns the parameters that outputs were computed from."""
    nodes: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, parameters = set(nodes), []
    while nodes:
        node = nodes.pop()
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            parameters.append(node.variable)
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        nodes += following
    return parameters


class _StageModule(nn.Module):
    """What the schedules call: with the tensors that were received and the number of the micro-batch."""

    def __init__(self, pipeline: Pipeline, stage: Stage, index: int):
        super().__init__()
        self.layers = nn.ModuleList(layer.module for layer in stage.layers)
        self._pipeline, self._stage, self._index = pipeline, stage, index

    def forward(self, *tensors: Tensor, micro_batch: Tensor) -> Any:
        return self._pipeline.compute(self._stage, tensors, self._index, int(micro_batch))
