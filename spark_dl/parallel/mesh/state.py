"""The state of one rank of a mesh by names: which elements of each tensor of the model and of the optimizer it has.

Elements are named by pieces (`parallel/pieces.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from spark_dl.parallel.mesh.flat import ShardedBucket, local
from spark_dl.parallel.mesh.groups import Groups
from spark_dl.parallel.pieces import AVERAGE, Layout, whole


@dataclass(frozen=True)
class Held:
    """Elements of a tensor that this rank has."""

    tensor: Tensor
    """As many elements as the layout has, in its order. It shares the memory of the model or of the optimizer."""
    layout: Layout
    writes: bool
    """Whether this rank writes them to checkpoints, as the first of those that have them."""


Read = Callable[[Sequence[tuple[str, Layout]]], list[Tensor]]
"""(names and layouts) -> the elements of each, flat, on the CPU. A name is that of `weights` or `optimizer_state`."""


@dataclass(frozen=True)
class _Slice:
    """A part of an optimizer's parameter that belongs to one parameter of the model."""

    name: str
    start: int
    stop: int
    """Range in the optimizer's parameter."""
    offset: int
    """First element among those of the model's parameter that this rank has."""
    layout: Layout
    writes: bool


class MeshState:
    """The state of a model and its optimizer on one rank."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        groups: Groups,
        *,
        buckets: Sequence[ShardedBucket] = (),
        cut: Mapping[str, Layout] | None = None,
        experts: Mapping[str, Layout] | None = None,
    ):
        """buckets: of ZeRO-1 and 2. cut: layouts of the parameters that are cut over tensor ranks.

        Args:
            experts: layouts of the parameters of which this rank has some experts.
        """
        self._model, self._optimizer, self._groups = model, optimizer, groups
        self._buckets = [bucket for bucket in buckets if bucket.shard is not None]
        self._cut, self._experts = dict(cut or {}), dict(experts or {})
        self.average: Sequence[Tensor] = ()
        """The averages of `optimized_parameters` (`train.ema_decay`), which are saved with the optimizer's state."""

    def tied(self) -> dict[str, str]:
        """Returns further names of tensors, with the name under which each is held."""
        first: dict[int, str] = {}
        names = {}
        for name, tensor in self._named():
            if id(tensor) in first:
                names[name] = first[id(tensor)]
            else:
                first[id(tensor)] = name
        return names

    def weights(self) -> dict[str, Held]:
        """Returns the parameters and persistent buffers that this rank has, by name."""
        sliced = {s.name: s for bucket in self._buckets for s in self._slices_of(bucket)}
        bucketed = {name for bucket in self._buckets for name in bucket.names}
        held = {}
        tied = self.tied()
        for name, tensor in self._named():
            if name in tied:
                continue
            if name not in bucketed:
                held[name] = Held(local(tensor).reshape(-1), self._layout(name, tensor), self._writes(name, tensor))
            elif not tensor.numel():  # no bucket has a part of it
                held[name] = Held(
                    local(tensor).reshape(-1),
                    Layout(tuple(tensor.shape), ()),
                    self._writes(name, tensor, is_sharded=True),
                )
            elif name in sliced:
                part = sliced[name]
                flat = local(tensor).reshape(-1)
                own = flat[part.offset : part.offset + part.stop - part.start]
                held[name] = Held(own, part.layout, part.writes)
        return held

    def copies(self) -> Iterator[tuple[str, str, Tensor, bool]]:
        """Yields what this rank has of each tensor of the model, as (name, key, elements, whether it is a parameter).

        Ranks with the same name and key must have the same elements, once `sync_weights` has made buffers equal.
        """
        at, tied = self._groups.at, self.tied()
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        for name, tensor in self._named():
            if name not in tied:
                # Data ranks share buffers, tensor ranks need not. Stages can have copies of a layer for a while.
                place = f"{at.pipeline}" if name in parameters else f"{at.pipeline}/{at.tensor}"
                pieces = [piece.to_plain() for piece in self._layout(name, tensor).pieces]
                yield name, f"{place} {pieces}", local(tensor), name in parameters

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                raise ValueError(
                    f"spec.build: the model has a state that is not a tensor, {name!r}, which parallel.strategy='mesh' "
                    "cannot save"
                )
            yield name, tensor

    def _layout(self, name: str, tensor: Tensor) -> Layout:
        layout = self._experts.get(name) or self._cut.get(name) or whole(tensor.shape)
        if isinstance(tensor, DTensor):
            # ZeRO-3 shards along the first axis, so a shard is a range of the elements that its ranks have together.
            # As torch.chunk: the first shards are the largest, and the last ones can be empty.
            rows, row = tensor.shape[0], math.prod(tensor.shape[1:])
            shard, size = self._groups.at.data % self._groups.dims.shards, -(-rows // self._groups.dims.shards)
            first, last = (min(each * size, rows) for each in (shard, shard + 1))
            assert local(tensor).numel() == (last - first) * row, f"{name}: this rank has another shard than {shard}"
            return layout.part(first * row, last * row)
        return layout

    def _writes(self, name: str, tensor: Tensor, *, is_sharded: bool = False) -> bool:
        at, dims = self._groups.at, self._groups.dims
        axes = {"tensor": at.tensor, "shards": at.data % dims.shards, "replicas": at.data // dims.shards}
        if is_sharded:
            axes["shards"] = 0
        elif name in self._experts:  # all that have the same experts have them whole
            axes["shards"], axes["replicas"] = 0, at.data // dims.experts
        if name in self._cut:
            axes["tensor"] = 0
        if isinstance(tensor, DTensor):
            names = tensor.device_mesh.mesh_dim_names or ()
            for axis, placement in zip(names, tensor.placements, strict=True):
                if not isinstance(placement, Replicate):
                    axes[axis] = 0
        return not any(axes.values())

    def _slices_of(self, bucket: ShardedBucket) -> Iterator[_Slice]:
        low, high = bucket.shard_range()
        for name, parameter, start, stop in bucket.ranges():
            first, last = max(start, low), min(stop, high)
            if first < last:
                layout = self._layout(name, parameter).part(first - start, last - start)
                writes = self._writes(name, parameter, is_sharded=True)
                yield _Slice(name, first - low, last - low, first - start, layout, writes)

    def _optimized(self) -> Iterator[tuple[nn.Parameter, list[_Slice]]]:
        """Yields the parameters of the optimizer with the parameters of the model that they are made of."""
        of_shard = {id(bucket.shard): bucket for bucket in self._buckets}
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in of_shard:
                    yield parameter, list(self._slices_of(of_shard[id(parameter)]))
                else:
                    name = names[id(parameter)]
                    layout = self._layout(name, parameter)
                    count = local(parameter).numel()
                    yield parameter, [_Slice(name, 0, count, 0, layout, self._writes(name, parameter))]

    def optimized_parameters(self) -> list[Tensor]:
        """Returns what this rank has of the optimizer's parameters, which can be shards."""
        return [local(parameter) for parameter, _ in self._optimized()]

    def group_names(self) -> list[list[str]]:
        """Returns the names of the model's parameters that each group of the optimizer is made of."""
        of_shard = {id(bucket.shard): bucket.names for bucket in self._buckets}
        names = {id(parameter): [name] for name, parameter in self._model.named_parameters()}
        groups = self._optimizer.param_groups
        return [[name for p in group["params"] for name in of_shard.get(id(p)) or names[id(p)]] for group in groups]

    def gradients(self) -> Iterator[tuple[str, Layout, Tensor]]:
        """Yields what this rank has of the gradients that the optimizer gets: the parameter, its layout, elements."""
        for parameter, slices in self._optimized():
            flat = None if parameter.grad is None else local(parameter.grad).detach().to_dense().reshape(-1)
            for part in slices:
                length = part.stop - part.start
                own = torch.zeros(length) if flat is None else flat[part.start : part.stop]
                yield part.name, part.layout, own

    def optimizer_state(self) -> dict[str, Held]:
        """Returns the tensors of the optimizer's state, by `<parameter>/<key>`, such as `fc.weight/exp_avg`.

        Tensors that do not have an element for each of the parameter, such as the number of steps, are whole.
        """
        held = {}
        for average, (_, slices) in zip(self.average, self._optimized(), strict=False):  # () without an average
            for part in slices:
                elements = average.view(-1)[part.start : part.stop]
                held[f"{part.name}/{AVERAGE}"] = Held(elements, part.layout, part.writes)
        for parameter, slices in self._optimized():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    raise ValueError(
                        f"train.optimizer: the state {key!r} of {type(self._optimizer).__name__} is not a tensor, "
                        "which parallel.strategy='mesh' cannot save"
                    )
                flat = local(value).reshape(-1)
                for part in slices:
                    if value.shape == parameter.shape:
                        own = Held(flat[part.start : part.stop], part.layout, part.writes)
                    else:
                        own = Held(flat, whole(local(value).shape), part.writes and _has_first(part.layout))
                    held[f"{part.name}/{key}"] = own
        return held

    def load(self, read_weights: Read, read_optimizer: Read, saved: Mapping[str, Sequence[int]]) -> None:
        """Loads what this rank has of a checkpoint, whatever mesh it was saved on. Not collective.

        Args:
            saved: shape of each tensor of the optimizer's state in the checkpoint, by `<parameter>/<key>`.

        Raises:
            ValueError: For a parameter without a state there, whose shard has others with one.
        """
        tied = self.tied()
        own = [(name, tensor) for name, tensor in self._named() if name not in tied]
        weights = read_weights([(name, self._layout(name, tensor)) for name, tensor in own])
        for (_, tensor), value in zip(own, weights, strict=True):
            target = local(tensor)
            target.copy_(value.view(target.shape))
        for parameter, slices in self._optimized():
            state = self._optimizer.state[parameter]
            state.clear()
            keys = {name.rpartition("/")[2] for part in slices for name in saved if _of(name, part.name)}
            keys.discard(AVERAGE)
            if lacking := [part.name for part in slices if any(f"{part.name}/{key}" not in saved for key in keys)]:
                others = ", ".join(part.name for part in slices if part.name not in lacking)
                raise ValueError(
                    f"cannot resume: the checkpoint has no state of the optimizer for {', '.join(lacking[:8])}, which "
                    f"is new, and parallel.zero_stage keeps it in one tensor with that of {others}; "
                    "freeze what was frozen, or begin another run with train.init_from"
                )
            for key in sorted(keys):
                state[key] = self._read_state(parameter, slices, key, read_optimizer, saved)
        for average, (parameter, slices) in zip(self.average, self._optimized(), strict=False):
            average.copy_(local(parameter))  # with which an average begins that the checkpoint does not have
            known = [part for part in slices if f"{part.name}/{AVERAGE}" in saved]
            values = read_optimizer([(f"{part.name}/{AVERAGE}", part.layout) for part in known])
            for part, value in zip(known, values, strict=True):
                average.view(-1)[part.start : part.stop] = value.to(average.device)

    def _read_state(
        self, parameter: nn.Parameter, slices: Sequence[_Slice], key: str, read: Read,
        saved: Mapping[str, Sequence[int]],
    ) -> Tensor:  # fmt: skip
        first = f"{slices[0].name}/{key}"
        if tuple(saved[first]) != slices[0].layout.shape:
            shape = tuple(saved[first])
            (value,) = read([(first, whole(shape))])
            return value.view(shape)
        values = read([(f"{part.name}/{key}", part.layout) for part in slices])
        target = torch.zeros_like(local(parameter), dtype=values[0].dtype)
        flat = target.view(-1)
        for part, value in zip(slices, values, strict=True):
            flat[part.start : part.stop] = value.to(flat.device)
        if isinstance(parameter, DTensor):
            return DTensor.from_local(
                target, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                stride=parameter.stride(),
            )  # fmt: skip
        return target


def _of(name: str, parameter: str) -> bool:
    return name.rpartition("/")[0] == parameter


def _has_first(layout: Layout) -> bool:
    """Whether a rank has the first element of a tensor, and so writes what belongs to the tensor as a whole."""
    return any(not any(piece.offsets) and piece.start == 0 for piece in layout.pieces)
