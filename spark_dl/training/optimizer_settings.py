"""Settings of an optimizer and its scheduler in checkpoints, by the names of the parameters.

Both are built anew when a run resumes. A setting that the code gives as it gave it before goes on as the checkpoint has
it, such as a rate that a scheduler has lowered. One that the code gives in another way the user has changed, and the
new value counts. Groups are found again by the names of their parameters, never by their place: a set has another order
in each process, and each stage of a pipeline has groups of its own.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spark_dl.rundir.plain import plain_state
from spark_dl.rundir.weights import plain_name
from spark_dl.training.schedule import Schedule

_log = logging.getLogger("spark_dl")
_RATES = ("lr", "initial_lr")
_BY_GROUP = (
    "base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas",
)  # fmt: skip
"""What torch's schedulers hold in a list with an item for each group."""
_WITH_STATE = ("amsgrad", "centered", "momentum")
"""Settings of torch's optimizers for which they have a further state in each parameter, from its first step on."""
_SHOWN = 4


def group_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Returns the names of the parameters of each group; the place of one that is not the model's."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return [
        [names.get(id(parameter), f"{i}/{k}") for k, parameter in enumerate(group["params"])]
        for i, group in enumerate(optimizer.param_groups)
    ]


def by_name(state: Mapping[int, Any], before: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> dict[int, Any]:
    """Returns the `state` of an optimizer's state dict for parameters that have other places now.

    before, now: names of the parameters of each group. The state of a parameter that is gone is left out.
    """
    places = {name: i for i, name in enumerate(name for group in before for name in group)}
    names = [name for group in now for name in group]
    found = [(i, places[name]) for i, name in enumerate(names) if name in places]
    return {i: state[place] for i, place in found if place in state}


@dataclass(frozen=True)
class _Source:
    """A group in a checkpoint."""

    saved: Mapping[str, Any]
    """What `OptimizerSettings.state_dict` returned on the rank that had it."""
    at: int
    """Which of its groups it is."""


class OptimizerSettings:
    """The settings of the optimizer and the schedule of one rank, as they were built and as they are."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: Schedule, names: Sequence[Sequence[str]], owner: str
    ):
        """Built before the first step. names: of the parameters of each group. owner: names the optimizer in errors."""
        self._optimizer, self._schedule, self._names, self._owner = optimizer, schedule, names, owner
        self._built = copy.deepcopy(self._groups())
        self._schedule_built = copy.deepcopy(schedule.state_dict())
        self._new: list[str] = []

    def _groups(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        found = [{key: v for key, v in group.items() if key not in ("params", "param_names")} for group in groups]
        return list(plain_state(found, self._owner))

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of the settings. Raises ValueError for what it cannot hold."""
        return {
            **classes_of(self._optimizer, self._schedule),
            "names": [list(names) for names in self._names],
            "groups": self._groups(),
            "built": self._built,
            "schedule": self._schedule.state_dict(),
            "schedule_built": self._schedule_built,
        }

    def of_older(
        self, groups: Sequence[Mapping[str, Any]], schedule: Mapping[str, Any], ratio: float
    ) -> dict[str, Any]:
        """Returns the settings of a checkpoint that has them by place, and not as they were built.

        ratio: factor of `train.lr_scaling` now over that of the checkpoint.
        """
        built = [{k: v / ratio if k in _RATES else v for k, v in group.items()} for group in self._built]
        scheduled = self._schedule_built
        if ratio != 1 and "base_lrs" in scheduled:
            scheduled = {**scheduled, "base_lrs": [lr / ratio for lr in scheduled["base_lrs"]]}
        settings = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups]
        return {
            **self.state_dict(), "groups": settings, "built": built, "schedule": schedule, "schedule_built": scheduled,
        }  # fmt: skip

    def check_classes(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError if a checkpoint is of another class of optimizer or scheduler.

        saved: what `state_dict` returned.
        """
        now = classes_of(self._optimizer, self._schedule)
        check_classes({key: saved[key] for key in now}, now)

    def load_state_dict(self, saved: Iterable[Mapping[str, Any]], *, tells: bool = False) -> None:
        """Takes the settings of a checkpoint, and of what the user has changed the new ones.

        saved: what `state_dict` returned on the ranks, of which the first that has a parameter counts.
        tells: whether to log what has changed.
        Raises ValueError for groups that were divided in another way, and for settings that need a state.
        """
        sources = self._sources(saved)
        changed: list[str] = []
        for i, (group, source) in enumerate(zip(self._optimizer.param_groups, sources, strict=True)):
            if source is not None:
                then, before, now = source.saved["built"][source.at], source.saved["groups"][source.at], self._built[i]
                self._check_state(i, before, now)
                group.update(_merged_group(before, then, now))
                changed += [
                    f"{key} of {_listed(self._names[i])} was {then.get(key)!r}, is {now.get(key)!r}"
                    for key in sorted(then.keys() | now.keys())
                    if key != "initial_lr" and not _same(then.get(key), now.get(key))
                ]
        if known := [source for source in sources if source is not None]:
            # A group that is new has no item in the lists of the checkpoint: it is as it was built.
            before, then = (
                _aligned([source and source.saved[key] for source in sources], sources, known[0].saved[key], built)
                for key, built in (("schedule", self._schedule_built), ("schedule_built", self._schedule_built))
            )
            changed += _differences(then, self._schedule_built, type(self._schedule.scheduler).__name__)
            self._schedule.load_state_dict(_merged(before, then, self._schedule_built))
        if self._new:
            changed.append(f"the optimizer has no state of {_listed(sorted(self._new))}, which is new")
        if changed and tells:
            _log.warning("the run goes on with new settings: %s", "; ".join(changed))

    def _sources(self, saved: Iterable[Mapping[str, Any]]) -> list[_Source | None]:
        """Returns where each group is in the checkpoint; None for one whose parameters are all new."""
        places: dict[str, _Source] = {}
        first: Mapping[str, Any] | None = None
        wanted = {name for names in self._names for name in names}
        for found in saved:
            first = first or found
            for at, names in enumerate(found["names"]):
                for name in names:
                    places.setdefault(name, _Source(found, at))
            if wanted <= places.keys():
                break
        self._new = [name for name in wanted if name not in places]
        sources = []
        for i, names in enumerate(self._names):
            of_names = [places[name] for name in names if name in places]
            if not names and first is not None and i < len(first["names"]):  # a rank without elements of a group
                of_names = [_Source(first, i)]
            self._check_settings(i, of_names)
            sources.append(of_names[0] if of_names else None)
        return sources

    def _check_state(self, i: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Raises ValueError for a setting whose state the checkpoint does not have."""
        if isinstance(self._optimizer, torch.optim.SGD):  # which begins its momentum in any step
            return
        for key in _WITH_STATE:
            if now.get(key) and not before.get(key):
                raise ValueError(
                    f"cannot resume: {key} of {_listed(self._names[i])} was {before.get(key)!r}, and is {now[key]!r} "
                    "now, for which the optimizer needs a state from its first step on; restore it, or begin another "
                    "run with train.init_from"
                )

    def _check_settings(self, i: int, sources: Sequence[_Source]) -> None:
        """Raises ValueError if parameters of a group had different settings."""
        for other in sources[1:]:
            first = sources[0]
            settings, others = first.saved["groups"][first.at], other.saved["groups"][other.at]
            if (first.saved is not other.saved or first.at != other.at) and not _same(settings, others):
                raise ValueError(
                    f"{self._owner}: {_listed(self._names[i])} are one group now, and were in groups with other "
                    "settings when the checkpoint was saved; keep the groups, or begin another run with "
                    "train.init_from"
                )


def classes_of(optimizer: torch.optim.Optimizer, schedule: Schedule) -> dict[str, str]:
    """Returns the names of the classes of an optimizer and its scheduler."""
    return {"optimizer": type(optimizer).__name__, "scheduler": type(schedule.scheduler).__name__}


def check_classes(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises ValueError if the optimizer or the scheduler of a checkpoint is of another class."""
    for key, name in now.items():
        if before[key] != name:
            raise ValueError(
                f"cannot resume: the {key} was {_of_class(before[key])}, and is {_of_class(name)} now, whose state is "
                "another one; restore it, or begin another run with train.init_from"
            )


def _of_class(name: str) -> str:
    return "none" if name == "NoneType" else name


def _merged_group(saved: Mapping[str, Any], then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a group: a changed rate changes the scheduled rate by the same factor."""
    found: dict[str, Any] = _merged(saved, then, now)
    if "lr" in then and not _same(then["lr"], now["lr"]) and "lr" in saved:
        is_scheduled = not _same(saved["lr"], then["lr"]) and bool(then["lr"])
        found["lr"] = saved["lr"] * (now["lr"] / then["lr"]) if is_scheduled else now["lr"]
    return found


def _merged(saved: Any, then: Any, now: Any) -> Any:
    """Returns a saved value, with what differs between `then`, as it was built before, and `now`."""
    if isinstance(saved, dict) and isinstance(now, dict):
        then = then if isinstance(then, dict) else {}
        kept = {
            key: _merged(value, then.get(key, now.get(key)), now[key]) if key in now else value
            for key, value in saved.items()
            if key in now or key not in then  # else the user has removed it
        }
        return {**kept, **{key: value for key, value in now.items() if key not in saved}}
    are_lists = all(isinstance(value, list | tuple) for value in (saved, then, now))
    if are_lists and len(saved) == len(then) == len(now):
        return type(now)(_merged(*parts) for parts in zip(saved, then, now, strict=True))
    return saved if _same(then, now) else now


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(*parts) for parts in zip(a, b, strict=True))
    return bool(a == b or (a != a and b != b))


def _aligned(states: Sequence[Any], sources: Sequence[_Source | None], first: Any, built: Any) -> Any:
    """Returns the state of a scheduler in which the lists by group have the groups of this rank.

    states: the state that each group is from; None for a new group, which is as `built`.
    """
    if isinstance(first, dict):
        found = {}
        for key, value in first.items():
            parts = [state and state.get(key) for state in states]
            own = built.get(key) if isinstance(built, dict) else None
            if key in _BY_GROUP and isinstance(value, list):
                found[key] = [
                    part[source.at] if source is not None else own[i] if own else None
                    for i, (part, source) in enumerate(zip(parts, sources, strict=True))
                ]
            else:
                found[key] = _aligned(parts, sources, value, own)
        return found
    if isinstance(first, list) and all(isinstance(part, dict) for part in first):  # those of SequentialLR
        own = built if isinstance(built, list) and len(built) == len(first) else [None] * len(first)
        return [
            _aligned([state and state[k] for state in states], sources, part, own[k]) for k, part in enumerate(first)
        ]
    return first


def _differences(then: Any, now: Any, name: str) -> list[str]:
    """Returns what the user has changed of a scheduler, in words."""
    if not isinstance(then, dict) or not isinstance(now, dict):
        return []
    return [
        f"{key.lstrip('_')} of {name} was {then.get(key)!r}, is {now.get(key)!r}"
        for key in sorted(then.keys() | now.keys())
        if key not in _BY_GROUP and not isinstance(then.get(key), list) and not _same(then.get(key), now.get(key))
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
