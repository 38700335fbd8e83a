"""BatchNorm over the rows of all ranks, as in a single process (`parallel.sync_batchnorm`).

On GPUs this is torch's SyncBatchNorm, which supports only GPUs. On CPUs it is `CpuSyncBatchNorm`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from spark_dl.parallel.exchange_clock import ExchangeClock
from spark_dl.spec import Batch, ModelSpec, Output

if TYPE_CHECKING:
    from spark_dl.config import Config


def synchronize_batchnorm(
    spec: ModelSpec, model: nn.Module, config: Config, device: torch.device, clock: ExchangeClock | None = None
) -> tuple[ModelSpec, nn.Module]:
    """Returns the model with every BatchNorm synchronized, and the spec that calls it. Called on a rank.

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

    def batch_loss(module: nn.Module, batch: Batch) -> Tensor:
        assert spec.batch_loss is not None
        set_weights(batch)
        return spec.batch_loss(module, batch)

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
