"""The driver's side of a job of trials: gives trainings to groups of ranks, and collects their outcomes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from spark_dl.cli.progress import EVENTS, OnEvent, ProgressDisplay
from spark_dl.launch.barrier import run_barrier
from spark_dl.launch.failures.root_cause import root_cause
from spark_dl.spec import Run
from spark_dl.trials import rank
from spark_dl.trials.rank import Order, Spec


class Trials(Protocol):
    """The trainings of a job, in the order in which groups get them. All calls are in the driver's thread."""

    def next(self) -> Order | None:
        """Returns the next training; None if there is none now."""

    def ends(self, order: Order, entry: Mapping[str, Any]) -> bool:
        """Whether a training ends after an epoch, of which `entry` is the line in its history."""

    def finish(self, order: Order, result: Mapping[str, Any] | None, error: BaseException | None) -> None:
        """Takes the result of a training, or its error."""


def run_trials(
    spark: Any, run: Run, spec: Spec, trials: Trials, *, num_groups: int, on_event: Callable[[Mapping[str, Any]], None]
) -> None:
    """Runs trainings on groups of `launch.num_ranks` ranks in one barrier job. Called on the driver.

    Raises as `run_barrier` does, but not for a training that fails.
    """
    num_ranks = run.config.launch.num_ranks
    launch = dataclasses.replace(run.config.launch, num_ranks=num_ranks * num_groups)
    hand_out = HandOut(trials, num_ranks)
    call = functools.partial(rank.run_trials, run, spec)
    run_barrier(spark, call, launch=launch, on_event=on_event, on_ask=hand_out.answer)


def show_trials(shown: ProgressDisplay, functions: Sequence[OnEvent] = ()) -> OnEvent:
    """Returns a function that shows the ends of trials and the output of ranks, and calls the user's functions.

    The steps of trials that are trained at the same time would take turns in one bar.
    """

    def pass_on(event: Mapping[str, Any]) -> None:
        if event["kind"] in ("output", "trial"):
            shown.show(event)
        if event["kind"] in (*EVENTS, "trial"):
            for function in functions:
                function(event)

    return pass_on


class HandOut:
    """Answers the questions of the ranks. A group has the ranks of the job from its number times `num_ranks` on.

    A group gets its next training when all its ranks have left the last one.
    """

    def __init__(self, trials: Trials, num_ranks: int):
        self._trials, self._num_ranks = trials, num_ranks
        self._orders: dict[int, Order] = {}
        """The training of each group that has one."""
        self._asking: dict[int, list[Mapping[str, Any]]] = {}
        """The questions of ranks that wait for the others of their group."""

    def answer(self, question: Mapping[str, Any]) -> dict[int, Any]:
        """Returns answers by task, to this question and to earlier ones. Called in the driver's thread."""
        group = question["rank"] // self._num_ranks
        if question["what"] == "epoch":
            return {question["task"]: self._trials.ends(self._orders[group], question["entry"])}
        asking = self._asking.setdefault(group, [])
        asking.append(question)
        if len(asking) < self._num_ranks:
            return {}
        del self._asking[group]
        if group in self._orders:
            self._finish(self._orders.pop(group), asking)
        return dict.fromkeys((q["task"] for q in asking), self._next(group))

    def _next(self, group: int) -> Any:
        order = self._trials.next()
        if order is not None:
            self._orders[group] = order
            return order.to_plain()
        # The ranks leave together, as rank 0 has the store of all of them.
        return "wait" if self._orders else "end"

    def _finish(self, order: Order, outcomes: Sequence[Mapping[str, Any]]) -> None:
        failures = [{"kind": "failed", "task": o["task"], **o["failed"]} for o in outcomes if "failed" in o]
        if failures:
            self._trials.finish(order, None, root_cause(failures, {}, None, {}))
        else:
            self._trials.finish(order, next(o["result"] for o in outcomes if "result" in o), None)
