"""What strategies do with a user's module: its layout, its state, its BatchNorm, and what is tied to its parameters.

- Memory format and `torch.compile`.
- What modules keep beside their parameters (buffers, plain attributes, generators), to restore it or to name changes.
- BatchNorm over the rows of all ranks, as in a single process (`parallel.sync_batchnorm`): on GPUs torch's
  SyncBatchNorm, which supports only GPUs, and on CPUs `CpuSyncBatchNorm`.
- The check that all ranks have built the same model, before they exchange its tensors. Gloo aborts the process if
  tensors of different sizes meet, and DDP names a parameter by its number alone.
- What a user has tied to the parameters of his model, where a strategy replaces them by others.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import types
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from spark_dl.parallel.exchange_clock import ExchangeClock
from spark_dl.spec import Batch, ModelSpec, Output

if TYPE_CHECKING:
    from spark_dl.config import Config
    from spark_dl.world import World

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module that are no state of the user's: parameters, buffers, modules, hooks."""
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter)

_MISSING = object()


def apply_layout(module: nn.Module, config: Config) -> None:
    """Applies `train.channels_last` and `train.compile` to a module, in place. Called on a rank, before the first step.

    Parameters stay the same objects, with the same names. Wrappers such as DDP call the compiled module.
    """
    if config.train.channels_last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # of tensors with 4 axes
    if config.train.compile:
        blocks = layers_of(module) if config.parallel.cuts_model else []
        for name in blocks:
            _compile_forward(module.get_submodule(name))
        if not blocks:
            _compile(module)


def layers_of(model: nn.Module, prefix: str = "") -> list[str]:
    """Returns the names of the modules with parameters in the outermost lists and chains of modules, its blocks."""
    found: list[str] = []
    for name, child in model.named_children():
        is_layer = isinstance(model, (nn.ModuleList, nn.Sequential))
        if is_layer and next(child.parameters(), None) is not None:
            found.append(prefix + name)
        elif not is_layer:
            found += layers_of(child, f"{prefix}{name}.")
    return found


def _compile(module: nn.Module) -> None:
    """Compiles the calls of a module, in place, so that wrappers such as DDP need not know.

    NOTE: `module.compile()` compiles nothing if the class of the module is torch's own, such as `nn.Sequential`: torch
    skips the frames of its own files. This function's frame is not skipped. Its code is a copy, as torch keeps compiled
    graphs by code, at most eight: a process that trains nine models, one after another, would stop compiling.
    """
    module._compiled_call_impl = _compiled(module._call_impl)


def _compile_forward(module: nn.Module) -> None:
    """Compiles the forward function of a block alone, in place.

    Ranks that have parts of a model gather weights in hooks, which stay as they are. So does what keeps no activations.
    """
    again = vars(module).get("forward")
    if again is not None and hasattr(again, "wrap"):
        again.wrap(_compiled)
    else:
        module.forward = _compiled(module.forward)  # type: ignore[method-assign]


