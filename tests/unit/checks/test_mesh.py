"""What the driver finds out about a mesh before ranks are started."""

import pytest
from torch import nn

from spark_dl import Mesh, ModelSpec
from spark_dl.checks.mesh import fit_mesh
from spark_dl.nn import MoE
from tests.builders.datasets import write_dataset
from tests.builders.models import blobs
from tests.builders.settings import make_config


@pytest.mark.parametrize(("layer", "mesh", "message"), [
    (MoE(4, 6), {"experts": 4}, r"parallel.experts: expected a divisor of the number of experts of '1', 6, found 4"),
    (nn.Linear(4, 4), {"experts": 2}, r"parallel.experts: expected 1, as the model has no spark_dl.nn.MoE layer"),
    (MoE(4, 6, balance="loss"), {"pipeline": 2}, r"parallel.pipeline: expected 1 with balance='loss' .* layer '1', "),
])  # fmt: skip
def test_experts_that_cannot_be_divided(layer, mesh, message):
    spec = ModelSpec(build=lambda: nn.Sequential(nn.Linear(4, 4), layer))
    config = make_config(num_ranks=4, accumulation_steps=4, parallel=Mesh(**mesh))
    with pytest.raises(ValueError, match=message):
        fit_mesh(spec, None, config, None)


@pytest.mark.parametrize("stages", [None, (3, 1)])
@pytest.mark.parametrize(("last", "is_trained"), [(nn.Tanh(), False), (nn.Linear(3, 3).requires_grad_(False), False),
                                                  (nn.Linear(3, 3), True)])  # fmt: skip
def test_B27_a_stage_without_a_parameter_to_train_is_found_on_the_driver(tmp_path, stages, last, is_trained):
    inner = [nn.Linear(4, 3)] if stages is None else [nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3)]
    spec = ModelSpec(build=lambda: nn.Sequential(*inner, last))
    config = make_config(
        num_ranks=2, accumulation_steps=2, label="label", features=("features",),
        parallel=Mesh(pipeline=2, stages=stages),
    )  # fmt: skip
    shards = write_dataset(str(tmp_path / "data"), blobs(64))
    if is_trained:
        assert sum(fit_mesh(spec, shards, config, None).parallel.stages) == len(inner) + 1
        return
    message = (
        r"^parallel\.stages: expected a parameter that requires a gradient on each rank of a pipeline, found none in "
        rf"the stage with the layers {len(inner)}; cut the model elsewhere, or use fewer stages$"
    )
    with pytest.raises(ValueError, match=message):
        fit_mesh(spec, shards, config, None)


def test_a_mesh_of_data_ranks_alone_needs_no_model():
    config = make_config(num_ranks=4, parallel=Mesh(zero_stage=3))
    assert fit_mesh(ModelSpec(build=nn.Identity), None, config, None) is config


def test_experts_that_can_be_divided_change_no_setting():
    config = make_config(num_ranks=4, parallel=Mesh(experts=2))
    assert fit_mesh(ModelSpec(build=lambda: MoE(4, 6)), None, config, None) == config


def test_an_evaluation_of_the_user_s_own_does_not_go_with_tensor_ranks():
    spec = ModelSpec(build=lambda: nn.Sequential(nn.Linear(4, 4)), evaluation=object)
    config = make_config(num_ranks=2, parallel=Mesh(tensor=2))
    with pytest.raises(ValueError, match="spec.evaluation: not supported with parallel.tensor=2, where several ranks"):
        fit_mesh(spec, None, config, None)
