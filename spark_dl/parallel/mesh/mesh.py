"""The strategy `mesh`: data ranks whose states are sharded, and models that are cut; and the check of its first step.

A mesh replaces parameters, modules and functions of the user. What he has tied to them in a way that no check knows
would give other weights, without a word. So the first step is computed twice before anything is trained, by the mesh
and with the whole model on one rank, and the gradients are compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from spark_dl.gather import RowRanks
from spark_dl.generators import generators_kept
from spark_dl.nn.moe import moe_layers
from spark_dl.parallel import ddp
from spark_dl.parallel.ddp import DDP
from spark_dl.parallel.exchange_clock import ExchangeClock, build_clock
from spark_dl.parallel.loss import Call, Count, noted_counts, noting_counts
from spark_dl.parallel.mesh.build import Part, build_part
from spark_dl.parallel.mesh.context import Context
from spark_dl.parallel.mesh.flat import FlatGradients, SameCalls, local, whole_again_named
from spark_dl.parallel.mesh.groups import Groups, build_groups
from spark_dl.parallel.mesh.layers import release_peers
from spark_dl.parallel.mesh.pipedream import PipeDream
from spark_dl.parallel.mesh.pipeline import Pipeline
from spark_dl.parallel.mesh.settings import Mesh
from spark_dl.parallel.mesh.state import MeshState
from spark_dl.parallel.modules import is_out_of_memory, module_state_kept
from spark_dl.parallel.pieces import Layout
from spark_dl.parallel.recompute import keep_states
from spark_dl.parallel.trainable import Trainable, add_gradients, build_optimization
from spark_dl.spec import Batch, ModelSpec

if TYPE_CHECKING:
    from spark_dl.config import Config
    from spark_dl.world import World

_log = logging.getLogger("spark_dl")
_TOLERANCE = {"float32": 0.02, "bf16-mixed": 0.2, "bf16": 0.2}
"""Difference of a gradient, in its norm. Convolutions of GPUs round float32 to 10 bits."""
_SMALL, _SMALL_IN_BF16 = 1e-4, 0.05
"""Gradients below this part of the gradient of the model are rounding, and losses of a row below it."""

_MIB = 1 << 20
_COPIES = 5
"""Tensors of the size of the model that the check needs: weights, gradients, and what sums them over the ranks."""


class FirstStepCheck:
    """Compares the gradients of a step, once. Called on each rank of a mesh."""

    def __init__(
        self, spec: ModelSpec, module: nn.Module, state: MeshState, optimizer: torch.optim.Optimizer, groups: Groups,
        world: World, config: Config, model_bytes: int,
    ):  # fmt: skip
        """module: what this rank has of the model. model_bytes: of the weights of the whole model."""
        self._bytes = model_bytes
        self._spec, self._module, self._state, self._optimizer = spec, module, state, optimizer
        self._groups, self._world, self._config = groups, world, config

    def compare(
        self, micro_batches: Sequence[Batch], count: Count, forward_backward: Callable[[Sequence[Batch], Count], Tensor]
    ) -> None:
        """Computes a step of the mesh and of the whole model, both without dropout. Collective.

        Models that draw other random numbers are left out, and a model for which a rank has not enough memory: the
        mesh may be there because of it. Raises ValueError on all ranks for a gradient that differs.
        """
        start = time.perf_counter()
        if not self._all(has_memory(_COPIES * self._bytes, self._world.device)):
            self._say_left_out()
            return
        gpus = [self._world.device.index] if self._world.device.type == "cuda" else []
        with generators_kept(gpus), module_state_kept(self._module), _without_dropout(self._module):
            losses = float(forward_backward(micro_batches, count))
            own = [(name, layout, value.float().cpu().clone()) for name, layout, value in self._state.gradients()]
            self._optimizer.zero_grad()
            self._module.zero_grad()
            reference = self._of_whole(micro_batches, count)
            worst = None
            if reference is not None:
                expected, expected_losses = reference
                worst = self._worst(own, expected) or self._of_losses(losses, expected_losses, count)
            if worst is not None:
                torch.manual_seed(self._config.train.seed + 1)
                again = self._of_whole(micro_batches, count)
                if again is None or any(not torch.allclose(again[0][name], value) for name, value in expected.items()):
                    worst = None
        for layer in moe_layers(self._module).values():
            layer.take_counts()  # only steps count
        if worst is not None:
            what, ratio = worst
            raise ValueError(
                f"parallel.check_first_step_mib: {what} in the first step differs from that of the whole "
                f"model by {ratio:.2g} of it, so the mesh would train another model; something is tied to the "
                "parameters or the modules that it replaces, as a weight that is used outside its module. Use ddp, "
                "leave these layers whole (spec.tensor_plan, spec.layers), or set it to 0"
            )
        if reference is None:
            self._say_left_out()
        elif self._world.rank == 0:
            _log.info("the first step has the gradients of the whole model (%.2f s)", time.perf_counter() - start)

    def _all(self, is_true: bool) -> bool:
        """Whether it is true on all ranks. Collective."""
        flag = torch.tensor([int(is_true)], device=self._world.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def _say_left_out(self) -> None:
        if self._world.rank == 0:
            _log.info(
                "parallel.check_first_step_mib: the first step is not compared with that of the whole model, which has "
                "%d MiB, as a rank has not enough memory for it", self._bytes >> 20,
            )  # fmt: skip

    def _of_whole(self, micro_batches: Sequence[Batch], count: Count) -> tuple[dict[str, Tensor], float] | None:
        """Returns the gradients and the loss of the whole model, with the weights that the ranks have. Collective.

        None if its activations do not fit into the memory of a rank.
        """
        whole = self._spec.build_to_train().to(self._world.device)
        first: dict[int, str] = {}  # of tied tensors, which a rank has under one name
        for name, tensor in whole.state_dict(keep_vars=True).items():
            if tensor.is_floating_point():
                first.setdefault(id(tensor), name)
        named = {name: whole.state_dict()[name] for name in first.values()}
        flat = torch.zeros(sum(tensor.numel() for tensor in named.values()), dtype=torch.float32)
        held = self._state.weights()
        at = 0
        for name, tensor in named.items():
            if name in held and held[name].writes:
                _put(flat[at : at + tensor.numel()], held[name].layout, held[name].tensor.detach().float().cpu())
            at += tensor.numel()
        _sum(flat, self._world)
        with torch.no_grad():
            for tensor, value in zip(named.values(), flat.split([t.numel() for t in named.values()]), strict=True):
                tensor.copy_(value.view(tensor.shape))
        for layer in moe_layers(whole).values():  # whose balance is that of all tokens
            layer.sum_over_data = self._sum_over_data
        losses = None
        with _without_dropout(whole):
            try:
                losses = add_gradients(
                    self._spec, whole, micro_batches, self._config, device=self._world.device,
                    scale=lambda losses: losses / count,
                )  # fmt: skip
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
        if not self._all(losses is not None):
            return None
        assert losses is not None
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense()
            for name, p in whole.named_parameters(remove_duplicate=False)
        }
        flat = torch.cat([*(g.float().cpu().reshape(-1) for g in gradients.values()), losses.float().cpu().view(1)])
        # Ranks of a copy of the model have the same rows.
        is_first = self._groups.counts and self._groups.at.pipeline == 0
        _sum(flat if is_first else flat.zero_(), self._world)
        parts = flat[:-1].split([gradient.numel() for gradient in gradients.values()])
        return {name: p.view(g.shape) for (name, g), p in zip(gradients.items(), parts, strict=True)}, float(flat[-1])

    def _sum_over_data(self, tensor: Tensor) -> None:
        if self._groups.data is not None:
            dist.all_reduce(tensor, group=self._groups.data)

    def _worst(
        self, own: Sequence[tuple[str, Layout, Tensor]], expected: dict[str, Tensor]
    ) -> tuple[str, float] | None:
        """Returns the first gradient of the model that differs on some rank, and by what part of it. Collective."""
        whole = float(torch.sqrt(sum(value.square().sum() for value in expected.values())))  # type: ignore[arg-type]
        # A gradient that is 0 but for rounding, as of a bias before BatchNorm, is that of roundings in bfloat16.
        small = _SMALL_IN_BF16 if self._config.train.precision == "bf16" else _SMALL
        order = {name: i for i, name in enumerate(expected)}
        differences: list[tuple[int, float]] = []
        for name, layout, gradient in own:
            if name not in expected:
                continue
            difference = float((gradient - _take(expected[name].reshape(-1), layout)).norm())
            norm = max(float(expected[name].norm()), small * whole, torch.finfo(torch.float32).tiny)
            if not difference <= _TOLERANCE[self._config.train.precision] * norm:
                differences.append((order[name], difference / norm))
        first = torch.tensor(
            min(differences, default=(len(order), 0.0)), dtype=torch.float64, device=self._world.device
        )
        of_ranks = [torch.empty_like(first) for _ in range(self._world.world_size)]
        dist.all_gather(of_ranks, first)
        index, ratio = min(each.tolist() for each in of_ranks)
        return None if index == len(order) else (f"the gradient of {list(order)[int(index)]!r}", ratio)

    def _of_losses(self, own: float, expected: float, count: Count) -> tuple[str, float] | None:
        """Returns the loss if it differs, and by what part of it. Collective. # own: of this rank, expected: of all"""
        total = torch.tensor([own])
        _sum(total, self._world)
        ratio = abs(float(total) - expected) / max(abs(expected), _SMALL * float(count))
        return ("the loss", ratio) if ratio > _TOLERANCE[self._config.train.precision] else None


