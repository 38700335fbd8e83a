"""The root cause of a failure under torchrun, which the ranks exchange among themselves, as there is no driver.

A rank with an error of its own writes it to the store before it leaves the process group. Ranks that lose their
connection to it raise that error instead of the backend's error about a closed connection.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from spark_dl.launch.failures.describe import is_secondary

if TYPE_CHECKING:
    from spark_dl.world import World

_WAIT_S = 2.0
"""How long a rank waits for the error of another rank, and then for all other ranks to leave."""
_FIRST = "failed/first"


def publish(world: World, error: BaseException) -> None:
    """Writes an error to the store, unless it follows from another rank's. Called before the rank leaves the group."""
    if not is_secondary(error):
        content = json.dumps({"rank": world.rank, "host": world.host, "error": f"{type(error).__name__}: {error}"})
        _bounded(lambda: world.store.compare_set(_FIRST, "", content))


def raise_published(world: World, error: BaseException) -> None:
    """Raises RuntimeError with the first error of another rank, if `error` follows from it.

    Called after the rank has left the process group. First waits some seconds for all ranks to leave: the store can end
    with this rank, and torchrun ends all ranks when the first rank ends.
    """
    wait = datetime.timedelta(seconds=_WAIT_S)
    found: list[bytes] = []

    def listen() -> None:
        world.store.wait([_FIRST], wait)
        found.append(world.store.get(_FIRST))

    def leave() -> None:
        world.store.set(f"left/{world.rank}", "1")
        world.store.wait([f"left/{rank}" for rank in range(world.world_size)], wait)

    if is_secondary(error):
        _bounded(listen)
    _bounded(leave)
    if found:
        first = json.loads(found[0])
        raise RuntimeError(f"rank {first['rank']} on {first['host']} failed: {first['error']}") from error


def _bounded(call: Callable[[], object]) -> None:
    """Calls a function of the store with a time limit, as not all of them respect a timeout. Ignores errors."""

    def attempt() -> None:
        with contextlib.suppress(Exception):  # no error in the store, not all ranks have left, or the store has ended
            call()

    thread = threading.Thread(target=attempt, name="spark_dl first failure", daemon=True)
    thread.start()
    thread.join(_WAIT_S + 1.0)
