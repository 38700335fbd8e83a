"""An order: one training that the driver gives to a group of ranks. It travels as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from spark_dl.config import Config
from spark_dl.config.checks import suggestion
from spark_dl.config.load import build_config, sections, with_settings
from spark_dl.rundir import attempt
from spark_dl.rundir.folder import trial_dir
from spark_dl.spec import ModelSpec, Run

Spec: TypeAlias = ModelSpec | Callable[..., ModelSpec]
"""The model of all trials, or a function that returns the model of a trial, given its arguments by name."""
TUNED = ("train", "parallel", "loader", "checkpoint", "faults")
"""Sections whose settings can differ between trials. The others define the dataset and the ranks."""


@dataclass(frozen=True)
class Order:
    """One training."""

    trial: int
    config: Config
    arguments: Mapping[str, Any]
    """Arguments of the function that returns the model."""
    run_dir: str
    generation: int
    fold: int | None = None

    @property
    def name(self) -> str:
        """Name for messages, unique in the job."""
        return f"trial {self.trial}" + ("" if self.fold is None else f", fold {self.fold}")

    def to_plain(self) -> dict[str, Any]:
        """Returns the order as JSON."""
        return {**dataclasses.asdict(self), "name": self.name, "config": self.config.to_dict()}


def begin(run: Run, trial: int, config: Config, arguments: Mapping[str, Any], fold: int | None = None) -> Order:
    """Starts the run folder of a training, and returns its order. Called on the driver.

    Raises ValueError if there is a training in the folder.
    """
    run_dir = trial_dir(run.run_dir, trial, fold)
    generation, _ = attempt.begin_attempt(run_dir, config, resume=False, overwrite=False)
    own = dataclasses.replace(run, config=config, run_dir=run_dir, generation=generation)
    attempt.take_over(own, overwrite=False, keep=())
    return Order(trial, config, dict(arguments), run_dir, generation, fold)


def split_values(values: Any, base: Config) -> tuple[Config, dict[str, Any]]:
    """Returns the settings of a trial, and the arguments of the function that returns its model.

    values: by key. Keys with a section, such as `train.lr`, are settings, which replace those of `base`. Raises
    ValueError for a key of a section that all trials share, and for invalid settings.
    """
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"suggest: expected a dict such as {{'train.lr': 0.1}}, found {values!r:.200}")
    settings = {key: value for key, value in values.items() if "." in key}
    for section in (key.split(".")[0] for key in settings):
        if section not in sections():
            raise ValueError(f"suggest: no section {section!r} of settings{suggestion(section, TUNED)}")
        if section not in TUNED:
            raise ValueError(
                f"suggest: expected settings of {', '.join(TUNED)}, found {section!r}, which is the same for all "
                "trials, as they share the ranks and one dataset; set it in config"
            )
    if path := _other_key({key: value for key, value in values.items() if "." not in key}):
        raise ValueError(f"suggest: expected strings as keys, which JSON has, found {path}")
    try:
        arguments = json.loads(json.dumps({key: value for key, value in values.items() if "." not in key}))
    except TypeError as error:
        raise ValueError(f"suggest: expected numbers, strings, lists and dicts: {error}") from None
    return build_config(with_settings(base.to_dict(), settings)), arguments


def _other_key(value: Any, path: str = "") -> str:
    """Returns the first key in nested dicts that is not a string, with where it is; empty without any."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(key, str):
                return f"{key!r} in {path}"
            if found := _other_key(part, f"{path}.{key}" if path else key):
                return found
    if isinstance(value, list | tuple):
        return next(filter(None, (_other_key(part, f"{path}[{i}]") for i, part in enumerate(value))), "")
    return ""


def spec_of(spec: Spec, arguments: Mapping[str, Any]) -> ModelSpec:
    """Returns the model of a trial. Raises ValueError for arguments without a function, and for another result."""
    if isinstance(spec, ModelSpec):
        if arguments:
            raise ValueError(
                f"suggest: found {', '.join(arguments)}, which have no section, such as train.lr, and are arguments of "
                "the function that returns the model; pass a function instead of a ModelSpec"
            )
        return spec
    found = spec(**arguments)
    if not isinstance(found, ModelSpec):
        raise ValueError(f"spec: expected a function that returns a ModelSpec, it returned {found!r:.200}")
    return found
