"""Bytes that a rank sends in a step, as the network interface of its host counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from benchmarks.parallel.training import build_batches, build_config, build_spec, take_step, training
from benchmarks.testbed.links import read_link
from spark_dl.gather import gather_json
from spark_dl.parallel.mesh.settings import Mesh
from spark_dl.world import World

_WIDTH, _LAYERS, _SEQUENCE, _HEADS = 256, 8, 128, 4
_STEPS = 3


@dataclass(frozen=True)
class Form:
    """A way to train, and the bytes that its formula gives for a rank, on average."""

    name: str
    formula: str
    parallel: Mesh
    build: Callable[[], nn.Module]
    bytes_of: Callable[[int, int], float]
    """(ranks, bytes of the gradient) -> bytes that a rank sends in a step."""
    shape: tuple[int, ...] = (4 * _WIDTH,)
    """Of a row."""
    rows: int = 1
    micro_batches: int = 1
    prepare: Callable[[nn.Module], None] = field(default=lambda module: None)


def _linear() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4 * _WIDTH, 4 * _WIDTH) for _ in range(_LAYERS)))


def _narrow() -> nn.Module:
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))


def _transformer() -> nn.Module:
    layers = [
        nn.TransformerEncoderLayer(_WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, batch_first=True) for _ in range(_LAYERS)
    ]
    return nn.Sequential(nn.LayerNorm(_WIDTH), *layers)


class _BackendsOwn:
    """The reduce-scatter of the backend, for FSDP."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _use_backends_own(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(_BackendsOwn())  # type: ignore[arg-type]


def forms(num_ranks: int) -> list[Form]:
    """Returns what is measured on this number of ranks."""
    rows, micro_batches = 8, 4
    activation = rows * _SEQUENCE * _WIDTH * 4

    def whole(factor: float) -> Callable[[int, int], float]:
        return lambda ranks, gradient: factor * (ranks - 1) / ranks * gradient

    def tensor(ranks: int, _: int) -> float:
        return _LAYERS * 4 * activation * 2 * (ranks - 1) / ranks

    def pipeline(ranks: int, _: int) -> float:
        return 2 * micro_batches * activation * (ranks - 1) / ranks

    two, three, four = "2 (N - 1) / N gradients", "3 (N - 1) / N gradients", "4 (N - 1) / N gradients"
    of_rows: dict[str, Any] = {"shape": (_SEQUENCE, _WIDTH), "rows": rows}
    return [
        Form("ddp", two, Mesh(bucket_mib=4), _linear, whole(2)),
        Form("zero1", two, Mesh(zero_stage=1, bucket_mib=4), _linear, whole(2)),
        Form("zero2", two, Mesh(zero_stage=2, bucket_mib=4), _linear, whole(2)),
        Form("zero3", three, Mesh(zero_stage=3), _linear, whole(3)),
        Form("zero3_gloo", four, Mesh(zero_stage=3), _linear, whole(4), prepare=_use_backends_own),
        Form("tensor", "4 all-reduces of b s h for each layer", Mesh(tensor=num_ranks), _transformer, tensor,
             **of_rows),
        Form("pipeline", "2 m activations for each boundary", Mesh(pipeline=num_ranks), _narrow, pipeline,
             micro_batches=micro_batches, **of_rows),
    ]  # fmt: skip


def measure(world: World) -> list[dict[str, Any]]:
    """Returns a row for each form: bytes that a rank sends in a step, on average over the ranks. Collective."""
    return [row for form in forms(world.world_size) for row in _of_form(form, world)]


def _of_form(form: Form, world: World) -> Iterator[dict[str, Any]]:
    config = build_config(form.parallel, world.world_size, micro_batches=form.micro_batches, rows=form.rows)
    batches = build_batches(form.shape, config)
    gradient = 4 * sum(p.numel() for p in form.build().parameters())
    torch.manual_seed(0)
    with training(build_spec(form.build), world, config) as trainable:
        form.prepare(part if isinstance(part := trainable.call, nn.Module) else trainable.modules[0])
        take_step(trainable, batches, config)
        dist.barrier()
        before = read_link(world.host)
        for _ in range(_STEPS):
            take_step(trainable, batches, config)
        dist.barrier()
        sent = (read_link(world.host) - before).sent / _STEPS
    of_ranks = gather_json(sent)
    mean, formula = sum(of_ranks) / len(of_ranks), form.bytes_of(world.world_size, gradient)
    yield {"form": form.name, "sent_bytes": mean, "formula_bytes": formula, "times_formula": mean / formula,
           "gradient_bytes": gradient, "per_gradient": mean / gradient, "of_gradients": form.parallel.model == 1,
           "formula": form.formula}  # fmt: skip
