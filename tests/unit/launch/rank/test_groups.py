"""The place of a rank in its group."""

import pytest
import torch

from spark_dl.launch.rank.rendezvous import group_of
from spark_dl.world import World

HOSTS = ("a", "a", "a", "b", "b", "c")


def places(num_ranks):
    """Group, rank, world size, local rank, local world size of each rank."""
    found = []
    for rank, host in enumerate(HOSTS):
        world = World(rank, len(HOSTS), HOSTS[:rank].count(host), HOSTS.count(host), host, torch.device("cpu"), None)
        group = group_of(world, HOSTS, num_ranks)
        own = group.world
        assert group.hosts == HOSTS[group.number * num_ranks : (group.number + 1) * num_ranks]
        found.append((group.number, own.rank, own.world_size, own.local_rank, own.local_world_size))
    return found


@pytest.mark.parametrize(("num_ranks", "expected"), [
    (1, [(n, 0, 1, 0, 1) for n in range(6)]),
    (2, [(0, 0, 2, 0, 2), (0, 1, 2, 1, 2), (1, 0, 2, 0, 1), (1, 1, 2, 0, 1), (2, 0, 2, 0, 1), (2, 1, 2, 0, 1)]),
    (3, [(0, 0, 3, 0, 3), (0, 1, 3, 1, 3), (0, 2, 3, 2, 3), (1, 0, 3, 0, 2), (1, 1, 3, 1, 2), (1, 2, 3, 0, 1)]),
])  # fmt: skip
def test_a_group_has_consecutive_ranks_and_counts_those_on_a_host_anew(num_ranks, expected):
    assert places(num_ranks) == expected
