"""The learning rate of each step, and the settings of an optimizer and its scheduler in checkpoints.

The scheduler is one of `torch.optim`, with a linear warm-up.

Both are built anew when a run resumes. A setting that the code gives as it gave it before goes on as the checkpoint
has it, such as a rate that a scheduler has lowered. One that the code gives in another way the user has changed, and
the new value counts. Groups are found again by the names of their parameters, never by their place: a set has another
order in each process, and each stage of a pipeline has groups of its own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from spark_dl.config import Config
from spark_dl.optimization import Optimization, class_name
from spark_dl.parallel.modules import plain_name
from spark_dl.parallel.trainable import sample_optimizer
from spark_dl.rundir.checkpoint_files import plain_state

_log = logging.getLogger("spark_dl")
_RATES = ("lr", "initial_lr")
_BY_GROUP = (
    "base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas",
)  # fmt: skip
"""What torch's schedulers hold in a list with an item for each group."""
_WITH_STATE = ("amsgrad", "centered", "momentum")
"""Settings of torch's optimizers for which they have a further state in each parameter, from its first step on."""
_SHOWN = 4
RUN = "run"
"""In `train.scheduler_args`: how often the run steps the scheduler."""
_LENGTH_OF = {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps"}
"""Arguments without a default that are the length of a run."""


def total_steps(config: Config, steps_per_epoch: int) -> int:
    """Returns the number of steps of a run."""
    total = config.train.epochs * steps_per_epoch
    return min(total, config.train.max_steps or total)


def with_length(config: Config, total_steps: int, steps_per_epoch: int) -> Config:
    """Returns the settings with the length of the run in the arguments of the scheduler, where they ask for it.

    Args:
        total_steps: of the run.
    """
    train = config.train
    args = dict(train.scheduler_args)
    name = _LENGTH_OF.get(train.scheduler or "")
    if name is not None and not args.keys() & {name, "epochs", "steps_per_epoch"}:
        args[name] = RUN
    length = max(1, total_steps if train.scheduler_interval == "step" else total_steps // steps_per_epoch)
    args = {key: length if value == RUN else value for key, value in args.items()}
    return dataclasses.replace(config, train=dataclasses.replace(train, scheduler_args=args))


class RateSchedule:
    """A scheduler and a linear warm-up. The warm-up is a factor during the step, so it works with any scheduler.

    Args:
        own: the scheduler of `ModelSpec.optimizer`, instead of that of the settings.
    """

    def __init__(self, optimizer: Optimizer, config: Config, *, own: Optimization | None = None):
        self._optimizer, self._train = optimizer, config.train
        self._interval: str = self._train.scheduler_interval
        self._frequency = 1
        self._monitor: str | None = None
        self.scheduler: Any = None
        if own is not None and own.scheduler is not None:
            self.scheduler = own.scheduler
            self._interval, self._frequency, self._monitor = own.interval, own.frequency, own.monitor
        elif self._train.scheduler is not None:
            cls = getattr(lr_scheduler, self._train.scheduler)
            try:
                self.scheduler = cls(optimizer, **self._train.scheduler_args)
            except (TypeError, ValueError, ArithmeticError) as error:
                raise ValueError(
                    f"train.scheduler_args: {cls.__name__} does not take {self._train.scheduler_args}: {error}"
                ) from error

    @contextlib.contextmanager
    def warm(self, global_step: int) -> Iterator[float]:
        """Sets the learning rates of this step for the block. Yields the rate of the first parameter group."""
        groups = self._optimizer.param_groups
        for group in groups:
            if isinstance(group["lr"], np.generic):  # as of a LambdaLR with np.cos; a resumed run has numbers, too
                group["lr"] = group["lr"].item()
        full = [group["lr"] for group in groups]
        factor = min(1.0, (global_step + 1) / self._train.warmup_steps) if self._train.warmup_steps else 1.0
        for group, lr in zip(groups, full, strict=True):
            group["lr"] = lr * factor
        try:
            yield float(groups[0]["lr"])
        finally:
            for group, lr in zip(groups, full, strict=True):
                group["lr"] = lr

    def end_step(self, step: int = 1) -> None:
        """Must be called after every optimizer step. step: number of steps of the epoch so far."""
        if self.scheduler is not None and self._interval == "step" and step % self._frequency == 0:
            self.scheduler.step()

    def calls(self, total_steps: int, steps_per_epoch: int) -> int:
        """Returns how often a run of so many steps steps the scheduler."""
        epochs, rest = divmod(total_steps, steps_per_epoch)
        if self._interval == "epoch":
            return epochs // self._frequency
        return epochs * (steps_per_epoch // self._frequency) + rest // self._frequency

    def end_epoch(self, train_loss: float, metrics: Mapping[str, Any] | None = None, *, epoch: int = 1) -> None:
        """Must be called after every epoch. metrics: of the validation rows. epoch: number of epochs so far.

        Raises ValueError if the metrics lack the value that the scheduler monitors.
        """
        if self.scheduler is None or self._interval != "epoch" or epoch % self._frequency:
            return
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(self._monitored({"train_loss": train_loss, **(metrics or {})}))
        else:
            self.scheduler.step()

    def _monitored(self, values: Mapping[str, Any]) -> float:
        if self._monitor is None:
            return float(values.get("loss", values["train_loss"]))
        monitored = values.get(self._monitor)
        if not isinstance(monitored, int | float):
            numbers = [name for name, value in values.items() if isinstance(value, int | float)]
            raise ValueError(
                f"spec.optimizer: the scheduler monitors {self._monitor!r}, expected one of {numbers}, the numbers of "
                "this epoch; add a metric of this name, or monitor one of these"
            )
        return float(monitored)

    def check_without_validation(self) -> None:
        """Raises ValueError if the scheduler monitors a value of validation rows. Called if there are none."""
        if self._monitor not in (None, "train_loss"):
            raise ValueError(
                f"spec.optimizer: the scheduler monitors {self._monitor!r}, which needs validation rows; set "
                "train.validation_fraction, pass validation, or monitor 'train_loss'"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint can hold of the scheduler. Raises ValueError if it has other objects."""
        if self.scheduler is None:
            return {}
        owner = f"train.scheduler: {type(self.scheduler).__name__}"
        return plain_state(self.scheduler.state_dict(), owner, of_scheduler=True)  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the scheduler."""
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state)


def check_optimization(config: Config) -> None:
    """Builds the configured optimizers and scheduler for small weights, and takes a step. Called on the driver.

    Raises ValueError, with the key, for arguments that torch refuses, so that ranks need not start to find them.
    """
    optimizer = sample_optimizer(config, config.launch.num_ranks)
    scheduler = RateSchedule(optimizer, with_length(config, 1000, 10)).scheduler  # a length of no run
    optimizer.step()  # without a gradient it changes nothing
    if scheduler is None:
        return
    try:
        scheduler.step(*([0.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    except Exception as error:
        name, args = type(scheduler).__name__, config.train.scheduler_args
        raise ValueError(f"train.scheduler_args: {name} fails with {args}: {type(error).__name__}: {error}") from error


def group_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Returns the names of the parameters of each group; the place of one that is not the model's."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return [
        [names.get(id(parameter), f"{i}/{k}") for k, parameter in enumerate(group["params"])]
        for i, group in enumerate(optimizer.param_groups)
    ]


def by_name(state: Mapping[int, Any], before: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> dict[int, Any]:
    """Returns the `state` of an optimizer's state dict for parameters that have other places now.

    Args:
        before, now: names of the parameters of each group. The state of a parameter that is gone is left out.
    """
    places = {name: i for i, name in enumerate(name for group in before for name in group)}
    names = [name for group in now for name in group]
    pairs = [(i, places[name]) for i, name in enumerate(names) if name in places]
    return {i: state[place] for i, place in pairs if place in state}


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
        self, optimizer: torch.optim.Optimizer, schedule: RateSchedule, names: Sequence[Sequence[str]], owner: str
    ):
        """Built before the first step. names: of the parameters of each group. owner: names the optimizer in errors."""
        self._optimizer, self._schedule, self._names, self._owner = optimizer, schedule, names, owner
        self._built = copy.deepcopy(self._groups())
        self._schedule_built = copy.deepcopy(schedule.state_dict())
        self._new: list[str] = []

    def _groups(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        described = [{key: v for key, v in group.items() if key not in ("params", "param_names")} for group in groups]
        return list(plain_state(described, self._owner))

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

        Args:
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

        Args:
            saved: what `state_dict` returned.
        """
        now = classes_of(self._optimizer, self._schedule)
        check_classes({key: saved[key] for key in now}, now)

    def load_state_dict(self, saved: Iterable[Mapping[str, Any]], *, tells: bool = False) -> None:
        """Takes the settings of a checkpoint, and of what the user has changed the new ones.

        Args:
            saved: what `state_dict` returned on the ranks, of which the first that has a parameter counts.
            tells: whether to log what has changed.

        Raises:
            ValueError: For groups that were divided in another way, and for settings that need a state.
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
        for source in saved:
            first = first or source
            for at, names in enumerate(source["names"]):
                for name in names:
                    places.setdefault(name, _Source(source, at))
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


def classes_of(optimizer: torch.optim.Optimizer, schedule: RateSchedule) -> dict[str, str]:
    """Returns the names of the classes of an optimizer and its scheduler."""
    return {"optimizer": class_name(optimizer), "scheduler": type(schedule.scheduler).__name__}


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
    group: dict[str, Any] = _merged(saved, then, now)
    if "lr" in then and not _same(then["lr"], now["lr"]) and "lr" in saved:
        is_scheduled = not _same(saved["lr"], then["lr"]) and bool(then["lr"])
        group["lr"] = saved["lr"] * (now["lr"] / then["lr"]) if is_scheduled else now["lr"]
    return group


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

    Args:
        states: the state that each group is from; None for a new group, which is as `built`.
    """
    if isinstance(first, dict):
        aligned = {}
        for key, value in first.items():
            parts = [state and state.get(key) for state in states]
            as_built = built.get(key) if isinstance(built, dict) else None
            if key in _BY_GROUP and isinstance(value, list):
                aligned[key] = [
                    part[source.at] if source is not None else as_built[i] if as_built else None
                    for i, (part, source) in enumerate(zip(parts, sources, strict=True))
                ]
            else:
                aligned[key] = _aligned(parts, sources, value, as_built)
        return aligned
    if isinstance(first, list) and all(isinstance(part, dict) for part in first):  # those of SequentialLR
        as_built = built if isinstance(built, list) and len(built) == len(first) else [None] * len(first)
        return [
            _aligned([state and state[k] for state in states], sources, part, as_built[k])
            for k, part in enumerate(first)
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
