"""Sequence parallelism: which layers get slices of the sequence axis (Korthikanti et al. 2022, arXiv:2205.05198)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from spark_dl.parallel.mesh.tensor.words import COLUMNS, ROWS, is_norm

KEY = "parallel.sequence"


@dataclass(frozen=True)
class Stack:
    """Consecutive layers of a model, between which activations are slices of the sequence axis."""

    layers: tuple[str, ...]
    """Names of the layers. The first takes whole activations, and the last returns whole ones."""
    axis: int
    """The sequence axis of the activations."""
    gathering: frozenset[str]
    """Names of modules in the layers that gather their input for the layers in them that are cut by columns."""

    def has(self, name: str) -> bool:
        """Whether a module is in one of the layers, or is one."""
        return any(name == layer or name.startswith(f"{layer}.") for layer in self.layers)

    def gathers(self, name: str) -> bool:
        """Whether a module is in a module that gathers its input, or is one."""
        return any(name == module or name.startswith(f"{module}.") for module in self.gathering)


def find_stacks(model: nn.Module, plan: Mapping[str, str]) -> list[Stack]:
    """Returns the stacks of a model: the children of a Sequential or a ModuleList that have both layers that are cut by
    columns and layers that are cut by rows, or an attention that is cut by heads.

    Raises ValueError, with `parallel.sequence`, if a layer may need whole sequences.
    """
    stacks: list[Stack] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Sequential | nn.ModuleList) or any(stack.has(name) for stack in stacks):
            continue
        children = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
        whole = [i for i, child in enumerate(children) if _is_whole({w for _, w in _within(child, plan)})]
        if not whole:
            continue
        layers = children[whole[0] : whole[-1] + 1]
        for layer in layers:
            _check(layer, model.get_submodule(layer), plan)
        stacks.append(Stack(tuple(layers), _axis(model, layers), frozenset(_gathering(model, layers, plan))))
    return stacks


def _within(layer: str, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, word in plan.items():
        if name.startswith(f"{layer}."):
            yield name, word


def _is_whole(words: set[str]) -> bool:
    return "heads" in words or (bool(words & {*COLUMNS}) and bool(words & {*ROWS}))


def _check(layer: str, module: nn.Module, plan: Mapping[str, str]) -> None:
    if isinstance(module, nn.TransformerDecoderLayer):
        raise ValueError(f"{KEY}: not supported for a TransformerDecoderLayer, found {layer!r}; set it to false")
    for inner, child in module.named_modules():
        name = f"{layer}.{inner}" if inner else layer
        has_own = any(parameter is not None for parameter in child._parameters.values())
        in_attention = any(name.startswith(f"{n}.") for n, word in plan.items() if word == "heads")
        is_attention = isinstance(child, nn.MultiheadAttention)
        is_inner = next(child.children(), None) is not None and not is_attention  # its own weights are of each position
        if has_own and not (name in plan or in_attention or is_norm(child) or is_inner):
            raise ValueError(
                f"{KEY}: expected norms and modules of the tensor plan alone in layers that get slices of sequences, "
                f"found the {type(child).__name__} {name!r}, which may need whole ones; set it to false, or add the "
                "module to spec.tensor_plan"
            )


def _axis(model: nn.Module, layers: Sequence[str]) -> int:
    attentions = (m for layer in layers for m in model.get_submodule(layer).modules())
    return 0 if any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in attentions) else 1


def _gathering(model: nn.Module, layers: Sequence[str], plan: Mapping[str, str]) -> Iterator[str]:
    """Yields the modules that gather their input.

    That is the module around the projections, as attentions take the shape of their scores from their input. If it is
    the layer itself or has a norm, which is for slices, it is each projection.
    """
    for layer in layers:
        for name, word in _within(layer, plan):
            if word not in COLUMNS:
                continue
            parent_name = name.rpartition(".")[0]
            parent = model.get_submodule(parent_name)
            norms = any(is_norm(m) and f"{parent_name}.{n}" not in plan for n, m in parent.named_modules())
            is_container = isinstance(parent, nn.ModuleList | nn.ModuleDict)
            yield name if parent_name == layer or norms or is_container else parent_name
