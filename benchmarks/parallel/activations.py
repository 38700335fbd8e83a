"""Bytes of activations that a rank holds, if all are kept, and if blocks compute them again in the backward pass
(`train.activation_checkpointing`; Chen et al. 2016, arXiv:1604.06174)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.parallel.held import kinds_of
from benchmarks.parallel.storages import Storages
from benchmarks.parallel.training import build_batches, build_config, build_spec, training
from spark_dl.gather import gather_json
from spark_dl.parallel.mesh.settings import Mesh
from spark_dl.parallel.recompute import recompute_activations
from spark_dl.world import World

_KEPT, _INNER = 9, 8
"""Activations that a block keeps for the backward pass, in multiples of its width: its input, and those within it."""


def measure(world: World, *, width: int = 64, blocks: int = 16, rows: int = 4096) -> list[dict[str, Any]]:
    """Returns a row for each way: what a rank has at most, beside weights, gradients and optimizer. Collective.

    A block is Linear(w, 4w), GELU, Linear(4w, w). The formula has what is kept for the backward pass; the passes also
    hold the gradients of the activations within a block, and with ZeRO-3 gathered weights.
    """
    formulas = {"kept": _KEPT * blocks, "full": blocks + _INNER}
    return [_of(form, stage, world, width, blocks, rows, formulas[form]) for stage in (0, 3) for form in formulas]


def _of(form: str, stage: int, world: World, width: int, blocks: int, rows: int, formula: int) -> dict[str, Any]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        made = [
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(blocks)
        ]
        model = nn.Sequential(*made)
        if form == "full":
            recompute_activations(model, "full")
        return model

    config = build_config(Mesh(zero_stage=stage), world.world_size, rows=rows)  # type: ignore[arg-type]
    batches = build_batches((width,), config)
    with Storages() as storages, training(build_spec(build), world, config) as trainable:
        storages.start_peak()
        trainable.forward_backward(batches, config.train.global_batch_size)
        found = storages.by_kind(storages.peak, kinds_of(trainable))["other"]
    held = max(gather_json(found)) / (4 * width * rows)
    return {"form": form, "zero_stage": stage, "held": held, "formula": formula, "most": formula + _INNER}