def has_memory(size: int, device: torch.device) -> bool:
    """Whether this process can have so many bytes more, on a GPU or within its limits (`ulimit`)."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return size <= free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        torch.empty(size, dtype=torch.uint8)  # is given back at once, and was never touched
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    """Sets the modules that drop values to evaluation mode for the block; others can have another output there."""
    dropping = [each for each in module.modules() if each.training and _drops(each)]
    for each in dropping:
        each.training = False
    try:
        yield
    finally:
        for each in dropping:
            each.training = True


def _drops(module: nn.Module) -> bool:
    # NOTE: cuDNN computes no gradients of recurrent layers in evaluation mode.
    if isinstance(module, nn.RNNBase):
        return False
    return any(
        isinstance(value, float) and value > 0 for name, value in vars(module).items() if name == "p" or "drop" in name
    )


def _sum(flat: Tensor, world: World) -> None:
    on_device = flat.to(world.device)
    dist.all_reduce(on_device)
    flat.copy_(on_device)


def _boxes(flat: Tensor, layout: Layout) -> Iterator[tuple[Tensor, int, int, int]]:
    """Yields the elements of each piece's box, the range of the piece in it, and its length."""
    whole = flat.view(layout.shape)
    for piece in layout.pieces:
        box = whole[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))]
        yield box, piece.start, piece.stop, piece.length


