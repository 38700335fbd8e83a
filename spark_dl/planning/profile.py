"""Reads the profile of a model's layers: JSON, which docs/planner.md describes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spark_dl import storage
from spark_dl.config.checks import suggestion
from spark_dl.parallel.mesh.planner.records import KINDS, Layer, Seconds

_LAYER = ("name", "forward_s", "backward_s", "parameter_bytes", "output_bytes", "kept_bytes", "tensor", "repeat")
_NEEDED = ("name", "forward_s", "backward_s", "parameter_bytes", "output_bytes", "kept_bytes")


def read_profile(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, tuple[Layer, ...]]:
    """Returns the name of a profile and its layers.

    source: path or URL of a JSON file, or its content. Raises ValueError, with the key, for what is no profile.
    """
    if isinstance(source, Mapping):
        return _profile(source, "profile", "model")
    url = storage.absolute(source)
    if not storage.exists(url):
        raise ValueError(f"profile: there is no {url}; expected a JSON file with the layers of a model")
    try:
        content = json.loads(storage.read_bytes(url))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"profile: {url} is not JSON: {error}") from error
    return _profile(content, url, storage.name(url).removesuffix(".json"))


def _profile(content: Any, where: str, name: str) -> tuple[str, tuple[Layer, ...]]:
    _check_mapping(content, ("name", "layers"), where)
    layers = content.get("layers")
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise ValueError(f"{where}: layers: expected a list with at least one layer, found {layers!r}")
    found = tuple(layer for i, each in enumerate(layers) for layer in _layers(each, f"{where}: layers[{i}]"))
    name = content.get("name", name)
    if not isinstance(name, str):
        raise ValueError(f"{where}: name: expected a string, found {name!r}")
    return name, found


def _layers(content: Any, where: str) -> Iterator[Layer]:
    """One entry of the list: a layer, or equal layers in a row."""
    _check_mapping(content, _LAYER, where)
    if missing := [key for key in _NEEDED if key not in content]:
        raise ValueError(f"{where}: expected the keys {', '.join(_NEEDED)}; missing: {', '.join(missing)}")
    name, repeat = content["name"], content.get("repeat", 1)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}.name: expected a string, found {name!r}")
    if isinstance(repeat, bool) or not isinstance(repeat, int) or repeat < 1:
        raise ValueError(f"{where}.repeat: expected a whole number >= 1, found {repeat!r}")
    layer = Layer(
        name,
        _seconds(content["forward_s"], f"{where}.forward_s"),
        _seconds(content["backward_s"], f"{where}.backward_s"),
        int(_number(content["parameter_bytes"], f"{where}.parameter_bytes")),
        _number(content["output_bytes"], f"{where}.output_bytes"),
        _number(content["kept_bytes"], f"{where}.kept_bytes"),
        _tensor(content.get("tensor", ()), f"{where}.tensor"),
    )
    if repeat == 1:
        yield layer
        return
    for i in range(repeat):
        yield Layer(f"{name}.{i}", *list(vars(layer).values())[1:])


def _seconds(content: Any, where: str) -> Seconds:
    _check_mapping(content, ("fixed", "per_row"), where)
    return Seconds(*(_number(content.get(key, 0.0), f"{where}.{key}") for key in ("fixed", "per_row")))


def _tensor(content: Any, where: str) -> tuple[str, ...]:
    if not isinstance(content, Sequence) or isinstance(content, str):
        raise ValueError(f"{where}: expected a list of {', '.join(KINDS)}, found {content!r}")
    for each in content:
        if each not in KINDS:
            raise ValueError(f"{where}: expected a list of {', '.join(KINDS)}, found {each!r}")
    return tuple(content)


def _number(content: Any, where: str) -> float:
    if isinstance(content, bool) or not isinstance(content, int | float) or not 0 <= content < math.inf:
        raise ValueError(f"{where}: expected a number >= 0, found {content!r}")
    return content


def _check_mapping(content: Any, known: Sequence[str], where: str) -> None:
    if not isinstance(content, Mapping):
        raise ValueError(f"{where}: expected an object with {', '.join(known)}, found {content!r:.80}")
    for key in content:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}{suggestion(str(key), known)}")
