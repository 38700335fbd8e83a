"""`TuneResult`: the trials of `spark_dl.tune`."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from spark_dl.config import Config
from spark_dl.driver import TrainResult
from spark_dl.rundir import metrics

if TYPE_CHECKING:
    import optuna

State = Literal["complete", "pruned", "failed"]
Direction = Literal["minimize", "maximize"]


@dataclass(frozen=True)
class TrialResult:
    """One trial of `tune`."""

    number: int
    """Number of the trial in the study."""
    state: State
    """`pruned`: the pruner of the study ended it. `failed`: it has an `error`."""
    values: Mapping[str, Any]
    """What `suggest` returned: settings by key, and arguments of the function that returns the model."""
    value: float | None
    """The metric of the last epoch; with folds, its mean. Of a pruned trial, the last one that was reported."""
    config: Config | None = field(repr=False)
    """The settings of the trial, for `spark_dl.train`; None if they are invalid."""
    results: tuple[TrainResult, ...] = field(repr=False)
    """The result of the training; with folds, one for each fold that was trained."""
    error: str
    seconds: float
    """From the choice of the settings to the end of the training."""

    @property
    def result(self) -> TrainResult | None:
        """The first of `results`; None without any."""
        return self.results[0] if self.results else None


@dataclass(frozen=True)
class TuneResult:
    """The result of `tune`. In a notebook it is shown as a table of the trials."""

    run_dir: str
    metric: str
    direction: Direction
    trials: tuple[TrialResult, ...] = field(repr=False)
    """The trials of this run, by number, with those of earlier attempts."""
    study: optuna.Study = field(repr=False)
    """Optuna's study, for its plots and data frames."""
    seconds: float
    """Duration of the call."""

    @property
    def best(self) -> TrialResult:
        """The best trial that is complete. Raises ValueError if there is none."""
        complete = [trial for trial in self.trials if trial.state == "complete" and trial.value is not None]
        if not complete:
            raise ValueError(f"none of {len(self.trials)} trials is complete; see `trials`")
        sign = 1 if self.direction == "minimize" else -1
        return min(complete, key=lambda trial: sign * (trial.value or 0.0))

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for trial in self.trials for name in trial.values))
        best = self.best.number if any(trial.state == "complete" for trial in self.trials) else None
        head = ["trial", "state", self.metric, *names, "seconds"]
        rows = [_row(trial, names, is_best=trial.number == best) for trial in self.trials]
        cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
        caption = f"{len(self.trials)} trials of {self.run_dir} ({self.direction} {self.metric}, {self.seconds:.1f} s)"
        return (
            f'<div style="overflow-x:auto"><table><caption>{html.escape(caption)}</caption>'
            f"<thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        )


def _row(trial: TrialResult, names: Sequence[str], *, is_best: bool) -> str:
    value = "" if trial.value is None else f"{trial.value:.6g}"
    cells = [
        str(trial.number), "best" if is_best else trial.state, value,
        *(_text(trial.values.get(name, "")) for name in names), f"{trial.seconds:.1f}",
    ]  # fmt: skip
    style = ' style="font-weight:bold"' if is_best else ""
    title = f' title="{html.escape(trial.error)}"' if trial.error else ""
    return f"<tr{style}{title}>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def history_of(run_dir: str) -> list[dict[str, Any]]:
    """Returns the history of a training, as in its `TrainResult`, from its run folder. Called on the driver."""
    lines = [line for line in metrics.read_metrics(run_dir) if line["kind"] == "epoch"]
    return [{name: line[name] for name in ("epoch", "train_loss", "metrics")} for line in lines]