def _take(flat: Tensor, layout: Layout) -> Tensor:
    """Returns the elements of a layout of a whole tensor. # flat: [elements of the whole tensor]"""
    parts = [box.reshape(-1)[start:stop] for box, start, stop, _ in _boxes(flat, layout)]
    return torch.cat(parts) if parts else flat[:0]


def _put(flat: Tensor, layout: Layout, values: Tensor) -> None:
    """Writes the elements of a layout into a whole tensor. # flat: as in `_take`"""
    at = 0
    for box, start, stop, length in _boxes(flat, layout):
        own = box.reshape(-1).clone()
        own[start:stop] = values.reshape(-1)[at : at + length]
        box.copy_(own.view(box.shape))
        at += length


def parallelize(spec: ModelSpec, world: World, config: Config) -> Trainable:
    """Builds this rank's part of the model. Where nothing is cut or sharded, trains as DDP does. Collective."""
    settings = config.parallel
    assert isinstance(settings, Mesh)
    groups = build_groups(world, settings.dims(world.world_size), config.launch.collective_timeout_s)
    clock = build_clock(world)
    if settings.model == settings.experts == settings.context == 1 and not settings.zero_stage:
        spec, model = ddp.build_model(spec, world, config, sync_batchnorm=False, clock=clock)
        optimization = build_optimization(spec, model, config, groups.dims.parts)
        plain = ddp.average_gradients(
            spec,
            model,
            optimization,
            world,
            config,
            clock=clock,
            settings=DDP(bucket_mib=settings.bucket_mib, find_unused_parameters=settings.find_unused_parameters),
        )
        # The size of buckets is no setting here, and other meshes do not have its state.
        extra = {name: part for name, part in plain.extra_state.items() if name != "bucket_size"}
        state = MeshState(model, optimization.optimizer, groups)
        return dataclasses.replace(plain, state=state, extra_state=extra)
    part = build_part(spec, world, config, groups, clock)
    optimization, flat = part.optimization, None
    hooks_run = part.pipeline is None or (isinstance(part.pipeline, Pipeline) and part.pipeline.runs_hooks)
    if settings.zero_stage < 3:
        flat = FlatGradients(
            part.module, optimization.optimizer, groups, stage=settings.zero_stage, clock=clock,
            bucket_bytes=int(settings.bucket_mib * _MIB),
            find_unused=settings.find_unused_parameters if hooks_run else None,
            experts=part.experts,
            kinds={name: (name in part.cut, is_counted(part, p)) for name, p in part.module.named_parameters()},
        )  # fmt: skip
    state = MeshState(
        part.module, optimization.optimizer, groups, buckets=flat.buckets if flat else (), cut=part.cut,
        experts=part.experts,
    )  # fmt: skip
    check = None
    # The gradients of PipeDream are late, and what `set_position` has set, a model that is built anew does not have.
    if settings.check_first_step_mib and spec.set_position is None and not isinstance(part.pipeline, PipeDream):
        if part.model_bytes <= settings.check_first_step_mib << 20:
            check = FirstStepCheck(
                spec, part.module, state, optimization.optimizer, groups, world, config, part.model_bytes
            )  # fmt: skip
        elif world.rank == 0:
            _log.info(
                "parallel.check_first_step_mib: the first step is not compared with that of the whole model, which has "
                "%d MiB, above %d MiB", part.model_bytes >> 20, settings.check_first_step_mib,
            )  # fmt: skip
    training = MeshTraining(spec, part, optimization.optimizer, flat, groups, world, config, clock, check)
    return Trainable(
        modules=[part.module],
        optimizer=optimization.optimizer,
        optimization=optimization,
        forward_backward=training.forward_backward,
        clip_grad_norm=training.clip_grad_norm,
        step=training.step,
        call=part.inside,
        forward=None if part.pipeline is None else part.pipeline.forward,
        counts=groups.counts,
        share_weights=training.share_weights,
        sync_weights=training.sync_weights,
        sum_over_data=training.sum_over_data,
        takes_counts=not isinstance(part.pipeline, PipeDream),
        row_ranks=None if groups.context else RowRanks(1 if groups.data is None else groups.data.size(), groups.data),
        clock=clock,
        state=state,
        close=training.close,
    )