def _compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    def call_module(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    own = types.FunctionType(call_module.__code__.replace(), globals(), closure=call_module.__closure__)
    compiled: Callable[..., Any] = torch.compile(own)
    return compiled


def to_device(batch: Batch, device: torch.device, config: Config) -> Batch:
    """Copies a batch to a device. With `train.channels_last`, columns of images get that memory format there."""
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    if not config.train.channels_last:
        return moved
    # After the copy: a copy that also changes the format would first change it on the CPU, and then wait.
    return {n: t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t for n, t in moved.items()}


class ModuleState:
    """The state of a model's modules at one moment, without its parameters.

    Attributes of other types than numbers, strings, arrays, tensors, generators and containers of these are not kept.
    """

    def __init__(self, model: nn.Module):
        self._modules = dict(model.named_modules())
        self._buffers = [
            (module, key, buffer, buffer.detach().clone())
            for module in self._modules.values() for key, buffer in module._buffers.items() if buffer is not None
        ]  # fmt: skip
        self._attributes = {name: _attributes_of(module) for name, module in self._modules.items()}
        generators = [v for m in self._modules.values() for v in vars(m).values() if isinstance(v, torch.Generator)]
        self._generators = [(generator, generator.get_state()) for generator in generators]

    @torch.no_grad()
    def restore(self) -> None:
        """Sets everything as it was."""
        for module, key, buffer, before in self._buffers:
            buffer.copy_(before)
            module._buffers[key] = buffer  # a forward pass may have put another tensor in its place
        for generator, state in self._generators:
            generator.set_state(state)
        for name, module in self._modules.items():
            before_of, now = self._attributes[name], module.__dict__
            for key, value in before_of.items():
                if not _same(now.get(key, _MISSING), value):
                    now[key] = value
            for key in [k for k, v in now.items() if k not in before_of and k not in _OF_TORCH and _is_plain(v)]:
                del now[key]

    def changed_unsaved(self) -> list[str]:
        """Returns the names of what has changed since, and is not in checkpoints.

        These are attributes, generators, and buffers that are not persistent; not those of modules that save a state
        of their own (`get_extra_state`), nor of metrics, which begin anew in each epoch.
        """
        changed = []
        before_of = {(id(module), key): before for module, key, _, before in self._buffers}
        for name, module in self._modules.items():
            if type(module).get_extra_state is not nn.Module.get_extra_state or hasattr(module, "compute_on_cpu"):
                continue
            of = f"{type(module).__name__}{f' ({name})' if name else ''}"
            now, before = vars(module), self._attributes[name]
            for key, value in now.items():
                if key in _OF_TORCH or key == "training":
                    continue
                if isinstance(value, torch.Generator):
                    if any(g is value and not torch.equal(g.get_state(), state) for g, state in self._generators):
                        changed.append(f"{key!r} of {of}")
                elif key in before and not _same(value, before[key]):
                    changed.append(f"{key!r} of {of}")
            for key in sorted(module._non_persistent_buffers_set):
                buffer = module._buffers.get(key)
                earlier = before_of.get((id(module), key))
                if buffer is None or earlier is None or buffer.shape != earlier.shape:
                    continue  # such as a table that grows with the longest row
                if not _same(buffer.detach(), earlier):
                    changed.append(f"the buffer {key!r} of {of}")
        return changed


@contextlib.contextmanager
def module_state_kept(model: nn.Module) -> Iterator[None]:
    """Restores buffers, plain attributes and generators of a model's modules after the block."""
    state = ModuleState(model)
    try:
        yield
    finally:
        state.restore()


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {n: _copied(v) for n, v in vars(module).items() if n not in _OF_TORCH and _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, _ATOMS):
        return True
    if isinstance(value, (Tensor, np.ndarray)):
        # A tensor with a graph belongs to a pass, and a cast of a lazy tensor is no copy.
        return not isinstance(value, nn.Parameter) and not (isinstance(value, Tensor) and value.requires_grad)
    if type(value) in _MAPPINGS:
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    return type(value) in _CONTAINERS and all(map(_is_plain, value))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in _MAPPINGS:
        return type(value)((k, _copied(v)) for k, v in value.items())
    if isinstance(value, collections.deque):
        return collections.deque(map(_copied, value), value.maxlen)
    return type(value)(map(_copied, value)) if type(value) in _CONTAINERS else value


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (Tensor, np.ndarray)):
        if a.shape != b.shape or a.dtype != b.dtype or (isinstance(a, Tensor) and a.device != b.device):
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if type(a) in _MAPPINGS:
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    if type(a) in (list, tuple, collections.deque):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or (a != a and b != b)


