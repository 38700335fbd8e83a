"""Checks that all ranks have built the same model, before they exchange its tensors.

Gloo aborts the process if tensors of different sizes meet, and DDP names a parameter by its number alone.
"""

from __future__ import annotations

import itertools
import json
import zlib
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from spark_dl.world import World


def check_same_model(model: nn.Module, world: World) -> None:
    """Raises ValueError on a rank whose model has other parameters or buffers than that of rank 0. Collective.

    Called after `spec.build`. Only the names, shapes and types travel, from rank 0 through the store.
    """
    if world.world_size == 1:
        return
    # NOTE: the store keeps its keys, and a job can train several models one after the other.
    key = f"model/{world.store.add(f'models/{world.rank}', 1)}"
    own = _described(model)
    if world.rank == 0:
        world.store.set(key, zlib.compress(json.dumps(own).encode()))  # type: ignore[arg-type] # bytes are accepted
        return
    first = json.loads(zlib.decompress(world.store.get(key)))
    for name in dict.fromkeys((*first, *own)):
        here, there = own.get(name, "no such tensor"), first.get(name, "no such tensor")
        if here != there:
            raise ValueError(
                f"spec.build: expected the same model on all ranks, found for {name!r} {here} on rank {world.rank} and "
                f"{there} on rank 0; spec.build must not depend on the rank, its host or its rows"
            )


def _described(model: nn.Module) -> dict[str, str]:
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {
        name: "uninitialized" if is_lazy(t) else f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        for name, t in named
    }
