"""Pipelines of `torch.distributed.pipelining`: GPipe, 1F1B, interleaved and zero-bubble schedules.

GPipe: Huang et al. 2019, arXiv:1811.06965. 1F1B and interleaved: Narayanan et al. 2021, arXiv:2104.04473. Zero bubble:
Qi et al. 2023, arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spark_dl.parallel.mesh.layers import Layer, Tied
from spark_dl.parallel.mesh.stage import Stage, enter
from spark_dl.parallel.mesh.stages import Stages
from spark_dl.spec import Batch, ModelSpec, Output

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

    from spark_dl.config import Config

Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]
_SPLIT = ("zero_bubble", "zbv")
"""Schedules that compute the gradients of inputs and of weights apart."""
_SEVERAL_STAGES = ("interleaved", "zero_bubble", "zbv")


def check_pipeline(spec: ModelSpec, num_ranks: int) -> None:
    """Raises ValueError for functions of a spec that a pipeline of several ranks cannot call. Called on the driver."""
    for name in ("batch_loss", "evaluation"):
        if getattr(spec, name) is not None:
            raise ValueError(
                f"spec.{name}: not supported with parallel.pipeline={num_ranks}: it is called with the whole model, "
                "and each rank of a pipeline has a part of it; use spec.forward and spec.loss"
            )


class Pipeline:
    """One rank of a synchronous pipeline. After each step, the weights are those of a single process.

    model: built on the CPU, on every rank with the same weights. `module` is this object, with only the layers of this
        rank, on `device`. The storage of the others is freed.
    chain: from `build_chain(model, spec.layers)`. cut: number of layers of each stage, first stage first, such as from
        `balance(times, num_ranks * stages_per_rank)`.
    group: the ranks of the pipeline, in order. Rank r has the stages r, r + num_ranks ...; with `zbv` the stages r and
        2 * num_ranks - 1 - r.

    Build the optimizer of `module.parameters()` after this object. Not collective.
    """

    def __init__(
        self, spec: ModelSpec, model: nn.Module, chain: Sequence[Layer], cut: Sequence[int], config: Config, *,
        group: dist.ProcessGroup, device: torch.device, schedule: Schedule = "1f1b", stages_per_rank: int = 1,
    ):  # fmt: skip
        num_ranks = dist.get_world_size(group)
        check_pipeline(spec, num_ranks)
        assert len(cut) == num_ranks * stages_per_rank
        last = len(cut) - 1

        def rank_of(stage: int) -> int:
            return min(stage, last - stage) if schedule == "zbv" else stage % num_ranks

        self._stages = Stages(spec, model, chain, cut, config, group=group, device=device, rank_of=rank_of)
        self._schedule = schedule
        self._micro_batches = config.train.accumulation_steps
        self._step: Callable[[int], None] | None = None
        self._batches: list[Batch] = []
        self._rows = 0
        self._losses: list[Tensor] = []
        self._error: Exception | None = None

    @property
    def module(self) -> nn.Module:
        """The model with only the layers of this rank. Parameters, buffers and state have their names in the model."""
        return self._stages.module

    @property
    def tied(self) -> list[Tied]:
        """The parameters that several ranks have a copy of: their names, and the ranks of the group."""
        return self._stages.tied

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, and so the output and the loss."""
        return self._stages.last_rank == self._stages.rank

    def counted_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that this rank counts in a norm over the model: of tied copies, one counts."""
        return self._stages.counted_parameters()

    def forward_backward(self, micro_batches: Sequence[Batch], rows: int) -> Tensor:
        """Adds the gradients of the sum of the true rows' losses, divided by `rows`, to `.grad`. Collective.

        All ranks of the pipeline have the same micro-batches, on the CPU. rows: true rows of the global batch.
        Returns the sum of losses, a float32 scalar, on the rank of the last stage, and 0 on the others.
        Raises ValueError if the shapes of micro-batches differ, in a step or between steps.
        """
        assert len(micro_batches) == self._micro_batches
        self._batches, self._rows = self._stages.take(micro_batches), rows
        try:
            if self._step is None:
                self._step = self._build_step()
            self._step(len(micro_batches))
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
                return losses / self._rows
            sent = stages.boundaries[index].unwrap(stage.activation(batch, received))
            # The schedules detach what was sent, which torch does not do with views.
            return tuple(t.clone() if t._is_view() and self._schedule in _SPLIT else t for t in sent)
        except Exception as error:
            self._error = error
            raise

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
            stages if self._schedule in _SEVERAL_STAGES else stages[0], count,
            loss_fn=lambda loss, _: loss, scale_grads=False,
        )  # fmt: skip

        def step(micro_batches: int) -> None:
            # The schedules cut tensors into micro-batches, and batches are dicts: they get the numbers alone.
            for numbers in torch.arange(micro_batches).split(count):
                schedule.step(micro_batch=numbers, target=numbers, return_outputs=False)

        return step

    def _torch_stage(self, index: int, stage: Stage) -> PipelineStage:
        from torch.distributed.pipelining import PipelineStage

        boundaries = self._stages.boundaries
        loss = torch.empty((), device="meta", requires_grad=True)
        return PipelineStage(
            _StageModule(self, stage, index), index, self._stages.num_stages, self._stages.device,
            input_args=() if stage.is_first else boundaries[index - 1].tensors,
            output_args=loss if stage.is_last else boundaries[index].tensors,
            group=self._stages.group,
        )  # fmt: skip


class _StageModule(nn.Module):
    """What the schedules call: with the tensors that were received and the number of the micro-batch."""

    def __init__(self, pipeline: Pipeline, stage: Stage, index: int):
        super().__init__()
        self.layers = nn.ModuleList(layer.module for layer in stage.layers)
        self._pipeline, self._stage, self._index = pipeline, stage, index

    def forward(self, *tensors: Tensor, micro_batch: Tensor) -> Any:
        return self._pipeline.compute(self._stage, tensors, self._index, int(micro_batch))