def synchronize_batchnorm(
    spec: ModelSpec, model: nn.Module, config: Config, device: torch.device, clock: ExchangeClock | None = None
) -> tuple[ModelSpec, nn.Module]:
    """Returns the model with every BatchNorm synchronized, and the spec that calls it. Called on a rank.

    Args:
        model: on the CPU. Rows of weight 0 fill a short batch. They do not count on CPUs; they do count on GPUs.
        clock: measures the exchanges of statistics, on CPUs.
    """
    if device.type == "cuda":
        return spec, nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = _converted(model)
    norms = [module for module in model.modules() if isinstance(module, CpuSyncBatchNorm)]
    for norm in norms:
        norm.clock = clock

    def set_weights(batch: Batch) -> None:
        for norm in norms:
            norm.row_weight = (batch["weight"] > 0).float()

    def forward(module: nn.Module, batch: Batch) -> Output:
        set_weights(batch)
        return spec.output(module, batch, config.inputs)

    def batch_loss(module: nn.Module, batch: Batch) -> Any:
        assert spec.batch_loss is not None
        set_weights(batch)
        return spec.batch_loss(module, batch)

    def embed(module: nn.Module, batch: Batch) -> Any:
        assert spec.embed is not None
        set_weights(batch)
        return spec.embed(module, batch)

    if spec.embed is not None:
        return dataclasses.replace(spec, forward=forward, embed=embed), model
    by_batch = None if spec.batch_loss is None else batch_loss
    return dataclasses.replace(spec, forward=forward, batch_loss=by_batch), model


def _converted(module: nn.Module) -> nn.Module:
    if isinstance(module, _BatchNorm):
        return CpuSyncBatchNorm.like(module)
    for name, child in module.named_children():
        setattr(module, name, _converted(child))
    return module


