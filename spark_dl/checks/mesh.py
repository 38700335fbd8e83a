"""Checks on the driver how a mesh cuts a model, and measures the layers for the stages of a pipeline."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

import torch

from spark_dl.config import Config
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.build import build_train_loader
from spark_dl.data.load.mixture import Mixture
from spark_dl.parallel.mesh.settings import Mesh
from spark_dl.rundir.checkpoint import Saved
from spark_dl.spec import Batch, ModelSpec

_log = logging.getLogger("spark_dl")


def fit_mesh(spec: ModelSpec, train: ShardSet | Mixture, config: Config, saved: Saved | None) -> Config:
    """Returns the settings with the number of layers of each stage, if the mesh has a pipeline. Called on the driver.
    Builds the model if the mesh cuts it.

    Args:
        saved: the checkpoint to resume, whose stages are used again if they are as many.

    Raises:
        ValueError: If the layers do not give the output of the model, or cannot be cut as the settings say, and if a
            rank would have no parameter to train.
    """
    mesh = config.parallel
    if not isinstance(mesh, Mesh) or mesh.model == mesh.experts == 1:
        return config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        return dataclasses.replace(config, parallel=_fitted(spec, train, config, mesh, saved))


def _fitted(spec: ModelSpec, train: ShardSet | Mixture, config: Config, mesh: Mesh, saved: Saved | None) -> Mesh:
    # A second of imports, which only these meshes need.
    from spark_dl.parallel.mesh.build import cut_of
    from spark_dl.parallel.mesh.layers import build_chain, cut_chain, find_experts
    from spark_dl.parallel.mesh.pipeline import check_pipeline, ranks_of_stages
    from spark_dl.parallel.mesh.tensor.plan import resolve_tensor_plan
    from spark_dl.parallel.mesh.trial import check_chain, check_trained, measure_layers

    model = spec.build_to_train()
    find_experts(model, spec.experts, mesh)
    plan: Mapping[str, str] = {}
    if mesh.tensor > 1:
        if spec.evaluation is not None:
            raise ValueError(
                f"spec.evaluation: not supported with parallel.tensor={mesh.tensor}, where several ranks evaluate the "
                "same rows; use spec.metrics"
            )
        plan = resolve_tensor_plan(model, spec.tensor_plan, mesh.tensor, sequence=mesh.sequence)
    if mesh.pipeline == 1:
        return mesh
    check_pipeline(spec, mesh.pipeline)
    chain = build_chain(model, spec.layers)
    batch = _first_batch(spec, train, config)
    check_chain(spec, model, chain, batch, config)
    if mesh.stages is None and (before := _stages_of(saved)) and len(before) == mesh.pipeline * mesh.stages_per_rank:
        mesh = dataclasses.replace(mesh, stages=before)
    times = [1.0] * len(chain)
    if mesh.stages is None:
        times = measure_layers(spec, model, chain, batch, config, device=torch.device("cpu"))
    cut = tuple(cut_of(chain, mesh, plan, times))
    check_trained(cut_chain(chain, cut), ranks_of_stages(len(cut), mesh.pipeline, mesh.schedule))
    _log.info("the stages of the pipeline have %s layers", ", ".join(map(str, cut)))
    return dataclasses.replace(mesh, stages=cut)


def _stages_of(saved: Saved | None) -> tuple[int, ...] | None:
    stages = None if saved is None else saved.manifest["config"]["parallel"].get("stages")
    return None if stages is None else tuple(stages)


def _first_batch(spec: ModelSpec, train: ShardSet | Mixture, config: Config) -> Batch:
    """Returns the first micro-batch of a rank."""
    loader = build_train_loader(train, spec, config, rank=0, world_size=config.data_size)
    steps = loader.epoch(0)
    try:
        return next(steps).micro_batches[0]
    finally:
        steps.close()
