"""What the mean of a loss is over: weights of classes, labels that count, values of ragged labels, tokens.

Every rank and every micro-batch has another share of it, and the weights are those of one process all the same.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from spark_dl import ModelSpec, storage, worker
from spark_dl.data.columns.ragged import from_lengths
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.data.load.build import build_loader
from spark_dl.evaluate import load_model
from spark_dl.launch.rank.environment import restored_process
from spark_dl.nn import causal_lm_loss
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.rundir.metrics import read_metrics
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.models import blobs, build_mlp, small_config
from tests.builders.settings import parallel
from tests.ranks.launcher import RankFailed, run_ranks

ROWS = 245
WEIGHTS = torch.tensor([0.2, 3.0, 1.0])
SGD = {"optimizer_args": {"momentum": 0.9}}


def columns():
    """Points with a class; and rows of 1 to 7 tokens with a tag each, of the classes 1 to 3, so that 0 is padding."""
    found, rng = blobs(ROWS), np.random.default_rng(5)
    lengths = rng.integers(1, 8, ROWS)
    tokens = rng.integers(1, 6, lengths.sum())
    tags = (tokens + rng.integers(0, 2, len(tokens))) % 3 + 1
    ignored = np.where(rng.random(ROWS) < 0.2, 2, found["label"] % 2)  # no batch has ignored labels alone
    importance = (10 * rng.random(ROWS)).astype(np.float32)
    packs = [[tokens[start : start + n] for start, n in texts] for texts in texts_of_packs(lengths)]
    packed = [sum(map(len, texts)) for texts in packs]
    ids = np.concatenate([text for texts in packs for text in texts])
    positions = np.concatenate([np.arange(len(text)) for texts in packs for text in texts])
    return {
        **found,
        "ignored": ignored,
        "importance": importance,
        "heavy": 1000 * importance,
        "tokens": from_lengths(tokens, lengths),
        "tags": from_lengths(tags, lengths),
        "input_ids": from_lengths(ids, packed),
        "labels": from_lengths(np.where(positions == 0, -100, ids), packed),
        "position_ids": from_lengths(positions, packed),
    }


def texts_of_packs(lengths):
    """Start and length of the texts of each pack: 1 to 3 rows of tokens."""
    starts = np.cumsum(lengths) - lengths
    for row in range(len(lengths)):
        yield [(starts[i % ROWS], lengths[i % ROWS]) for i in range(row, row + 1 + row % 3)]


class TokensLast(nn.Module):
    def forward(self, scores):
        return scores.transpose(1, 2)


def build_tagger():
    """Scores of 4 tags for each token, which meshes can cut. # tokens: [rows, longest], returns: [rows, 4, longest]"""
    return nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), TokensLast())


def weighted_mean(model, batch):
    return F.cross_entropy(model(batch["features"]), batch["label"], weight=WEIGHTS)


def mean_of_counted(model, batch):
    return F.cross_entropy(model(batch["features"]), batch["ignored"], ignore_index=2)


def token_losses(model, batch):
    return F.cross_entropy(model(batch["tokens"]), batch["tags"], reduction="none") * batch["tags_mask"]


def mean_over_tokens(model, batch):
    return token_losses(model, batch).sum() / batch["tags_mask"].sum()


def num_tokens(batch):
    return batch["tags_mask"].sum()


def weight_of_labels(batch):
    return WEIGHTS[batch["label"]].sum()


def squares_of_tags(model, batch):
    return ((model(batch["tokens"])[:, 0] - batch["tags"]).square() * batch["tags_mask"]).sum() / batch[
        "tags_mask"
    ].sum()


def kl_of_output(model, batch):
    target = F.one_hot(batch["label"], 3).float() * 0.8 + 0.05
    return F.kl_div(model(batch["features"]).log_softmax(1), target, reduction="batchmean")


def smoothed(model, batch):
    return F.cross_entropy(model(batch["features"]), batch["label"], weight=WEIGHTS, label_smoothing=0.1)


def soft_labels(batch):
    return {**batch, "label": F.one_hot(batch["label"], 3).float() * 0.8 + 0.05}


def log_softmax(model, batch):
    return model(batch["features"]).log_softmax(1)


def first_score(model, batch):
    return model(batch["tokens"])[:, 0]


def squares(output, label):
    return (output - label.float()).square()


def by_importance(model, batch):
    losses = F.cross_entropy(model(batch["features"]), batch["label"], reduction="none")
    return (losses * batch["weight"]).sum() / batch["weight"].sum()


