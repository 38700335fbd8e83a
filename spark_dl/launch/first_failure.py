"""The failure that the others follow from, told by the ranks to each other: under torchrun, where no driver finds it.

A rank that fails by itself leaves its error in the store before it leaves the process group. One that only loses it
fails with that error then, not with the backend's words about a closed connection.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from spark_dl.launch.failure import follows

if TYPE_CHECKING:
    from spark_dl.world import World

_WAIT_S = 2.0
"""How long a rank waits for the error of another one, and then for all others to have left or to know it too."""
_FIRST = "failed/first"


def tell(world: World, error: BaseException) -> None:
    """Leaves the error of a rank that failed by itself for the others. Before the rank leaves the process group."""
    if not follows(error):
        told = json.dumps({"rank": world.rank, "host": world.host, "error": f"{type(error).__name__}: {error}"})
        _bounded(lambda: world.store.compare_set(_FIRST, "", told))


def raise_told(world: World, error: BaseException) -> None:
    """Raises RuntimeError with what another rank has told, on a rank that has only lost it. After it left the group.

    Returns, on other ranks too, once all ranks have left, or some seconds later: the store may go with this rank, and
    torchrun ends all other ranks when the first one ends.
    """
    wait = datetime.timedelta(seconds=_WAIT_S)
    found: list[bytes] = []

    def listen() -> None:
        world.store.wait([_FIRST], wait)
        found.append(world.store.get(_FIRST))

    def leave() -> None:
        world.store.set(f"left/{world.rank}", "1")
        world.store.wait([f"left/{rank}" for rank in range(world.world_size)], wait)

    if follows(error):
        _bounded(listen)
    _bounded(leave)
    if found:
        first = json.loads(found[0])
        raise RuntimeError(f"rank {first['rank']} on {first['host']} failed: {first['error']}") from error


def _bounded(call: Callable[[], object]) -> None:
    """Does without what the store's host does not answer: not each call of a store has a timeout that holds."""

    def attempt() -> None:
        with contextlib.suppress(Exception):  # nobody has told anything, not all ranks leave, or the store is gone
            call()

    thread = threading.Thread(target=attempt, name="spark_dl first failure", daemon=True)
    thread.start()
    thread.join(_WAIT_S + 1.0)
