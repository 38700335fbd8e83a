"""What the trainings of `certify` have in place of the user's functions, on ranks."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spark_dl import storage
from spark_dl.spec import Batch, Position


@dataclass(frozen=True)
class Traced:
    """A `set_position` that keeps the weights before each step."""

    inner: Callable[[nn.Module, Position], None] | None
    url: str
    most_bytes: int

    def __call__(self, model: nn.Module, position: Position) -> None:
        if not position.is_validation and not (dist.is_initialized() and dist.get_rank()):
            weights = {name: tensor.detach().float().cpu() for name, tensor in model.named_parameters()}
            size = sum(tensor.numel() * 4 for tensor in weights.values()) * (position.global_step + 1)
            if size <= self.most_bytes:
                buffer = io.BytesIO()
                np.savez(buffer, **{name: tensor.numpy() for name, tensor in weights.items()})  # type: ignore[arg-type]
                storage.make_folder(self.url)
                storage.write_bytes(storage.join(self.url, f"{position.global_step:04}.npz"), buffer.getvalue())
        if self.inner is not None:
            self.inner(model, position)


def read_trace(url: str) -> list[dict[str, Tensor]]:
    """Returns the weights before each step that was kept."""
    trace: list[dict[str, Tensor]] = []
    while storage.exists(path := storage.join(url, f"{len(trace):04}.npz")):
        with np.load(io.BytesIO(storage.read_bytes(path))) as arrays:
            trace.append({name: torch.from_numpy(arrays[name]) for name in arrays.files})
    return trace


@dataclass(frozen=True)
class Rounded:
    """Builds the model with weights that differ by rounding."""

    build: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        model = self.build()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    noise = torch.rand(parameter.shape, generator=generator).to(parameter) - 0.5
                    parameter.mul_(1 + 2.0**-23 * noise.sign())
        return model


@dataclass(frozen=True)
class OtherPadding:
    """A `transform` that first changes what fills a batch: rows of weight 0, and the ends of ragged cells."""

    inner: Callable[[Batch], Batch] | None

    def __call__(self, batch: Batch) -> Batch:
        weight, found = batch["weight"], dict(batch)
        rows = len(weight)
        source, (true,) = torch.arange(rows), torch.nonzero(weight > 0, as_tuple=True)
        if len(true):
            source = torch.where(weight > 0, source, true[source % len(true)])
        for name, tensor in found.items():
            if name != "weight" and tensor.ndim and len(tensor) == rows:
                found[name] = tensor[source]
        for name in [name for name in found if f"{name}_mask" in found]:
            found[name] = _longer(found[name])
            found[f"{name}_mask"] = _longer(found[f"{name}_mask"])
        return found if self.inner is None else self.inner(found)


def _longer(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros((len(tensor), 3, *tensor.shape[2:]))], 1)
