"""Two settings together that are not the default: the run is the one that each of them promises, or an error before it.

Each run is that of one rank, in this process. The rows are a dataset of this package, or, if a setting of the pair is
about columns, a Parquet file of somebody else, which is read by these settings. `make test` draws some pairs by a seed,
`make test-long` tries all.
"""

import collections
import contextlib
import dataclasses
import itertools
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from spark_dl import DDP, LocalSGD, Mesh, ModelSpec, Sequences, Single, inputs, storage, worker
from spark_dl.config.checks import SettingError
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.models import blobs, build_dropout_mlp, same_bits, small_config
from tests.ranks.runs import cut_at

ROWS, ROWS_OF_COLUMNS, CUT = 130, 240, 4
ACCURACY = {"accuracy": {"class": "MulticlassAccuracy", "num_classes": 3}}

CHANGES = {
    "shards.rows_per_row_group": {"rows_per_row_group": 11}, "loader.num_streams": {"num_streams": 4},
    "loader.shuffle": {"shuffle": False}, "loader.shuffle_window_rows": {"shuffle_window_rows": 17},
    "train.global_batch_size": {"global_batch_size": 24}, "train.accumulation_steps": {"accumulation_steps": 2},
    "train.epochs": {"epochs": 3}, "train.max_steps": {"max_steps": 5}, "train.optimizer": {"optimizer": "AdamW"},
    "train.lr": {"lr": 0.02}, "train.optimizer_args": {"optimizer_args": {"weight_decay": 0.1}},
    "train.scheduler": {"scheduler": "ExponentialLR", "scheduler_args": {"gamma": 0.7}},
    "train.scheduler_interval": {
        "scheduler": "CosineAnnealingLR", "scheduler_args": {"T_max": 5}, "scheduler_interval": "step",
    },
    "train.warmup_steps": {"warmup_steps": 5}, "train.clip_grad_norm": {"clip_grad_norm": 0.05},
    "train.precision": {"precision": "bf16-mixed"}, "train.validation_fraction": {"validation_fraction": 0.25},
    "train.early_stop_metric": {
        "early_stop_metric": "loss", "early_stop_patience": 1, "early_stop_min_delta": 9.0, "validation_fraction": 0.2,
    },
    "train.seed": {"seed": 9}, "parallel: single": {"parallel": Single()},
    "parallel: zero3": {"parallel": Mesh(zero_stage=3)},
    "parallel: local_sgd": {"parallel": LocalSGD(sync_every_steps=3, sync_start_step=1)},
    "parallel: compression": {"parallel": DDP(compression="topk", compression_start_step=1)},
    "parallel: powersgd": {"parallel": DDP(compression="powersgd", compression_start_step=1)},
}  # fmt: skip
"""Settings that give other weights."""
ENCODE = {"town": {"as": "vocabulary", "values": ["Oslo", "Rome"]}, "words": {"ragged": True}}
COLUMNS = {
    "data.filters": {"filters": [("day", "!=", 1)]}, "data.nulls: drop": {"labels": ("town",), "nulls": "drop"},
    "data.nonfinite: drop": {"labels": ("ratio",), "nonfinite": "drop"}, "data.weight": {"weight": "times"},
    "loader.rows_at_once": {"labels": ("words",), "rows_at_once": 7},
    "sequences": {"sequences": Sequences(length=3)},
}  # fmt: skip
"""Settings of columns that give other weights."""
NEUTRAL_COLUMNS = {
    "data.nulls: fill": {"labels": ("town",), "nulls": "fill", "fill": {"town": "Oslo"}},
    "data.nonfinite: allow": {"labels": ("ratio",), "nonfinite": "allow"}, "data.cast": {"cast": {"day": "int8"}},
    "data.labels": {"labels": ("times",)}, "loader.ragged": {"labels": ("words",), "ragged": "offsets"},
}  # fmt: skip
NEUTRAL = {
    "loader.memory_mib": {"memory_mib": 64}, "loader.reader_threads": {"reader_threads": 1},
    "loader.prefetch_batches": {"prefetch_batches": 1}, "train.lr_scaling": {"lr_scaling": "sqrt"},
    "train.channels_last": {"channels_last": True}, "train.deterministic": {"deterministic": True},
    "train.offload_optimizer": {"offload_optimizer": True},
    "train.on_nonfinite: skip": {"on_nonfinite": "skip"},
    "train.on_nonfinite: rollback": {"on_nonfinite": "rollback", "max_nonfinite": 1},
    "train.check_replicas_every": {"check_replicas_every": 2}, "train.metrics": {"metrics": ACCURACY},
    "train.log_every": {"log_every": 4}, "checkpoint.every_steps": {"every_steps": 3},
    "checkpoint.every_epochs": {"every_epochs": 2}, "checkpoint.keep": {"keep": 1},
    "checkpoint.keep_best": {"keep_best": 1}, "checkpoint.asynchronous": {"asynchronous": True},
    "checkpoint.on_error": {"on_error": "warn"}, "checkpoint.strict": {"strict": True},
    "track.profile_steps": {"profile_steps": (2, 3)}, "launch.preemption_grace_s": {"preemption_grace_s": 0},
    "parallel: buckets": {"parallel": DDP(bucket_mib=0.001)},
    "parallel: unused": {"parallel": DDP(find_unused_parameters=True)},
    "parallel: static": {"parallel": DDP(static_graph=True)}, "parallel: ring": {"parallel": DDP(all_reduce="ring")},
    **NEUTRAL_COLUMNS,
}  # fmt: skip
"""Settings that leave the weights as they are, to the bit."""
SETTINGS = {**CHANGES, **COLUMNS, **NEUTRAL}
OF_COLUMNS = {*COLUMNS, *NEUTRAL_COLUMNS}
PAIRS = sorted(pair for pair in itertools.combinations(SETTINGS, 2))

