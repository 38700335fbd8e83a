import pytest

from spark_dl.parallel.cost.cost import Network
from spark_dl.parallel.mesh.dims import Dims
from spark_dl.parallel.mesh.planner.records import Cluster, Links

WITHIN, BETWEEN = Network(1e-6, 1e10), Network(1e-4, 1e9)


def links(dims, hosts):
    return Links(Dims(*dims), Cluster(Dims(*dims).num_ranks, hosts, WITHIN, BETWEEN))


def shares(networks):
    """How many share a host's link; 0 within a host."""
    return [0 if each == WITHIN else round(BETWEEN.bytes_per_s / each.bytes_per_s) for each in networks]


@pytest.mark.parametrize(
    ("dims", "hosts", "data", "pipeline"),
    [
        ((1, 4, 1), 1, [0], []),
        ((1, 4, 1), 4, [1], []),  # one ring
        ((1, 4, 2), 4, [2], []),  # two rings, one for each tensor rank
        ((1, 8, 1), 2, [1], []),  # a ring over 2 x 4 ranks leaves each host once
        ((4, 1, 1), 2, [0, 0, 0, 0], [0, 1, 0]),
        ((2, 4, 1), 2, [0, 0], [4]),  # the stages are on different hosts: 4 ranks send at the same time
        ((2, 2, 2), 4, [2, 2], [2]),
        ((4, 2, 1), 2, [0, 0, 0, 0], [0, 2, 0]),
        ((2, 3, 1), 3, [1, 1], [2]),  # hosts with ranks of both stages
    ],
)
def test_groups_that_cross_hosts_share_their_links(dims, hosts, data, pipeline):
    found = links(dims, hosts)
    assert shares(found.data) == data
    assert shares(found.pipeline) == pipeline
