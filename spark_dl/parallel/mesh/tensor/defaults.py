"""The tensor plan of a model for which the user has set none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from spark_dl.parallel.mesh.tensor.words import is_linear

ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Tanhshrink, nn.Hardshrink,
    nn.Softshrink, nn.Threshold, nn.Dropout, nn.Identity,
)  # fmt: skip
"""Layers that compute each feature by itself."""
_BERT = {
    "embeddings.word_embeddings": "vocab",
    "encoder.layer.*.attention.self.query": "colwise",
    "encoder.layer.*.attention.self.key": "colwise",
    "encoder.layer.*.attention.self.value": "colwise",
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}
_WITHOUT_OWN: Mapping[str, Mapping[str, str]] = {
    "bert": _BERT,
    "roberta": _BERT,
    "gpt2": {
        "wte": "vocab",
        "h.*.attn.c_attn": "colwise_qkv",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
}
"""Plans of Hugging Face's models that bring none, by `model_type`, relative to the base model."""


def default_plan(model: nn.Module) -> dict[str, str]:
    """Returns the word of each module that is cut by default.

    The plan that a model of Hugging Face brings, or that its type has here; otherwise that of all pairs of linear
    layers in Sequentials with only activations and dropout between them, and of torch's Transformer layers.

    Raises ValueError if there is nothing of this kind.
    """
    plan = _of_pretrained(model) or {**_of_sequentials(model), **_of_transformer_layers(model)}
    if not plan:
        raise ValueError(
            f"spec.tensor_plan: expected a plan for {type(model).__name__}, found None: the model brings no plan, and "
            "has neither two Linear layers with an activation between them in a Sequential, nor a "
            "TransformerEncoderLayer; set a plan such as {'layers.*.fc1': 'colwise', 'layers.*.fc2': 'rowwise'}"
        )
    return plan


def _of_pretrained(model: nn.Module) -> dict[str, str]:
    words: dict[str, str] = {}
    roots: list[str] = []
    for name, module in model.named_modules():
        plan = getattr(module, "_tp_plan", None)
        if not isinstance(plan, Mapping) or any(not root or name.startswith(f"{root}.") for root in roots):
            continue
        of_module = dict(_matches(module, plan or _of_type(module)))
        words |= {f"{name}.{inner}" if name else inner: word for inner, word in of_module.items()}
        roots += [name] if of_module else []
    return words


def _of_type(module: Any) -> dict[str, str]:
    base = getattr(module, "base_model", module)
    prefix = next((f"{name}." if name else "" for name, m in module.named_modules() if m is base), "")
    plan = _WITHOUT_OWN.get(getattr(module.config, "model_type", ""), {})
    return {prefix + pattern: word for pattern, word in plan.items()}


def _matches(module: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    names = [name.split(".") for name, _ in module.named_modules()]
    for pattern, word in plan.items():
        wanted = pattern.split(".")
        for parts in names:
            if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
                yield ".".join(parts), word


def _of_sequentials(model: nn.Module) -> dict[str, str]:
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) is not nn.Sequential:
            continue
        prefix, last = f"{name}." if name else "", None
        for child_name, child in module.named_children():
            if isinstance(child, nn.Linear) and is_linear(child):
                if last is not None and last[1] == child.in_features:
                    plan |= {prefix + last[0]: "colwise", prefix + child_name: "rowwise"}
                    last = None
                else:
                    last = child_name, child.out_features
            elif not isinstance(child, ELEMENTWISE):
                last = None
    return plan


def _of_transformer_layers(model: nn.Module) -> dict[str, str]:
    plan: dict[str, str] = {}
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            prefix = f"{name}." if name else ""
            heads = [n for n, child in module.named_children() if isinstance(child, nn.MultiheadAttention)]
            plan |= {prefix + n: "heads" for n in heads}
            if is_linear(module.linear1) and is_linear(module.linear2):
                plan |= {f"{prefix}linear1": "colwise", f"{prefix}linear2": "rowwise"}
    return plan
