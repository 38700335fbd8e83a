"""The certificate of a training: it names what makes the weights differ, and passes what does not."""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import spark_dl
from spark_dl import Config, Data, Loader, ModelSpec, Train
from tests.builders.lightning_modules import Classifier
from tests.builders.models import blobs, build_mlp
from tests.ranks import test_exactness as recipes

pytestmark = [pytest.mark.slow, pytest.mark.modes("local")]
SGD = {"lr": 0.05, "optimizer_args": {"momentum": 0.9}}
RAGGED = {"tokens": {"ragged": True}, "tags": {"ragged": True}}
TOKENS = Data(features=("tokens",), encode={"tokens": {"ragged": True}})


@pytest.fixture(scope="module")
def rows(spark):
    rng, found = np.random.default_rng(5), blobs(245)
    lengths = rng.geometric(0.3, 245)
    tokens = [rng.integers(1, 6, length).tolist() for length in lengths]
    data = [
        (features.tolist(), int(label), own, [token % 3 for token in own], index)
        for index, (features, label, own) in enumerate(zip(found["features"], found["label"], tokens, strict=True))
    ]
    schema = "features array<float>, label long, tokens array<long>, tags array<long>, row long"
    return spark.createDataFrame(data, schema).coalesce(2).cache()


def certified(rows, spec, *only, data=None, **train):
    config = Config(data=data or Data(), train=Train(**{**SGD, **train}))
    return spark_dl.certify(rows, spec, config, only=only, progress=False)


def check_of(certificate, name):
    (check,) = (check for check in certificate.checks if check.name == name)
    return check


def test_a_training_that_is_exact_passes_every_check(rows, tmp_path):
    page = tmp_path / "certificate.html"
    config = Config(train=Train(**SGD, validation_fraction=0.2, precision="bf16-mixed"))
    certificate = spark_dl.certify(rows, ModelSpec(build=build_mlp), config, page=page, progress=False)
    assert certificate.passed, certificate.text
    assert {check.outcome for check in certificate.checks} == {"same"}
    assert [check.name for check in certificate.checks] == [
        "rounding", "the same again", "2 ranks", "3 ranks", "2 micro-batches", "2 ranks, 2 micro-batches",
        "other padding", "cut and resumed", "cut on 1 rank, resumed on 2", "each row once", "evaluation on 2 ranks",
        "ZeRO 3 on 2 ranks", "tree_reduce on 2 ranks", "bf16",
    ]  # fmt: skip
    assert check_of(certificate, "2 ranks").size < 1e-6
    text = page.read_text()
    assert "<h1>Passed</h1>" in text
    assert "3 ranks" in text
    assert json.loads((tmp_path / "certificate.json").read_text())["passed"] is True
    assert str(certificate).startswith("passed: 14 checks of 10 steps on 245 rows")


class Words(nn.Module):
    """Classes of the sum of a row's vectors. # (rows, longest) -> (rows, 3)"""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 3, padding_idx=0)

    def forward(self, tokens):
        return self.embed(tokens).sum(1)


def test_lengths_averages_and_schedules_are_certified(rows):
    """The average follows from the weights, and a run that is cut has the schedule of the whole run."""
    config = Config(
        data=TOKENS, loader=Loader(group_by_length=True, max_tokens=24),
        train=Train(**SGD, ema_decay=0.9, scheduler="CosineAnnealingLR", scheduler_interval="step"),
    )  # fmt: skip
    certificate = spark_dl.certify(rows, ModelSpec(build=Words), config, progress=False)
    assert certificate.passed, certificate.text
    assert check_of(certificate, "max_tokens on 2 ranks").outcome == "same"


def test_a_way_that_the_settings_exclude_is_not_run(rows):
    certificate = certified(rows, ModelSpec(build=build_mlp), "compiled", random_by="row")
    check = check_of(certificate, "compiled")
    assert (check.outcome, certificate.passed) == ("not run", True)
    assert check.why.startswith("train.random_by: ")


def token_mean(model, batch):
    losses = F.cross_entropy(model(batch["tokens"]).transpose(1, 2), batch["tags"], reduction="none")
    return (losses * batch["tags_mask"]).sum() / batch["tags_mask"].sum()


def padded_mean(output, batch):
    return F.cross_entropy(output.transpose(1, 2), batch["tags"], reduction="none") * batch["tags_mask"]


def class_weights(model, batch):
    return F.cross_entropy(model(batch["features"]), batch["label"], weight=torch.tensor([0.2, 3.0, 1.0]))


