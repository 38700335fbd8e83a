"""Packs: rows with several texts, one after another, that must not see each other (`spark_dl.pack_rows`); and rows of
which each rank has a slice (`parallel.context`)."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

_IGNORED = -100  # as of torch.nn.CrossEntropyLoss


def document_mask(position_ids: Tensor, *, is_causal: bool = True) -> Tensor:
    """Returns which tokens each token attends to: those of its text, and with `is_causal` not those after it.

    For `torch.nn.functional.scaled_dot_product_attention(attn_mask=...)`. Models of transformers with the attention
    `sdpa` take it as `attention_mask`; those with `eager` add what they get to the scores, so that `causal_lm_loss`
    gives them the least number for False. Without a mask, texts of a pack see each other, and nothing says so.

    Args:
        position_ids: the place of each token in its text, where a text begins with 0; padding is 0. # [rows, length]
        is_causal: as of a language model; False for an encoder.

    Returns:
        Whether the token of the third axis attends to that of the last, [rows, 1, length, length] bool. Each token
        attends to itself, padding to nothing else.

    Example:
        >>> spark_dl.nn.document_mask(torch.tensor([[0, 1, 0]]))[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    text = (position_ids == 0).cumsum(1)
    mask = text[:, :, None] == text[:, None, :]
    return (mask.tril() if is_causal else mask)[:, None]


def causal_lm_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the `.loss` of a causal language model of transformers, for `ModelSpec.batch_loss`.

    It is a mean over the labels that are not -100; the step makes it that of the global batch. Texts of a pack do not
    see each other. Labels of padding, and of rows of weight 0, do not count. Called on ranks; not collective.

    Args:
        model: that takes `input_ids`, `attention_mask`, `position_ids` and `labels`.
        batch: `input_ids`, [rows, length] of an integer dtype; with ragged columns `input_ids_mask`; for packs
            `position_ids`; and `labels`, without which all tokens are predicted.

    Raises:
        ValueError: For packs and an attention other than `sdpa` and `eager`, which would not take the mask.

    Example:
        >>> language_model = spark_dl.ModelSpec(build=torch.nn.Identity, batch_loss=spark_dl.nn.causal_lm_loss)
    """
    ids = batch["input_ids"].long()
    is_token = batch.get("input_ids_mask", torch.ones_like(ids, dtype=torch.bool))
    labels = batch.get("labels", ids).long().masked_fill(~is_token, _IGNORED)
    if "weight" in batch:
        labels = labels.masked_fill(batch["weight"][:, None] == 0, _IGNORED)
    if "position_ids" not in batch:
        found = model(input_ids=ids, attention_mask=is_token.long(), labels=labels)
    else:
        positions = batch["position_ids"].long()
        mask = _as_taken(document_mask(positions), model)
        found = model(input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels)
    loss: Tensor = found.loss
    return loss


def _as_taken(mask: Tensor, model: nn.Module) -> Tensor:
    """Returns the mask as the attention of the model takes it."""
    configs = (getattr(module, "config", None) for module in model.modules())
    attention = next((a for a in (getattr(c, "_attn_implementation", None) for c in configs) if a is not None), "sdpa")
    if attention == "eager":
        dtype = next(model.parameters()).dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
    if attention != "sdpa":
        raise ValueError(
            f"causal_lm_loss: found packs and the attention {attention!r}, expected sdpa or eager, which take a mask; "
            "build the model with attn_implementation='sdpa', or leave out pack_rows"
        )
    return mask


_offset: contextvars.ContextVar[int] = contextvars.ContextVar("spark_dl_position_offset", default=0)


def position_offset() -> int:
    """Returns the position in its row of the first value that this rank computes: 0 without `parallel.context`.

    Called in the forward pass. A model that numbers the positions of what it gets adds it to them.

    Example:
        >>> positions = torch.arange(16) + spark_dl.nn.position_offset()
    """
    return _offset.get()


@contextlib.contextmanager
def offset_by(offset: int) -> Iterator[None]:
    """Sets what `position_offset` returns in the block."""
    token = _offset.set(offset)
    try:
        yield
    finally:
        _offset.reset(token)
