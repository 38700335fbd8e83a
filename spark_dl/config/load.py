"""Settings from outside: YAML files and dotted command-line overrides (`--train.lr=0.1`), through jsonargparse."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spark_dl.config import Config
from spark_dl.config.checks import check, suggestion


def config_keys() -> list[str]:
    """All dotted keys, such as `train.lr`."""
    sections = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    return [f"{s}.{f.name}" for s, cls in sections.items() for f in dataclasses.fields(cls)]  # type: ignore[arg-type]


def build_config(sections: Mapping[str, Any]) -> Config:
    """A `Config` from plain nested dicts, such as those of a YAML file; keys that are missing keep their defaults."""
    known = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    built: dict[str, Any] = {}
    for name, values in sections.items():
        if name not in known:
            raise ValueError(f"unknown config key {name!r}{suggestion(str(name), list(known))}")
        check(isinstance(values, Mapping), name, "a mapping of keys to values", values)
        for key in values:
            if f"{name}.{key}" not in config_keys():
                raise ValueError(f"unknown config key '{name}.{key}'{suggestion(f'{name}.{key}', config_keys())}")
        built[name] = known[name](**values)  # type: ignore[operator, misc]
    return Config(**built)


def load_config(path: str | Path | None = None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """Reads a YAML file and applies dotted overrides, `["train.lr=0.1"]` or `{"train.lr": 0.1}`.

    Raises ValueError for an unknown key, naming the nearest one, and for a value that does not fit.
    """
    import jsonargparse

    pairs = overrides.items() if isinstance(overrides, Mapping) else [o.partition("=")[::2] for o in overrides]
    args = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in pairs]
    parser = jsonargparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Config, None)
    try:
        parsed = parser.parse_args(args if path is None else [f"--config={path}", *args]).as_dict()
    except jsonargparse.ArgumentError as error:
        raise ValueError(explain_parse_error(str(error), config_keys())) from None
    return build_config({name: section for name, section in parsed.items() if name != "config"})


def explain_parse_error(message: str, known: Sequence[str]) -> str:
    """The message of jsonargparse in one line, and, where it is about an unknown key, with the nearest known key."""
    group = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message)
    other = re.search(r"(?:[Uu]nrecognized arguments: --|Option ')([\w.]+)", message)
    key = ".".join(group.groups()) if group else other.group(1) if other else None
    if key is None:
        return re.sub(r"\s+", " ", message.replace('Parser key "', '"')).strip()
    nearest = suggestion(key, known)
    if key.count(".") == 0 and "mean" not in nearest:
        nearest = suggestion(key, sorted({k.split(".")[0] for k in known}))
    return f"unknown config key {key!r}{nearest}"