def build_tagger():
    return nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 3))


class Counting(nn.Module):
    """The loss depends on a number that no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.layers, self.calls = build_mlp(), 0

    def forward(self, features):
        self.calls += self.training
        return self.layers(features) * (1 + 0.1 * self.calls)


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.generator = build_mlp(), torch.Generator().manual_seed(1)

    def forward(self, features):
        noise = torch.randn(features.shape, generator=self.generator) if self.training else 0
        return self.layers(features + noise)


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = build_mlp()
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, features):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * features.detach().mean(0)
        return self.layers(features - self.mean)


def draws(batch):
    return {**batch, "features": batch["features"] + torch.randn_like(batch["features"])}


def by_time(model, batch):
    return model(batch["features"]) + 0.1 * torch.randn(1, generator=torch.Generator().manual_seed(_nanoseconds()))


def _nanoseconds():
    import time

    return time.time_ns() % 2**31


TAGS = Data(features=("tokens", "tags"), label=None, encode=RAGGED)
FINDINGS = {  # the spec, the check that finds it, the cause, settings, and the columns
    "token means": (ModelSpec(build=build_tagger, batch_loss=token_mean), "mean over rows", "loss", {}, TAGS),
    "token means, accepted": (
        ModelSpec(build=build_tagger, batch_loss=token_mean), "2 ranks", "loss", {"check_batch_loss": False}, TAGS,
    ),
    "losses of padded length": (
        ModelSpec(build=build_tagger, loss=padded_mean), "2 ranks", "loss", {},
        Data(features=("tokens",), label=None, labels=("tags",), encode=RAGGED),
    ),
    "class weights": (ModelSpec(build=build_mlp, batch_loss=class_weights), "mean over rows", "loss", {}, None),
    "in-batch negatives": (
        ModelSpec(build=build_mlp, batch_loss=recipes.clip_loss), "mean over rows", "loss", {}, None,
    ),
    "in-batch negatives in micro-batches": (
        ModelSpec(build=build_mlp, batch_loss=recipes.clip_loss), "2 micro-batches", "loss",
        {"check_batch_loss": False}, None,
    ),
    "the last state of padding": (ModelSpec(build=recipes.LastState), "other padding", "loss", {}, TOKENS),
    "the mean over padding": (ModelSpec(build=recipes.Pooled), "3 ranks", "loss", {}, TOKENS),
    "evaluation with padding": (ModelSpec(build=recipes.Pooled), "evaluation on 2 ranks", "loss", {}, TOKENS),
    "dropout": (ModelSpec(build=recipes.build_dropout), "2 ranks", "random", {}, None),
    "noise": (ModelSpec(build=recipes.Noisy), "cut on 1 rank, resumed on 2", "random", {}, None),
    "noise in hooks": (ModelSpec(build=recipes.build_noisy_gradients), "2 micro-batches", "gradients", {}, None),
    "BatchNorm": (ModelSpec(build=recipes.build_batchnorm), "2 ranks", "batchnorm", {}, None),
    "BatchNorm of padding": (ModelSpec(build=recipes.build_batchnorm), "other padding", "batchnorm", {}, None),
    "statistics in a buffer": (ModelSpec(build=recipes.Statistics), "3 ranks", "buffers", {}, None),
    "spectral norm": (ModelSpec(build=recipes.build_spectral), "2 micro-batches", "buffers", {}, None),
    "a number outside of checkpoints": (ModelSpec(build=Counting), "cut and resumed", "state", {}, None),
    "a generator outside of checkpoints": (ModelSpec(build=OwnGenerator), "cut and resumed", "state", {}, None),
    "a buffer outside of checkpoints": (ModelSpec(build=Hidden), "cut and resumed", "state", {}, None),
    "a transform that draws": (ModelSpec(build=build_mlp, transform=draws), "1 rank", "transform", {}, None),
    "a rate by ranks": (ModelSpec(build=build_mlp), "2 ranks", "rates", {"lr_scaling": "linear"}, None),
    "sparse rows of padding": (
        ModelSpec(build=recipes.Sparse), "other padding", "sparse",
        {"optimizer": "SparseAdam", "lr": 0.1, "optimizer_args": {}}, Data(features=("row",)),
    ),
    "unused parameters": (ModelSpec(build=recipes.Unused), "1 rank", "unused", {}, None),
    "the time": (ModelSpec(build=build_mlp, forward=by_time), "the same again", "unknown", {}, None),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", FINDINGS)
def test_what_makes_weights_differ_is_found_and_named(rows, name):
    spec, check, cause, train, data = FINDINGS[name]
    only = () if check in ("mean over rows", "1 rank") else (check,)
    certificate = certified(rows, spec, *(only or ("2 ranks",)), data=data, **train)
    assert not certificate.passed, certificate.text
    found = check_of(certificate, check)
    assert found.outcome in ("differs", "failed"), certificate.text
    assert cause in found.causes, certificate.text
    assert found.why
    if found.outcome == "differs" and cause not in ("rates", "unknown"):
        assert found.change
    if check in ("2 ranks", "3 ranks", "2 micro-batches"):
        assert 1 <= found.step <= 12
        assert found.tensor


@pytest.mark.parametrize(("name", "check"), [("dropout", "3 ranks"), ("BatchNorm", "2 ranks")])
def test_a_setting_that_helps_is_tried(rows, name, check):
    spec, _, cause, _, _ = FINDINGS[name]
    found = check_of(certified(rows, spec, check), check)
    assert found.causes == (cause,)
    assert found.size > 1e-2
    assert found.size_with_change < 1e-5


def test_what_is_accepted_is_no_reason_to_refuse(rows):
    spec = ModelSpec(build=recipes.build_dropout)
    config = Config(train=Train(**SGD))
    for accept in (("random",), ("2 ranks",)):
        certificate = spark_dl.certify(rows, spec, config, only=("2 ranks",), accept=accept, progress=False)
        assert certificate.passed
        assert check_of(certificate, "2 ranks").outcome == "differs"
        assert "accepted" in certificate.text


def test_a_lightning_module_is_certified_as_it_is_trained(rows):
    config = Config(train=Train(validation_fraction=0.2))
    certificate = spark_dl.certify(rows, Classifier, config, only=("2 ranks", "cut and resumed"), progress=False)
    assert certificate.passed, certificate.text


def exact_loop(url):
    return _loop(url, is_exact=True)


def loop_of_means(url):
    return _loop(url, is_exact=False)


def _loop(url, *, is_exact):
    """A loop of a user's own, with the sum of losses over the rows of all ranks, or with the mean of ranks' means."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = build_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = spark_dl.open_dataset(
        url, spark_dl.Data(), batch_size=48 // ranks, loader=spark_dl.Loader(num_streams=12)
    )
    for batch in dataset:
        losses = F.cross_entropy(model(batch["features"]), batch["label"], reduction="none")
        weight = batch["weight"]
        count = weight.sum()
        if is_exact:
            dist.all_reduce(count)
        else:
            count = count.clamp_min(1) * ranks
        optimizer.zero_grad()
        ((losses * weight).sum() / count).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    dist.destroy_process_group()
    return model.state_dict()


