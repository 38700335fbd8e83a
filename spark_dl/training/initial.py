"""The weights that a run begins with: those of a checkpoint of another run (`train.init_from`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from spark_dl.config import Config
from spark_dl.data.columns.schema import Column, check_reference_columns
from spark_dl.rundir import checkpoint, signing
from spark_dl.rundir.weights import load_into, load_weights
from spark_dl.spec import ModelSpec, Run


@dataclass(frozen=True)
class InitialWeights:
    """A `ModelSpec.build` that loads the weights and buffers of a checkpoint into the model. Called on every rank."""

    build: Callable[[], nn.Module]
    url: str
    """The checkpoint."""
    sha256: str
    """Checksum of its manifest, which was checked before."""

    def __call__(self) -> nn.Module:
        """Builds the model with the weights. Raises as `load_into` does, and for a damaged checkpoint."""
        return self.load_into(self.build())

    def load_into(self, model: nn.Module) -> nn.Module:
        """Returns the model with the weights."""
        saved = checkpoint.open_checkpoint(self.url, sha256=self.sha256)
        if isinstance(model, nn.Module):  # another type is reported by the caller
            try:
                load_into(model, load_weights(saved), f"the weights of {self.url}", same_dtypes=True)
            except ValueError as error:
                raise ValueError(
                    f"train.init_from: {error}; build the same model, or leave out train.init_from and load the parts "
                    "that fit in spec.build"
                ) from None
        return model


def begin(
    spec: ModelSpec | None, config: Config, saved: checkpoint.Saved | None, run_dir: str, *, overwrite: bool
) -> tuple[ModelSpec | None, Sequence[Column]]:
    """Returns the spec with the weights of `train.init_from`, and the columns that the model was trained on before.

    Called on the driver. spec: None for trials, each of which has its own; their ranks load the weights (`for_rank`).
    saved: the checkpoint that the run resumes from, which replaces these weights, or None.
    Raises ValueError if the checkpoint is missing or damaged, if its weights are those of another model, or if
    `overwrite` would delete it.
    """
    if saved is not None:
        return spec, saved.columns
    if config.train.init_from is None:
        return spec, ()
    found = _find(config.train.init_from, config)
    signing.warn_if_ignored(found.url, found.manifest, config.checkpoint.signing_key_file)
    if overwrite and checkpoint.run_dir_of(found) == run_dir:
        raise ValueError(
            f"train.init_from: {found.url} is a checkpoint of the run_dir, which overwrite deletes; use another run_dir"
        )
    if spec is None:
        return None, found.columns
    weights = InitialWeights(spec.build, found.url, found.sha256)
    _check_fits(weights)
    return dataclasses.replace(spec, build=weights), found.columns


def for_rank(run: Run) -> Run:
    """Returns the run with the weights of `train.init_from`, if no driver has prepared it, as under torchrun."""
    url = run.config.train.init_from
    if url is None or run.checkpoint is not None or isinstance(run.spec.build, InitialWeights):
        return run
    found = _find(url, run.config)
    if run.train.columns:
        check_reference_columns(run.train.select(run.config.data.columns), found.columns)
    spec = dataclasses.replace(run.spec, build=InitialWeights(run.spec.build, found.url, found.sha256))
    return dataclasses.replace(run, spec=spec)


def _find(url: str, config: Config) -> checkpoint.Saved:
    try:
        return checkpoint.find(url, only_weights=True, key_file=config.checkpoint.signing_key_file)
    except ValueError as error:
        raise ValueError(f"train.init_from: {error}") from error


def _check_fits(weights: InitialWeights) -> None:
    """Raises ValueError if the weights are those of another model, before ranks start.

    Other errors of `build` are left to the ranks, which may have packages and devices that the driver lacks.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            model = weights.build()
        except Exception:
            return
        weights.load_into(model)
