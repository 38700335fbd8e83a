"""What a user has tied to the parameters of his model, where a strategy replaces them by others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def marks_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns the attributes that were set on parameters, by name, such as `weight._no_weight_decay = True`."""
    return {name: dict(vars(p)) for name, p in model.named_parameters(remove_duplicate=False) if vars(p)}


def set_marks(model: nn.Module, marks: Mapping[str, Mapping[str, Any]]) -> None:
    """Sets attributes on the parameters that have replaced those that had them, for `spec.optimizer` to read."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        vars(parameter).update(marks.get(name, {}))


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """Returns the names of each parameter, by its id; several names for one that is tied."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return found


def replace_parameters(optimizer: torch.optim.Optimizer, names: Mapping[int, Sequence[str]], model: nn.Module) -> None:
    """Makes an optimizer of a whole model train what a rank has of it. The groups, also empty ones, stay.

    names: `names_of` the whole model. model: the rank's part, whose parameters have their names in the whole model.
    State that exists before the first step, such as Adagrad's sums, is the same in each element.
    """
    now = dict(model.named_parameters(remove_duplicate=False))
    for group in optimizer.param_groups:
        before, group["params"] = group["params"], []
        for parameter in before:
            own = next((now[name] for name in names[id(parameter)] if name in now), None)
            state = optimizer.state.pop(parameter, None)
            if own is None:
                continue
            group["params"].append(own)
            if state is not None:
                optimizer.state[own] = {key: _like(value, parameter, own) for key, value in state.items()}


def _like(value: Any, parameter: nn.Parameter, own: nn.Parameter) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.numel():
        return value
    return torch.full_like(own, float(value.flatten()[0]), requires_grad=False)


def check_hooks(model: nn.Module, names: Collection[str], how: str) -> None:
    """Raises ValueError if a parameter that is to be replaced has a hook, which would not be called any more.

    names: of these parameters. how: the setting by which they are replaced, for the message.
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
