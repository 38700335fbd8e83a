"""Plans on the driver: what is planned from which facts, and what cannot be planned."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from spark_dl import Auto, Mesh, ModelSpec
from spark_dl.checks import auto
from spark_dl.checks.functions import check_functions
from spark_dl.parallel.cost.cost import Network
from spark_dl.rundir.checkpoint import Saved, check_same_settings
from spark_dl.trials.checks import check_cluster
from tests.builders.datasets import write_dataset
from tests.builders.settings import make_config

LINKS = {"hosts": 1, "local_rate_mbit": 8000.0, "local_latency_ms": 0.01}
WIDTH = 256


class Wide(nn.Module):
    """A layer whose weights are larger than its activations."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        return x + self.inner(x)


def build():
    return nn.Sequential(nn.Linear(4, WIDTH), *(Wide() for _ in range(4)), nn.Linear(WIDTH, 3))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    url = str(tmp_path_factory.mktemp("rows") / "data")
    columns = {
        "features": np.random.default_rng(0).normal(size=(128, 4)).astype(np.float32),
        "label": np.arange(128) % 3,
    }
    return write_dataset(url, columns)


def config_of(num_ranks=4, **settings):
    parallel = Auto(**{**LINKS, **settings.pop("auto", {})})
    fields = {"num_ranks": num_ranks, "global_batch_size": 32, "optimizer": "Adam", "parallel": parallel, **settings}
    return make_config(features=("features",), label="label", **fields)


def plan(rows, config, spec=None, saved=None):
    return auto.plan_mesh_of(None, spec or ModelSpec(build=build), rows, config, saved)


def test_without_a_limit_the_model_is_not_cut(rows):
    found = plan(rows, config_of(auto={"zero_stages": (0,), "local_rate_mbit": 1e6}))
    assert found.parallel == Mesh()
    assert (found.train.accumulation_steps, found.data_size) == (1, 4)


WHOLE = sum(p.nbytes for p in build().parameters()) / 2**30


@pytest.mark.parametrize("zero_stages", [(0, 1, 2, 3), (0,)])
def test_a_model_larger_than_the_memory_is_cut_or_sharded(rows, zero_stages, caplog):
    caplog.set_level("INFO", "spark_dl")
    found = plan(rows, config_of(auto={"memory_gib": 1.5 * WHOLE, "zero_stages": zero_stages}))
    mesh = found.parallel
    assert isinstance(mesh, Mesh)
    parts = mesh.model * (found.data_size if mesh.zero_stage else 1)
    assert parts > 4 / 1.5  # Adam holds 4 times the bytes of the weights
    if mesh.pipeline > 1:
        assert sum(mesh.stages) == 6
        assert found.train.accumulation_steps >= mesh.pipeline or mesh.schedule == "gpipe"
    assert "auto: network within hosts: 8,000 Mbit/s (set), 0.01 ms (set)" in caplog.text
    assert "to train with the same mesh again, set parallel.strategy=mesh" in caplog.text


def test_a_plan_that_does_not_fit_says_what_it_needs(rows):
    with pytest.raises(ValueError, match=r"parallel.memory_gib: no plan fits .* The smallest needs .*num_streams=16"):
        plan(rows, config_of(auto={"memory_gib": 1e-4}))


def test_data_ranks_divide_the_streams(rows):
    spec = ModelSpec(build=lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False)))
    with pytest.raises(
        ValueError, match=r"parallel.strategy: no mesh has 3 ranks .*must also divide loader.num_streams=16"
    ):
        plan(rows, config_of(3), spec)


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.second(x + self.first(x))