def by_importance_and_class(model, batch):
    losses = F.cross_entropy(model(batch["features"]), batch["label"], weight=WEIGHTS, reduction="none")
    return (losses * batch["weight"]).sum() / (WEIGHTS[batch["label"]] * batch["weight"]).sum()


def losses_of_rows(output, batch):
    return F.cross_entropy(output, batch["label"], reduction="none")


def losses_and_weights(output, batch):
    return F.cross_entropy(output, batch["label"], reduction="none"), WEIGHTS[batch["label"]]


def tags_with_weights(output, label):
    """Of each token, and 0 for padding, of which there is a value only because rows are as long as the longest."""
    return F.cross_entropy(output, label, reduction="none"), (label > 0).float()


def sum_and_count(model, batch):
    return token_losses(model, batch).sum(), batch["tags_mask"].sum()


def build_gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=6, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )


def loss_of_transformers(model, batch):
    labels = batch["tokens"].masked_fill(~batch["tokens_mask"], -100)
    return model(input_ids=batch["tokens"], attention_mask=batch["tokens_mask"].long(), labels=labels).loss


def loss_of_texts(model, batch):
    """The mean over the tokens of packs, each text of which is a row by itself."""
    total, count = 0.0, 0
    for ids, positions, mask in zip(batch["input_ids"], batch["position_ids"], batch["input_ids_mask"], strict=True):
        ends = [*(positions[mask] == 0).nonzero()[1:, 0].tolist(), int(mask.sum())]
        for text in ids[mask].tensor_split(ends[:-1]):
            logits = model(input_ids=text[None]).logits[0, :-1]
            total = total + F.cross_entropy(logits, text[1:], reduction="sum")
            count += len(text) - 1
    return total / count


def build_tagger_of_transformers():
    return transformers.BertForTokenClassification(
        transformers.BertConfig(
            vocab_size=6, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=8, num_labels=4, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )
    )  # fmt: skip


def tags_of_transformers(model, batch):
    mask = batch["tokens_mask"]
    labels = batch["tags"].masked_fill(~mask, -100)
    return model(input_ids=batch["tokens"], attention_mask=mask.long(), labels=labels).loss


def listwise(output, batch):
    """ListNet, with a group in each row: the cross entropy of its values. # returns: [rows]"""
    mask = batch["tags_mask"]
    wanted = batch["tags"].float().masked_fill(~mask, -torch.inf).softmax(1)
    return -(wanted * output[:, 0].masked_fill(~mask, -1e9).log_softmax(1)).sum(1)


def mean_of_groups(model, batch):
    return listwise(model(batch["tokens"]), batch).mean()


POINTS, TAGS = {"features": ("features",)}, {"features": ("tokens",), "label": "tags"}
CASES = {  # the spec, what a plain loop minimizes, and the columns
    "class weights": (ModelSpec(build=build_mlp, loss=nn.CrossEntropyLoss(weight=WEIGHTS)), weighted_mean, POINTS),
    "class weights without reduction": (
        ModelSpec(build=build_mlp, loss=nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none")), weighted_mean, POINTS,
    ),
    "class weights of NLLLoss": (
        ModelSpec(build=build_mlp, forward=log_softmax, loss=nn.NLLLoss(weight=WEIGHTS)), weighted_mean, POINTS,
    ),
    "smoothed": (
        ModelSpec(build=build_mlp, loss=nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1)), smoothed, POINTS,
    ),
    "ignore_index": (
        ModelSpec(build=build_mlp, loss=nn.CrossEntropyLoss(ignore_index=2)), mean_of_counted,
        {**POINTS, "label": "ignored"},
    ),
    "batchmean": (
        ModelSpec(build=build_mlp, forward=log_softmax, transform=soft_labels,
                  loss=nn.KLDivLoss(reduction="batchmean")), kl_of_output, POINTS,
    ),
    "tags": (ModelSpec(build=build_tagger), mean_over_tokens, TAGS),
    "tags of another loss": (ModelSpec(build=build_tagger, forward=first_score, loss=squares), squares_of_tags, TAGS),
    "count": (
        ModelSpec(build=build_tagger, batch_loss=mean_over_tokens, count=num_tokens),
        mean_over_tokens, {"features": ("tokens", "tags"), "label": None},
    ),
    "losses and weights": (ModelSpec(build=build_mlp, loss=losses_and_weights), weighted_mean,
                           {**POINTS, "label": None, "labels": ("label",)}),
    "tags with weights": (ModelSpec(build=build_tagger, loss=tags_with_weights), mean_over_tokens, TAGS),
    "sum and count": (
        ModelSpec(build=build_tagger, batch_loss=sum_and_count),
        mean_over_tokens, {"features": ("tokens", "tags"), "label": None},
    ),
    "GPT-2": (ModelSpec(build=build_gpt2, batch_loss=loss_of_transformers), loss_of_transformers,
              {"features": ("tokens",), "label": None}),
    "packs": (ModelSpec(build=build_gpt2, batch_loss=causal_lm_loss), loss_of_texts,
              {"features": ("input_ids", "position_ids", "labels"), "label": None}),
    "BERT": (ModelSpec(build=build_tagger_of_transformers, batch_loss=tags_of_transformers), tags_of_transformers,
             {"features": ("tokens", "tags"), "label": None}),
    "groups": (ModelSpec(build=build_tagger, loss=listwise), mean_of_groups,
               {"features": ("tokens",), "label": None, "labels": ("tags",)}),
    "weights of rows": (
        ModelSpec(build=build_mlp, loss="CrossEntropyLoss"), by_importance,
        {**POINTS, "weight": "importance", "weight_mean": "weights"},
    ),
    "weights of rows and classes": (
        ModelSpec(build=build_mlp, loss=nn.CrossEntropyLoss(weight=WEIGHTS)), by_importance_and_class,
        {**POINTS, "weight": "importance", "weight_mean": "weights"},
    ),
    "count of classes": (
        ModelSpec(build=build_mlp, batch_loss=weighted_mean, count=weight_of_labels),
        weighted_mean, POINTS,
    ),
}  # fmt: skip


