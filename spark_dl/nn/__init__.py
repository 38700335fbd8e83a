"""Layers for models that spark_dl trains. They also work without it, in any model of PyTorch."""

from spark_dl.nn.moe import FeedForward as FeedForward
from spark_dl.nn.moe import MoE as MoE
from spark_dl.nn.packed import causal_lm_loss as causal_lm_loss
from spark_dl.nn.packed import document_mask as document_mask
from spark_dl.nn.packed import position_offset as position_offset

__all__ = ["FeedForward", "MoE", "causal_lm_loss", "document_mask", "position_offset"]
