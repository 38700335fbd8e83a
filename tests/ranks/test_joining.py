"""How ranks come together: none of them begins before all are connected."""

import time
from unittest import mock

import pytest
import torch.distributed as dist

from spark_dl import Launch
from spark_dl.launch.rank import rendezvous
from tests.ranks.launcher import run_ranks


def joined_at(late):
    """When this rank was connected, and when it began. Rank `late` is connected half a second after the others."""
    init, connected = dist.init_process_group, []

    def connect(*args, **options):
        init(*args, **options)
        time.sleep(0.5 * (options["rank"] == late))
        connected.append(time.monotonic())  # the same clock for all processes

    launch = Launch(start_timeout_s=30, collective_timeout_s=30)
    with mock.patch.object(dist, "init_process_group", connect), rendezvous.join(launch):
        return connected[0], time.monotonic()


@pytest.mark.parametrize(("world_size", "late"), [(2, 0), (2, 1), (3, 1)])
def test_a_rank_begins_when_all_are_connected(world_size, late):
    """Else one that fails at once closes connections that others are making, whose errors then hide its own."""
    found = run_ranks(joined_at, world_size, late)
    assert min(began for _, began in found) >= max(connected for connected, _ in found)