def dataset(tmp_path):
    url = str(tmp_path / "data")
    if storage.exists(url):
        return read_shards(url)
    return write_dataset(url, columns(), group_rows=40, shard_rows=120)


def train_rank(run):
    with restored_process():
        return worker.main(run).result


def trained(tmp_path, name, config, spec=None):
    given, _, _ = CASES[name]
    run = Run(spec=spec or given, config=config, train=dataset(tmp_path), run_dir=str(tmp_path / "run"))
    result = run_ranks(train_rank, config.launch.num_ranks, run)[0]
    losses = [line["loss"] for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    return result, losses, load_weights(checkpoint.find(run.run_dir))


def plain_loop(tmp_path, name, config):
    """Losses and weights of a loop over the same global batches, in one process."""
    spec, loss, _ = CASES[name]
    torch.manual_seed(config.train.seed)
    model = spec.build()
    optimizer = getattr(torch.optim, config.train.optimizer)(
        model.parameters(), lr=config.train.lr, **config.train.optimizer_args
    )
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulation_steps=1))
    losses = []
    loader = build_loader(dataset(tmp_path), config, rank=0, world_size=1)
    for epoch in range(config.train.epochs):
        for step in loader.epoch(epoch):
            (batch,) = step.micro_batches
            rows = {key: value[batch["weight"] > 0] for key, value in batch.items()}
            optimizer.zero_grad()
            found = loss(model, rows)
            found.backward()
            if config.train.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_grad_norm)
            optimizer.step()
            losses.append(found.item())
    return losses, model.state_dict()


def config_of(name, num_ranks, train=None, **sections):
    data = {"label": "label", **CASES[name][2]}
    return small_config(num_ranks, {**SGD, "lr": 0.02, **(train or {})}, data, **sections)


def assert_as_plain_loop(tmp_path, name, config):
    expected_losses, expected = plain_loop(tmp_path, name, config)
    _, losses, weights = trained(tmp_path, name, config)
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-6)
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-6)


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("num_ranks", "accumulation_steps"), [(1, 1), (2, 1), (3, 1), (1, 2), (3, 2), (1, 4), (2, 4)])
@pytest.mark.parametrize("name", CASES)
def test_the_mean_is_that_of_one_process(tmp_path, name, num_ranks, accumulation_steps):
    config = config_of(name, num_ranks, {"accumulation_steps": accumulation_steps})
    assert_as_plain_loop(tmp_path, name, config)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_the_mean_is_that_of_one_process_after_a_resume_on_other_ranks(tmp_path, name):
    """With Adam and clipping, and micro-batches on some of the ranks' numbers."""
    adam = {"optimizer": "Adam", "optimizer_args": {}, "lr": 0.01, "clip_grad_norm": 0.3}
    if (
        name == "groups"
    ):  # a bias shifts all scores of a group, so its gradient is 0, of whose rounding Adam makes steps
        adam = {**SGD, "clip_grad_norm": 0.3}
    config = config_of(name, 2, {**adam, "accumulation_steps": 2, "max_steps": 4})
    run = Run(spec=CASES[name][0], config=config, train=dataset(tmp_path), run_dir=str(tmp_path / "run"))
    run_ranks(train_rank, 2, run)
    config = config_of(name, 3, {**adam, "accumulation_steps": 2})
    run = dataclasses.replace(
        run, config=config, checkpoint=checkpoint.latest(run.run_dir).url,
        generation=checkpoint.start_generation(run.run_dir),
    )  # fmt: skip
    run_ranks(train_rank, 3, run)
    weights, (_, expected) = load_weights(checkpoint.find(run.run_dir)), plain_loop(tmp_path, name, config)
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=3e-5, atol=1e-5)


