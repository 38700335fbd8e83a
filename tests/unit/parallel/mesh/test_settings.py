"""What a mesh cannot be, and which settings of other sections it excludes."""

import pytest

from spark_dl import Mesh
from spark_dl.parallel.mesh.settings import check_version
from tests.builders.settings import make_config


@pytest.mark.parametrize(("mesh", "message"), [
    ({"schedule": "gpipe", "stages_per_rank": 2}, "parallel.stages_per_rank: expected 1 with .*'gpipe', found 2"),
    ({"schedule": "zbv"}, "parallel.stages_per_rank: expected 2 with .*'zbv', found 1"),
    ({"vertical_sync": True}, "parallel.vertical_sync: only supported with .*'pipedream', found '1f1b'"),
    ({"sequence": True}, "parallel.sequence: only supported with parallel.tensor above 1"),
    ({"replicas": 2}, "parallel.replicas: only supported with parallel.zero_stage above 0, found 2"),
    ({"pipeline": 2, "zero_stage": 2}, "parallel.zero_stage: not supported with parallel.pipeline=2 .* use 0, 1 or 3"),
    ({"pipeline": 2, "schedule": "pipedream", "zero_stage": 1}, "parallel.zero_stage: not supported .* use 0$"),
    ({"pipeline": 2, "schedule": "zero_bubble", "zero_stage": 3}, "parallel.zero_stage: expected 0 or 1 .* found 3"),
    ({"pipeline": 2, "stages": (1, 2, 3)}, "parallel.stages: expected 2 integers > 0"),
    ({"pipeline": 2, "stages": (1, 0)}, "parallel.stages: expected 2 integers > 0"),
    ({"pipeline": 2, "stages": "12"}, "parallel.stages: expected 2 integers > 0"),
])  # fmt: skip
def test_settings_that_do_not_fit_each_other(mesh, message):
    with pytest.raises(ValueError, match=message):
        Mesh(**mesh)


@pytest.mark.parametrize(("mesh", "more", "message"), [
    ({"pipeline": 2, "tensor": 2}, {"num_ranks": 6, "accumulation_steps": 2},
     r"parallel.pipeline, parallel.tensor: .* divides .*=6, found 2 \* 2"),
    ({"zero_stage": 1, "replicas": 3}, {}, "parallel.replicas: expected a divisor of the number of data ranks"),
    ({"pipeline": 4}, {"accumulation_steps": 3}, "train.accumulation_steps: .* at least 4, .* found 3; raise it"),
    ({"pipeline": 4, "schedule": "interleaved", "stages_per_rank": 2}, {"accumulation_steps": 9},
     "train.accumulation_steps: .* multiple of the number of rounds .*'interleaved', found 9; a multiple of 4"),
    ({"pipeline": 4, "schedule": "pipedream"}, {"clip_grad_norm": 1.0}, "train.clip_grad_norm: expected null with"),
    ({"pipeline": 4, "schedule": "pipedream"}, {"on_nonfinite": "skip"}, "train.on_nonfinite: expected 'raise' with"),
    ({"zero_stage": 1}, {"optimizer": "Adafactor"}, "train.optimizer: expected one of SGD"),
    ({"zero_stage": 1}, {"param_groups": ({"match": "a", "optimizer": "Muon"},)}, r"expected one of SGD.*'Muon'\]"),
    ({"pipeline": 2}, {"param_groups": ({"match": "a"},), "accumulation_steps": 2}, "train.param_groups: .*stages"),
    ({"tensor": 2}, {"precision": "fp16-mixed"}, "train.precision: expected float32 or bf16-mixed"),
    ({"tensor": 2}, {"compile": True}, "train.compile: expected false with tensor and expert ranks"),
    ({"experts": 2}, {"compile": True}, "train.compile: expected false with tensor and expert ranks"),
    ({"pipeline": 2, "schedule": "zero_bubble"}, {"compile": True, "accumulation_steps": 2},
     "train.compile: expected false with .* zero_bubble"),
    ({"context": 2, "tensor": 2}, {}, "parallel.context: expected 1 with a pipeline, tensor or expert .* found 2"),
    ({"context": 2, "experts": 2}, {}, "parallel.context: expected 1 with"),
    ({"context": 2}, {"compile": True}, "parallel.context: expected 1 with .* train.compile"),
    ({"context": 2}, {"random_by": "row"}, "parallel.context: expected 1 with"),
    ({"context": 2}, {"ragged": "offsets"}, "parallel.context: expected 1 with"),
    ({"context": 2}, {"storage": "local"}, "shards.storage: expected 'shared' with parallel.context above 1"),
    ({"context": 3}, {}, "parallel.context: expected a divisor of the number of data ranks, launch.num_ranks=4"),
    ({"zero_stage": 1}, {"channels_last": True}, "train.channels_last: not supported"),
    ({"tensor": 2}, {"random_by": "row"}, "train.random_by: expected 'rank' with parallel.pipeline or parallel.tensor"),
    ({"pipeline": 2}, {"random_by": "row", "accumulation_steps": 2}, "train.random_by: expected 'rank' with"),
    ({"tensor": 2}, {"storage": "local"}, "shards.storage: expected 'shared' with parallel.pipeline or"),
    ({"pipeline": 2}, {"ragged": "offsets", "accumulation_steps": 2}, "loader.ragged: expected 'pad' with"),
    ({"pipeline": 2, "tensor": 2}, {"num_streams": 1, "global_batch_size": 8, "num_ranks": 8, "accumulation_steps": 2},
     "loader.num_streams: expected at least 2, the number of data ranks,"),
])  # fmt: skip
def test_settings_of_other_sections(mesh, more, message):
    with pytest.raises(ValueError, match=message):
        make_config(**{"num_ranks": 4, "global_batch_size": 144, "num_streams": 144, **more}, parallel=Mesh(**mesh))


@pytest.mark.parametrize("version", ["2.8.0", "2.12.1+cu126", "1.13.0"])
def test_an_older_torch_is_an_error_that_says_which_is_needed(version):
    check_version("2.13.0+cpu")
    check_version("3.0.0")
    with pytest.raises(ValueError, match=f"'mesh' needs torch 2.13 or newer, .* found {version.partition('+')[0]}"):
        check_version(version)


def test_data_ranks_are_what_pipeline_and_tensor_leave():
    config = make_config(num_ranks=8, num_streams=8, global_batch_size=64, parallel=Mesh(pipeline=2, tensor=2),
                         accumulation_steps=2)  # fmt: skip
    assert config.data_size == 2
    assert config.num_trainers == 8


def test_ranks_with_slices_of_the_same_rows_have_one_part_of_a_batch():
    config = make_config(num_ranks=8, num_streams=8, global_batch_size=64, parallel=Mesh(context=4, zero_stage=1))
    assert config.data_size == 2
    assert config.parallel.dims(8).shards == 8