_seen: list[tuple[float, ...]] = []
"""Of each batch that was trained on, the first feature of its rows, which no other row has."""


def forward(model, batch):
    features = batch["features"]
    features = features[:, -1] if features.dim() == 3 else features
    if model.training:
        _seen.append(tuple(features[batch["weight"] > 0, 0].tolist()))
    return model(features.float())


def loss(output, label):
    """The loss of each row; that of a sequence is of its last row."""
    label = label[:, -1] if label.dim() == 2 else label
    return torch.nn.functional.cross_entropy(output, label.long(), reduction="none")


SPEC = ModelSpec(build=build_dropout_mlp, forward=forward, loss=loss)


def config_of(*names):
    """The settings of a run, without the layout of its rows. Raises SettingError if they do not go together."""
    fields = {key: value for name in names for key, value in SETTINGS[name].items()}
    fields["labels"] = tuple(sorted({label for name in names for label in SETTINGS[name].get("labels", ())}))
    if "cast" in fields:
        fields["labels"] += ("day",)
    fields["encode"] = {label: ENCODE[label] for label in fields["labels"] if label in ENCODE}
    group_rows = fields.pop("rows_per_row_group", 40)
    config = small_config(1, train=fields)
    return config, group_rows


def columns():
    """A third of the days are 1; a quarter of the towns is null, a fifth of the ratios NaN."""
    at = np.arange(ROWS_OF_COLUMNS)
    return {
        **blobs(ROWS_OF_COLUMNS), "day": at % 3, "town": np.where(at % 4 == 0, None, np.where(at % 2, "Rome", "Oslo")),
        "ratio": np.where(at % 5 == 0, np.nan, at / 7), "times": at % 2 + 0.5,
        "words": [[*range(number % 6)] for number in at],
    }  # fmt: skip


def samples_of(names):
    """The number of rows, or of sequences of rows, that are left with these settings."""
    if OF_COLUMNS.isdisjoint(names):
        return ROWS
    left = columns()
    keeps = np.ones(ROWS_OF_COLUMNS, bool)
    for name, passes in {
        "data.filters": left["day"] != 1, "data.nulls: drop": left["town"] != None,  # noqa: E711 - of each value
        "data.nonfinite: drop": np.isfinite(left["ratio"]),
    }.items():  # fmt: skip
        keeps &= passes if name in names else True
    return int(keeps.sum()) - (2 if "sequences" in names else 0)


