"""Sparse gradients: what trains with them, and one error before the first step for what does not."""

import pytest
import torch
from torch import nn

from spark_dl import DDP, Mesh, ModelSpec
from spark_dl.rundir.checkpoint import load_weights
from tests.builders.models import same_bits, small_config
from tests.ranks.launcher import RankFailed, run_ranks
from tests.ranks.runs import cut_at, make_run, train, train_rank


class Words(nn.Module):
    def __init__(self, sparse=True):
        super().__init__()
        self.table, self.out = nn.Embedding(8, 4, sparse=sparse), nn.Linear(4, 3)

    def forward(self, features):
        return self.out(self.table((features[:, 0] * 2).long().clamp(0, 7)))


def build_dense():
    return Words(sparse=False)


def build_table():
    return nn.Sequential(nn.Flatten(), TableOnly())


class TableOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 3, sparse=True)

    def forward(self, features):
        return self.table((features[:, 0] * 2).long().clamp(0, 7))


def two_kinds(model):
    return torch.optim.Adam(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": {"clip_grad_norm": 1.0}}, r"train.clip_grad_norm: found 1.0, .* sparse gradients of 'table.weight'"),
        ({"parallel": DDP(all_reduce="ring")}, r"parallel.all_reduce: found 'ring', .* of 'table.weight'"),
        ({"parallel": DDP(compression="topk")}, r"parallel.compression: found 'topk', .* of 'table.weight'"),
        ({"parallel": Mesh(zero_stage=3)}, r"parallel.zero_stage: found 3, .* of 'table.weight'"),
        (
            {"train": {"optimizer": "Adam"}},
            r"optimizer: Adam does not take the sparse gradients of 'table.weight'",
        ),
        ({"train": {"optimizer": "SparseAdam"}}, r"SparseAdam takes sparse gradients alone, and those of 'out.weight'"),
    ],
)
def test_what_does_not_take_sparse_gradients_is_one_error_before_the_first_step(tmp_path, settings, message):
    run = make_run(tmp_path, small_config(2, **settings), spec=ModelSpec(build=Words))
    with pytest.raises(RankFailed, match=message) as caught:
        run_ranks(train_rank, 2, run)
    assert "ValueError" in str(caught.value)  # which is not tried again


def test_a_dense_model_has_no_use_for_sparse_adam(tmp_path):
    run = make_run(tmp_path, small_config(1, train={"optimizer": "SparseAdam"}), spec=ModelSpec(build=build_dense))
    with pytest.raises(RankFailed, match="SparseAdam takes sparse gradients alone, and the model has none"):
        run_ranks(train_rank, 1, run)


@pytest.mark.parametrize(
    "settings",
    [{}, {"parallel": Mesh(zero_stage=1)}, {"train": {"optimizer": "Adagrad"}}, {"train": {"accumulation_steps": 2}}],
    ids=str,
)
def test_sparse_and_dense_gradients_train_the_same(tmp_path, settings):
    weights = []
    for name, build in (("sparse", Words), ("dense", build_dense)):
        run = make_run(tmp_path, cut_at(small_config(2, **settings), 6), spec=ModelSpec(build=build), name=name)
        weights.append(load_weights(train(run)))
    for key, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][key], rtol=1e-5, atol=1e-6)
    assert not same_bits(weights[0], build_dense().state_dict())


def test_a_table_alone_trains_with_sparse_adam(tmp_path):
    settings = {"train": {"optimizer": "SparseAdam", "lr": 0.01}}
    run = make_run(tmp_path, cut_at(small_config(2, **settings), 3), spec=ModelSpec(build=build_table))
    assert train(run).step == 3


def build_lazy():
    return nn.Sequential(nn.LazyLinear(16), nn.Linear(16, 3))


def test_a_lazy_module_is_named(tmp_path):
    run = make_run(tmp_path, small_config(2), spec=ModelSpec(build=build_lazy))
    with pytest.raises(RankFailed, match=r"spec.build: the shape of '0.weight' is not known yet, as its"):
        run_ranks(train_rank, 2, run)


BINARY = {"auroc": {"class": "BinaryAUROC"}}


def test_a_metric_that_does_not_take_an_output_is_named(tmp_path):
    config = small_config(1, train={"validation_fraction": 0.3, "epochs": 1, "metrics": BINARY})
    run = make_run(tmp_path, config)
    expected = r"metric 'auroc': .*The output is \(\d+, 3\) float32, and its label 'label' \(\d+,\) int64; choose"
    with pytest.raises(RankFailed, match=expected) as caught:
        run_ranks(train_rank, 1, run)
    assert "ValueError" in str(caught.value)


def as_flags(batch):
    return {**batch, "label": batch["label"] > 0}


def first(model, batch):
    return model(batch["features"])[:, 0]


def test_a_loss_that_takes_no_booleans_names_the_column(tmp_path):
    spec = ModelSpec(build=lambda_free_mlp, forward=first, transform=as_flags, loss="L1Loss")
    run = make_run(tmp_path, small_config(1), spec=spec)
    with pytest.raises(RankFailed, match=r"spec.loss: .*bool.*the column 'label' is \(48,\) bool; change"):
        run_ranks(train_rank, 1, run)


def lambda_free_mlp():
    return nn.Linear(4, 3)
