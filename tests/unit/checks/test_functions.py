"""Settings and functions of a spec that exclude each other."""

import pytest
from torch import nn

from spark_dl import DDP, Auto, Mesh, ModelSpec, ParameterServer
from spark_dl.checks.functions import CONFLICTS, check_functions
from tests.builders.settings import make_config, parallel


def nothing(*_):
    return None


OPTIMIZER, BATCH_LOSS = {"optimizer": nothing}, {"batch_loss": nothing}
CASES = [
    ("train.optimizer", OPTIMIZER, {"optimizer": "Adam"}),
    ("train.lr", OPTIMIZER, {"lr": 0.5}),
    ("train.optimizer_args", OPTIMIZER, {"optimizer_args": {"momentum": 0.9}}),
    ("train.param_groups", OPTIMIZER, {"param_groups": ({"match": "bias"},)}),
    ("train.scheduler", OPTIMIZER, {"scheduler": "StepLR", "scheduler_args": {}}),
    ("train.scheduler_args", OPTIMIZER, {"scheduler_args": {"gamma": 0.9}}),
    ("train.scheduler_interval", OPTIMIZER, {"scheduler_interval": "step"}),
    ("parallel.strategy", OPTIMIZER, {"parallel": ParameterServer(), "num_ranks": 2}),
    ("parallel.strategy", OPTIMIZER, {"parallel": parallel("horovod")}),
    ("parallel.strategy", {"set_position": nothing}, {"parallel": ParameterServer(), "num_ranks": 2}),
    ("parallel.strategy", {"hooks": nothing}, {"parallel": ParameterServer(), "num_ranks": 2}),
    ("parallel.strategy", BATCH_LOSS, {"parallel": parallel("dp_single_process")}),
    ("data.weight", BATCH_LOSS, {"weight": "w"}),
    ("train.compile", BATCH_LOSS, {"compile": True}),
    ("parallel.context", {"batch_loss": nothing}, {"parallel": Mesh(context=2), "num_ranks": 2}),
    ("parallel.context", {"evaluation": nothing}, {"parallel": Mesh(context=2), "num_ranks": 2}),
    ("parallel.experts", {"evaluation": nothing}, {"parallel": Mesh(experts=2), "num_ranks": 2}),
    ("parallel.zero_stage", {"evaluation": nothing}, {"parallel": Mesh(zero_stage=3), "num_ranks": 2}),
    ("parallel.strategy", BATCH_LOSS, {"parallel": Auto()}),
    ("loader.ragged", BATCH_LOSS, {"ragged": "offsets"}),
    ("loader.ragged", {"evaluation": nothing}, {"ragged": "offsets"}),
    ("loader.max_tokens", {"embed": nothing, "global_loss": nothing}, {"max_tokens": 4096}),
    *(("data.assemble", functions, {"assemble": "float32"}) for functions in (BATCH_LOSS, {"forward": nothing})),
]


@pytest.mark.parametrize(("key", "functions", "settings"), CASES)
def test_a_setting_without_effect_or_support_is_an_error_that_names_it(key, functions, settings):
    config = make_config(**settings)
    with pytest.raises(ValueError, match=rf"^{key}: .*(spec\.|configure_optimizers)"):
        check_functions(ModelSpec(build=nn.Identity, **functions), config)
    check_functions(ModelSpec(build=nn.Identity), config)
    check_functions(ModelSpec(build=nn.Identity, **functions), make_config(parallel=DDP()))


def test_every_row_of_the_table_has_a_case():
    def found(conflict):
        specs = [(ModelSpec(build=nn.Identity, **functions), make_config(**s)) for _, functions, s in CASES]
        return any(conflict.excluded(spec, config) for spec, config in specs)

    assert all(found(conflict) for conflict in CONFLICTS)
