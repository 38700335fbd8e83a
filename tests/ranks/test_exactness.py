"""The tables of docs/exactness.md: each recipe trains as one process does, or differs as the page says.

A difference is ||a - b|| / ||b - start||, the part of what training did that differs. Rounding is 1e-7. Errors are in
test_means.py. `python -m tests.ranks.test_exactness` prints the tables.
"""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils import checkpoint as checkpointing

from spark_dl import ModelSpec, Optimization, storage, worker
from spark_dl.data.columns.ragged import from_lengths
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.data.load.build import build_loader
from spark_dl.launch.rank.environment import restored_process
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.models import blobs, build_mlp, small_config
from tests.builders.settings import parallel
from tests.ranks.launcher import kill_ranks, run_ranks

CELLS = {  # ranks, micro-batches of a step of each rank
    "1 rank": (1, 1),
    "2 ranks": (2, 1),
    "3 ranks": (3, 1),
    "accumulation": (1, 2),
    "accumulation on 2 ranks": (2, 4),
    "resumed on 3 ranks": (2, 1),
}
RESUMED = "resumed on 3 ranks"
EXACT = 2e-6


@dataclasses.dataclass
class Recipe:
    """What is trained, and the loop that it is compared with.

    loss: of rows, in a plain loop. None: one rank of spark_dl is compared with, as the model draws random numbers.
    train: settings of training; the optimizer of the plain loop is built from them.
    differs: the cells in which training differs, as documented; "all" for each with more than one rank or micro-batch.
    rows: 245 leave a short last batch of 48, which is filled with copies of weight 0; 240 do not.
    """

    spec: ModelSpec
    loss: Callable | None = None
    train: dict = dataclasses.field(default_factory=dict)
    data: dict = dataclasses.field(default_factory=lambda: {"features": ("features",)})
    settings: dict = dataclasses.field(default_factory=dict)
    differs: tuple[str, ...] | str = ()
    rows: int = 245
    rounding: float = EXACT

    def is_exact(self, cell):
        if self.differs == "all":
            return self.loss is None and cell == "1 rank"
        return cell not in self.differs


def columns(rows):
    """Points with a class and a weight; and rows of one token or several."""
    rng = np.random.default_rng(5)
    lengths = rng.geometric(0.3, rows)  # few are long, so that the longest of each rank differs
    tokens = rng.integers(1, 6, lengths.sum())
    weight = rng.random(rows).astype(np.float32) + 0.5
    return {**blobs(rows), "tokens": from_lengths(tokens, lengths), "row_weight": weight}


def cross_entropy(model, rows):
    return F.cross_entropy(model(rows["features"]), rows["label"])


def of_tokens(model, rows):
    return F.cross_entropy(model(rows["tokens"]), rows["label"])


def masked(model, batch):
    return model(batch["tokens"], batch["tokens_mask"])


def of_masked_tokens(model, rows):
    return F.cross_entropy(masked(model, rows), rows["label"])


def weighted_rows(model, rows):
    return (F.cross_entropy(model(rows["features"]), rows["label"], reduction="none") * rows["weight"]).mean()


def smoothed(model, rows):
    return F.cross_entropy(model(rows["features"]), rows["label"], label_smoothing=0.1)


def gradient_penalty(model, batch):
    """The penalty of each row is that of its own inputs, so the mean over the rows is exact."""
    features = batch["features"].requires_grad_()
    losses = F.cross_entropy(model(features), batch["label"], reduction="none")
    (slopes,) = torch.autograd.grad(losses.sum(), features, create_graph=True)
    return (losses + 0.1 * slopes.square().sum(1)).mean()


def clip_loss(model, batch):
    """Each row is compared with the others of its batch."""
    embedded = F.normalize(model(batch["features"]), dim=1)
    return F.cross_entropy(embedded @ F.normalize(batch["features"][:, :3], dim=1).T / 0.3,
                           torch.arange(len(embedded)))  # fmt: skip


def mlp(*layers):
    return nn.Sequential(nn.Linear(4, 16), *layers, nn.Linear(16, 3))


def build_norms():
    return mlp(nn.LayerNorm(16), nn.GELU(), nn.GroupNorm(4, 16))


def build_batchnorm():
    return mlp(nn.BatchNorm1d(16), nn.Tanh())


