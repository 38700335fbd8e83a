"""The choice of what reads the rows: one function, which training and evaluation call."""

from __future__ import annotations

from typing import Any

from spark_dl.config import Config
from spark_dl.data.loader import Loader
from spark_dl.data.manifest import ShardSet
from spark_dl.data.mixture import MixedLoader, Mixture
from spark_dl.data.petastorm_reader import PetastormLoader

BatchLoader = Loader | MixedLoader | PetastormLoader


def build_loader(data: ShardSet | Mixture, config: Config, **options: Any) -> BatchLoader:
    """The loader of a dataset or of a mixture, that `data.reader` names. Called on a worker; not collective.

    `options` are those of `Loader`. Raises as the loaders do, and ValueError for `data.filters` whose rows were not
    counted on the driver.
    """
    for shards in data.datasets.values() if isinstance(data, Mixture) else [data]:
        if config.data.filters and shards.filtered is None:
            raise ValueError(
                f"data.filters: all rows of {shards.url} would be read; count those that pass before the ranks start, "
                "with spark_dl.data.filter_counts.filter_rows(shards, config.data.filters), as spark_dl.train does"
            )
    if isinstance(data, Mixture):
        return MixedLoader(data, config, **options)
    loaders: dict[str, type[Loader] | type[PetastormLoader]] = {"spark_dl": Loader, "petastorm": PetastormLoader}
    return loaders[config.data.reader](data, config, **options)
