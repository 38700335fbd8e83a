"""Compares the gradients of the first step of a mesh with those of the whole model on one rank.

A mesh replaces parameters, modules and functions of the user. What he has tied to them in a way that no check knows
would give other weights, without a word. So the first step is computed twice before anything is trained.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spark_dl.generators import generators_kept
from spark_dl.nn.moe import moe_layers
from spark_dl.parallel.loss import Count
from spark_dl.parallel.mesh.groups import Groups
from spark_dl.parallel.mesh.pieces import Layout
from spark_dl.parallel.mesh.state import MeshState
from spark_dl.parallel.module_state import module_state_kept
from spark_dl.parallel.trainable import add_gradients
from spark_dl.spec import Batch, ModelSpec

if TYPE_CHECKING:
    from spark_dl.config import Config
    from spark_dl.world import World

_log = logging.getLogger("spark_dl")
_TOLERANCE = {"float32": 0.02, "bf16": 0.2}
"""Difference of a gradient, in its norm. Convolutions of GPUs round float32 to 10 bits."""
_SMALL = 1e-4
"""Gradients below this part of the gradient of the model are rounding, and losses of a row below it."""


class FirstStepCheck:
    """Compares the gradients of a step, once. Called on each rank of a mesh."""

    def __init__(
        self, spec: ModelSpec, module: nn.Module, state: MeshState, optimizer: torch.optim.Optimizer, groups: Groups,
        world: World, config: Config,
    ):  # fmt: skip
        """module: what this rank has of the model."""
        self._spec, self._module, self._state, self._optimizer = spec, module, state, optimizer
        self._groups, self._world, self._config = groups, world, config

    def compare(
        self, micro_batches: Sequence[Batch], count: Count, forward_backward: Callable[[Sequence[Batch], Count], Tensor]
    ) -> None:
        """Computes a step of the mesh and of the whole model, both without dropout. Collective.

        Models that draw other random numbers are left out. Raises ValueError on all ranks for a gradient that differs.
        """
        start = time.perf_counter()
        gpus = [self._world.device.index] if self._world.device.type == "cuda" else []
        with generators_kept(gpus), module_state_kept(self._module), _without_dropout(self._module):
            losses = float(forward_backward(micro_batches, count))
            own = [(name, layout, value.float().cpu().clone()) for name, layout, value in self._state.gradients()]
            self._optimizer.zero_grad()
            self._module.zero_grad()
            expected, expected_losses = self._of_whole(micro_batches, count)
            worst = self._worst(own, expected) or self._of_losses(losses, expected_losses, count)
            if worst is not None:
                torch.manual_seed(self._config.train.seed + 1)
                again, _ = self._of_whole(micro_batches, count)
                if any(not torch.allclose(again[name], value) for name, value in expected.items()):
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
        if self._world.rank == 0:
            _log.info("the first step has the gradients of the whole model (%.2f s)", time.perf_counter() - start)

    def _of_whole(self, micro_batches: Sequence[Batch], count: Count) -> tuple[dict[str, Tensor], float]:
        """Returns the gradients and the loss of the whole model, with the weights that the ranks have. Collective."""
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
        with _without_dropout(whole):
            losses = add_gradients(
                self._spec, whole, micro_batches, self._config, device=self._world.device,
                scale=lambda losses: losses / count,
            )  # fmt: skip
        found = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense()
            for name, p in whole.named_parameters(remove_duplicate=False)
        }
        flat = torch.cat([*(g.float().cpu().reshape(-1) for g in found.values()), losses.float().cpu().view(1)])
        # Ranks of a copy of the model have the same rows.
        is_first = self._groups.at.tensor == self._groups.at.pipeline == 0
        _sum(flat if is_first else flat.zero_(), self._world)
        parts = flat[:-1].split([gradient.numel() for gradient in found.values()])
        return {name: p.view(g.shape) for (name, g), p in zip(found.items(), parts, strict=True)}, float(flat[-1])

    def _sum_over_data(self, tensor: Tensor) -> None:
        if self._groups.data is not None:
            dist.all_reduce(tensor, group=self._groups.data)

    def _worst(
        self, own: Sequence[tuple[str, Layout, Tensor]], expected: dict[str, Tensor]
    ) -> tuple[str, float] | None:
        """Returns the first gradient of the model that differs on some rank, and by what part of it. Collective."""
        whole = float(torch.sqrt(sum(value.square().sum() for value in expected.values())))  # type: ignore[arg-type]
        order = {name: i for i, name in enumerate(expected)}
        found: list[tuple[int, float]] = []
        for name, layout, gradient in own:
            if name not in expected:
                continue
            difference = float((gradient - _take(expected[name].reshape(-1), layout)).norm())
            norm = max(float(expected[name].norm()), _SMALL * whole, torch.finfo(torch.float32).tiny)
            if not difference <= _TOLERANCE[self._config.train.precision] * norm:
                found.append((order[name], difference / norm))
        first = torch.tensor(min(found, default=(len(order), 0.0)), dtype=torch.float64, device=self._world.device)
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