STRATEGIES = {
    "horovod": (2, {"strategy": "horovod"}),
    "mesh": (2, {"strategy": "mesh"}),
    "zero1": (2, {"strategy": "mesh", "zero_stage": 1}),
    "zero2": (2, {"strategy": "mesh", "zero_stage": 2}),
    "zero3": (2, {"strategy": "mesh", "zero_stage": 3}),
    "tensor": (2, {"strategy": "mesh", "tensor": 2}),
    "pipeline": (2, {"strategy": "mesh", "pipeline": 2, "schedule": "gpipe"}),
    "servers": (4, {"strategy": "parameter_server", "num_servers": 1}),
    "two servers": (4, {"strategy": "parameter_server", "num_servers": 2}),
    "single": (1, {"strategy": "single"}),
}


UNDER_EVERY_STRATEGY = [
    "class weights", "tags", "count", "ignore_index", "weights of rows", "losses and weights", "sum and count", "GPT-2",
    "packs",
]  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        (name, strategy)
        for name, strategy in itertools.product(UNDER_EVERY_STRATEGY, STRATEGIES)
        if strategy != "pipeline" or CASES[name][0].batch_loss is None  # which is called with a whole model
    ],
)
def test_the_mean_is_that_of_one_process_under_every_strategy(tmp_path, name, strategy):
    num_ranks, settings = STRATEGIES[strategy]
    if strategy == "horovod":
        pytest.importorskip("horovod.torch", reason="no horovod", exc_type=ImportError)
    streams = {"num_streams": 12} if "servers" in strategy else {}
    config = config_of(name, num_ranks, parallel=parallel(**settings))
    config = dataclasses.replace(config, loader=dataclasses.replace(config.loader, **streams))
    assert_as_plain_loop(tmp_path, name, config)


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline": 2, "schedule": "gpipe"},
        {"tensor": 2},
        {"pipeline": 2, "schedule": "gpipe", "zero_stage": 1},
    ],
)
def test_losses_with_weights_have_the_mean_of_one_process_in_parts_of_a_model(tmp_path, settings):
    config = config_of("losses and weights", 4, {"accumulation_steps": 2}, parallel=parallel("mesh", **settings))
    assert_as_plain_loop(tmp_path, "losses and weights", config)


@pytest.mark.parametrize("settings", [{"tensor": 2}, {"zero_stage": 2}], ids=str)
def test_packs_have_the_mean_of_one_process_in_parts_of_a_model(tmp_path, settings):
    config = config_of("packs", 2, {"accumulation_steps": 2}, parallel=parallel("mesh", **settings))
    assert_as_plain_loop(tmp_path, "packs", config)


def test_losses_that_count_themselves_are_an_error_where_ranks_step_alone(tmp_path):
    config = config_of("sum and count", 2, parallel=parallel("local_sgd"))
    with pytest.raises(RankFailed, match=r"expected ddp, .*found 'local_sgd'; say it by ModelSpec\(count="):
        trained(tmp_path, "sum and count", config)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(("name", "same"), [("tags with weights", "tags"), ("sum and count", "count"), ("GPT-2", None)])
