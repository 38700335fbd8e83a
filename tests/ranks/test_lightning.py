"""A LightningModule trains as under Lightning's own Trainer, on any number of ranks, and goes on exactly."""

import dataclasses

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spark_dl import DDP, LocalSGD, ModelSpec, Single, read_shards, storage
from spark_dl.data.plan import Plan
from spark_dl.evaluate import load_model
from spark_dl.rundir import checkpoint
from spark_dl.rundir.metrics import read_metrics
from tests.builders.datasets import global_batches, write_dataset
from tests.builders.lightning_modules import (
    ByEpoch,
    ByStep,
    Classifier,
    OnPlateau,
    SeesPosition,
    WithState,
)
from tests.builders.models import blobs, build_dropout_mlp, small_config
from tests.ranks.launcher import run_ranks
from tests.ranks.runs import assert_same_to_the_bit, cut_at, make_run, resume, train, train_rank

VALIDATION_ROWS = 61


def config_of(num_ranks, **train):
    """lr is that of the module."""
    return small_config(num_ranks, train={"lr": 0.01, **train})


def tensors(columns):
    return TensorDataset(torch.from_numpy(columns["features"]), torch.from_numpy(columns["label"]))


class GlobalBatches(torch.utils.data.Sampler):
    """The rows of the same global batches, epoch by epoch."""

    def __init__(self, shards, config):
        groups = tuple(n for s in shards.shards for n in s.row_groups)
        self.plan = Plan(
            group_rows=groups, global_batch_size=config.train.global_batch_size, num_streams=config.loader.num_streams,
            window_rows=config.loader.shuffle_window_rows, seed=config.train.seed,
        )  # fmt: skip
        self.epoch = -1

    def __len__(self):
        return self.plan.steps

    def __iter__(self):
        self.epoch += 1
        yield from (list(batch) for batch in global_batches(self.plan, self.epoch))


def fit_by_lightning(build, shards, config, rows, folder):
    """The module that Lightning's Trainer trains in this process, and what its last validation logged."""
    torch.manual_seed(config.train.seed)
    module = build()
    trainer = pl.Trainer(
        max_epochs=config.train.epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder,
    )  # fmt: skip
    batches = DataLoader(tensors(blobs(rows)), batch_sampler=GlobalBatches(shards, config))
    validation = DataLoader(tensors(blobs(VALIDATION_ROWS, seed=1)), batch_size=17)
    trainer.fit(module, batches, validation)
    (values,) = trainer.validate(module, validation, verbose=False)
    return module, values


def run_of(tmp_path, config, build, *, rows=245, name="run", **options):
    """A run with validation rows."""
    url, columns = str(tmp_path / "validation"), blobs(VALIDATION_ROWS, seed=1)
    exists = storage.exists(url)
    validation = read_shards(url) if exists else write_dataset(url, columns, group_rows=20, shard_rows=40)
    spec = options.pop("spec", None) or ModelSpec.from_lightning(build)
    return make_run(tmp_path, config, spec=spec, rows=rows, name=name, validation=validation, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("build", "num_ranks", "rows", "train_settings"),
    [
        pytest.param(Classifier, 1, 245, {}, id="1"),
        pytest.param(Classifier, 2, 243, {"accumulation_steps": 3}, id="2-accumulation"),
        pytest.param(Classifier, 3, 193, {}, id="3-one row in the last batch"),
        pytest.param(ByEpoch, 2, 245, {"epochs": 3}, id="2-by epoch"),
        pytest.param(ByStep, 3, 245, {}, id="3-by step"),
        pytest.param(OnPlateau, 2, 245, {"epochs": 3}, id="2-plateau"),
    ],
)
def test_same_as_lightning_s_trainer(tmp_path, build, num_ranks, rows, train_settings):
    config = config_of(num_ranks, **train_settings)
    run = run_of(tmp_path, config, build, rows=rows)
    result = run_ranks(train_rank, num_ranks, run)[0]
    expected, values = fit_by_lightning(build, run.train, config, rows, tmp_path)
    weights = checkpoint.load(checkpoint.find(run.run_dir), "model.pt")["0"]
    assert weights.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
    assert set(values) == {"val_loss", "val_acc", "val_largest", "val_share"}
    assert result["metrics"] == pytest.approx(values, rel=1e-5), "what validation_step logs, in every epoch"
    assert result["history"][-1]["metrics"] == result["metrics"]


