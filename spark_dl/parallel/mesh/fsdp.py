"""ZeRO-3: weights, gradients and the optimizer's state in shards, by torch's `fully_shard` (Zhao et al. 2023,
arXiv:2304.11277)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from spark_dl.parallel.async_collectives import start_reduce_scatter
from spark_dl.parallel.loss import Inside


class _ReduceScatter:
    """A reduce-scatter for FSDP that sends 0.75 of a tensor with 4 ranks, where that of Gloo sends 1.5."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(start_reduce_scatter(input_tensor, group)())


def shard_fully(
    model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, *, with_rest: bool = True
) -> Inside | None:
    """Replaces the parameters of a model by their shards. Collective.

    Returns what calls functions with the model, while its other parameters are gathered; None without `with_rest`.

    The weights of a unit are gathered for its forward and its backward pass, so a rank has the whole weights of one
    unit at a time, or of two while it gathers the next one.

    units: modules of the model that are called as modules. Those that share parameters are gathered together.
    with_rest: whether the model is called as a whole, so that its other parameters are sharded, too.
    mesh: of the axis `shards`, or of `replicas` and `shards`.
    """
    for together in _with_shared_parameters([unit for unit in units if next(unit.parameters(), None) is not None]):
        fully_shard(together if len(together) > 1 else together[0], mesh=mesh)
    inside = Inside(model) if with_rest else None
    if inside is not None:
        fully_shard(inside, mesh=mesh)
    uses_gloo = dist.get_backend(mesh.get_group("shards")) == "gloo"
    for module in (inside or model).modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # With a factor of one FSDP would ask for a sum that is multiplied before, which Gloo does not have.
            module.set_force_sum_reduction_for_comms(True)
            if uses_gloo:
                module.set_custom_reduce_scatter(_ReduceScatter())  # type: ignore[arg-type]
    return inside


def default_units(model: nn.Module) -> list[nn.Module]:
    """Returns the children of a model that have parameters; of lists and chains of modules, their children."""
    found: list[nn.Module] = []
    for child in model.children():
        inner = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else [child]
        found += [module for module in inner if next(module.parameters(), None) is not None]
    return found


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
            found = self._inside(function, batch)
            self._compare(len(names), names)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def _compare(self, index: int, names: Sequence[str]) -> None:
        """Raises ValueError unless all ranks call the same module next. index: of the module; their number at the
        end."""
        own = torch.tensor([index], device=self._device)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own)
        called = [int(each) for each in found]
        if len({*called}) > 1:
            words = [f"rank {rank} {f'calls {names[i]!r}' if i < len(names) else 'calls no more'}"
                     for rank, i in enumerate(called[:8])]  # fmt: skip
            raise ValueError(
                "parallel.zero_stage: with 3, the ranks gather the weights of a layer together, so all of them must "
                f"call the same layers in the same order, found that {', '.join(words)}; use zero_stage 2 with "
                "parallel.find_unused_parameters, or call all layers on each rank"
            )
