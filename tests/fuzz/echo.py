"""A model whose predictions are its features, so that every way of predicting shows what the model got."""

import torch
from torch import nn

from spark_dl import ModelSpec


class Echo(nn.Module):
    """Returns its features as `feature_0`, `feature_1` ..."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, *features):
        return {f"feature_{i}": feature for i, feature in enumerate(features)}


def no_loss(model, batch):
    """A loss that any features have."""
    return model.unused.sum()


ECHO = ModelSpec(build=Echo, batch_loss=no_loss)
