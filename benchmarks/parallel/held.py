"""Bytes that a rank holds for each parameter, at three points of a step (ZeRO: Rajbhandari et al. 2020,
arXiv:1910.02054, section 5)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.parallel.storages import Storages
from benchmarks.parallel.training import build_batches, build_config, build_spec, training
from spark_dl.gather import gather_json
from spark_dl.parallel.mesh.planner.records import STATES, held
from spark_dl.parallel.mesh.settings import Mesh
from spark_dl.parallel.trainable import Trainable
from spark_dl.world import World

FORMS = ("ddp", "zero1", "zero2", "zero3")
POINTS = ("built", "backward", "stepped")
"""After the model is built; when the rank holds most in the passes of a step; after the step of the optimizer."""
_LET_GO_S = 0.05
_STEPS = 2  # the optimizer has its state after the first one


def measure(world: World, *, width: int = 256, layers: int = 256, forms: Sequence[str] = FORMS) -> list[dict[str, Any]]:
    """Returns a row for each form and point: bytes per parameter of the rank that holds most, by kind. Collective.

    The model is a chain of linear layers, trained by Adam in float32 with one row on each rank, so that activations
    are small. A bucket has the size of a layer, which is the unit of ZeRO-3.
    """
    return [row for form in forms for row in _of_form(form, world, width, layers)]


def _of_form(form: str, world: World, width: int, layers: int) -> Iterator[dict[str, Any]]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    stage = FORMS.index(form)
    unit = width * (width + 1)
    parallel = Mesh(zero_stage=stage, bucket_mib=4 * unit / 2**20)  # type: ignore[arg-type]
    config = build_config(parallel, world.world_size, optimizer="Adam")
    batches = build_batches((width,), config)
    found = {}
    with Storages() as storages, training(build_spec(build), world, config) as trainable:
        found["built"] = storages.by_kind(_now(storages), kinds_of(trainable))
        for _ in range(_STEPS):
            trainable.optimizer.zero_grad(set_to_none=True)
            storages.start_peak()
            trainable.forward_backward(batches, config.train.global_batch_size)
            found["backward"] = storages.by_kind(storages.peak, kinds_of(trainable))
            trainable.step()
            found["stepped"] = storages.by_kind(_now(storages), kinds_of(trainable))
    states = held(1, STATES["adam"], stage, world.world_size).total
    for point in POINTS:
        ranks = gather_json(found[point])
        most = max(ranks, key=lambda kinds: sum(kinds.values()))
        per_parameter = {kind: number / (layers * unit) for kind, number in most.items()}
        yield {"form": form, "point": point, "held": sum(per_parameter.values()), **per_parameter, "formula": states,
               "unit": 4 / layers}  # fmt: skip


def _now(storages: Storages) -> dict[int, int]:
    # NOTE: a thread of Gloo lets go of the tensors of an exchange only some time after the wait for it has ended.
    time.sleep(_LET_GO_S)
    return storages.now()


def kinds_of(trainable: Trainable) -> Mapping[str, Sequence[Tensor]]:
    (module,), optimizer = trainable.modules, trainable.optimizer
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = [*module.parameters(), *trained]
    return {
        "weights": [p.detach() for p in parameters],
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer": [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)],
    }
