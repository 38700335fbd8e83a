"""The weights of a checkpoint, whichever strategy and mesh it was saved by, and how a model takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import Saved
from spark_dl.rundir.checkpoint_files import MODEL
from spark_dl.rundir.tensor_files import TensorFiles

_NAMED = 5
"""Names of parameters in an error."""


def load_weights(saved: Saved) -> dict[str, Tensor]:
    """Returns the weights and buffers of a checkpoint by name, whole, on the CPU. Called on any side.

    Raises DamagedError for a damaged file.
    """
    if "tensors" not in saved.manifest:
        weights: dict[str, Tensor] = checkpoint.load(saved, MODEL)["0"]
        return weights
    return TensorFiles(saved.url, saved.manifest, "model").read_whole()


def plain_name(name: str) -> str:
    """Returns the name of a weight without what `torch.compile` puts before the names of a module."""
    return name.replace("_orig_mod.", "")


def shapes_of(saved: Saved) -> dict[str, list[int]]:
    """Returns the shapes of a checkpoint's weights by name, from its manifest; none for a checkpoint without them."""
    if "tensors" in saved.manifest:
        return {name: list(entry["shape"]) for name, entry in saved.manifest["tensors"]["model"].items()}
    return dict(saved.manifest.get("shapes", {}))


def load_into(model: nn.Module, weights: Mapping[str, Any], what: str, *, same_dtypes: bool = False) -> None:
    """Loads weights and buffers into a model. what: begins errors, such as "the weights of <URL>".

    Names are compared without those that `torch.compile` adds.
    Raises ValueError unless names and shapes are the same (and dtypes, with `same_dtypes`), and if the model has one
    tensor for weights that differ, as an embedding that is tied now and was not.
    """
    own = model.state_dict(keep_vars=True)
    found = {plain_name(name): value for name, value in weights.items()}
    renamed: Any = type(weights)() if isinstance(weights, dict) else {}
    renamed.update({name: found.pop(plain_name(name)) for name in own if plain_name(name) in found} | found)
    if (about := getattr(weights, "_metadata", None)) is not None:
        renamed._metadata = about
    problems = _differences(own, renamed, same_dtypes=same_dtypes) if same_dtypes else []
    if not problems:
        problems = _tied_now(own, renamed)
    if not problems:
        try:
            model.load_state_dict(renamed)
        except RuntimeError as error:
            problems = _differences(own, renamed) or [str(error)]
    if problems:
        raise ValueError(f"{what} do not fit the model of spec.build ({'; '.join(problems)})")


def _differences(own: Mapping[str, Any], weights: Mapping[str, Any], *, same_dtypes: bool = False) -> list[str]:
    problems = []
    if not same_dtypes:
        if missing := [name for name in own if name not in weights]:
            problems.append(f"not in the checkpoint: {_list(missing)}")
        if unknown := [name for name in weights if name not in own]:
            problems.append(f"not in the model: {_list(unknown)}")
    different = [
        f"{name}: {_describe(weights[name])} in the checkpoint, {_describe(value)} in the model"
        for name, value in own.items()
        if name in weights and not _fits(value, weights[name], same_dtypes=same_dtypes)
    ]
    return [*problems, _list(different)] if different else problems


def _fits(own: Any, found: Any, *, same_dtypes: bool) -> bool:
    if not isinstance(own, Tensor) or not isinstance(found, Tensor):
        return isinstance(own, Tensor) == isinstance(found, Tensor)
    return own.shape == found.shape and (not same_dtypes or own.dtype == found.dtype)


def _tied_now(own: Mapping[str, Any], weights: Mapping[str, Any]) -> list[str]:
    """Names weights that differ and for which the model has one tensor, so that the last one loaded would win."""
    names: dict[Any, str] = {}
    problems = []
    for name, value in own.items():
        if not isinstance(value, Tensor) or not isinstance(weights.get(name), Tensor):
            continue
        memory = (value.data_ptr(), value.shape, value.stride()) if value.numel() else id(value)
        first = names.setdefault(memory, name)
        if first != name and not torch.equal(weights[first], weights[name]):
            problems.append(f"{name} is the same tensor as {first} in the model, and another one in the checkpoint")
    return problems


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):  # of get_extra_state
        return type(value).__name__
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