@pytest.mark.parametrize(("spec", "message"), [
    (ModelSpec(build=Skips), r"spec.layers: expected the names of the layers"),
    (ModelSpec(build=Skips, layers=["first", "second"]), r"spec.layers: .* give another output than the model"),
    (ModelSpec(build=build, tensor_plan={"9": "colwise"}), r"spec.tensor_plan: no module of the model has .* '9'"),
    (ModelSpec(build=lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))),
     r"parallel.strategy: found 'auto' for a model with the BatchNorm1d '1', .*set parallel.strategy to 'mesh'"),
])  # fmt: skip
def test_what_cannot_be_planned(rows, spec, message):
    generator = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        plan(rows, config_of(), spec)
    assert torch.equal(torch.get_rng_state(), generator)


def test_functions_that_need_the_whole_model_and_trials_are_refused():
    spec = ModelSpec(build=build, batch_loss=lambda model, batch: model(batch["features"]).sum())
    with pytest.raises(ValueError, match=r"parallel.strategy: expected another strategy with spec.batch_loss"):
        check_functions(spec, config_of())
    with pytest.raises(ValueError, match=r"parallel.strategy: expected another strategy for trials, found 'auto'"):
        check_cluster(SimpleNamespace(), config_of(), 1)


def saved_by(config):
    return Saved("/runs/1/checkpoints/step-00000001.gen-0001", 1, 1, {"config": config.to_dict()})


def test_a_resumed_run_has_the_mesh_of_its_checkpoint_if_it_has_as_many_ranks(rows):
    mesh = Mesh(pipeline=2, tensor=2, stages=(2, 4), schedule="gpipe")
    before = dataclasses.replace(config_of(accumulation_steps=8), parallel=mesh)
    saved = saved_by(before)
    check_same_settings(saved, config_of(auto={"memory_gib": 1.0}))
    found = plan(rows, config_of(), saved=saved)
    assert (found.parallel, found.train.accumulation_steps) == (mesh, 8)
    other = plan(rows, config_of(2, auto={"zero_stages": (0,), "local_rate_mbit": 1e6}), saved=saved)
    assert other.parallel == Mesh()
    with pytest.raises(ValueError, match=r"cannot resume .*train.lr: was 0.01, now 0.5"):
        check_same_settings(saved, config_of(lr=0.5))
    with pytest.raises(ValueError, match=r"cannot resume .*parallel.strategy: was 'ddp', now 'auto'"):
        check_same_settings(saved_by(make_config()), config_of())


def test_measured_networks_and_those_that_are_set(monkeypatch):
    def probed(*hosts):
        found = auto.Probed(hosts, Network(1e-5, 1e9, 0.0, 2e-5), Network(1e-3, 1e7) if len(hosts) > 1 else None)
        monkeypatch.setattr(auto, "probe", lambda *args, **kwargs: found)

    probed(2, 2)
    config = config_of(auto={"hosts": None, "rate_mbit": 160.0, "memory_gib": 2.0, "local_latency_ms": None})
    found = auto._cluster(None, config)
    assert (found.hosts, found.num_ranks, found.memory_bytes) == (2, 4, 2 * 2**30)
    assert found.between == Network(1e-3, 2e7)
    assert found.within == Network(1e-5, 1e9, 0.0, 2e-5)
    assert found.within.bytes_per_s == 1e9  # 8,000 Mbit/s, as set
    probed(3, 1)
    with pytest.raises(ValueError, match=r"parallel.hosts: .*found hosts with 3, 1 ranks; change launch.num_ranks"):
        auto._cluster(None, config)


def test_the_slowest_rank_counts_and_noise_gives_no_negative_time():
    points = [[[4, size, 1e-4 + 1.5 * size / 1e9] for size in auto.SIZES] for _ in range(3)]
    points.append([[4, size, seconds / 2] for _, size, seconds in points[0]])
    found = auto.fit_slowest(points)
    assert found.bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert found.alpha_s * 6 + found.overhead_s == pytest.approx(1e-4, rel=1e-3)
    assert auto.fit_slowest([]) is None
    assert math.isfinite(auto.fit_slowest([[[2, size, 1e-3] for size in auto.SIZES]]).alpha_s)
