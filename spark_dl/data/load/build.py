"""Builds the loader that the configuration selects, for training and evaluation."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

from spark_dl.config import Config
from spark_dl.data.columns.batch import StepBatches
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.records import ShardSet, leaves_out_rows
from spark_dl.data.load.loader import ShardLoader
from spark_dl.data.load.mixture import MixedLoader, MixedPlan, Mixture
from spark_dl.data.load.row_names import NamesRows
from spark_dl.data.plan import Plan
from spark_dl.spec import ModelSpec, Run
from spark_dl.world import World


class BatchLoader(NamesRows, Protocol):
    """The batches of one rank, with the interface of `ShardLoader`."""

    @property
    def plan(self) -> Plan | MixedPlan: ...

    @property
    def columns(self) -> tuple[Column, ...]: ...

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[StepBatches, None, None]: ...


def build_loader(data: ShardSet | Mixture, config: Config, **options: Any) -> BatchLoader:
    """Builds the loader of a dataset or a mixture. Called on a worker; not collective.

    `options` are the options of `ShardLoader`. Raises the errors of the loaders, and ValueError for `data.filters` if
    the driver did not count the rows that pass.
    """
    for shards in data.datasets.values() if isinstance(data, Mixture) else [data]:
        if leaves_out_rows(shards, config) and shards.filtered is None:
            raise ValueError(
                f"data.filters, data.nulls, data.nonfinite: all rows of {shards.url} would be read; count the rows "
                "that pass before the ranks start, with spark_dl.data.external.files.filter_rows, as "
                "spark_dl.train does"
            )
    if isinstance(data, Mixture):
        return MixedLoader(data, config, **options)
    return ShardLoader(data, config, **options)


def build_train_loader(
    data: ShardSet | Mixture, spec: ModelSpec, config: Config, *, rank: int, world_size: int, pin: bool = False
) -> BatchLoader:
    """Builds the training loader of a rank: shuffled, augmented, in micro-batches. Raises as `build_loader` does."""
    return build_loader(
        data, config, rank=rank, world_size=world_size, split="train", micro_batches=config.train.accumulation_steps,
        prepare=spec.prepare_in_loader(config.train.seed), pin=pin,
    )  # fmt: skip


def build_validation_loader(run: Run, world: World) -> BatchLoader | None:
    """Builds the loader of validation rows: of a separate dataset, of a split of the training dataset, or None."""
    config = run.config.without_sampling()
    split: dict[str, Any] = {}
    if run.validation is None:
        if not run.config.train.validation_fraction:
            return None
        split = {"split": "validation"}
    return build_loader(
        run.train if run.validation is None else run.validation, config, rank=world.data_rank,
        world_size=world.data_size, shuffle=False, prepare=run.spec.prepare_in_loader(),
        pin=world.device.type == "cuda", **split,
    )  # fmt: skip
