"""From settings and events to the parameters and metrics of trackers. Pure functions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_POSITION = ("kind", "epoch", "step", "steps", "seconds", "time", "task", "rank", "host", "pid")
"""Fields of an event that are no metrics."""


def metrics_of(event: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of an event of a run, by name. Those of other events than `step` and `epoch` are empty.

    Of a metric with a list of numbers, each number is a metric, `validation/recall/0` ...
    """
    if event["kind"] == "step":
        numbers = _numbers({name: value for name, value in event.items() if name not in _POSITION}, "train")
        load = {name: layer["max_over_mean"] for name, layer in event.get("expert_load", {}).items()}
        return {**numbers, **_numbers(load, "expert_load")}
    if event["kind"] == "epoch":
        return {**_numbers({"epoch_loss": event["train_loss"]}, "train"), **_numbers(event["metrics"], "validation")}
    return {}


def _numbers(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        if is_number(value):
            found[f"{prefix}/{name}"] = float(value)
        elif prefix == "validation" and isinstance(value, list) and all(map(is_number, value)):
            found |= {f"{prefix}/{name}/{i}": float(number) for i, number in enumerate(value)}
    return found


def is_number(value: Any) -> bool:
    """Whether this is a number, also NaN. True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns nested settings as strings by dotted keys, such as `train.lr`. Values that are no mappings are JSON."""
    found: dict[str, str] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping) and value:
            found |= flatten(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return found


def as_key(name: str, longest: int) -> str:
    """Returns a name with the characters that MLflow accepts, and its last ones if it is too long."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII).strip("/ ")[-longest:]


def as_value(value: str, longest: int) -> str:
    """Returns a string, shortened to `longest` characters."""
    return value if len(value) <= longest else f"{value[: longest - 3]}..."


def name_of(function: Any) -> str:
    """Returns the name of a function or a class, of the function in a partial, or of the class of another object."""
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__qualname__", None) or type(inner).__name__)
