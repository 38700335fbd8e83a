import itertools

import pytest

from spark_dl.parallel.mesh.dims import Dims, Place, mesh_of


def grid(pipeline):
    for data, tensor in itertools.product((1, 2, 4, 6), (1, 2, 4)):
        for experts, shards in itertools.product((1, 2, 3, 6), (1, 2, 4)):
            if data % experts == 0 and data % shards == 0 and (shards == 1 or shards % experts == 0):
                yield Dims(pipeline, data, tensor, experts=experts, shards=shards)


GRID = pytest.mark.parametrize("pipeline", [1, 2, 3, 4])
KINDS = {
    "tensor_groups": ("pipeline", "data"),
    "data_groups": ("pipeline", "tensor"),
    "pipeline_groups": ("data", "tensor"),
    "model_groups": ("data",),
}
"""What the ranks of a group have in common."""


@GRID
def test_places_and_ranks_are_inverse(pipeline):
    for dims in grid(pipeline):
        places = [Place(*at) for at in itertools.product(range(dims.pipeline), range(dims.data), range(dims.tensor))]
        assert [dims.place(rank) for rank in range(dims.num_ranks)] == places  # tensor innermost, pipeline outermost
        assert [dims.rank(place) for place in places] == list(range(dims.num_ranks))
        assert dims.model * dims.data == dims.num_ranks


@GRID
def test_groups_partition_the_ranks(pipeline):
    for dims in grid(pipeline):
        sizes = {
            "tensor_groups": dims.tensor, "data_groups": dims.data, "pipeline_groups": dims.pipeline,
            "model_groups": dims.model, "shard_groups": dims.shards, "replica_groups": dims.data // dims.shards,
            "expert_groups": dims.experts, "expert_replica_groups": dims.data // dims.experts,
            "expert_shard_groups": max(1, dims.shards // dims.experts),
        }  # fmt: skip
        for name, size in sizes.items():
            groups = getattr(dims, name)()
            assert sorted(rank for group in groups for rank in group) == list(range(dims.num_ranks)), name
            assert {len(group) for group in groups} == {size}, name
            assert all(group == sorted(group) for group in groups), name
            for group in groups:
                for axis in KINDS.get(name, ("pipeline", "tensor")):
                    assert len({getattr(dims.place(rank), axis) for rank in group}) == 1, name


@GRID
def test_tensor_ranks_are_consecutive_and_so_are_shards_and_experts_of_data_ranks(pipeline):
    for dims in grid(pipeline):
        for group in dims.tensor_groups():
            assert group == list(range(group[0], group[0] + dims.tensor))
        for groups in (dims.shard_groups(), dims.expert_groups()):
            for group in groups:
                data = [dims.place(rank).data for rank in group]
                assert data == list(range(data[0], data[0] + len(data)))


@GRID
def test_a_shard_group_and_a_replica_group_have_one_rank_in_common_at_most(pipeline):
    for dims in grid(pipeline):
        pairs = [(dims.shard_groups(), dims.replica_groups()), (dims.expert_groups(), dims.expert_replica_groups())]
        for ones, others in pairs:
            assert all(len({*one} & {*other}) <= 1 for one in ones for other in others)
        for data in dims.data_groups():
            within = [group for group in dims.shard_groups() if {*group} <= {*data}]
            assert len(within) == dims.data // dims.shards


@pytest.mark.parametrize("num_ranks", range(1, 17))
def test_data_ranks_are_what_pipeline_and_tensor_leave(num_ranks):
    for pipeline, tensor in itertools.product(range(1, 9), repeat=2):
        if num_ranks % (pipeline * tensor):
            with pytest.raises(ValueError, match=rf"launch.num_ranks={num_ranks}, found {pipeline} \* {tensor} = "):
                mesh_of(num_ranks, pipeline=pipeline, tensor=tensor)
        else:
            dims = mesh_of(num_ranks, pipeline=pipeline, tensor=tensor)
            assert (dims.pipeline, dims.tensor, dims.num_ranks) == (pipeline, tensor, num_ranks)
            assert (dims.experts, dims.shards) == (1, 1)


def test_ranks_with_slices_of_the_same_rows_are_neighbors_among_the_data_ranks():
    dims = mesh_of(8, context=2, shard=True)
    assert (dims.data, dims.parts, dims.shards) == (8, 4, 8)
    assert dims.context_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert dims.data_groups() == [[*range(8)]]
    assert mesh_of(8, pipeline=2, context=4).context_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_shards_are_the_data_ranks_of_one_replica():
    assert mesh_of(8, pipeline=2, shard=True).shards == 4
    assert mesh_of(8, pipeline=2, replicas=2, shard=True).shards == 2
    assert mesh_of(8, experts=4).experts == 4


@pytest.mark.parametrize(
    ("sizes", "fact"),
    [
        ({"pipeline": 3}, "parallel.pipeline, parallel.tensor: expected sizes whose product divides"),
        ({"pipeline": 16}, "found 16 * 1 = 16"),
        ({"tensor": 2, "experts": 3}, "parallel.experts: expected a divisor of the number of data ranks"),
        ({"tensor": 2, "experts": 3}, "launch.num_ranks=8 / (1 * 2) = 4, found 3"),
        ({"pipeline": 2, "replicas": 8, "shard": True}, "parallel.replicas: expected a divisor"),
    ],
)
def test_sizes_that_do_not_divide_are_an_error_that_names_the_setting(sizes, fact):
    with pytest.raises(ValueError, match=r"parallel\.") as error:
        mesh_of(8, **sizes)
    assert fact in str(error.value)
