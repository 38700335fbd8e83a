"""Mixtures: several datasets mixed by proportion, with a share of each dataset in every global batch.

Each dataset has its own plan and loader. An epoch of the mixture uses every row of every dataset at least once: the
dataset with the most steps sets the length, and shorter datasets start again in a new order. With `loader.epoch_size`,
an epoch has so many rows, and each dataset goes on where it was at the end of the epoch before. So the position of a
mixture is (epoch, step), too, and the order does not depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spark_dl.config import Config
from spark_dl.data.columns.batch import BatchBuilder, Prepare, StepBatches, StepRows
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.memory import memory_setting
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.loader import READY_SHARE, ShardLoader, read_ahead
from spark_dl.data.parquet.buffers import PrefetchBudget
from spark_dl.data.plan import Plan


@dataclass(frozen=True)
class Mixture:
    """Datasets with the same columns, by name."""

    datasets: Mapping[str, ShardSet]

    @property
    def url(self) -> str:
        """The URLs of all datasets, for messages."""
        return ", ".join(dataset.url for dataset in self.datasets.values())

    @property
    def num_shards(self) -> int:
        return sum(dataset.num_shards for dataset in self.datasets.values())

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the first dataset."""
        return next(iter(self.datasets.values())).columns

    @property
    def rows(self) -> int:
        return sum(dataset.rows for dataset in self.datasets.values())

    def select(self, names: Sequence[str]) -> tuple[Column, ...]:
        """Returns the columns of these names. Raises ValueError if one is missing, or differs between the datasets."""
        first_name, *other_names = self.datasets
        columns = self.datasets[first_name].select(names)
        for name in other_names:
            for a, b in zip(columns, self.datasets[name].select(names), strict=True):
                if (a.dtype, a.shape) != (b.dtype, b.shape):
                    raise ValueError(
                        f"column {a.name!r}: found the dtype {b.dtype} and shape {b.shape} in the dataset {name!r}, "
                        f"expected {a.dtype} and {a.shape} as in {first_name!r}; mixed datasets need the same columns"
                    )
        return columns


def batch_shares(proportions: Mapping[str, float], global_batch_size: int, num_streams: int) -> dict[str, int]:
    """Returns each dataset's rows in a global batch: the multiples of `num_streams` closest to the proportions.

    Uses the largest remainder method. Raises ValueError if a dataset would have no rows.
    """
    units = global_batch_size // num_streams
    total = sum(proportions.values())
    exact = {name: units * p / total for name, p in proportions.items()}
    shares = {name: int(e) for name, e in exact.items()}
    by_remainder = sorted(exact, key=lambda name: shares[name] - exact[name])  # stable: ties keep their order
    for name in by_remainder[: units - sum(shares.values())]:
        shares[name] += 1
    if empty := [name for name, share in shares.items() if share == 0]:
        raise ValueError(
            f"loader.proportions: the dataset {empty[0]!r} would have no row in a global batch of {global_batch_size}, "
            f"which is dealt in {units} lots of loader.num_streams={num_streams} rows; raise train.global_batch_size, "
            "lower loader.num_streams, or raise the proportion of the dataset"
        )
    return {name: share * num_streams for name, share in shares.items()}


def dataset_configs(config: Config) -> dict[str, Config]:
    """Returns the configuration of each dataset, with its share of a global batch. Raises as `batch_shares` does."""
    shares = batch_shares(config.loader.proportions, config.train.global_batch_size, config.loader.num_streams)
    return {
        name: dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch_size=share))
        for name, share in shares.items()
    }


