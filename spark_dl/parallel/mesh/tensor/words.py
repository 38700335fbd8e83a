"""The words of a tensor plan: how a module is cut over tensor ranks. Most are those of Hugging Face's plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spark_dl.parallel.mesh.tensor.functions import bounds

COLUMNS: Mapping[str, int] = {"colwise": 1, "colwise_gather_output": 1, "packed_colwise": 2, "colwise_qkv": 3}
"""Words for linear layers whose outputs are cut, with the number of matrices that one weight holds."""
ROWS = ("rowwise", "rowwise_split_input")
"""Words for linear layers whose inputs are cut."""
WORDS: Mapping[str, str] = {
    "colwise": "outputs are cut",
    "colwise_gather_output": "outputs are cut, and gathered",
    "packed_colwise": "outputs, which are two matrices (gate and up) one after the other, are cut",
    "colwise_qkv": "outputs, which are queries, keys and values one after the other, are cut by heads",
    "rowwise": "inputs, which a layer before has cut, are cut, and outputs are summed",
    "rowwise_split_input": "inputs are whole, and otherwise as rowwise",
    "heads": "torch.nn.MultiheadAttention is cut by heads",
    "vocab": "an embedding is cut over the vocabulary",
    "sequence": "with parallel.sequence, the layer gets a slice of each sequence",
    "replicate": "each rank has the layer whole",
    "replicated_with_grad_allreduce": "each rank has the layer whole, and calls it with its own heads",
}
ALIASES: Mapping[str, str] = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "embedding_rowwise": "vocab",
    "sequence_parallel": "sequence",
}
"""Other words of Hugging Face with the same meaning."""
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer that computes what `nn.Linear` does, with a weight of its own.

    A subclass with another `forward`, such as one of LoRA, or a weight that is computed (weight_norm), would be another
    layer once it is cut.
    """
    if is_conv1d(module):
        return True
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
        and module._parameters.get("weight") is not None
    )


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is the linear layer of Hugging Face's GPT-2, whose weight is [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalizes the features of each position by itself."""
    return isinstance(module, _NORMS) or type(module).__name__.endswith(("LayerNorm", "RMSNorm"))


def outputs(module: nn.Module) -> int:
    """Returns the number of outputs of a whole linear layer."""
    return int(module.nf if is_conv1d(module) else module.out_features)  # type: ignore[arg-type]


def inputs(module: nn.Module) -> int:
    """Returns the number of inputs of a whole linear layer."""
    return int(module.nx if is_conv1d(module) else module.in_features)  # type: ignore[arg-type]


class Box(NamedTuple):
    """A part of a whole tensor."""

    offsets: tuple[int, ...]
    """First index, per axis."""
    sizes: tuple[int, ...]
    """Number of indices, per axis."""


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut: along an axis, each of the parts that it has there by itself."""

    axis: int
    parts: int = 1

    def boxes(self, shape: tuple[int, ...], num_ranks: int, rank: int) -> tuple[Box, ...]:
        """Returns the boxes that a rank has, given the shape of the whole parameter."""
        length = shape[self.axis] // self.parts
        start, stop = bounds(length, num_ranks, rank)
        pieces = []
        for part in range(self.parts):
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[self.axis], sizes[self.axis] = part * length + start, stop - start
            pieces.append(Box(tuple(offsets), tuple(sizes)))
        return tuple(pieces)


def take(whole: Tensor, boxes: tuple[Box, ...]) -> Tensor:
    """Returns a copy of the elements of boxes, one box after another in memory.

    The boxes are joined along the first axis if they were cut there, else stacked along a new first axis.
    """
    parts = [whole[tuple(slice(o, o + n) for o, n in zip(b.offsets, b.sizes, strict=True))] for b in boxes]
    if len(parts) == 1:
        return parts[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(parts) if boxes[0].offsets[0] != boxes[1].offsets[0] else torch.stack(parts)


def cuts(word: str, module: nn.Module) -> Mapping[str, Cut]:
    """Returns the parameters of a module that a word cuts, by name."""
    if word in COLUMNS:
        parts = COLUMNS[word]
        return {"weight": Cut(1 if is_conv1d(module) else 0, parts), "bias": Cut(0, parts)}
    if word in ROWS:
        return {"weight": Cut(0 if is_conv1d(module) else 1)}
    if word == "vocab":
        return {"weight": Cut(0)}
    if word == "heads":
        separate = {f"{name}_proj_weight": Cut(0) for name in "qkv"}
        return {"in_proj_weight": Cut(0, 3), "in_proj_bias": Cut(0, 3), **separate, "out_proj.weight": Cut(1)}
    return {}
