"""What the driver finds out about a mesh before ranks are started."""

import pytest
from torch import nn

from spark_dl import Mesh, ModelSpec
from spark_dl.checks.mesh import fit_mesh
from spark_dl.nn import MoE
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


def test_a_mesh_of_data_ranks_alone_needs_no_model():
    config = make_config(num_ranks=4, parallel=Mesh(zero_stage=3))
    assert fit_mesh(ModelSpec(build=nn.Identity), None, config, None) is config


def test_experts_that_can_be_divided_change_no_setting():
    config = make_config(num_ranks=4, parallel=Mesh(experts=2))
    assert fit_mesh(ModelSpec(build=lambda: MoE(4, 6)), None, config, None) == config
