"""The choice of what reads the shards: one function, which training and evaluation call."""

from __future__ import annotations

from spark_dl.config import Config
from spark_dl.data.loader import Loader
from spark_dl.data.petastorm_reader import PetastormLoader
from spark_dl.data.rows import Part
from spark_dl.data.shards import ShardSet

BatchLoader = Loader | PetastormLoader


def build_loader(
    shards: ShardSet,
    config: Config,
    *,
    rank: int,
    world_size: int,
    part: Part = "all",
    shuffle: bool = True,
    micro_batches: int = 1,
) -> BatchLoader:
    """The loader that `data.reader` names. Called on a worker; not collective. Raises as the loaders do."""
    loaders: dict[str, type[Loader] | type[PetastormLoader]] = {"spark_dl": Loader, "petastorm": PetastormLoader}
    return loaders[config.data.reader](
        shards, config, rank=rank, world_size=world_size, part=part, shuffle=shuffle, micro_batches=micro_batches
    )
