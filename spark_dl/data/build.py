"""The choice of what reads the rows: one function, which training and evaluation call."""

from __future__ import annotations

from typing import Any

from spark_dl.config import Config
from spark_dl.data.loader import Loader
from spark_dl.data.mixture import MixedLoader, Mixture
from spark_dl.data.petastorm_reader import PetastormLoader
from spark_dl.data.shards import ShardSet

BatchLoader = Loader | MixedLoader | PetastormLoader


def build_loader(data: ShardSet | Mixture, config: Config, **options: Any) -> BatchLoader:
    """The loader of a dataset or of a mixture, that `data.reader` names. Called on a worker; not collective.

    `options` are those of `Loader`. Raises as the loaders do.
    """
    if isinstance(data, Mixture):
        return MixedLoader(data, config, **options)
    loaders: dict[str, type[Loader] | type[PetastormLoader]] = {"spark_dl": Loader, "petastorm": PetastormLoader}
    return loaders[config.data.reader](data, config, **options)