def test_functions_of_launch_are_certified(rows):
    some = rows.select("features", "label")
    certificate = spark_dl.certify(some, exact_loop, progress=False)
    assert certificate.passed, certificate.text
    assert [check.name for check in certificate.checks] == ["the same again", "2 ranks", "3 ranks"]
    certificate = spark_dl.certify(some, loop_of_means, progress=False)
    assert check_of(certificate, "the same again").outcome == "same"
    assert check_of(certificate, "3 ranks").outcome == "differs"
    assert "the loss is not the mean over the global batch" in check_of(certificate, "3 ranks").why


def test_B27_what_cannot_be_checked_is_an_error_before_any_training(rows, tmp_path):
    spec = ModelSpec(build=build_mlp)
    rows = rows.select("features", "label")
    with pytest.raises(ValueError, match="only: there is no check '2 rank'; did you mean '2 ranks'"):
        spark_dl.certify(rows, spec, only=("2 rank",), progress=False)
    with pytest.raises(ValueError, match="certify: expected a ModelSpec, a LightningModule, or a function of launch"):
        spark_dl.certify(rows, 3, progress=False)
    (tmp_path / "notes.html").write_text("mine")
    with pytest.raises(ValueError, match="notes.html is a file that is not a certificate; nothing was changed"):
        spark_dl.certify(rows, spec, page=tmp_path / "notes.html", progress=False)
    assert (tmp_path / "notes.html").read_text() == "mine"


def returns_nothing(url):
    return None


def test_B27_a_function_without_weights_is_an_error(rows):
    with pytest.raises(ValueError, match=r"expected the trained weights, such as .*, from returns_nothing"):
        spark_dl.certify(rows.select("features", "label"), returns_nothing, progress=False)
