"""The failure that the others follow from, told by the ranks to each other: under torchrun, where no driver finds it.

A rank that fails by itself leaves its error in the store before it leaves the process group. One that only loses it
fails with that error then, not with the backend's words about a closed connection.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from typing import TYPE_CHECKING

from spark_dl.launch.failure import follows

if TYPE_CHECKING:
    from spark_dl.launch.rendezvous import World

_WAIT = datetime.timedelta(seconds=2)
"""How long a rank waits for the error of another one, and then for all others to know it too."""
_FIRST = "failed/first"


def tell(world: World, error: BaseException) -> None:
    """Leaves the error of a rank that failed by itself for the others. Before the rank leaves the process group."""
    if not follows(error):
        told = json.dumps({"rank": world.rank, "host": world.host, "error": f"{type(error).__name__}: {error}"})
        with contextlib.suppress(Exception):  # the store goes with its host
            world.store.compare_set(_FIRST, "", told)


def raise_told(world: World, error: BaseException) -> None:
    """Raises RuntimeError with what another rank has told, on a rank that has only lost it. After it left the group.

    Returns, on other ranks too, once all ranks have failed, or some seconds later: the store may go with this rank, and
    torchrun ends all other ranks when the first one ends.
    """
    first = None
    with contextlib.suppress(Exception):  # nobody has told anything, or the store is gone
        if follows(error):
            world.store.wait([_FIRST], _WAIT)
            first = json.loads(world.store.get(_FIRST))
    with contextlib.suppress(Exception):  # not all of them fail
        world.store.set(f"failed/{world.rank}", "1")
        world.store.wait([f"failed/{rank}" for rank in range(world.world_size)], _WAIT)
    if first:
        raise RuntimeError(f"rank {first['rank']} on {first['host']} failed: {first['error']}") from error