def _check_same_rows(micro_batches: Sequence[Batch], groups: Groups, world: World) -> None:
    """Raises RuntimeError on all ranks of a copy of the model that do not have the same batches. Collective."""
    if groups.tensor is groups.pipeline is groups.context is None:
        return
    checksum = 0
    for batch in micro_batches:
        for name in sorted(batch):
            checksum = zlib.crc32(batch[name].contiguous().reshape(-1).view(torch.uint8).numpy().data, checksum)
    for group in (groups.tensor, groups.pipeline, groups.context):
        if group is None:
            continue
        own = torch.tensor([checksum], device=world.device)
        others = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(others, own, group=group)
        if any(int(each) != checksum for each in others):
            raise RuntimeError(
                f"rank {world.rank} on host {world.host}: the ranks of one copy of the model have different batches, "
                f"ranks {dist.get_process_group_ranks(group)}; spec.transform must not draw random numbers: use "
                "spec.augment, whose generator is the same on these ranks"
            )


def is_counted(part: Part, parameter: nn.Parameter) -> bool:
    """Whether this rank counts a parameter in a norm over the model: of copies on several stages, one counts."""
    if not isinstance(part.pipeline, Pipeline):
        return True
    return any(parameter is counted for counted in part.pipeline.counted_parameters())


