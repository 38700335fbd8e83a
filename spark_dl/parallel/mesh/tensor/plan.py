"""The tensor plan of a model: which module is cut over tensor ranks, and how. Pure: made and checked on the driver."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from spark_dl.config.checks import suggestion
from spark_dl.parallel.mesh.tensor.defaults import default_plan
from spark_dl.parallel.mesh.tensor.sequence import KEY as SEQUENCE_KEY
from spark_dl.parallel.mesh.tensor.sequence import find_stacks
from spark_dl.parallel.mesh.tensor.words import (
    ALIASES,
    COLUMNS,
    ROWS,
    WORDS,
    cuts,
    inputs,
    is_linear,
    is_norm,
    outputs,
)
from spark_dl.parallel.modules import names_of

KEY = "spec.tensor_plan"
_SLICED = tuple(word for word in COLUMNS if word != "colwise_gather_output")
"""Words for layers whose outputs stay slices."""
_HEAD_SIZES = ("head_dim", "attention_head_size", "head_size")


def resolve_tensor_plan(
    model: nn.Module, plan: Mapping[str, str] | None, num_ranks: int, *, sequence: bool = False
) -> dict[str, str]:
    """Returns the word of each module that is cut, by the module's name. Called on the driver, or on every rank.

    Raises ValueError, with `spec.tensor_plan` and the module, for a pattern without a match, an unknown word, a module
    that a word does not fit, sizes that the number of ranks does not divide, layers by columns without one by rows, and
    a model without a default plan.

    Args:
        plan: words by patterns of names, in which `*` stands for one part of a name, as in `layers.*.linear1`; None:
            the plan that the model brings, or that its kind of layers has.
        num_ranks: number of tensor ranks.
        sequence: whether activations between cut layers are slices of the sequence axis.
    """
    resolved = _match(model, plan) if plan is not None else default_plan(model)
    _check_words(resolved, is_own=plan is not None)
    resolved = {name: ALIASES.get(word, word) for name, word in resolved.items()}
    modules = dict(model.named_modules())
    for name, word in resolved.items():
        _check_fit(name, word, modules[name])
    resolved = _with_tied(model, resolved)
    _check_shared(model, resolved)
    _check_sizes(model, resolved, num_ranks)
    _check_pairs(model, resolved)
    if sequence and not find_stacks(model, resolved):
        raise ValueError(
            f"{SEQUENCE_KEY}: expected layers in a Sequential or a ModuleList, each with projections by columns and by "
            "rows, or an attention that is cut by heads; found none in the tensor plan; set it to false"
        )
    return {name: word for name, word in resolved.items() if word != "replicate"}


def _match(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(plan, Mapping) or not plan:
        raise ValueError(f"{KEY}: expected words by patterns of modules' names, found {plan!r}")
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    matched: dict[str, str] = {}
    by: dict[str, str] = {}
    for pattern, word in plan.items():
        matches = [name for name in names if _fits(name, pattern)]
        if not matches:
            known = sorted({re.sub(r"(?<=\.)\d+\b", "*", name) for name in names})
            raise ValueError(f"{KEY}: no module of the model has the name {pattern!r}{suggestion(pattern, known)}")
        for name in matches:
            if matched.get(name, word) != word:
                raise ValueError(
                    f"{KEY}: expected one word for {name!r}, found {matched[name]!r} by {by[name]!r} and {word!r} by "
                    f"{pattern!r}"
                )
            matched[name], by[name] = word, pattern
    return matched


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), str(pattern).split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _check_words(plan: Mapping[str, str], *, is_own: bool) -> None:
    for name, word in plan.items():
        if word in WORDS or word in ALIASES:
            continue
        near = suggestion(str(word), [*WORDS, *ALIASES])
        if is_own:
            raise ValueError(f"{KEY}: unknown word {word!r} for {name!r}{near}")
        raise ValueError(
            f"{KEY}: the model's own plan has the word {word!r} for {name!r}, which is not supported; set {KEY} to a "
            f"plan without it. The words are {', '.join(sorted(WORDS))}"
        )


def _check_fit(name: str, word: str, module: nn.Module) -> None:
    kind, expected = type(module).__name__, None
    if word in COLUMNS or word in ROWS:
        expected = None if is_linear(module) else "a linear layer"
        if expected and isinstance(module, nn.Linear):
            expected = "a linear layer with the forward and the weight of nn.Linear ('replicate' keeps it whole)"
        if isinstance(module, nn.MultiheadAttention):
            expected = "a linear layer ('heads' cuts a MultiheadAttention)"
    elif word == "vocab" and not isinstance(module, nn.Embedding):
        expected = "an Embedding"
    elif word == "heads" and not isinstance(module, nn.MultiheadAttention):
        expected = "a torch.nn.MultiheadAttention"
    elif word == "sequence" and not is_norm(module) and next(module.parameters(), None) is not None:
        expected = "a norm, or a layer without parameters"
    if expected:
        raise ValueError(f"{KEY}: {word!r} expects {expected}, found {kind} for {name!r}")
    if isinstance(module, nn.Embedding) and word == "vocab":
        settings = {
            "max_norm": module.max_norm,
            "scale_grad_by_freq": module.scale_grad_by_freq,
            "sparse": module.sparse,
        }
        used = [f"{key}={value}" for key, value in settings.items() if value]
        if used:
            raise ValueError(f"{KEY}: an embedding with {used[0]} cannot be cut over the vocabulary, found {name!r}")
    if isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
        raise ValueError(
            f"{KEY}: an attention with add_bias_kv or add_zero_attn cannot be cut by heads, found {name!r}"
        )


def _with_tied(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Returns a plan in which an embedding and a linear layer that share a weight are both cut, over the vocabulary."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append((name, module))
    with_tied = dict(plan)
    for sharing in owners.values():
        words = {plan.get(name) for name, _ in sharing}
        if len(sharing) == 1 or not words & {"vocab", "colwise_gather_output"}:
            continue
        for name, module in sharing:
            if name not in plan and isinstance(module, nn.Embedding):
                with_tied[name] = "vocab"
            elif name not in plan and isinstance(module, nn.Linear):
                with_tied[name] = "colwise_gather_output"
    for sharing in owners.values():
        of_each = {name: with_tied.get(name) for name, _ in sharing}
        cut = {word for word in of_each.values() if word in COLUMNS or word in ROWS or word == "vocab"}
        is_over_vocabulary = {*of_each.values()} <= {"vocab", "colwise_gather_output"}
        if cut and len({*of_each.values()}) > 1 and not is_over_vocabulary:
            raise _unlike(of_each)
    return with_tied


def _check_shared(model: nn.Module, plan: Mapping[str, str]) -> None:
    """Raises ValueError for a parameter that layers share and that the plan cuts in different ways."""
    cut_of = {
        f"{name}.{own}": cut
        for name, word in plan.items()
        for own, cut in cuts(word, model.get_submodule(name)).items()
    }
    modules = dict(model.named_modules(remove_duplicate=False))
    for names in names_of(model).values():
        owners_of = {name: modules[name.rpartition(".")[0]] for name in names}
        # Others, such as the head of Hugging Face's BERT, hold a parameter of a layer and do not use it.
        using = [name for name, m in owners_of.items() if is_linear(m) or isinstance(m, (nn.Linear, nn.Embedding))]
        if len({cut_of.get(name) for name in using}) > 1:
            raise _unlike({name: plan.get(name.rpartition(".")[0]) for name in using})


def _unlike(words: Mapping[str, str | None]) -> ValueError:
    each = ", ".join(f"{word or 'replicate'!r} for {name!r}" for name, word in words.items())
    return ValueError(f"{KEY}: modules that share a parameter must be cut in the same way, found {each}")


def _check_sizes(model: nn.Module, plan: Mapping[str, str], num_ranks: int) -> None:
    sizes = list(_sizes(model, plan))
    common = math.gcd(*(size for _, _, size in sizes))
    works = [n for n in range(1, common + 1) if common % n == 0]
    for name, what, size in sizes:
        if size % num_ranks:
            raise ValueError(
                f"{KEY}: parallel.tensor={num_ranks} does not divide the {size} {what} of {name!r}; for this plan "
                f"parallel.tensor of {', '.join(map(str, works))} works"
            )
    for name, word in plan.items():
        module = model.get_submodule(name)
        size = module.num_embeddings if isinstance(module, nn.Embedding) else num_ranks
        if word == "vocab" and size < num_ranks:
            raise ValueError(f"{KEY}: expected at least parallel.tensor={num_ranks} rows in {name!r}, found {size}")


def _check_pairs(model: nn.Module, plan: Mapping[str, str]) -> None:
    """Raises ValueError for layers whose slices no later layer takes, and for layers that would get no slices.

    Modules are defined in the order in which they are called, or at least those of one parent are called together.
    """
    order = {name: number for number, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}

    def has(words: Collection[str], of: str, *, later: bool) -> bool:
        parent = of.rpartition(".")[0]
        return any(
            word in words and (name.rpartition(".")[0] == parent or (order[name] > order[of]) == later)
            for name, word in plan.items()
        )

    for name, word in plan.items():
        if word in _SLICED and not has(("rowwise",), name, later=True):
            raise ValueError(
                f"{KEY}: {word!r} for {name!r} leaves slices of its outputs on the ranks, and no layer after it takes "
                "them; expected 'rowwise' for the next linear layer, or 'colwise_gather_output' for this one"
            )
        if word == "rowwise" and not has(_SLICED, name, later=False):
            raise ValueError(
                f"{KEY}: 'rowwise' for {name!r} expects slices of its inputs, and no layer before it is cut by "
                "columns; expected 'colwise' for the linear layer before it, or 'rowwise_split_input' for this one"
            )


def _sizes(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str, int]]:
    """Yields what the number of tensor ranks must divide: the module, what it is, and how many there are."""
    for name, word in plan.items():
        module, parent = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, nn.MultiheadAttention) and word == "heads":
            yield name, "heads", module.num_heads
        elif word in ROWS:
            yield name, "inputs", inputs(module)
        elif word in COLUMNS and word != "colwise_gather_output":
            features = outputs(module) // COLUMNS[word]
            head_size = next((getattr(parent, key) for key in _HEAD_SIZES if hasattr(parent, key)), None)
            heads = getattr(getattr(parent, "config", None), "num_attention_heads", None)
            if not isinstance(head_size, int) or features % head_size:
                yield name, "outputs", features
                continue
            own = (
                features // head_size
            )  # fewer for keys and values that heads share, more where one weight has them all
            yield name, "heads", heads if isinstance(heads, int) and own % heads == 0 else own
