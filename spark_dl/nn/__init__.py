"""Layers for models that spark_dl trains. They also work without it, in any model of PyTorch."""

from spark_dl.nn.moe import FeedForward as FeedForward
from spark_dl.nn.moe import MoE as MoE

__all__ = ["FeedForward", "MoE"]
