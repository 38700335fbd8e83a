"""Which ranks have which experts, and which settings do not fit."""

import pytest

from spark_dl import Mesh
from spark_dl.parallel.mesh.dims import mesh_of
from tests.builders.settings import make_config


def test_consecutive_data_ranks_have_different_experts():
    dims = mesh_of(8, experts=2, replicas=2, shard=True)
    assert dims.expert_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert dims.expert_replica_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert dims.expert_shard_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert dims.replica_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_shards_of_experts_divide_what_the_ranks_with_the_same_experts_have():
    for data in range(1, 17):
        for experts in (n for n in range(1, data + 1) if data % n == 0):
            for replicas in (n for n in range(1, data + 1) if data % n == 0 and (data // n) % experts == 0):
                dims = mesh_of(data * 2, tensor=2, experts=experts, replicas=replicas, shard=True)
                for shards in dims.expert_shard_groups():
                    (same,) = [set(ranks) for ranks in dims.expert_replica_groups() if shards[0] in ranks]
                    assert len(shards) * replicas == len(same)
                    others = [set(ranks) for ranks in dims.replica_groups() if set(ranks) & set(shards)]
                    assert set().union(*others) == same


@pytest.mark.parametrize(("options", "message"), [
    ({"experts": 3}, r"parallel.experts: expected a divisor of the number of data ranks, .* = 4, found 3"),
    ({"experts": 4, "tensor": 2}, r"parallel.experts: .* = 2, found 4"),
    ({"experts": 4, "replicas": 2, "zero_stage": 1}, r"parallel.experts: .* / parallel.replicas = 4 / 2 = 2, found 4"),
    ({"experts": 2, "zero_stage": 3}, r"parallel.zero_stage: .* 0, 1 or 2 with parallel.experts above 1, .* found 3"),
])  # fmt: skip
def test_sizes_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        make_config(num_ranks=4, parallel=Mesh(**options))