class MeshTraining:
    """The steps of one rank of a mesh. The functions are those of `Trainable`."""

    def __init__(
        self, spec: ModelSpec, part: Part, optimizer: torch.optim.Optimizer, flat: FlatGradients | None,
        groups: Groups, world: World, config: Config, clock: ExchangeClock | None,
        check: FirstStepCheck | None = None,
    ):  # fmt: skip
        self._spec, self._part, self._optimizer, self._flat = spec, part, optimizer, flat
        self._groups, self._world, self._config, self._clock = groups, world, config, clock
        self._is_first_step, self._check = True, check
        self._same_calls: SameCalls | None = None
        self._context = None if groups.context is None else Context(groups.context, config.data.features)
        if self._context is not None:
            keep_states(part.module, self._context.again)

    def forward_backward(self, micro_batches: Sequence[Batch], count: Count) -> Tensor:
        if self._is_first_step:
            _check_same_rows(micro_batches, self._groups, self._world)
            self._is_first_step = False
            if self._check is not None:
                with noting_counts():  # of this pass, which is not one of a step
                    self._check.compare(micro_batches, count, self.forward_backward)
        pipeline, flat = self._part.pipeline, self._flat
        if isinstance(pipeline, PipeDream):
            total = pipeline.forward_backward(micro_batches, count)
            if pipeline.has_gradients:
                self._exchange()
        elif pipeline is not None:
            if flat is not None:
                flat.start(len(micro_batches))
            with flat.no_sync() if flat is not None else contextlib.nullcontext():
                total = pipeline.forward_backward(micro_batches, count)
            if flat is not None:
                flat.finish()
        elif self._context is not None:
            total = self._of_slices(self._context, micro_batches, count)
        else:
            total = self._without_pipeline(micro_batches, count)
        return total if self._groups.at.tensor == 0 else torch.zeros_like(total)

    def _of_slices(self, context: Context, micro_batches: Sequence[Batch], count: Count) -> Tensor:
        """Computes this rank's slices of the rows. The loss of a row is the mean of those of its slices, unless it says
        what it counts."""
        total = self._without_pipeline([context.own_part(batch) for batch in micro_batches], count)
        if not (counts := noted_counts()):
            return total / context.size
        counts[:] = [context.sum(torch.stack(counts).sum())]  # of the ranks with the same rows, one counts
        return total

    def _without_pipeline(self, micro_batches: Sequence[Batch], count: Count) -> Tensor:
        flat, inside = self._flat, self._part.inside
        if flat is not None:
            flat.start(len(micro_batches))
        call: Call | None = inside
        if inside is not None and self._same_calls is None:
            self._same_calls = call = SameCalls(inside, self._world.device)
        parts = 1
        if self._context is not None:
            parts = self._context.size
            call = self._context.inside(call or (lambda function, batch: function(self._part.module, batch)))
        with contextlib.nullcontext() if inside is None else whole_again_named(self._part.module):
            total = add_gradients(
                self._spec, self._part.module, micro_batches, self._config, device=self._world.device,
                scale=lambda losses: losses / (count if parts == 1 or noted_counts() else count * parts), call=call,
                clock=self._clock if flat is None else None,
                before_last=contextlib.nullcontext if flat is None else flat.no_sync,
            )  # fmt: skip
        if flat is not None:
            flat.finish()
        return total

    def _exchange(self) -> None:
        """Sums the gradients of a mini-batch that PipeDream has computed."""
        if self._flat is not None and self._groups.data is not None:
            self._flat.exchange()

    def step(self) -> None:
        if isinstance(self._part.pipeline, PipeDream):
            self._part.pipeline.step(self._optimizer)
            return
        with self._flat.unused_kept(self._optimizer) if self._flat is not None else contextlib.nullcontext():
            self._optimizer.step()
        if self._flat is not None:
            self._flat.gather_weights()

    def share_weights(self) -> None:
        if self._flat is not None:
            self._flat.gather_weights()
        for module in (self._part.inside or self._part.module).modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # or it would go on with weights that it gathered before

    def sync_weights(self) -> None:
        if isinstance(self._part.pipeline, PipeDream):
            self._part.pipeline.settle(self._optimizer, self._exchange)
        if self._groups.data is not None:
            for buffer in self._part.module.buffers():
                dist.broadcast(local(buffer), group_src=0, group=self._groups.data)

    def sum_over_data(self, tensor: Tensor) -> None:
        if self._groups.data is not None:
            dist.all_reduce(tensor, group=self._groups.data)

    def close(self) -> None:
        release_peers(self._part.module)
        if self._flat is not None:
            self._flat.close()

    def clip_grad_norm(self, most: float) -> Tensor:
        """Scales the gradients to at most this L2 norm over the whole model. Returns the norm before. Collective.

        Each rank adds the squares of the gradients that it alone has, or has as the first of several ranks.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self._world.device)
        gradients = []
        for parameter, counts in self._counted():
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                gradients.append(gradient)
                if counts:
                    squares += torch.linalg.vector_norm(gradient).double() ** 2
        dist.all_reduce(squares)
        norm = squares.sqrt()
        factor = (most / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
        return norm.float()

    def _counted(self) -> Iterator[tuple[nn.Parameter, bool]]:
        """Yields the parameters of the optimizer, and whether this rank counts them in a norm over the model."""
        dims, at = self._groups.dims, self._groups.at
        names = {id(parameter): name for name, parameter in self._part.module.named_parameters()}
        of_shard = {id(bucket.shard): bucket for bucket in self._flat.buckets} if self._flat is not None else {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                bucket = of_shard.get(id(parameter))
                first = parameter if bucket is None else bucket.parameters[0]
                is_sharded = bucket is not None or isinstance(parameter, DTensor)
                # Data ranks with different parts: shards, or experts, or no parts at all.
                parts = dims.shards if is_sharded else dims.experts if names[id(first)] in self._part.experts else 1
                is_cut = names[id(first)] in self._part.cut
                yield parameter, at.data < parts and (is_cut or at.tensor == 0) and is_counted(self._part, first)
