"""What sparse gradients, of `nn.Embedding(sparse=True)` and `nn.EmbeddingBag(sparse=True)`, can be trained with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from spark_dl.config import Config

_TAKE_SPARSE = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)


def check_sparse(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Raises ValueError if sparse gradients would meet a setting that does not take them. Called on every rank.

    Before the first step, as the errors of torch in the step name neither the parameter nor the setting.
    """
    named = [(name, p) for module in modules for name, p in module.named_parameters()]
    sparse_ids = {
        id(layer.weight)
        for module in modules
        for layer in module.modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad
    }
    if not sparse_ids:
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise ValueError(
                "train.optimizer: SparseAdam takes sparse gradients alone, and the model has none; use Adam, or "
                "sparse=True in its nn.Embedding and nn.EmbeddingBag"
            )
        return
    names = [name for name, p in named if id(p) in sparse_ids]
    of = f"{names[0]!r}{f' and {len(names) - 1} more parameters' if len(names) > 1 else ''}"
    parallel = config.parallel
    for key, is_set in (
        ("train.clip_grad_norm", config.train.clip_grad_norm is not None),
        ("parallel.all_reduce", getattr(parallel, "all_reduce", "backend") != "backend"),
        ("parallel.compression", getattr(parallel, "compression", "none") in ("powersgd", "threshold", "topk")),
        ("parallel.zero_stage", getattr(parallel, "zero_stage", 0) == 3),
    ):
        if is_set:
            section, _, setting = key.partition(".")
            value = getattr(getattr(config, section), setting)
            raise ValueError(
                f"{key}: found {value!r}, which does not take the sparse gradients of {of}; change it, or build its "
                "layer without sparse=True"
            )
    in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if isinstance(optimizer, torch.optim.SparseAdam):
        dense = [name for name, p in named if id(p) in in_optimizer and id(p) not in sparse_ids]
        if dense:
            raise ValueError(
                f"train.optimizer: SparseAdam takes sparse gradients alone, and those of {dense[0]!r} are dense; use "
                "SGD or Adagrad, or an optimizer of your own for each kind (spec.optimizer)"
            )
    elif (
        sparse_ids & in_optimizer
        and type(optimizer).__module__.startswith("torch.optim")
        and not isinstance(optimizer, _TAKE_SPARSE)
    ):
        raise ValueError(
            f"train.optimizer: {type(optimizer).__name__} does not take the sparse gradients of {of}; use SGD, Adagrad "
            "or SparseAdam, or build its layer without sparse=True"
        )