@pytest.mark.parametrize(("num_ranks", "stop_at"), [(2, 8)])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, num_ranks, stop_at):
    """With BatchNorm, dropout, Adam, a scheduler of schedulers, and a loss that depends on the position."""
    config = config_of(num_ranks, warmup_steps=3, clip_grad_norm=1.0)
    whole = run_of(tmp_path, config, WithState, name="whole")
    cut = dataclasses.replace(whole, run_dir=str(tmp_path / "cut"), config=cut_at(config, stop_at))
    ends = train(whole), resume(cut, train(cut), config)
    assert_same_to_the_bit(*ends)
    states = [checkpoint.load(end, "training.pt") for end in ends]
    assert states[0]["settings"] == states[1]["settings"]
    assert states[0]["progress"] == states[1]["progress"]


@pytest.mark.parametrize("parallel", [Single(), LocalSGD(sync_every_steps=2)], ids=lambda p: p.strategy)
def test_other_strategies_train_it(tmp_path, parallel):
    config = small_config(1 if parallel.one_rank else 2, train={"lr": 0.01, "epochs": 3}, parallel=parallel)
    history = run_ranks(train_rank, config.launch.num_ranks, run_of(tmp_path, config, ByStep))[0]["history"]
    assert history[-1]["metrics"]["val_loss"] < 0.7 * history[0]["metrics"]["val_loss"]


def test_rates_are_those_of_the_module_times_scaling_and_warm_up(tmp_path):
    config = config_of(2, lr_scaling="linear", warmup_steps=2, epochs=2)
    run = run_of(tmp_path, config, ByEpoch)
    train(run)
    rates = [line["lr"] for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    assert rates == pytest.approx([0.1, *[0.2] * 5, *[0.1] * 6])


def test_the_module_sees_the_epoch_and_the_step(tmp_path):
    run = run_of(tmp_path, config_of(2), SeesPosition)
    train(run)
    losses = [line["loss"] for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    assert losses == pytest.approx([100 * (step // 6) + 10 * step + step % 6 for step in range(12)])


class Normalized(Classifier):
    def __init__(self):
        super().__init__()
        self.model = build_dropout_mlp()
        self.model[3] = nn.Identity()  # without dropout


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [3, 49, 245])
def test_batchnorm_over_all_ranks_is_that_of_one_process(tmp_path, rows):
    """Also if ranks have one row, or none, which torch's BatchNorm does not take."""
    config = small_config(3, train={"lr": 0.01}, parallel=DDP(sync_batchnorm=True))
    saved = train(run_of(tmp_path, config, Normalized, rows=rows))
    alone = small_config(1, train={"lr": 0.01}, parallel=DDP(sync_batchnorm=True))
    expected = train(run_of(tmp_path, alone, Normalized, rows=rows, name="alone"))
    found, weights = (checkpoint.load(s, "model.pt")["0"] for s in (saved, expected))
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_batchnorm_of_each_rank_takes_a_batch_of_one_row(tmp_path):
    result = run_ranks(train_rank, 2, run_of(tmp_path, config_of(2), Normalized, rows=49))[0]
    assert result["rows"] == 98
    assert np.isfinite(result["train_loss"])


def test_the_trained_module_is_a_lightning_module_with_these_weights(tmp_path):
    spec = ModelSpec.from_lightning(Classifier())
    run = run_of(tmp_path, config_of(1, epochs=1), None, spec=spec)
    saved = train(run)
    module = load_model(spec, saved.url)
    assert isinstance(module, Classifier)
    assert module.hparams.lr == 0.1
    torch.testing.assert_close(module.state_dict(), checkpoint.load(saved, "model.pt")["0"])
    with pytest.raises(RuntimeError, match="not attached to a `Trainer`"):
        module.trainer.max_epochs  # noqa: B018 - as before the training
