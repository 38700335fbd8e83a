"""Each setting of each strategy trains, from a DataFrame and through the driver's checks.

A test of the ranks alone does not see what the driver refuses: two parameter servers passed all of them, and could not
be trained.
"""

import dataclasses
import math
import typing

import pytest
from torch import nn

import spark_dl
from spark_dl import Auto, ModelSpec
from spark_dl.nn import MoE
from tests.builders.models import blobs, build_mlp, small_config
from tests.builders.settings import STRATEGIES

CLASSES = {**STRATEGIES, "auto": Auto}
ROWS = 245


def build_chain():
    layers = [module for _ in range(3) for module in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), *layers, nn.Linear(16, 3))


class Block(nn.Module):
    """Of a tensor plan: the normalization works on parts of a sequence."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Positions(nn.Module):
    """Each feature is a position of a sequence."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.out = nn.Linear(1, 16), nn.Sequential(Block(), Block()), nn.Linear(16, 3)

    def forward(self, features):
        return self.out(self.blocks(self.embed(features[..., None]))).mean(1)


class EachPosition(Positions):
    """Scores of each position, which sees those before it."""

    def forward(self, features):
        x = self.embed(features[..., None])[:, None]
        x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.out(self.blocks(x[:, 0]))


def loss_of_each_position(scores, label):
    labels = label[:, None].expand(-1, scores.shape[1])
    return nn.functional.cross_entropy(scores.transpose(1, 2), labels, reduction="none")


def build_experts():
    return nn.Sequential(nn.Linear(4, 16), MoE(16, 4, hidden=8), nn.Linear(16, 3))


def build_normed():
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


MLP, CHAIN, POSITIONS = ModelSpec(build=build_mlp), ModelSpec(build=build_chain), ModelSpec(build=Positions)
EXPERTS, NORMED = ModelSpec(build=build_experts), ModelSpec(build=build_normed)
SLICES = ModelSpec(build=EachPosition, loss=loss_of_each_position)
LATE = {"compression_start_step": 1}
PIPELINE = {"pipeline": 2}
NETWORK = {"rate_mbit": 1000.0, "latency_ms": 0.1, "local_rate_mbit": 8000.0, "local_latency_ms": 0.05}
CASES = [  # the strategy, its settings, the number of ranks, the model
    ("ddp", {"bucket_mib": 0.01, "find_unused_parameters": True}, 2, MLP),
    ("ddp", {"bucket_mib": "auto"}, 2, MLP),
    ("ddp", {"static_graph": True}, 2, MLP),
    ("ddp", {"sync_batchnorm": True}, 2, NORMED),
    *(("ddp", {"all_reduce": kind}, 3, MLP)
      for kind in ("backend", "naive", "reduce_broadcast", "tree", "ring", "halving_doubling")),
    *(("ddp", {"compression": kind}, 2, MLP) for kind in ("none", "fp16", "bf16")),
    ("ddp", {"compression": "powersgd", "powersgd_rank": 2, **LATE}, 2, MLP),
    ("ddp", {"compression": "threshold", "threshold": 0.01, **LATE}, 2, MLP),
    ("ddp", {"compression": "topk", "topk_ratio": 0.1, **LATE}, 2, MLP),
    *(("mesh", {"zero_stage": stage}, 2, MLP) for stage in (0, 1, 2, 3)),
    ("mesh", {"zero_stage": 3, "replicas": 2, "bucket_mib": 0.01}, 4, MLP),
    ("mesh", {"zero_stage": 1, "find_unused_parameters": True, "check_first_step_mib": 0}, 2, MLP),
    ("mesh", {"tensor": 2, "sequence": True}, 2, POSITIONS),
    ("mesh", {"context": 2, "zero_stage": 1}, 4, SLICES),
    ("mesh", {"experts": 2}, 2, EXPERTS),
    *(("mesh", {**PIPELINE, "schedule": schedule}, 2, CHAIN) for schedule in ("naive", "gpipe")),
    ("mesh", {**PIPELINE, "schedule": "1f1b", "stages": (4, 5)}, 2, CHAIN),
    *(("mesh", {**PIPELINE, "schedule": schedule, "stages_per_rank": 2}, 2, CHAIN)
      for schedule in ("interleaved", "zero_bubble", "zbv")),
    ("mesh", {**PIPELINE, "schedule": "pipedream", "vertical_sync": True}, 2, CHAIN),
    ("horovod", {"bucket_mib": 1.0, "compression": "fp16"}, 2, MLP),
    ("horovod", {"compression": "none"}, 2, MLP),
    ("local_sgd", {"sync_every_steps": 2, "sync_start_step": 1, "sync_batchnorm": True}, 2, NORMED),
    ("single", {}, 1, MLP),
    ("dp_single_process", {}, 1, MLP),
    ("tree_reduce", {"tree_depth": 3}, 3, MLP),
    ("shuffle_reduce", {}, 3, MLP),
    ("parameter_server", {"num_servers": 2, "server_mode": "sync"}, 4, MLP),
    *(("parameter_server", {"num_servers": 2, "server_mode": mode, "server_k": 1}, 4, MLP)
      for mode in ("k_sync", "k_batch_sync", "k_async", "k_batch_async")),
    ("parameter_server", {"server_mode": "async", "max_staleness": 4, "staleness_lr": True}, 3, MLP),
    ("auto", {"memory_gib": 1.0, "hosts": 1, **NETWORK}, 2, CHAIN),
    ("auto", {"zero_stages": (0, 1), "schedules": ("gpipe",)}, 2, CHAIN),
]  # fmt: skip


def uses_of(cls):
    """Each setting of a class with what must be used: each choice, else some value that is not the default."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        choices = typing.get_args(hints[field.name]) if typing.get_origin(hints[field.name]) is typing.Literal else ()
        for choice in choices or ("another",):
            yield field.name, choice


def test_each_setting_of_each_strategy_is_used():
    missing = []
    for name, cls in CLASSES.items():
        cases = [settings for strategy, settings, *_ in CASES if strategy == name]
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        for field, choice in uses_of(cls):
            used = [case[field] for case in cases if field in case]
            if not (any(value != defaults[field] for value in used) if choice == "another" else choice in used):
                missing.append((name, field))
        assert cases, name
    assert missing == []


@pytest.fixture(scope="module")
def points(spark):
    columns = blobs(ROWS)
    rows = [(x.tolist(), int(y)) for x, y in zip(*columns.values(), strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label bigint").repartition(3).cache()


@pytest.mark.modes("local")
@pytest.mark.sampled(5)
@pytest.mark.parametrize(("strategy", "settings", "num_ranks", "spec"), CASES,
                         ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict)
                         else "" if isinstance(value, ModelSpec) else None)  # fmt: skip
def test_it_trains(spark, points, tmp_path, strategy, settings, num_ranks, spec):
    if strategy == "horovod":
        pytest.importorskip("horovod.torch", reason="no horovod", exc_type=ImportError)
    train = {"accumulation_steps": 2 if settings.get("pipeline") else 1, "epochs": 1, "lr": 0.05}
    config = small_config(num_ranks, train, {"features": ("features",)}, {"threads": 1},
                          parallel=CLASSES[strategy](**settings))  # fmt: skip
    result = spark_dl.train(points, spec, config, run_dir=str(tmp_path / "run"), progress=False, spark=spark)
    assert result.rows == ROWS
    assert math.isfinite(result.train_loss)
    scored = spark_dl.evaluate(points, spec, result.checkpoint, progress=False, spark=spark)
    assert scored["rows"] == ROWS
    assert scored["loss"] < 1.2  # ln 3 is 1.1
