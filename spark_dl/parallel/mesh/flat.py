"""ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): gradients of data ranks, summed in flat buckets, and their shards.

ZeRO-1 and ZeRO-2: each data rank has a shard of every bucket: the same part of its gradients, of its weights, and of
the optimizer's state for them. With stage 1 a rank keeps all gradients, with stage 2 the gradients of its shard.
After the optimizer step the ranks gather the weights of all shards. This needs an optimizer that updates each element
independently, as its parameters are flat shards.

ZeRO-3: weights, gradients and the optimizer's state in shards, by torch's `fully_shard` (Zhao et al. 2023,
arXiv:2304.11277).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from spark_dl.parallel.async_collectives import gather_parts, start_reduce_scatter, start_sum
from spark_dl.parallel.exchange_clock import ExchangeClock
from spark_dl.parallel.loss import Inside, unused_message
from spark_dl.parallel.mesh.groups import Groups, Holders


def local(tensor: Tensor) -> Tensor:
    """Returns the elements that this rank has: of a DTensor its local tensor, else the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


@dataclass
class ShardedBucket:
    """Parameters of one dtype and one optimizer group, which the same ranks have, and whose gradients are exchanged
    together."""

    names: list[str]
    parameters: list[nn.Parameter]
    group: int
    """Index of the group of the optimizer."""
    holders: Holders
    """Ranks that have the parameters."""
    length: int = 0
    """Number of elements with padding, a multiple of the number of shards."""
    weights: Tensor | None = None
    """Flat buffer that holds the parameters, with stage 1 and 2. # [length]"""
    gradients: Tensor | None = None
    """Flat buffer that holds the gradients, with stage 0 and 1. # [length]"""
    shard: nn.Parameter | None = None
    """This rank's part of `weights`."""
    waiting: set[int] = field(default_factory=set)
    """Parameters whose gradients this backward pass has not computed yet, by position."""

    def shard_range(self) -> tuple[int, int]:
        """Returns the range of the bucket that `shard` is."""
        assert self.shard is not None
        assert self.weights is not None
        start = int(self.shard.storage_offset() - self.weights.storage_offset())
        return start, start + len(self.shard)

    def ranges(self) -> Iterator[tuple[str, nn.Parameter, int, int]]:
        """Yields each parameter with its range in the bucket."""
        at = 0
        for name, parameter in zip(self.names, self.parameters, strict=True):
            end = at + local(parameter).numel()
            yield name, parameter, at, end
            at = end


