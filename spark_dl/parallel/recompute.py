"""Activations that are computed again in the backward pass (`train.activation_checkpointing`), in place of being kept.

Chen et al. 2016 (Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spark_dl.parallel.modules import layers_of

FULL = "full"


@dataclass(frozen=True)
class Recomputed:
    """A `ModelSpec.build` whose layers compute their activations again. Called on every rank."""

    build: Callable[[], nn.Module]
    patterns: str | Sequence[str]
    """`train.activation_checkpointing`."""

    def __call__(self) -> nn.Module:
        """Builds the model. Raises ValueError as `recompute_activations` does."""
        model = self.build()
        if isinstance(model, nn.Module):  # another type is reported by the caller
            recompute_activations(model, self.patterns)
        return model


def recompute_activations(model: nn.Module, patterns: str | Sequence[str]) -> list[str]:
    """Makes layers of a model keep their inputs only, and compute their activations again. Returns their names.

    In place: names, parameters and hooks of modules stay as they are. Random numbers are the same when they are drawn
    again, and buffers, such as the statistics of BatchNorm, are updated once.

    Args:
        patterns: `full`, for the layers of its lists and chains of modules; or names of modules, or patterns of these.
            Of modules in one another, the outermost counts.

    Raises:
        ValueError: For a pattern that is that of no module.
    """
    names = [name for name, _ in model.named_modules() if name]
    chosen: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = layers_of(model) if pattern == FULL else [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            shown = ", ".join(names[:20])
            raise ValueError(
                f"train.activation_checkpointing: no module of the model is {pattern!r}; its modules are [{shown}"
                f"{', ...' if len(names) > 20 else ''}]"
            )
        chosen += found
    outermost = [name for name in dict.fromkeys(chosen) if not any(name.startswith(f"{other}.") for other in chosen)]
    for name in outermost:
        module = model.get_submodule(name)
        module.forward = _Again(module, module.forward)  # type: ignore[method-assign] # hooks stay around it
    return outermost


State: TypeAlias = Callable[[], contextlib.AbstractContextManager[Any]]
"""Called in a forward pass. Returns a context that sets the state of that moment, while it is computed again."""


def keep_states(model: nn.Module, state: State) -> None:
    """Lets the layers that compute their activations again do it with a state of what runs them, as the first time."""
    for module in model.modules():
        if isinstance(again := vars(module).get("forward"), _Again):
            again.states.append(state)


class _Again:
    """The forward function of a module, whose activations are not kept."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        self._module, self._forward = module, forward
        self.states: list[State] = []

    def wrap(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces the function that is computed twice."""
        self._forward = wrapper(self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        return contextlib.nullcontext(), _as_before(self._module, [state() for state in self.states])


@contextlib.contextmanager
def _as_before(module: nn.Module, states: Sequence[contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Gives the buffers of a module back the values that they had before the block, which runs in these contexts."""
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        with contextlib.ExitStack() as until_done:
            for state in states:
                until_done.enter_context(state)
            yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