def test_the_validation_divides_by_what_the_losses_count(tmp_path, name, same, num_ranks):
    config = config_of(name, num_ranks, {"validation_fraction": 0.3, "epochs": 1})
    result, _, _ = trained(tmp_path / "one", name, config)
    if same is None:  # what it is on one rank
        same, config = name, config_of(name, 1, {"validation_fraction": 0.3, "epochs": 1})
    else:
        config = config_of(same, num_ranks, {"validation_fraction": 0.3, "epochs": 1})
    expected, _, _ = trained(tmp_path / "other", same, config)
    assert result["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_validation_of_ragged_labels_counts_no_padding(tmp_path, num_ranks):
    metric = {"accuracy": {"class": "MulticlassAccuracy", "num_classes": 4, "average": "micro"}}
    config = config_of("tags", num_ranks, {"validation_fraction": 0.3, "metrics": metric, "epochs": 1})
    result, _, _ = trained(tmp_path, "tags", config)
    model = load_model(CASES["tags"][0], result["checkpoint"])
    loader = build_loader(dataset(tmp_path), config, rank=0, world_size=1, split="validation", shuffle=False)
    losses, right, tokens = 0.0, 0, 0
    for step in loader.epoch(0):
        (batch,) = step.micro_batches
        rows = {key: value[batch["weight"] > 0] for key, value in batch.items()}
        mask = rows["tags_mask"]
        with torch.no_grad():
            losses += float(token_losses(model, rows).sum())
            right += int(((model(rows["tokens"]).argmax(1) == rows["tags"]) & mask).sum())
        tokens += int(mask.sum())
    assert result["metrics"]["loss"] == pytest.approx(losses / tokens, rel=1e-5)
    assert result["metrics"]["accuracy"] == pytest.approx(right / tokens, abs=1e-6)


@pytest.mark.parametrize("weight_mean", ["rows", "weights"])
def test_the_loss_and_own_metrics_of_a_validation_divide_by_the_weights(tmp_path, weight_mean):
    name = "weights of rows"
    spec = dataclasses.replace(CASES[name][0], metrics={"own": losses_of_rows})
    config = config_of(name, 2, {"validation_fraction": 0.3, "epochs": 1})
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, weight_mean=weight_mean))
    result, _, _ = trained(tmp_path, name, config, spec)
    loader = build_loader(dataset(tmp_path), config, rank=0, world_size=1, split="validation", shuffle=False)
    model, total, weights = load_model(spec, result["checkpoint"]), 0.0, 0.0
    for step in loader.epoch(0):
        (batch,) = step.micro_batches
        with torch.no_grad():
            total += float((losses_of_rows(model(batch["features"]), batch) * batch["weight"]).sum())
        weights += float(batch["weight"].sum())
    assert result["metrics"]["loss"] == pytest.approx(total / weights, rel=1e-5)
    assert result["metrics"]["own"] == pytest.approx(total / weights, rel=1e-5)


def test_with_the_mean_over_weights_their_scale_changes_nothing(tmp_path):
    name, found = "weights of rows", []
    for column in ("importance", "heavy"):
        config = config_of(name, 2, {"epochs": 1})
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, weight=column))
        found.append(trained(tmp_path / column, name, config))
    (_, losses, weights), (_, same_losses, same) = found
    assert same_losses == pytest.approx(losses, rel=1e-5)
    for key, value in weights.items():
        torch.testing.assert_close(same[key], value, rtol=2e-5, atol=2e-6)


def all_ignored(batch):
    return {**batch, "ignored": torch.full_like(batch["ignored"], 2)}


def some_left_out(batch):
    return {**batch, "label": batch["label"].where(batch["label"] != 1, -100)}


def test_a_batch_in_which_nothing_counts_changes_no_weight(tmp_path):
    """Torch's mean over no label is NaN."""
    loss = nn.CrossEntropyLoss(ignore_index=2)
    spec = ModelSpec(build=build_mlp, transform=all_ignored, loss=loss)
    config = config_of("ignore_index", 2, {"epochs": 1})
    result, losses, weights = trained(tmp_path, "ignore_index", config, spec=spec)
    torch.manual_seed(config.train.seed)
    assert losses == [0.0] * len(losses)
    for key, value in build_mlp().state_dict().items():
        assert weights[key].equal(value)
    assert result["train_loss"] == 0


def test_labels_that_the_default_leaves_out_are_an_error_that_says_what_to_count(tmp_path):
    spec = ModelSpec(build=build_mlp, transform=some_left_out)
    with pytest.raises(RankFailed, match=r"column 'label' has \d+ values of -100.*ModelSpec\(count=lambda batch"):
        trained(tmp_path, "class weights", config_of("class weights", 1), spec=spec)


@pytest.mark.parametrize("name", ["class weights", "ignore_index", "count"])
def test_a_mean_over_something_else_is_an_error_before_the_first_step(tmp_path, name):
    _, loss, _ = CASES[name]
    spec = ModelSpec(build=CASES[name][0].build, batch_loss=loss)
    config = config_of(name, 1)
    with pytest.raises(RankFailed, match=r"spec\.batch_loss.*is not a mean over the rows.*ModelSpec\(count="):
        trained(tmp_path, name, config, spec=spec)
    assert checkpoint.latest(str(tmp_path / "run")) is None
    accepted = dataclasses.replace(config, train=dataclasses.replace(config.train, check_batch_loss=False))
    trained(tmp_path, name, accepted, spec=spec)