def build_dropout():
    return mlp(nn.Tanh(), nn.Dropout(0.5))


def build_spectral():
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 16)), nn.Tanh(), nn.Linear(16, 3))


def build_weight_norm():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 16)), nn.Tanh(), nn.Linear(16, 3))


def build_frozen():
    model = build_mlp()
    model[0].requires_grad_(False)
    return model


def build_noisy_gradients():
    model = build_mlp()
    model[0].weight.register_hook(lambda gradient: gradient + 0.1 * torch.randn_like(gradient))
    return model


class Tied(nn.Module):
    """A matrix that is used twice, and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.out = nn.Linear(4, 16, bias=False), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, features):
        hidden = self.middle(self.middle(self.first(features)).tanh()).tanh()
        return self.out(self.first(hidden @ self.first.weight).tanh())


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = build_mlp()

    def forward(self, features):
        return self.layers(features + torch.randn_like(features))


class Statistics(nn.Module):
    """Centres its features by a running mean, which the forward pass computes from its rows."""

    def __init__(self):
        super().__init__()
        self.layers = build_mlp()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, features):
        if self.training:
            self.mean.mul_(0.9).add_(features.detach().mean(0), alpha=0.1)
        return self.layers(features - self.mean)


class Unused(nn.Module):
    """A layer that is used in some steps alone."""

    def __init__(self):
        super().__init__()
        self.layers, self.other = build_mlp(), nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, features):
        self.calls += 1
        return self.layers(features) + (self.other(features) if self.calls % 2 else 0)


class LastState(nn.Module):
    """The last state of an LSTM: without lengths, that of the padding."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.out = nn.Embedding(6, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, tokens, mask=None):
        states, _ = self.lstm(self.embed(tokens))
        last = states[:, -1] if mask is None else states[torch.arange(len(states)), mask.sum(1) - 1]
        return self.out(last)


class Pooled(nn.Module):
    """The mean over the positions of a row: without a mask, over the padding, too."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(6, 8), nn.Linear(8, 3)

    def forward(self, tokens, mask=None):
        embedded = self.embed(tokens)
        if mask is None:
            return self.out(embedded.mean(1))
        return self.out((embedded * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class Attention(nn.Module):
    """Dropout of attention, in a checkpointed layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(6, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, tokens, mask):
        hidden = checkpointing.checkpoint(self._encode, self.embed(tokens), ~mask, use_reentrant=False)
        states, _ = self.lstm(F.dropout(hidden, 0.3, self.training))
        return self.out(states[torch.arange(len(states)), mask.sum(1) - 1])

    def _encode(self, embedded, padding):
        return self.layer(embedded, src_key_padding_mask=padding)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(300, 3, sparse=True)

    def forward(self, row):
        return self.embed(row)


class Averaged(nn.Module):
    """Trained layers, and an average of their weights, which `set_position` moves before each step."""

    def __init__(self):
        super().__init__()
        self.layers, self.average = build_mlp(), build_mlp().requires_grad_(False)

    def forward(self, features):
        return self.layers(features)

    @torch.no_grad()
    def move(self, position):
        if not position.is_validation:
            for own, trained in zip(self.average.parameters(), self.layers.parameters(), strict=True):
                own.lerp_(trained, 0.3)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(6, 8, mode="sum"), nn.Linear(8, 3)

    def forward(self, tokens, offsets):
        return self.out(self.bag(tokens, offsets[:-1]))


def bagged(model, batch):
    return model(batch["tokens"], batch["tokens_offsets"])


def build_checkpointed():
    layers = mlp(nn.Tanh(), parametrizations.orthogonal(nn.Linear(16, 16)), nn.Tanh())
    layers.register_module("2", Checkpointed(layers[2]))
    return layers


class Checkpointed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, inputs):
        return checkpointing.checkpoint(self.layer, inputs, use_reentrant=False)


def muon(model):
    return torch.optim.Muon([model[0].weight, model[2].weight], lr=0.02)


def in_groups(model):
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters(), "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=0.002)


