"""What the losses of models of transformers are a mean over, which their `.loss` does not say."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

_IS_CAUSAL = re.compile("CausalLM|LMHead|ForConditionalGeneration")
"""Classes of transformers whose loss is of the next token, but for encoders with a decoder."""


@contextlib.contextmanager
def means_over_labels(model: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collects the losses of models of transformers in this block, and how many labels each is the mean over.

    Their `.loss` is a mean over the labels that are not -100, such as those of tokens, and not over the rows. Causal
    models compare the output at a position with the label at the next one, so the first label counts nothing.
    """
    means: list[tuple[Tensor, Tensor]] = []
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)

    def note(module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        labels, loss = kwargs.get("labels"), getattr(output, "loss", None)
        if isinstance(labels, Tensor) and isinstance(loss, Tensor) and not labels.is_floating_point():
            is_shifted = bool(_IS_CAUSAL.search(type(module).__name__)) and not module.config.is_encoder_decoder
            counted = labels[:, 1:] if is_shifted and labels.ndim == 2 else labels
            means.append((loss, (counted != -100).sum()))

    found = [module for module in model.modules() if isinstance(module, base)] if base is not None else []
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in found]
    try:
        yield means
    finally:
        for hook in hooks:
            hook.remove()


def of_mean(loss: Any, means: Sequence[tuple[Tensor, Tensor]]) -> Tensor | None:
    """Returns how many labels a loss is the mean over, if `means_over_labels` has collected it. # () int64"""
    return next((labels for mean, labels in means if mean is loss), None)
