"""Small models and data that tests train on."""

import math

import numpy as np
import torch
from torch import nn

from spark_dl import ModelSpec
from tests.builders.settings import make_config


def build_mlp():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def build_dropout_mlp():
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def blobs(rows, seed=0):
    """Three classes of points around three centres, as columns."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, rows)
    centres = np.array([[2, 0, 0, 1], [0, 2, 0, -1], [0, 0, 2, 0]], dtype=np.float32)
    features = centres[label] + rng.normal(size=(rows, 4)).astype(np.float32)
    return {"features": features.astype(np.float32), "label": label}


def small_config(num_ranks, train=None, data=None, launch=None, **sections):
    """24 streams: a multiple of 1, 2, 3 and 4 ranks. `train`, `data` and `launch` are fields of any section."""
    fields = {
        "global_batch_size": 48, "lr": 0.1, "epochs": 2, "log_every": 1, "seed": 3, "num_streams": 24,
        "shuffle_window_rows": 96, "num_ranks": num_ranks, "collective_timeout_s": 20, "start_timeout_s": 20,
        "max_restarts": 0,
    }  # fmt: skip
    return make_config(**{**fields, **(train or {}), **(data or {}), **(launch or {}), **sections})


MLP = ModelSpec(build=build_mlp)
DROPOUT_MLP = ModelSpec(build=build_dropout_mlp)


def same_bits(a, b):
    """Whether two state dicts are equal to the last bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class CityModel(nn.Module):
    """Columns of several types: a word's index [rows], a number in a struct [rows], a photo [rows, 2, 3]."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.linear = nn.Linear(3 + 1 + 6, 3)

    def forward(self, city, age, photo):
        columns = [self.embedding(city), age.float()[:, None] / 100, photo.flatten(1).float() / 255]
        return self.linear(torch.cat(columns, 1))


class NeverFinite(nn.Linear):
    """A model whose gradients are NaN in every step."""

    def forward(self, features):
        out = super().forward(features)
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * math.nan)
        return out


def build_never_finite():
    return NeverFinite(4, 3)