def plateau(model):
    """Each epoch whose loss is not below half of the best one lowers the rate."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.5)
    return Optimization(optimizer=optimizer, scheduler=scheduler, monitor="loss")


def of_sparse(model, rows):
    return F.cross_entropy(model(rows["row"]), rows["label"])


def augment(batch, generator):
    return {**batch, "features": batch["features"] + torch.randn(batch["features"].shape, generator=generator)}


TOKENS = {"features": ("tokens",)}
BY_ROW = {"random_by": "row"}
SEVERAL = ("2 ranks", "3 ranks", "accumulation on 2 ranks", RESUMED)
MICRO = ("accumulation", "accumulation on 2 ranks")

LAYERS = {
    "mlp": Recipe(ModelSpec(build=build_mlp), cross_entropy),
    "LayerNorm, GroupNorm": Recipe(ModelSpec(build=build_norms), cross_entropy),
    "tied weights": Recipe(ModelSpec(build=Tied), cross_entropy),
    "frozen layer": Recipe(ModelSpec(build=build_frozen), cross_entropy),
    "weight norm": Recipe(ModelSpec(build=build_weight_norm), cross_entropy),
    "last state, by the mask": Recipe(ModelSpec(build=LastState, forward=masked), of_masked_tokens, data=TOKENS),
    "mean over positions, by the mask": Recipe(ModelSpec(build=Pooled, forward=masked), of_masked_tokens, data=TOKENS),
    "label smoothing": Recipe(
        ModelSpec(build=build_mlp, loss=nn.CrossEntropyLoss(label_smoothing=0.1)), smoothed,
    ),
    "weights of rows": Recipe(
        ModelSpec(build=build_mlp), weighted_rows, data={"features": ("features",), "weight": "row_weight"},
    ),
    "gradient penalty": Recipe(ModelSpec(build=build_mlp, batch_loss=gradient_penalty), gradient_penalty),
    "sparse embedding": Recipe(
        ModelSpec(build=Sparse), of_sparse, data={"features": ("row",)}, train={"optimizer": "SGD", "lr": 5.0},
    ),
    "orthogonal, checkpointed": Recipe(ModelSpec(build=build_checkpointed), cross_entropy),
    "EmbeddingBag": Recipe(
        ModelSpec(build=Bag, forward=bagged), data={**TOKENS, "ragged": "offsets"},
    ),
    "an average of the weights by set_position": Recipe(
        ModelSpec(build=Averaged, set_position=Averaged.move), data={"features": ("features",)},
        train={"validation_fraction": 0.2},
    ),
    "dropout": Recipe(ModelSpec(build=build_dropout), differs=SEVERAL),
    "randn in the forward pass": Recipe(ModelSpec(build=Noisy), differs=SEVERAL),
    "dropout by row": Recipe(ModelSpec(build=build_dropout), train=BY_ROW),
    "dropout by row in batch_loss": Recipe(ModelSpec(build=build_dropout, batch_loss=cross_entropy), train=BY_ROW),
    "dropout by row in ZeRO 3": Recipe(
        ModelSpec(build=build_dropout), train=BY_ROW, settings={"parallel": parallel("mesh", zero_stage=3)},
    ),
    "randn by row": Recipe(ModelSpec(build=Noisy), train=BY_ROW),
    "attention with dropout by row": Recipe(ModelSpec(build=Attention, forward=masked), train=BY_ROW, data=TOKENS),
    "augment": Recipe(ModelSpec(build=build_mlp, augment=augment)),
    "noise in hooks of gradients": Recipe(ModelSpec(build=build_noisy_gradients), differs="all"),
    "BatchNorm, whole batches": Recipe(
        ModelSpec(build=build_batchnorm), cross_entropy, differs=(*SEVERAL, "accumulation"), rows=240,
    ),
    "BatchNorm, a short last batch": Recipe(ModelSpec(build=build_batchnorm), cross_entropy, differs="all"),
    "BatchNorm with sync_batchnorm": Recipe(
        ModelSpec(build=build_batchnorm), cross_entropy, differs=MICRO,
        settings={"parallel": parallel(sync_batchnorm=True)},
    ),
    "statistics in a buffer": Recipe(ModelSpec(build=Statistics), cross_entropy, differs="all"),
    "spectral norm": Recipe(ModelSpec(build=build_spectral), cross_entropy, differs=MICRO),
    "last state, of the padding": Recipe(
        ModelSpec(build=LastState), of_tokens, data=TOKENS, differs=(*SEVERAL, "accumulation"),
    ),
    "mean over positions, with the padding": Recipe(
        ModelSpec(build=Pooled), of_tokens, data=TOKENS, differs=(*SEVERAL, "accumulation"),
    ),
    "SparseAdam, a short last batch": Recipe(
        ModelSpec(build=Sparse), of_sparse, data={"features": ("row",)}, differs="all",
        train={"optimizer": "SparseAdam", "lr": 0.1, "optimizer_args": {}},
    ),
    "in-batch negatives, accepted": Recipe(
        ModelSpec(build=build_mlp, batch_loss=clip_loss), clip_loss, train={"check_batch_loss": False},
        differs=(*SEVERAL, "accumulation"),
    ),
    "bf16": Recipe(ModelSpec(build=build_mlp), train={"precision": "bf16-mixed"}, rounding=1e-2),
    "fp16": Recipe(ModelSpec(build=build_mlp), train={"precision": "fp16-mixed"}, rounding=1e-2),
    "calls in a buffer, unused parameters": Recipe(
        ModelSpec(build=Unused), cross_entropy, settings={"parallel": parallel(find_unused_parameters=True)},
        differs=MICRO,
    ),
}  # fmt: skip
OPTIMIZERS = {
    name: Recipe(ModelSpec(build=build_mlp), cross_entropy, train={"optimizer_args": {}, **train}, rounding=rounding)
    for name, rounding, train in [
        ("momentum", EXACT, {"lr": 0.05, "optimizer_args": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}}),
        ("clipped", EXACT, {"lr": 0.1, "clip_grad_norm": 0.5}),
        ("Adam", 2e-5, {"optimizer": "Adam", "lr": 0.01, "optimizer_args": {"amsgrad": True}}),
        ("AdamW", 2e-5, {"optimizer": "AdamW", "lr": 0.01}),
        ("NAdam", 2e-5, {"optimizer": "NAdam", "lr": 0.01}),
        ("RAdam", 2e-5, {"optimizer": "RAdam", "lr": 0.01}),
        ("Adamax", 2e-5, {"optimizer": "Adamax", "lr": 0.01}),
        ("Adagrad", 2e-5, {"optimizer": "Adagrad", "lr": 0.05}),
        ("Adadelta", 2e-5, {"optimizer": "Adadelta", "lr": 1.0}),
        ("RMSprop", 2e-5, {"optimizer": "RMSprop", "lr": 0.01, "optimizer_args": {"centered": True}}),
        ("Rprop", 2e-5, {"optimizer": "Rprop", "lr": 0.01}),
        ("ASGD", EXACT, {"optimizer": "ASGD", "lr": 0.05}),
        ("Adafactor", 2e-5, {"optimizer": "Adafactor", "lr": 0.05}),
        ("a warm-up", EXACT, {"lr": 0.1, "warmup_steps": 5}),
    ]
} | {
    "Muon": Recipe(ModelSpec(build=build_mlp, optimizer=muon), cross_entropy, rounding=2e-3),
    "parameter groups": Recipe(ModelSpec(build=build_mlp, optimizer=in_groups), cross_entropy, rounding=2e-5),
    "ReduceLROnPlateau": Recipe(
        ModelSpec(build=build_mlp, optimizer=plateau), train={"epochs": 4, "validation_fraction": 0.2},
    ),
}  # fmt: skip
SCHEDULES = {
    name: Recipe(
        ModelSpec(build=build_mlp), cross_entropy,
        train={"lr": 0.1, "scheduler": name, "scheduler_args": args, "scheduler_interval": "step"},
    )
    for name, args in [
        ("StepLR", {"step_size": 2, "gamma": 0.5}), ("OneCycleLR", {"max_lr": 0.3, "total_steps": 20}),
        ("CosineAnnealingLR", {"T_max": 12}), ("CosineAnnealingWarmRestarts", {"T_0": 4}),
        ("ExponentialLR", {"gamma": 0.9}), ("PolynomialLR", {"total_iters": 10}),
        ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 3, "cycle_momentum": False}),
        ("LinearLR", {"total_iters": 6}), ("MultiStepLR", {"milestones": [3, 7]}),
    ]
}  # fmt: skip
RECIPES = {**LAYERS, **OPTIMIZERS, **SCHEDULES}


def dataset(folder, rows):
    url = str(folder / f"data-{rows}")
    if storage.exists(url):
        return read_shards(url)
    return write_dataset(url, {**columns(rows), "row": np.arange(rows)}, group_rows=40, shard_rows=120)


def config_of(recipe, num_ranks, accumulation_steps):
    train = {"lr": 0.1, **recipe.train, "accumulation_steps": accumulation_steps}
    return small_config(num_ranks, train, {"label": "label", **recipe.data}, **recipe.settings)


def train_rank(run):
    with restored_process():
        return worker.main(run).result


def weights_of(folder, recipe, cell):
    num_ranks, accumulation_steps = CELLS[cell]
    config = config_of(recipe, num_ranks, accumulation_steps)
    run_dir = str(folder / "run")
    run = Run(spec=recipe.spec, config=config, train=dataset(folder, recipe.rows), run_dir=run_dir)
    if cell == RESUMED:
        first = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=4))
        run_ranks(train_rank, num_ranks, dataclasses.replace(run, config=first))
        num_ranks = 3
        run = dataclasses.replace(
            run, checkpoint=checkpoint.latest(run_dir).url, generation=checkpoint.start_generation(run_dir),
            config=dataclasses.replace(config, launch=dataclasses.replace(config.launch, num_ranks=num_ranks)),
        )  # fmt: skip
    run_ranks(train_rank, num_ranks, run)
    return load_weights(checkpoint.find(run_dir))


def plain_loop(folder, recipe):
    """The weights of a loop over the same global batches in one process, without those that fill the last batch."""
    config = config_of(recipe, 1, 1)
    torch.manual_seed(config.train.seed)
    model = recipe.spec.build()
    if recipe.spec.optimizer is not None:
        optimizer = recipe.spec.optimizer(model)
    else:
        optimizer = getattr(torch.optim, config.train.optimizer)(
            [p for p in model.parameters() if p.requires_grad], lr=config.train.lr, **config.train.optimizer_args
        )
    warmup, number = config.train.warmup_steps, 0
    scheduler = None
    if config.train.scheduler is not None:
        scheduler = getattr(torch.optim.lr_scheduler, config.train.scheduler)(optimizer, **config.train.scheduler_args)
    loader = build_loader(dataset(folder, recipe.rows), config, rank=0, world_size=1)
    for epoch in range(config.train.epochs):
        for step in loader.epoch(epoch):
            (batch,) = step.micro_batches
            rows = {key: value[batch["weight"] > 0] for key, value in batch.items()}
            optimizer.zero_grad()
            recipe.loss(model, rows).backward()
            if config.train.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_grad_norm)
            number += 1
            if number <= warmup:
                optimizer.param_groups[0]["lr"] = config.train.lr * number / warmup
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return model.state_dict()


def difference(folder, recipe, cell):
    """The part of what training did that differs from one process."""
    torch.manual_seed(config_of(recipe, 1, 1).train.seed)
    start = recipe.spec.build().state_dict()
    if recipe.loss is None:
        (folder / "reference").mkdir()
        expected = weights_of(folder / "reference", recipe, "1 rank")
    else:
        expected = plain_loop(folder, recipe)
    found = weights_of(folder, recipe, cell)

    def norm(a, b):
        parameters = [key for key, value in a.items() if value.is_floating_point()]
        return torch.cat([(a[key].double() - b[key].double()).flatten() for key in parameters]).norm().item()

    return norm(found, expected) / norm(expected, start)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", RECIPES)
def test_recipe(tmp_path, name, cell):
    recipe = RECIPES[name]
    found = difference(tmp_path, recipe, cell)
    if recipe.is_exact(cell):
        assert found <= recipe.rounding
    else:
        assert found > 1e-3, "more exact than documented: say so in docs/exactness.md"


if __name__ == "__main__":
    print(f"{'':40}" + "".join(f"{cell:>26}" for cell in CELLS))
    for name, recipe in RECIPES.items():
        values = []
        for cell in CELLS:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    values.append(f"{difference(Path(folder), recipe, cell):.1e}")
                except Exception as error:
                    values.append(str(error).strip().splitlines()[-1][-24:])
        print(f"{name:40}" + "".join(f"{value:>26}" for value in values), flush=True)
    kill_ranks()
