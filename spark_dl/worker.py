"""The worker story: what one rank does, from joining the others to leaving them.

The same entry runs in a barrier task, which `driver.py` starts, and under torchrun, where a script calls `main(run)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spark_dl.config import Launch
from spark_dl.evaluate import evaluate
from spark_dl.launch import rendezvous
from spark_dl.launch.barrier import RankResult
from spark_dl.loop import train
from spark_dl.spec import Run

Report = Callable[[Mapping[str, Any]], None]

LOOPS: dict[str, Callable[..., dict[str, Any]]] = {"train": train, "evaluate": evaluate}


def main(run: Run, *, task: str = "train", report: Report | None = None) -> RankResult:
    """Trains (or evaluates) as one of the ranks of a run. Collective: called on every rank."""
    with rendezvous.join(run.config.launch, report=report) as world:
        return RankResult(world.rank, LOOPS[task](run, world))


def call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], launch: Launch, report: Report | None = None
) -> RankResult:
    """Calls a user's function as one of the ranks. Collective: called on every rank.

    The environment is as under torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR ...), and the function makes the
    process group itself, if it needs one: `torch.distributed.init_process_group()`.
    """
    with rendezvous.join(launch, init_group=False, report=report) as world:
        return RankResult(world.rank, fn(*args, **kwargs))
