"""Settings of `auto`: what a plan could not have is an error before anything is measured."""

import pytest

from spark_dl import Auto, load_config
from spark_dl.config.load import build_config
from tests.builders.settings import make_config


@pytest.mark.parametrize(("settings", "message"), [
    ({"memory_gib": 0}, r"parallel.memory_gib: expected a finite number > 0, found 0"),
    ({"hosts": 1.5}, r"parallel.hosts: expected an integer >= 1, found 1.5"),
    ({"latency_ms": -1}, r"parallel.latency_ms: expected a finite number >= 0, found -1"),
    ({"zero_stages": (4,)}, r"parallel.zero_stages: expected some of 0, 1, 2, 3, found \(4,\)"),
    ({"schedules": ()}, r"parallel.schedules: expected some of 1f1b, gpipe, found \(\)"),
])  # fmt: skip
def test_a_setting_that_is_wrong(settings, message):
    with pytest.raises(ValueError, match=message):
        Auto(**settings)


@pytest.mark.parametrize(("settings", "message"), [
    ({"optimizer": "Adafactor"}, r"train.optimizer: expected one of SGD, .*found \['Adafactor'\]"),
    ({"lr_scaling": "linear"}, "train.lr_scaling: expected 'none' with parallel.strategy='auto', which chooses"),
    ({"precision": "fp16-mixed"}, "train.precision: expected float32 or bf16-mixed with .*, found 'fp16-mixed'"),
    ({"storage": "local"}, "shards.storage: expected 'shared' with parallel.strategy='auto', found 'local'"),
    ({"parallel": Auto(hosts=3)}, "parallel.hosts: expected a divisor of launch.num_ranks=4, .*found 3"),
])  # fmt: skip
def test_what_a_plan_could_not_have(settings, message):
    with pytest.raises(ValueError, match=message):
        make_config(**{"num_ranks": 4, "parallel": Auto(), **settings})


def test_it_is_read_from_files_and_command_lines():
    config = load_config(None, ["parallel.strategy=auto", "parallel.zero_stages=[0,3]", "parallel.memory_gib=2"])
    assert config.parallel == Auto(zero_stages=(0, 3), memory_gib=2.0)
    assert build_config(config.to_dict()).to_dict() == config.to_dict()
    assert config.data_size == 1
