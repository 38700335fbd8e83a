"""Slices of rows on several ranks: the weights of one rank with whole rows."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spark_dl import Mesh, ModelSpec
from spark_dl.nn import position_offset
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.rundir.metrics import read_metrics
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.models import same_bits, small_config
from tests.ranks.launcher import RankFailed
from tests.ranks.runs import cut_at, resume, train

LENGTH, WORDS, WIDTH = 12, 7, 8


class Layer(nn.Module):
    def __init__(self, *, is_causal):
        super().__init__()
        self.is_causal = is_causal
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # the gradient of a bias of keys is rounding alone
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Tokens [rows, positions] -> scores [rows, positions, words]."""

    def __init__(self, *, is_causal=True, has_offset=True):
        super().__init__()
        self.has_offset = has_offset
        self.embed, self.at = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(is_causal=is_causal) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        at = torch.arange(tokens.shape[1]) + (position_offset() if self.has_offset else 0)
        x = self.embed(tokens.long()) + self.at(at)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WithMask(Model):
    def forward(self, tokens):
        x = self.embed(tokens.long())[:, None]
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool)
        return self.head(F.scaled_dot_product_attention(x, x, x, attn_mask=mask)[:, 0])


class Pooled(Model):
    def forward(self, tokens):
        return super().forward(tokens).mean(1, keepdim=True).expand(-1, tokens.shape[1], -1)


def of_tokens(scores, label):
    return F.cross_entropy(scores.transpose(1, 2), label.long(), reduction="none")


def of_counted(scores, label):
    """The loss of some positions, which it counts: other numbers of them in each row and slice."""
    weights = (label % 3 > 0).float() * (torch.arange(label.shape[1]) + position_offset() >= 0)
    return of_tokens(scores, label), weights


SPECS = {
    "causal": ModelSpec(build=Model, loss=of_tokens), "counted": ModelSpec(build=Model, loss=of_counted),
    "all positions": ModelSpec(build=lambda: Model(is_causal=False), loss=of_tokens),
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, WORDS, (100, LENGTH + 1)).astype(np.int32)
    columns = {"tokens": tokens[:, :-1].copy(), "next": tokens[:, 1:].copy()}
    return write_dataset(str(tmp_path_factory.mktemp("rows") / "data"), columns, group_rows=20, shard_rows=50)


def run_of(tmp_path, rows, name, spec, num_ranks=1, parallel=None, **train_):
    settings = {"lr": 0.3, "epochs": 2, "global_batch_size": 24, "clip_grad_norm": 1.0, **train_}
    config = small_config(num_ranks, train=settings, data={"features": ("tokens",), "label": "next"},
                          launch={"collective_timeout_s": 60}, parallel=parallel or Mesh())  # fmt: skip
    return Run(spec=spec, config=config, train=rows, run_dir=str(tmp_path / name))


def assert_close(expected, found):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def losses_of(run, kind):
    lines = [line for line in read_metrics(run.run_dir) if line["kind"] == kind]
    return [line["metrics"]["loss"] if kind == "epoch" else line["loss"] for line in lines]


@pytest.mark.parametrize(("spec", "num_ranks", "mesh", "more"), [
    ("causal", 2, {"context": 2}, {}),
    ("causal", 4, {"context": 2, "zero_stage": 1}, {"accumulation_steps": 2}),
    ("causal", 3, {"context": 3, "zero_stage": 3}, {"activation_checkpointing": "full"}),
    ("causal", 2, {"context": 2, "zero_stage": 2},
     {"accumulation_steps": 2, "activation_checkpointing": ("layers.0",)}),
    ("counted", 2, {"context": 2}, {"accumulation_steps": 2}),
    ("counted", 4, {"context": 2, "zero_stage": 3}, {}),
    ("all positions", 2, {"context": 2, "zero_stage": 1}, {"optimizer": "Adam", "lr": 0.003}),
    ("all positions", 4, {"context": 4}, {}),
], ids=str)  # fmt: skip
def test_slices_train_the_weights_of_whole_rows(tmp_path, rows, spec, num_ranks, mesh, more):
    shared = {"validation_fraction": 0.2, "log_every": 1, **more}
    one = run_of(tmp_path, rows, "one", SPECS[spec], **shared)
    several = run_of(tmp_path, rows, "several", SPECS[spec], num_ranks, Mesh(**mesh), **shared)
    assert_close(load_weights(train(one)), load_weights(train(several)))
    for kind in ("step", "epoch"):
        np.testing.assert_allclose(losses_of(several, kind), losses_of(one, kind), rtol=1e-5)


def build_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=LENGTH, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def forward_gpt2(model, batch):
    tokens = batch["tokens"].long()
    positions = torch.arange(tokens.shape[1])[None] + position_offset()
    return model(tokens, position_ids=positions, use_cache=False).logits


def test_a_model_of_transformers_takes_its_positions(tmp_path, rows):
    pytest.importorskip("transformers")
    spec = ModelSpec(build=build_gpt2, forward=forward_gpt2, loss=of_tokens)
    one = train(run_of(tmp_path, rows, "one", spec))
    several = train(run_of(tmp_path, rows, "several", spec, 2, Mesh(context=2, zero_stage=1)))
    assert_close(load_weights(one), load_weights(several))


def test_a_resume_has_other_slices(tmp_path, rows):
    whole = run_of(tmp_path, rows, "whole", SPECS["causal"], 2, Mesh(context=2, zero_stage=1))
    trained = train(whole)
    cut = dataclasses.replace(whole, run_dir=str(tmp_path / "cut"), config=cut_at(whole.config, 5))
    saved = train(cut)
    one = dataclasses.replace(run_of(tmp_path, rows, "one", SPECS["causal"]), run_dir=cut.run_dir)
    assert same_bits(load_weights(trained), load_weights(resume(cut, saved, whole.config)))
    again = resume(one, saved)
    assert again.step == trained.step
    assert_close(load_weights(trained), load_weights(again))


@pytest.mark.parametrize(("build", "problem"), [
    (lambda: Model(has_offset=False), "the gradient of 'embed.weight' in the first step differs"),
    (Pooled, "in the first step differs from that of the whole model"),
    (WithMask, r"an attention with a mask \(attn_mask\) is not supported"),
])  # fmt: skip
def test_a_model_that_sees_its_slice_only_is_an_error(tmp_path, rows, build, problem):
    run = run_of(tmp_path, rows, "run", ModelSpec(build=build, loss=of_tokens), 2, Mesh(context=2))
    with pytest.raises(RankFailed, match=problem):
        train(run)


def test_positions_that_cannot_be_divided_are_an_error(tmp_path, rows):
    run = run_of(tmp_path, rows, "run", SPECS["causal"], 5, Mesh(context=5))
    with pytest.raises(RankFailed, match="expected a multiple of 5 positions, found 12 in the feature 'tokens'"):
        train(run)
    none = run_of(tmp_path, rows, "none", ModelSpec(build=Model, loss=of_tokens, transform=lambda batch: {
        **batch, "tokens": batch["tokens"][:, 0]}), 2, Mesh(context=2))  # fmt: skip
    with pytest.raises(RankFailed, match="expected a feature with an axis of positions"):
        train(none)
