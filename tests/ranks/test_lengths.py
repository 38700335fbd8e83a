"""Rows of different lengths: `loader.group_by_length`, `loader.max_tokens` and `loader.pad_to`, on real ranks."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spark_dl import (
    DDP,
    Checkpoint,
    LocalSGD,
    Mesh,
    ModelSpec,
    ParameterServer,
    Single,
    gather_rows,
)
from spark_dl.data.columns.ragged import from_lengths
from spark_dl.data.load.loader import ShardLoader
from spark_dl.rundir import checkpoint
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.models import small_config
from tests.ranks.launcher import RankFailed
from tests.ranks.runs import cut_at, distance, on_ranks, resume, train
from tests.ranks.test_training import evaluate_rank

TOKENS = {"features": ("tokens",), "label": "label", "labels": ("number",)}
GROUPED = {"group_by_length": True, "num_streams": 12, "shuffle_window_rows": 10_000}


class Text(nn.Module):
    """The mean of the vectors of a row's tokens, and classes of it. # (rows, longest) -> (rows, 3)"""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(50, 8, padding_idx=0)
        self.out = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, tokens):
        return self.out(self.embed(tokens).sum(1) / (tokens > 0).sum(1, keepdim=True))


SPEC = ModelSpec(build=Text)


def texts(rows=500, seed=0):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 60, rows)
    return {
        "tokens": from_lengths(random.integers(1, 50, lengths.sum()), lengths),
        "label": random.integers(0, 3, rows),
        "number": np.arange(rows),
    }


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_dataset(str(tmp_path_factory.mktemp("texts")), texts(), group_rows=40, shard_rows=120, **TOKENS)


def config_of(num_ranks, loader, train=None, **sections):
    return small_config(num_ranks, train, {**TOKENS, "shuffle_window_rows": 200, **loader}, **sections)


def steps_of(shards, config, *, epoch=0, start_step=0, ranks=None, **options):
    """The micro-batches of each step, of all ranks."""
    ranks = ranks or config.launch.num_ranks
    loaders = [ShardLoader(shards, config, rank=rank, world_size=ranks, **options) for rank in range(ranks)]
    by_rank = [[step.micro_batches for step in loader.epoch(epoch, start_step)] for loader in loaders]
    return [[batch for batches in of_ranks for batch in batches] for of_ranks in zip(*by_rank, strict=True)]


def numbers_of(batches):
    """The true rows of a step, sorted."""
    return sorted(int(n) for batch in batches for n in batch["number"][batch["weight"] > 0])


def padding_of(steps):
    """The part of the values that is padding."""
    return 1 - np.mean([float(batch["tokens_mask"].float().mean()) for batches in steps for batch in batches])


@pytest.mark.parametrize("memory_mib", [64, 1])
@pytest.mark.parametrize("window", [40, 500, 10_000])
def test_steps_have_rows_of_similar_lengths_the_same_ones_on_any_number_of_ranks(shards, window, memory_mib):
    settings = {**GROUPED, "shuffle_window_rows": window, "memory_mib": memory_mib}
    orders = []
    for ranks in (1, 2, 3, 4):
        found = steps_of(shards, config_of(ranks, {**settings}))
        orders.append([numbers_of(step) for step in found])
        assert sorted(itertools.chain(*orders[-1])) == list(range(500))
    assert all(order == orders[0] for order in orders)
    config = config_of(1, settings)
    later = [numbers_of(step) for step in steps_of(shards, config, epoch=1)]
    assert sorted(itertools.chain(*later)) == list(range(500))
    assert later != orders[0]
    plain = steps_of(shards, config_of(1, {**settings, "group_by_length": False}))
    assert [len(numbers_of(step)) for step in plain] == [len(order) for order in orders[0]]
    for step in range(len(plain)):
        assert [numbers_of(each) for each in steps_of(shards, config, start_step=step)] == orders[0][step:]


def test_little_is_padding_and_no_step_has_all_the_longest_rows_in_every_epoch(tmp_path):
    shards = write_dataset(str(tmp_path / "texts"), texts(2400), group_rows=60, shard_rows=240, **TOKENS)
    plain, config = config_of(1, {}), config_of(1, GROUPED)
    assert padding_of(steps_of(shards, plain)) > 0.45
    assert padding_of(steps_of(shards, config)) < 0.25
    assert padding_of(steps_of(shards, config_of(1, {**GROUPED, "max_tokens": 400}))) < 0.07
    longest = [int(np.argmax([step[0]["tokens"].shape[1] for step in steps_of(shards, config, epoch=epoch)]))
               for epoch in range(4)]  # fmt: skip
    assert len({*longest}) > 1


def test_without_shuffling_rows_are_grouped_too(shards):
    config = config_of(2, GROUPED)
    found = steps_of(shards, config, shuffle=False)
    assert sorted(itertools.chain(*map(numbers_of, found))) == list(range(500))
    assert padding_of(found) < padding_of(steps_of(shards, config_of(2, {}), shuffle=False)) - 0.2


@pytest.mark.parametrize("pad_to", [(), (16, 32)])
@pytest.mark.parametrize("max_tokens", [1, 150, 100_000])
def test_micro_batches_have_at_most_so_many_values(shards, max_tokens, pad_to):
    settings = {"max_tokens": max_tokens, "pad_to": pad_to}
    plain = steps_of(shards, config_of(2, {}))
    found = steps_of(shards, config_of(2, settings))
    for batches, expected in zip(found, plain, strict=True):
        assert numbers_of(batches) == numbers_of(expected)
        for batch in batches:
            rows, longest = batch["tokens"].shape
            assert rows * longest <= max_tokens or rows == 1
            assert not pad_to or longest in (16, 32, 64)
            assert torch.equal(batch["tokens"] > 0, batch["tokens_mask"])


