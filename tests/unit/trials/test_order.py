"""What `suggest` may return, and what becomes of it: the settings and the model of a trial."""

import pytest

from spark_dl import DDP, LocalSGD, ModelSpec
from spark_dl.trials.rank import spec_of, split_values
from tests.builders.models import MLP, build_mlp
from tests.builders.settings import make_config

BASE = make_config(lr=0.5, num_ranks=2, parallel=DDP(bucket_mib=3))


def test_keys_with_a_section_are_settings_and_all_others_arguments():
    config, arguments = split_values({"train.lr": 0.25, "hidden": (4, 2), "loader.shuffle": False}, BASE)
    assert (config.train.lr, config.loader.shuffle, config.launch.num_ranks) == (0.25, False, 2)
    assert config.parallel == BASE.parallel
    assert arguments == {"hidden": [4, 2]}  # as the ranks get it, by JSON
    assert split_values({}, BASE) == (BASE, {})


def test_another_strategy_has_its_own_settings():
    config, _ = split_values({"parallel.strategy": "local_sgd", "parallel.sync_every_steps": 4}, BASE)
    assert config.parallel == LocalSGD(sync_every_steps=4)


@pytest.mark.parametrize(("values", "message"), [
    (None, "suggest: expected a dict such as {'train.lr': 0.1}, found None"),
    ([("train.lr", 0.1)], "suggest: expected a dict"),
    ({3: 0.1}, "suggest: expected a dict"),
    ({"train.lrr": 0.1}, "unknown config key 'train.lrr'; did you mean 'train.lr'"),
    ({"trian.lr": 0.1}, "suggest: no section 'trian' of settings; did you mean 'train'"),
    ({"train.lr": -1}, "train.lr: expected a finite number > 0, found -1"),
    ({"launch.num_ranks": 4}, "found 'launch', which is the same for all trials"),
    ({"data.features": ["x"]}, "found 'data', which is the same for all trials"),
    ({"train.global_batch_size": 65}, "expected a multiple of loader.num_streams"),
    ({"model": object()}, "suggest: expected numbers, strings, lists and dicts: Object of type object"),
])  # fmt: skip
def test_what_is_no_settings_is_an_error(values, message):
    with pytest.raises(ValueError, match=message):
        split_values(values, BASE)


def test_the_model_is_that_of_all_trials_or_of_a_function():
    assert spec_of(MLP, {}) is MLP
    assert spec_of(lambda hidden: ModelSpec(build=build_mlp, metrics={hidden: build_mlp}), {"hidden": "h"}).metrics
    with pytest.raises(ValueError, match=r"found hidden, which have no section, such as train.lr, .* instead of a Mod"):
        spec_of(MLP, {"hidden": 4})
    with pytest.raises(ValueError, match="spec: expected a function that returns a ModelSpec, it returned <function"):
        spec_of(lambda: build_mlp, {})