class CpuSyncBatchNorm(_BatchNorm):
    """A BatchNorm that, in training, uses the mean and variance of the true rows of all ranks. Collective.

    If the first axis of an input is not the rows of the batch, all its rows count. If no rank has a true row, as in the
    last micro-batches of a very short batch, each rank uses its own mean and variance.
    """

    row_weight: Tensor | None = None
    """[rows] of the next micro-batch: 1 for a true row, else 0."""
    clock: ExchangeClock | None = None
    """Measures the exchanges."""

    @classmethod
    def like(cls, norm: _BatchNorm) -> CpuSyncBatchNorm:
        """Returns a module with the settings of `norm`, which shares its parameters and buffers."""
        new = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        new.weight, new.bias = norm.weight, norm.bias
        new.running_mean, new.running_var = norm.running_mean, norm.running_var
        new.num_batches_tracked = norm.num_batches_tracked
        return new.train(norm.training)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.ndim < 2:
            raise ValueError(f"BatchNorm takes [rows, channels, ...], found the shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        weight = self.row_weight
        if weight is None or len(weight) != len(input):
            weight = torch.ones(len(input))
        output, mean, variance, count = _Normalize.apply(input, weight, self.weight, self.bias, self.eps, self.clock)
        if self.running_mean is not None and self.running_var is not None and count > 0:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            share = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            unbiased = variance * (count / max(count - 1, 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        result: Tensor = output
        return result


class _Normalize(torch.autograd.Function):
    """Batch normalization (Ioffe and Szegedy 2015, arXiv:1502.03167) with weighted rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        row_weight: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        clock: ExchangeClock | None,
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """# x: (rows, channels, ...), row_weight: (rows,), weight and bias: (channels,)

        Returns the output, the mean and variance over the ranks, [channels] float64, and the number of values of each.
        """
        own, ctx.clock = _statistics(x, row_weight), clock or contextlib.nullcontext()
        with ctx.clock:
            count, mean, squares = _over_ranks(*own)
        ctx.is_alone = count == 0
        if ctx.is_alone:
            row_weight = torch.ones_like(row_weight)
            own_count, mean, squares = _statistics(x, row_weight)
        ctx.count = own_count if ctx.is_alone else count
        variance = squares / ctx.count
        dtype = torch.promote_types(x.dtype, torch.float32)
        output = F.batch_norm(x, mean.to(dtype), variance.to(dtype), weight, bias, eps=eps)
        ctx.save_for_backward(x, row_weight.to(dtype), weight, mean.to(dtype), (variance + eps).rsqrt().to(dtype))
        ctx.mark_non_differentiable(mean, variance)
        return output, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, row_weight, weight, mean, inverse_std = ctx.saved_tensors
        shape = (1, -1, *[1] * (x.ndim - 2))
        normalized = (x - mean.view(shape)) * inverse_std.view(shape)
        dims = [d for d in range(x.ndim) if d != 1]
        grad_bias = grad.sum(dims, dtype=mean.dtype)
        grad_weight = (grad * normalized).sum(dims)
        grad_x = None
        if ctx.needs_input_grad[0]:
            # The output depends on each row directly, and through the mean and the variance.
            sums = torch.cat([grad_bias, grad_weight])
            if not ctx.is_alone:
                with ctx.clock:
                    dist.all_reduce(sums)
            by_mean, by_variance = (part.view(shape) for part in (sums / ctx.count).chunk(2))
            share = row_weight.view(-1, *[1] * (x.ndim - 1))
            scale = inverse_std if weight is None else inverse_std * weight
            grad_x = (scale.view(shape) * (grad - share * (by_mean + normalized * by_variance))).to(x.dtype)
        return grad_x, None, None if weight is None else grad_weight, None if weight is None else grad_bias, None, None


def _statistics(x: Tensor, row_weight: Tensor) -> tuple[float, Tensor, Tensor]:
    """Returns each channel's number of values, mean, and sum of squared distances from the mean; float64."""
    count = float(row_weight.sum()) * math.prod(x.shape[2:])
    shape = (1, -1, *[1] * (x.ndim - 2))

    def total(values: Tensor) -> Tensor:
        by_row = values.flatten(2).sum(2, dtype=torch.float64) if x.ndim > 2 else values.double()
        return row_weight.double() @ by_row

    mean = total(x) / max(count, 1.0)
    return count, mean, total((x - mean.to(x.dtype).view(shape)).square())


def _over_ranks(count: float, mean: Tensor, squares: Tensor) -> tuple[float, Tensor, Tensor]:
    """Combines the `_statistics` of all ranks by the updating formula of Chan, Golub and LeVeque 1979. Collective."""
    own = torch.cat([mean.new_tensor([count]), mean, squares])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    counts, means, all_squares = torch.stack(parts).split([1, len(mean), len(mean)], dim=1)
    total = float(counts.sum())
    mean = (counts * means).sum(0) / max(total, 1.0)
    return total, mean, (all_squares + counts * (means - mean).square()).sum(0)


def check_same_model(model: nn.Module, world: World) -> None:
    """Raises ValueError on a rank whose model has other parameters or buffers than that of rank 0. Collective.

    Called after `spec.build`. Only the names, shapes and types travel, from rank 0 through the store.
    """
    if world.world_size == 1:
        return
    # NOTE: the store keeps its keys, and a job can train several models one after the other.
    key = f"model/{world.store.add(f'models/{world.rank}', 1)}"
    own = _described(model)
    if world.rank == 0:
        world.store.set(key, zlib.compress(json.dumps(own).encode()))  # type: ignore[arg-type] # bytes are accepted
        return
    first = json.loads(zlib.decompress(world.store.get(key)))
    for name in dict.fromkeys((*first, *own)):
        here, there = own.get(name, "no such tensor"), first.get(name, "no such tensor")
        if here != there:
            raise ValueError(
                f"spec.build: expected the same model on all ranks, found for {name!r} {here} on rank {world.rank} and "
                f"{there} on rank 0; spec.build must not depend on the rank, its host or its rows"
            )


def _described(model: nn.Module) -> dict[str, str]:
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {
        name: "uninitialized" if is_lazy(t) else f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        for name, t in named
    }


def marks_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns the attributes that were set on parameters, by name, such as `weight._no_weight_decay = True`."""
    return {name: dict(vars(p)) for name, p in model.named_parameters(remove_duplicate=False) if vars(p)}


def set_marks(model: nn.Module, marks: Mapping[str, Mapping[str, Any]]) -> None:
    """Sets attributes on the parameters that have replaced those that had them, for `spec.optimizer` to read."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        vars(parameter).update(marks.get(name, {}))


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """Returns the names of each parameter, by its id; several names for one that is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def replace_parameters(optimizer: torch.optim.Optimizer, names: Mapping[int, Sequence[str]], model: nn.Module) -> None:
    """Makes an optimizer of a whole model train what a rank has of it. The groups, also empty ones, stay.

    State that exists before the first step, such as Adagrad's sums, is the same in each element.

    Args:
        names: `names_of` the whole model.
        model: the rank's part, whose parameters have their names in the whole model.
    """
    now = dict(model.named_parameters(remove_duplicate=False))
    for group in optimizer.param_groups:
        before, group["params"] = group["params"], []
        for parameter in before:
            replaced_by = next((now[name] for name in names[id(parameter)] if name in now), None)
            state = optimizer.state.pop(parameter, None)
            if replaced_by is None:
                continue
            group["params"].append(replaced_by)
            if state is not None:
                optimizer.state[replaced_by] = {
                    key: _like(value, parameter, replaced_by) for key, value in state.items()
                }


def _like(value: Any, parameter: nn.Parameter, own: nn.Parameter) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.numel():
        return value
    return torch.full_like(own, float(value.flatten()[0]), requires_grad=False)


def check_hooks(model: nn.Module, names: Collection[str], how: str) -> None:
    """Raises ValueError if a parameter that is to be replaced has a hook, which would not be called any more.

    Args:
        names: of these parameters.
        how: the setting by which they are replaced, for the message.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if name in names and hooks:
            raise ValueError(
                f"spec.build: the parameter {name!r} has a hook (register_hook), and {how} replaces parameters by "
                "parts of them, whose gradients the hook would not get; change the gradients in the model's forward, "
                "or use another strategy, such as ddp"
            )


def check_unshared(model: nn.Module, how: str) -> None:
    """Raises ValueError for two parameters in the same memory, which would not be tied any more. how: as above."""
    last: tuple[int, str] | None = None
    for start, end, name in sorted(_ranges(model)):
        if last is not None and start < last[0]:
            raise ValueError(
                f"spec.build: the parameters {last[1]!r} and {name!r} share memory, which they do not under {how}, "
                "whose ranks have parts of them; make them one parameter: b.weight = a.weight"
            )
        if last is None or end > last[0]:
            last = end, name


def _ranges(model: nn.Module) -> Iterator[tuple[int, int, str]]:
    """Yields the first address of each parameter, the one after its last element, and its name."""
    for name, parameter in model.named_parameters():
        if parameter.numel() and not parameter.is_sparse:
            sizes = zip(parameter.shape, parameter.stride(), strict=True)
            elements = 1 + sum((size - 1) * stride for size, stride in sizes)
            yield parameter.data_ptr(), parameter.data_ptr() + elements * parameter.element_size(), name


def check_shardable(model: nn.Module) -> None:
    """Raises ValueError for parameters that ZeRO-3, which shards along the first axis, cannot have shards of."""
    for name, parameter in model.named_parameters():
        found = (
            "is a scalar" if not parameter.ndim
            else "has no elements" if not parameter.numel()
            else "is not contiguous, as after a transposition" if not parameter.is_contiguous()
            else None
        )  # fmt: skip
        if found:
            raise ValueError(
                f"parallel.zero_stage: with 3 each rank has a range of rows of every parameter, and {name!r} {found}; "
                "build it as a contiguous tensor with rows, or use zero_stage 1 or 2"
            )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error of torch says that a device, or the host, has no memory left."""
    # On CPUs torch has no class for it.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def plain_name(name: str) -> str:
    """Returns the name of a weight without what `torch.compile` puts before the names of a module."""
    return name.replace("_orig_mod.", "")