def test_each_row_keeps_its_values(shards):
    config = config_of(2, {**GROUPED, "max_tokens": 100, "pad_to": (8, 64)})
    expected = texts()
    for batch in itertools.chain(*steps_of(shards, config)):
        for number, tokens, mask, label in zip(
            *(batch[name] for name in ("number", "tokens", "tokens_mask", "label")), strict=True
        ):
            start, stop = expected["tokens"].offsets[number : number + 2]
            assert tokens[mask].tolist() == expected["tokens"].values[start:stop].tolist()
            assert int(label) == expected["label"][number]


def weights_of(tmp_path, shards, config, spec=SPEC, name="run"):
    saved = train(Run(spec=spec, config=config, train=shards, run_dir=str(tmp_path / name)))
    return checkpoint.load_weights(saved)


STRATEGIES = [
    (DDP(), 1), (DDP(), 2), (DDP(), 3), (Single(), 1), (Mesh(), 2), (Mesh(zero_stage=1), 3), (Mesh(tensor=2), 2),
    (ParameterServer(num_servers=1), 3),
]  # fmt: skip


@pytest.mark.parametrize(("parallel", "num_ranks"), STRATEGIES, ids=str)
def test_weights_depend_neither_on_ranks_nor_on_max_tokens(tmp_path, shards, parallel, num_ranks):
    loader = {**GROUPED, "max_tokens": 200, "pad_to": (16, 32)}
    found = weights_of(tmp_path, shards, config_of(num_ranks, loader, parallel=parallel))
    expected = weights_of(tmp_path, shards, config_of(1, GROUPED, parallel=Single()), name="plain")
    assert distance(found, expected) < 1e-5 * distance(expected, Text().state_dict())


def test_local_steps_take_as_many_micro_batches_as_each_rank_needs(tmp_path, shards):
    parallel = LocalSGD(sync_every_steps=2)
    found = weights_of(tmp_path, shards, config_of(2, {"max_tokens": 200}, parallel=parallel))
    expected = weights_of(tmp_path, shards, config_of(2, {}, parallel=parallel), name="plain")
    assert distance(found, expected) < 1e-5 * distance(expected, Text().state_dict())


@pytest.mark.parametrize("stop_at", [1, 3, 13])
def test_a_resume_on_other_ranks_goes_on_within_the_steps_that_are_sorted_together(tmp_path, shards, stop_at):
    config = config_of(2, {**GROUPED, "max_tokens": 300}, checkpoint=Checkpoint(every_steps=1, keep=99))
    expected = weights_of(tmp_path, shards, config, name="whole")
    run = Run(spec=SPEC, config=cut_at(config, stop_at), train=shards, run_dir=str(tmp_path / "cut"))
    saved = train(run)
    three = config_of(3, {**GROUPED, "max_tokens": 300}, checkpoint=config.checkpoint)
    found = checkpoint.load_weights(resume(run, saved, three))
    assert distance(found, expected) < 1e-5 * distance(expected, Text().state_dict())


def build_with_dropout():
    return nn.Sequential(Text(), nn.Dropout(0.3))


def test_random_numbers_by_row_are_those_of_the_row_in_any_micro_batch(tmp_path, shards):
    spec = ModelSpec(build=build_with_dropout)
    by_row = {"random_by": "row"}
    found = weights_of(tmp_path, shards, config_of(2, {**GROUPED, "max_tokens": 200}, by_row), spec)
    expected = weights_of(tmp_path, shards, config_of(1, GROUPED, by_row), spec, name="plain")
    assert distance(found, expected) < 1e-5 * distance(expected, build_with_dropout().state_dict())


def contrastive(model, batch):
    rows = gather_rows(model(batch["tokens"]))
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def test_rows_of_other_micro_batches_cannot_be_gathered(tmp_path, shards):
    config = config_of(1, {"max_tokens": 200}, {"check_batch_loss": False})
    run = Run(
        spec=ModelSpec(build=Text, batch_loss=contrastive), config=config, train=shards, run_dir=str(tmp_path / "run")
    )
    expected = r"gather_rows: found loader\.max_tokens=200, expected one micro-batch"
    with pytest.raises(RankFailed, match=expected):
        train(run)
    saved = train(dataclasses.replace(run, config=config_of(1, {}, {"check_batch_loss": False})))
    with pytest.raises(RankFailed, match=expected):
        on_ranks(evaluate_rank, dataclasses.replace(run, config=config, checkpoint=saved.url))


def names_of_rows(run):
    loader = ShardLoader(run.train, run.config, rank=0, world_size=1)
    return loader.plan.length_steps, loader.name_rows(0, 3)


def test_a_message_names_the_rows_that_a_step_is_sorted_by_length_with(tmp_path, shards):
    run = Run(spec=SPEC, config=config_of(1, GROUPED), train=shards, run_dir=str(tmp_path / "run"))
    ((steps, named),) = on_ranks(names_of_rows, run)
    assert steps == 5
    assert named.startswith("among those of 5 steps that are sorted by length (loader.group_by_length): row")
