"""Whole training runs on ranks, in one piece or cut in two."""

import dataclasses
import math

import cloudpickle

from spark_dl import storage, worker
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.rundir import checkpoint, saving
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.models import MLP, blobs, same_bits
from tests.ranks.launcher import run_ranks


def train_rank(run):
    return worker.main(run).result


def _call(pickled):
    function, *args = cloudpickle.loads(pickled)
    return function(*args)


def on_ranks(function, run, *args):
    """What a function returns on each rank. Models and optimizers of a test may be closures."""
    return run_ranks(_call, run.config.launch.num_ranks, cloudpickle.dumps((function, run, *args)))


def make_run(tmp_path, config, *, spec=MLP, rows=245, name="run", **run):
    url = str(tmp_path / f"data-{rows}")
    shards = read_shards(url) if storage.exists(url) else write_dataset(url, blobs(rows), group_rows=40, shard_rows=120)
    return Run(spec=spec, config=config, train=shards, run_dir=str(tmp_path / name), **run)


def train(run):
    """The checkpoint that a run ends with."""
    on_ranks(train_rank, run)
    return checkpoint.latest(run.run_dir)


def resume(run, saved, config=None):
    """Goes on from a checkpoint, with the run's settings or others; the checkpoint that it ends with."""
    generation = checkpoint.start_generation(run.run_dir)
    return train(dataclasses.replace(run, config=config or run.config, checkpoint=saved.url, generation=generation))


def cut_at(config, step):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=step))


def distance(weights, expected):
    """The norm of the difference of two models, over the tensors of `expected`."""
    return math.sqrt(sum(float((weights[name] - value).square().sum()) for name, value in expected.items()))


def rank_states(saved):
    """What each rank had alone, by rank."""
    ranks = saved.manifest["world_size"]
    return [saving.load_rank_state(saved, rank, ranks) for rank in range(ranks)]


def flat_tensors(state, prefix=""):
    """The tensors and numbers of a nested state, by their path."""
    if not isinstance(state, dict):
        return {prefix: state}
    return {k: v for key, value in state.items() for k, v in flat_tensors(value, f"{prefix}/{key}").items()}


def assert_same_to_the_bit(saved, again):
    """Weights, and what each rank has alone, of two checkpoints of the same step."""
    assert saved.step == again.step
    assert same_bits(*(checkpoint.load(s, "model.pt")["0"] for s in (saved, again)))
    for state, state_again in zip(rank_states(saved), rank_states(again), strict=True):
        a, b = flat_tensors(state), flat_tensors(state_again)
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert value.equal(b[name]) if hasattr(value, "equal") else value == b[name], name