@dataclass(frozen=True)
class MixedPlan:
    """The combined steps of several plans in an epoch."""

    plans: tuple[Plan, ...]
    epoch_steps: int | None = None
    """Global batches of an epoch (`loader.epoch_size`); None for those of the dataset that has the most."""

    @cached_property
    def steps(self) -> int:
        """Global batches of an epoch, the same for all ranks."""
        return self.epoch_steps or max(plan.steps for plan in self.plans)

    @cached_property
    def rows(self) -> int:
        """Rows that the first epoch uses, with the repeated rows of shorter datasets."""
        return self.rows_before(self.steps)

    def batch_rows(self, step: int, epoch: int = 0) -> int:
        """Returns the true rows of global batch `step`, over all ranks."""
        return sum(plan.batch_rows(self.place(plan, epoch, step)[1]) for plan in self.plans)

    def rows_before(self, step: int, epoch: int = 0) -> int:
        """Returns the true rows of an epoch's global batches before `step`, over all ranks."""

        def rows(plan: Plan, step: int) -> int:
            number, own = self.place(plan, epoch, step)
            return number * plan.rows + plan.rows_before(own)

        return sum(rows(plan, step) - rows(plan, 0) for plan in self.plans)

    def place(self, plan: Plan, epoch: int, step: int) -> tuple[int, int]:
        """Returns how often a plan's dataset has been read before a step of the mixture, and its own step there."""
        return divmod(epoch * self.per_epoch(plan) + step, plan.steps)

    def per_epoch(self, plan: Plan) -> int:
        """Returns how many steps of a plan's dataset are between the starts of two epochs."""
        return self.steps if self.epoch_steps else -(-self.steps // plan.steps) * plan.steps


class MixedLoader:
    """The batches of one rank from a mixture, with the interface and the options of `ShardLoader`. Not collective.

    The rows of all datasets are joined to one batch before `prepare` is called. Each dataset has an equal share of
    `loader.memory_mib`. Raises ValueError as `batch_shares` and `ShardLoader` do.
    """

    def __init__(
        self,
        mixture: Mixture,
        config: Config,
        *,
        rank: int,
        micro_batches: int = 1,
        prepare: Prepare | None = None,
        pin: bool = False,
        **options: Any,
    ):
        self.columns = mixture.select(config.data.columns)
        configs = dataset_configs(config)
        self.loaders = {
            name: ShardLoader(mixture.datasets[name], share, rank=rank, num_datasets=len(configs), **options)
            for name, share in configs.items()
        }
        size = config.loader.epoch_size
        self.plan = MixedPlan(
            tuple(loader.plan for loader in self.loaders.values()),
            None if size is None else -(-size // config.train.global_batch_size),
        )
        self._rank = rank
        memory_mib = config.loader.memory_mib
        self._builder = BatchBuilder(
            self.columns, config.data, micro_batches, config.loader.ragged, prepare, pin, memory=memory_mib << 20,
            memory_setting=memory_setting(memory_mib), numbered=config.train.random_by == "row",
            max_tokens=config.loader.max_tokens, pad_to=config.loader.pad_to,
        )  # fmt: skip
        self._ready_bytes = (memory_mib << 20) // READY_SHARE

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[StepBatches, None, None]:
        """Yields the steps of an epoch, from `start_step` on. Prefetching stops when the iterator is closed."""
        room = PrefetchBudget(self._ready_bytes)
        return read_ahead(
            self._batches(epoch, start_step, room), min(loader.prefetch for loader in self.loaders.values()), room
        )

    def name_rows(self, epoch: int, step: int) -> str:
        """Names the rows of this rank in a step, of each dataset, for messages."""
        named = []
        for name, loader in self.loaders.items():
            number, own_step = self.plan.place(loader.plan, epoch, step)
            named.append(f"of the dataset {name!r}: {loader.name_rows(number, own_step)}")
        return "; ".join(named)

    def _batches(self, epoch: int, start_step: int, room: PrefetchBudget) -> Generator[list[StepBatches], None, None]:
        with contextlib.ExitStack() as stack:
            sources = [
                stack.enter_context(contextlib.closing(self._endless(loader, epoch, start_step)))
                for loader in self.loaders.values()
            ]
            for step in range(start_step, self.plan.steps):
                parts, key = [next(source) for source in sources], (epoch, step, self._rank)
                room.take(self._builder.bytes_of(parts, key))
                batches = self._builder.build(parts, key)
                yield [StepBatches(step, batches, self.plan.batch_rows(step, epoch))]

    def _endless(self, loader: ShardLoader, epoch: int, start_step: int) -> Generator[StepRows, None, None]:
        number, step = self.plan.place(loader.plan, epoch, start_step)
        while True:
            with contextlib.closing(loader.steps(number, step)) as bundles:
                for bundle in bundles:
                    yield from bundle
            number, step = number + 1, 0
