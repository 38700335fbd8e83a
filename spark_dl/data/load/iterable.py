"""`RankDataset`: the rows of one rank as an iterable of batches, for a training loop of the user's own."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from spark_dl.config import Config
from spark_dl.data.columns.batch import Batch
from spark_dl.data.columns.ragged import check_one_batch
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.build import BatchLoader
from spark_dl.data.load.resume_check import dataset_digest
from spark_dl.data.plan import Split

_NEW = ("split", "validation_fraction", "validation_fold", "window_rows", "window_bytes", "length_steps")
"""Keys that a state saved by an earlier version does not have."""
_CALLERS = 12
"""How many callers are looked at."""


class RankDataset(IterableDataset[Any]):
    """The batches of one rank, as `open_dataset` returns them. Not collective: each rank reads on its own.

    Each `iter()` yields one epoch: `len()` batches, the same number on all ranks. The first one is epoch 0, and each
    further one is the next epoch, in a new order. `set_epoch` selects another one. Batches are read and prefetched
    in threads, so a DataLoader around this dataset needs `batch_size=None` and `num_workers=0`.

    `state_dict` and `load_state_dict` follow the stateful protocol of torchdata: a loop that stops after any batch goes
    on with the next one.
    """

    def __init__(
        self,
        loader: BatchLoader,
        shards: ShardSet,
        config: Config,
        *,
        shuffle: bool,
        split: Split,
        transform: Callable[[Batch], Any] | None = None,
        drop_last: bool = False,
    ):
        """drop_last: whether the last batch is left out if it is not full. Raises ValueError if it is the only one."""
        check_one_batch(config.loader)
        self._loader, self._transform = loader, transform
        global_batch = config.train.global_batch_size
        self._steps = loader.plan.rows // global_batch if drop_last else loader.plan.steps
        if not self._steps:
            raise ValueError(
                f"open_dataset: drop_last leaves no batch: found {loader.plan.rows} rows, and a batch of all ranks has "
                f"{global_batch}"
            )
        is_shuffled, is_ragged = config.loader.shuffle and shuffle, any(c.is_ragged for c in loader.columns)
        self._order: dict[str, Any] = {
            "global_batch_size": global_batch,
            "num_streams": config.loader.num_streams,
            "shuffle_window_rows": config.loader.shuffle_window_rows,
            "shuffle": is_shuffled,
            "seed": config.train.seed,
            "rows": dataset_digest(shards),
            "split": split,
            "validation_fraction": config.train.validation_fraction if split != "all" else 0.0,
            "validation_fold": config.train.validation_fold if split != "all" else 0,
            # loader.memory_mib bounds these, and need not be the same.
            "window_rows": getattr(loader.plan, "window_rows", None) if is_shuffled else None,
            "window_bytes": getattr(loader.plan, "window_bytes", None) if is_shuffled and is_ragged else None,
            "length_steps": getattr(loader.plan, "length_steps", 1),
        }
        """All that the order of rows depends on."""
        self._epoch, self._step = 0, 0
        self._is_started = False
        """Whether the current epoch was begun by `iter()`."""
        self._finished: int | None = None
        """The epoch of whose end `load_state_dict` got the position, until the next `iter()`."""
        self.batch_rows = 0
        """True rows of the current batch over all ranks: the sum of rows without padding."""

    def __len__(self) -> int:
        """Returns the batches of an epoch, the same number on all ranks."""
        return self._steps

    @property
    def rows(self) -> int:
        """Rows of an epoch over all ranks, without padding, and without those that `drop_last` leaves out."""
        return min(self._loader.plan.rows, self._steps * int(self._order["global_batch_size"]))

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of a batch, with their dtypes and shapes."""
        return self._loader.columns

    @property
    def epoch(self) -> int:
        """The current epoch; before the first `iter()`, the one that it will begin."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Selects the epoch of the next `iter()`. A position from `load_state_dict` in the same epoch is kept.

        At a position after the last batch of an epoch, the next `iter()` in that epoch yields nothing.
        """
        if epoch == self._finished:
            self._epoch, self._step = epoch, len(self)
        elif self._is_started or epoch != self._epoch:
            self._epoch, self._step, self._is_started = epoch, 0, False

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise RuntimeError(
                "open_dataset: found a worker process of a DataLoader, each of which would read all rows of the rank; "
                "set num_workers=0 (the dataset reads in threads: loader.reader_threads)"
            )
        if name := _splits_again():
            raise RuntimeError(
                f"open_dataset: found {name} of Accelerate, which would split the rows of a rank once more, and lose "
                "rows; do not pass this dataset to Accelerator.prepare; with the Trainer of transformers, return it "
                "from get_train_dataloader"
            )
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        # Runs when the first batch is asked for: some loops call `iter` an additional time, to see whether they can.
        if self._is_started:
            self._epoch, self._step = self._epoch + 1, 0
        self._is_started, self._finished = True, None
        epoch, start_step = self._epoch, self._step
        if start_step >= len(self):
            return
        with closing(self._loader.epoch(epoch, start_step)) as steps:
            for step in itertools.islice(steps, self._steps - start_step):
                batch = step.micro_batches[0]
                self._epoch, self._step, self.batch_rows = epoch, step.step + 1, step.rows
                yield batch if self._transform is None else self._transform(batch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, as plain data: the epoch, the number of its batches that were yielded, and the order.

        The same on all ranks that have yielded the same number of batches, so one rank can save it for all.
        """
        return {"epoch": self._epoch, "step": self._step, **self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a position of `state_dict`: the next `iter()` yields the rest of that epoch.

        After the last batch of an epoch, `epoch` is the next one.
        The number of ranks can differ if the global batch has the same size. Raises ValueError if the rows, or
        settings that their order depends on, differ from those of the state.
        """
        for name, now in self._order.items():
            if (found := state.get(name, now if name in _NEW else None)) != now:
                raise ValueError(
                    f"load_state_dict: found {name}={found!r}, expected {now!r} as in this dataset; rows would be "
                    "repeated or skipped; open it with the same rows and settings (a global batch is batch_size rows "
                    "of each rank, and loader.memory_mib bounds window_rows and window_bytes), or start a new epoch "
                    "with set_epoch"
                )
        for name, most in (("epoch", None), ("step", len(self))):
            found = state.get(name)
            if type(found) is not int or found < 0 or (most is not None and found > most):
                upto = "" if most is None else f" and up to {most}, the batches of an epoch"
                raise ValueError(
                    f"load_state_dict: expected {name} as a whole number from 0 on{upto}, found {found!r}; use a "
                    "state of state_dict"
                )
        self._epoch, self._step, self._is_started = state["epoch"], state["step"], False
        self._finished = None
        if self._step >= len(self):
            self._finished = self._epoch
            self._epoch, self._step = self._epoch + 1, 0


def _splits_again() -> str:
    """Returns the class of Accelerate that asks for the rows to split them again; empty if none does."""
    frame = sys._getframe(1)
    for _ in range(_CALLERS):
        name = type(frame.f_locals.get("self")).__name__
        if name in ("IterableDatasetShard", "DataLoaderDispatcher"):
            return name
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