class FlatGradients:
    """Sums the gradients of a model over its data ranks, in buckets, while the backward pass computes the next ones."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        groups: Groups,
        *,
        stage: int,
        bucket_bytes: int,
        kinds: Mapping[str, Hashable] | None = None,
        experts: Collection[str] = (),
        clock: ExchangeClock | None = None,
        find_unused: bool | None = False,
    ):
        """kinds: of parameters, by name. Those of different kinds are in different buckets.

        Args:
            experts: names of the parameters that only the ranks with the same experts have.
            find_unused: whether steps may leave out parameters (`Mesh.find_unused_parameters`); None if that is not
                known, as in pipelines whose schedules set gradients without hooks.
        """
        self._stage, self._clock, self._finds_unused = stage, clock, find_unused
        self._fired: set[int] = set()
        """Ids of the parameters whose gradient this backward pass has completed."""
        self._used: set[int] = set()
        """Ids of the parameters with a gradient on this rank in this step."""
        self._unused: list[tuple[ShardedBucket, nn.Parameter, int, int]] = []
        """Parameters without a gradient on all ranks in this step, with their ranges in their buckets."""
        self.buckets = _deal(model, optimizer, groups, bucket_bytes, kinds or {}, experts)
        self._is_exchanging = True
        self._launched = self._to_launch = 0
        self._pending: list[tuple[ShardedBucket, Callable[[], Tensor]]] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        if stage:
            for bucket in self.buckets:
                _flatten(bucket)
            shard_optimizer(optimizer, self.buckets)

    def start(self, num_passes: int) -> None:
        """Prepares the gradients of a step. num_passes: number of its micro-batches."""
        self._launched = 0
        self._used.clear()
        self._fired.clear()
        self._to_launch = len(self.buckets) * (num_passes if self._stage == 2 else 1)
        if not self._handles:  # after those of others, which need the gradients that stage 2 frees
            self._handles = [
                parameter.register_post_accumulate_grad_hook(self._note(bucket, i))
                for bucket in self.buckets
                for i, parameter in enumerate(bucket.parameters)
            ]
        for bucket in self.buckets:
            bucket.waiting = set(range(len(bucket.parameters)))
            if self._stage == 2:
                assert bucket.shard is not None
                bucket.shard.grad = torch.zeros_like(bucket.shard)
                continue
            if bucket.gradients is None:
                bucket.gradients = local(bucket.parameters[0]).new_zeros(bucket.length)
            bucket.gradients.zero_()
            for _, parameter, start, end in bucket.ranges():
                parameter.grad = _like(parameter, bucket.gradients[start:end])

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of the micro-batches before the last one: with stage 0 and 1 their gradients are only added up."""
        self._is_exchanging = self._stage == 2
        try:
            yield
        finally:
            self._is_exchanging = True
            self._fired.clear()
            if self._stage < 2:
                for bucket in self.buckets:
                    bucket.waiting = set(range(len(bucket.parameters)))

    def finish(self) -> None:
        """Waits for all exchanges of a step. Then the gradients are the sums over all data ranks. Collective.

        Raises ValueError if this rank has no gradient of a parameter, unless that is asked for.
        """
        self._find_unused()
        while self._launched < self._to_launch:
            self._launch_next()
        with self._clock or contextlib.nullcontext():
            while self._pending:
                self._end_first()
            for bucket in self.buckets:
                if bucket.holders.replicas is not None:
                    assert bucket.shard is not None
                    dist.all_reduce(bucket.shard.grad, group=bucket.holders.replicas)

    def exchange(self) -> None:
        """Sums gradients that were computed without `start`, after a backward pass, over all data ranks. Collective."""
        grads = [[parameter.grad for parameter in bucket.parameters] for bucket in self.buckets]
        self.start(1)
        for bucket, gradients in zip(self.buckets, grads, strict=True):
            for parameter, gradient in zip(bucket.parameters, gradients, strict=True):
                if gradient is not None:
                    assert parameter.grad is not None
                    parameter.grad.copy_(gradient)
                    self._used.add(id(parameter))
        self.finish()

    def _find_unused(self) -> None:
        if self._finds_unused is None:
            return
        missing = [
            name for bucket in self.buckets for name, p, _, _ in bucket.ranges() if id(p) not in self._used
        ]  # fmt: skip
        if not self._finds_unused:
            if missing:
                raise ValueError(unused_message(missing))
            return
        self._unused = []
        by_holders: dict[int, list[ShardedBucket]] = {}
        for bucket in self.buckets:
            by_holders.setdefault(id(bucket.holders.everyone), []).append(bucket)
        for buckets in by_holders.values():
            ranges = [(bucket, *each[1:]) for bucket in buckets for each in bucket.ranges()]
            own = [id(parameter) in self._used for _, parameter, _, _ in ranges]
            used = torch.tensor(own, dtype=torch.int32, device=local(buckets[0].parameters[0]).device)
            if buckets[0].holders.everyone is not None:
                dist.all_reduce(used, dist.ReduceOp.MAX, group=buckets[0].holders.everyone)
            self._unused += [found for found, is_used in zip(ranges, used.tolist(), strict=True) if not is_used]

    @contextlib.contextmanager
    def unused_kept(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Keeps parameters that no rank has used, and their state, as they are in a step of the optimizer."""
        kept: list[tuple[nn.Parameter, slice, Tensor, dict[str, Tensor]]] = []
        for bucket, parameter, start, end in self._unused:
            if bucket.shard is None:
                parameter.grad = None
                continue
            first, last = bucket.shard_range()
            part = slice(max(start, first) - first, min(end, last) - first)
            if part.start < part.stop:
                state = {
                    key: value[part].clone()
                    for key, value in optimizer.state[bucket.shard].items()
                    if isinstance(value, Tensor) and value.shape == bucket.shard.shape
                }
                kept.append((bucket.shard, part, bucket.shard.detach()[part].clone(), state))
        yield
        with torch.no_grad():
            for shard, part, weights, state in kept:
                shard[part] = weights
                for key, value in optimizer.state[shard].items():
                    if isinstance(value, Tensor) and value.shape == shard.shape:
                        value[part] = state.get(key, 0)  # state that the first step has made begins as 0

    def gather_weights(self) -> None:
        """Gathers the weights of all shards, after a step of the optimizer. Collective."""
        with self._clock or contextlib.nullcontext():
            for bucket in self.buckets:
                if bucket.holders.shards is not None:
                    assert bucket.weights is not None
                    gather_parts(bucket.weights, bucket.holders.shards)

    def close(self) -> None:
        """Removes the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    def _note(self, bucket: ShardedBucket, index: int) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            if id(parameter) in self._fired and self._is_exchanging and self._finds_unused is not None:
                raise ValueError(
                    f"the parameter {bucket.names[index]!r} got its gradient in several parts, in backward passes "
                    "within the backward pass, as of a module that is called several times in checkpoint(..., "
                    "use_reentrant=True); the first part would be exchanged alone: use use_reentrant=False"
                )
            self._fired.add(id(parameter))
            bucket.waiting.discard(index)
            self._used.add(id(parameter))
            if self._is_exchanging:
                while self._launched < self._to_launch and not self._next.waiting:
                    self._launch_next()

        return note

    @property
    def _next(self) -> ShardedBucket:
        return self.buckets[self._launched % len(self.buckets)]

    def _launch_next(self) -> None:
        # Always in the order of the buckets, and as many on each rank: a rank may not use all parameters.
        bucket = self._next
        bucket.waiting = set(range(len(bucket.parameters)))
        self._launched += 1
        self._launch(bucket)

    def _launch(self, bucket: ShardedBucket) -> None:
        holders, flat = bucket.holders, bucket.gradients
        if self._stage and len(self._pending) > 1:  # each needs a buffer of a bucket's size, or two with stage 2
            self._end_first()
        if self._stage == 2:
            flat = local(bucket.parameters[0]).new_zeros(bucket.length)
            for _, parameter, start, end in bucket.ranges():
                if parameter.grad is not None:
                    flat[start:end] = _of_gradient(parameter).reshape(-1)
                    parameter.grad = None
        assert flat is not None
        if holders.shards is not None:
            self._pending.append((bucket, start_reduce_scatter(flat, holders.shards)))
        else:
            self._pending.append((bucket, start_sum(flat, holders.everyone)))

    def _end_first(self) -> None:
        bucket, wait = self._pending.pop(0)
        reduced = wait()
        if bucket.shard is None:
            return
        if self._stage == 2:
            assert bucket.shard.grad is not None
            bucket.shard.grad += reduced
        else:
            assert bucket.gradients is not None
            start, stop = bucket.shard_range()
            own = bucket.gradients[start:stop]
            own.copy_(reduced)
            bucket.shard.grad = own


def _deal(
    model: nn.Module, optimizer: torch.optim.Optimizer, groups: Groups, most_bytes: int,
    kinds: Mapping[str, Hashable], experts: Collection[str],
) -> list[ShardedBucket]:  # fmt: skip
    """Deals the parameters of an optimizer to buckets, those of the last layers first, as their gradients are."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = {key: i for i, key in enumerate(names)}
    buckets: list[ShardedBucket] = []
    for index, group in enumerate(optimizer.param_groups):
        open_buckets: dict[Hashable, tuple[ShardedBucket, int]] = {}
        trained = [p for p in group["params"] if p.requires_grad]
        for parameter in sorted(trained, key=lambda p: -order[id(p)]):
            size, name = local(parameter).numel(), names[id(parameter)]
            kind = (parameter.dtype, kinds.get(name), name in experts)
            bucket, used = open_buckets.get(kind, (None, 0))
            if bucket is None or (used + size) * parameter.element_size() > most_bytes:
                bucket, used = ShardedBucket([], [], index, groups.holders(of_experts=name in experts)), 0
                buckets.append(bucket)
            shards = bucket.holders.num_shards
            bucket.names.append(name)
            bucket.parameters.append(parameter)
            bucket.length = -(-(used + size) // shards) * shards
            open_buckets[kind] = bucket, used + size
    return sorted(buckets, key=lambda bucket: -order[id(bucket.parameters[0])])


def _flatten(bucket: ShardedBucket) -> None:
    """Moves the parameters of a bucket into one flat buffer, and makes this rank's part of it a parameter."""
    bucket.weights = local(bucket.parameters[0]).new_zeros(bucket.length)
    for _, parameter, start, end in bucket.ranges():
        own = local(parameter)
        view = bucket.weights[start:end].view(own.shape)
        view.copy_(own)
        if isinstance(parameter, DTensor):
            parameter._local_tensor = view
        else:
            parameter.data = view
    length = bucket.length // bucket.holders.num_shards
    index = 0 if bucket.holders.shards is None else bucket.holders.shards.rank()
    bucket.shard = nn.Parameter(bucket.weights[index * length : (index + 1) * length])


def shard_optimizer(optimizer: torch.optim.Optimizer, buckets: Sequence[ShardedBucket]) -> None:
    """Makes an optimizer train the shards of buckets in place of their parameters.

    State that exists before the first step, such as Adagrad's sums, is cut as the parameters are.
    """
    before, state = [list(group["params"]) for group in optimizer.param_groups], dict(optimizer.state)
    for index, group in enumerate(optimizer.param_groups):
        group_buckets = [bucket for bucket in buckets if bucket.group == index]
        dealt = {id(parameter) for bucket in group_buckets for parameter in bucket.parameters}
        group["params"] = [bucket.shard for bucket in group_buckets] + [p for p in before[index] if id(p) not in dealt]
    for bucket in buckets:
        assert bucket.shard is not None
        start, stop = bucket.shard_range()
        states = [state.get(parameter, {}) for parameter in bucket.parameters]
        for key, value in states[0].items():
            if not isinstance(value, Tensor) or value.shape != bucket.parameters[0].shape:
                optimizer.state[bucket.shard][key] = value
                continue
            flat = local(value).new_zeros(bucket.length)
            for (_, _, low, high), of_parameter in zip(bucket.ranges(), states, strict=True):
                flat[low:high] = local(of_parameter[key]).reshape(-1)
            optimizer.state[bucket.shard][key] = flat[start:stop].clone()
        for parameter in bucket.parameters:
            optimizer.state.pop(parameter, None)


def _like(parameter: nn.Parameter, flat: Tensor) -> Tensor:
    """Returns a flat tensor in the form of a parameter, without a copy."""
    view = flat.view(local(parameter).shape)
    if isinstance(parameter, DTensor):
        return DTensor.from_local(
            view, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
            stride=parameter.stride(),
        )  # fmt: skip
    return view


def _of_gradient(parameter: nn.Parameter) -> Tensor:
    """Returns the local elements of a parameter's gradient, summed as the parameter is laid out."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)


class _ReduceScatter:
    """A reduce-scatter for FSDP that sends 0.75 of a tensor with 4 ranks, where that of Gloo sends 1.5."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(start_reduce_scatter(input_tensor, group)())


def shard_fully(
    model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, *, with_rest: bool = True, in_bf16: bool = False
) -> Inside | None:
    """Replaces the parameters of a model by their shards. Collective.

    Returns what calls functions with the model, while its other parameters are gathered; None without `with_rest`.

    The weights of a unit are gathered for its forward and its backward pass, so a rank has the whole weights of one
    unit at a time, or of two while it gathers the next one.

    Args:
        units: modules of the model that are called as modules. Those that share parameters are gathered together.
        with_rest: whether the model is called as a whole, so that its other parameters are sharded, too.
        mesh: of the axis `shards`, or of `replicas` and `shards`.
        in_bf16: whether weights are gathered, and computed with, in bfloat16. The shards stay in float32, and so do the
            sums of gradients, and units with a floating point buffer, such as the statistics of BatchNorm.
    """
    for together in _with_shared_parameters([unit for unit in units if next(unit.parameters(), None) is not None]):
        policy = _policy(together) if in_bf16 else MixedPrecisionPolicy()
        fully_shard(together if len(together) > 1 else together[0], mesh=mesh, mp_policy=policy)
    inside = Inside(model) if with_rest else None
    if inside is not None:
        whole = dataclasses.replace(_policy([]), output_dtype=torch.float32) if in_bf16 else MixedPrecisionPolicy()
        fully_shard(inside, mesh=mesh, mp_policy=whole)
    uses_gloo = dist.get_backend(mesh.get_group("shards")) == "gloo"
    for module in (inside or model).modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # With a factor of one FSDP would ask for a sum that is multiplied before, which Gloo does not have.
            module.set_force_sum_reduction_for_comms(True)
            if uses_gloo:
                module.set_custom_reduce_scatter(_ReduceScatter())  # type: ignore[arg-type]
    return inside


def _policy(unit: Sequence[nn.Module]) -> MixedPrecisionPolicy:
    """Returns the precision of the modules of a unit."""
    has_buffers = any(buffer.is_floating_point() for module in unit for buffer in module.buffers())
    own, output = (torch.float32, torch.bfloat16) if has_buffers else (torch.bfloat16, None)
    return MixedPrecisionPolicy(param_dtype=own, reduce_dtype=torch.float32, output_dtype=output)


def default_units(model: nn.Module) -> list[nn.Module]:
    """Returns the children of a model that have parameters; of lists and chains of modules, their children."""
    units: list[nn.Module] = []
    for child in model.children():
        inner = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else [child]
        units += [module for module in inner if next(module.parameters(), None) is not None]
    return units


def _with_shared_parameters(units: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Returns the units in lists of those that share parameters with each other."""
    groups: list[tuple[set[int], list[nn.Module]]] = []
    for unit in units:
        ids, modules = {id(p) for p in unit.parameters()}, [unit]
        apart = []
        for other_ids, others in groups:
            if ids & other_ids:
                ids, modules = ids | other_ids, others + modules
            else:
                apart.append((other_ids, others))
        groups = [*apart, (ids, modules)]
    return [modules for _, modules in groups]


@contextlib.contextmanager
def whole_again_named(model: nn.Module) -> Iterator[None]:
    """Raises ValueError in place of torch's error if the forward or backward pass needs weights that are freed.

    Or if it leaves weights gathered, whose gradients would never be exchanged.
    """
    cause = None
    try:
        yield
    except RuntimeError as error:
        if "storage of size 0" not in str(error):
            raise
        cause = error
    if cause is not None or not all(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            "parallel.zero_stage: with 3, the weights of a layer are freed after its forward and its backward pass, "
            "and this model needs them within another backward pass, as for derivatives in its forward or for "
            "checkpoint(..., use_reentrant=True); use zero_stage 2, or use_reentrant=False"
        ) from cause


class SameCalls:
    """Calls a function with a sharded model, and checks in the first call that all ranks call the same modules.

    The ranks gather the weights of a module together. If one of them does not call it, or another one first, tensors of
    different modules meet, and Gloo aborts the process. Later calls are not checked.
    """

    def __init__(self, inside: Inside, device: torch.device):
        self._inside, self._device, self._is_first = inside, device, True

    def __call__(self, function: Any, batch: Any) -> Any:
        if not self._is_first:
            return self._inside(function, batch)
        self._is_first = False
        named = list(self._inside.model.named_modules())
        modules: dict[str, nn.Module] = dict(each for each in named if isinstance(each[1], FSDPModule))
        names = list(modules)
        handles = [
            module.register_forward_pre_hook(lambda *_, i=i: self._compare(i, names), prepend=True)
            for i, module in enumerate(modules.values())
        ]
        try:
            # The hooks of the modules run before those that gather, which were registered earlier.
            output = self._inside(function, batch)
            self._compare(len(names), names)
        finally:
            for handle in handles:
                handle.remove()
        return output

    def _compare(self, index: int, names: Sequence[str]) -> None:
        """Raises ValueError unless all ranks call the same module next. index: of the module; their number at the
        end."""
        own = torch.tensor([index], device=self._device)
        others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(others, own)
        called = [int(each) for each in others]
        if len({*called}) > 1:
            words = [f"rank {rank} {f'calls {names[i]!r}' if i < len(names) else 'calls no more'}"
                     for rank, i in enumerate(called[:8])]  # fmt: skip
            raise ValueError(
                "parallel.zero_stage: with 3, the ranks gather the weights of a layer together, so all of them must "
                f"call the same layers in the same order, found that {', '.join(words)}; use zero_stage 2 with "
                "parallel.find_unused_parameters, or call all layers on each rank"
            )