def run_of(tmp_path, name, config, group_rows, of_columns):
    url = str(tmp_path / f"data-{group_rows}{'.parquet' if of_columns else ''}")
    tmp_path.mkdir(exist_ok=True)
    if of_columns and not storage.exists(url):
        stored = {key: pa.array(list(value), from_pandas=key == "town") for key, value in columns().items()}
        pq.write_table(pa.table(stored), url, row_group_size=group_rows)
    elif not storage.exists(url):
        write_dataset(url, blobs(ROWS), group_rows=group_rows)
    with contextlib.ExitStack() as until_done:
        shards = inputs.shards_of(url, "", config, until_done, reuse="no")
    return Run(spec=SPEC, config=config, train=shards, run_dir=str(tmp_path / name))


def train(run):
    """The last checkpoint, what the run returns, and how often each row was trained on."""
    _seen.clear()
    result = worker.main(run).result
    while _seen[0] in _seen[1:3]:  # before the first step, DDP learns the order of gradients from its last micro-batch
        _seen.pop(0)
    return checkpoint.latest(run.run_dir), result, collections.Counter(itertools.chain.from_iterable(_seen))


def resumed(run, saved, config):
    generation = checkpoint.start_generation(run.run_dir)
    return train(dataclasses.replace(run, config=config, checkpoint=saved.url, generation=generation))


def assert_pair(tmp_path, pair):
    if {*SETTINGS[pair[0]]} & {*SETTINGS[pair[1]]} & {"parallel", "nulls", "nonfinite"}:
        return "one choice"
    try:
        config, group_rows = config_of(*pair)
    except SettingError:
        return "refused"
    if config.sequences and config.train.metrics:
        return "refused"  # the metric gets an output for each sequence, and the labels of its rows
    of_columns = not OF_COLUMNS.isdisjoint(pair)
    run = run_of(tmp_path, "whole", config, group_rows, of_columns)
    saved, result, rows = train(run)
    # Each row of an epoch once.
    trained = samples_of(pair) - round(config.train.validation_fraction * samples_of(pair))
    times = {*rows.values()}
    assert max(times) - min(times) <= 1
    assert sum(rows.values()) == result["rows"]
    if config.train.max_steps is None:
        assert (len(rows), times) == (trained, {result["epochs"]})
    # The same weights, without what leaves them as they are.
    weights = load_weights(saved)
    assert all(torch.isfinite(value).all() for value in weights.values())
    left = [name for name in pair if name not in NEUTRAL]
    if len(left) < len(pair):
        without, _, _ = train(run_of(tmp_path, "without", *config_of(*left), of_columns))
        assert same_bits(load_weights(without), weights)
    # A run that was cut goes on to the same bits.
    cut = run_of(tmp_path, "cut", cut_at(config, CUT), group_rows, of_columns)
    first, _, before = train(cut)
    second, again, after = resumed(cut, first, config)
    assert same_bits(load_weights(second), weights)
    assert before + after == rows
    assert {key: again[key] for key in ("steps", "epochs", "rows")} == {
        key: result[key] for key in ("steps", "epochs", "rows")
    }
    return "trained"


@pytest.mark.parametrize("seed", range(12))
def test_a_sample_of_pairs(tmp_path, seed, no_launcher):
    for i, pair in enumerate(random.Random(seed).sample(PAIRS, 4)):
        assert_pair(tmp_path / str(i), pair)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", SETTINGS)
def test_all_pairs(tmp_path, first, no_launcher):
    outcomes = collections.Counter()
    for i, pair in enumerate(pair for pair in PAIRS if pair[0] == first):
        try:
            outcomes[assert_pair(tmp_path / str(i), pair)] += 1
        except Exception as error:
            raise AssertionError(f"{pair}: {error}") from error
    assert outcomes["refused"] <= sum(outcomes.values()) // 2
