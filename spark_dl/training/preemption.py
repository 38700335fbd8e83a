"""Ranks whose host is taken away: SIGTERM ends a rank after all ranks have saved a checkpoint at the same step.

The ranks learn of it where they reduce their losses for a log line (`step_times.py`), so it costs no message. The rank
then ends by SIGTERM as it would have without a checkpoint, which the driver does not count as a failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

from spark_dl.config import Config
from spark_dl.gather import gather_json
from spark_dl.launch.failures.errors import OtherRankError
from spark_dl.launch.rank import sigterm
from spark_dl.world import World


class Preemption:
    """Whether this rank has got SIGTERM, and whether any rank has."""

    def __init__(self, notice: sigterm.Notice, world: World):
        self._notice, self._world = notice, world
        self.is_due = False
        """Whether all ranks end after a checkpoint of this step. All ranks know it since the last log line."""

    @property
    def must_end(self) -> bool:
        """Whether this rank has got SIGTERM."""
        return self._notice.received

    def end(self, checkpoint: str | None) -> NoReturn:
        """Ends the ranks that have got SIGTERM, and raises OtherRankError on the others. Collective.

        Args:
            checkpoint: URL of the last one, which is committed. No rank ends before all ranks know that it is.
        """
        ranks = gather_json({"host": self._world.host, "must_end": self.must_end})
        if self.must_end:
            sigterm.end(self._world.report)
        ended = [f"rank {rank} on {about['host']}" for rank, about in enumerate(ranks) if about["must_end"]]
        raise OtherRankError(f"{', '.join(ended)} was ended by SIGTERM; the last checkpoint is {checkpoint}")


@contextlib.contextmanager
def awaited(config: Config, world: World, *, on_driver: bool) -> Iterator[Preemption]:
    """Lets this rank go on after SIGTERM in the block, for at most `launch.preemption_grace_s`.

    Args:
        on_driver: whether this process is a driver that trains for all ranks. SIGTERM ends it at once, and so it ends a
            rank of trials, as a trial does not go on from its checkpoint.
    """
    at_once = on_driver or world.ends_run is not None
    with sigterm.postponed(0.0 if at_once else config.launch.preemption_grace_s) as notice:
        yield Preemption(notice, world)


def never(world: World) -> Preemption:
    """Returns the preemption of a loop that SIGTERM ends at once, such as that of a driver."""
    return Preemption(sigterm.Notice(), world)
