"""The section `loader`: the order of rows, how they are read, and how batches are made of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from spark_dl.config.checks import check, check_bool, check_choices, check_number
from spark_dl.config.fields import may_change

Ragged = Literal["pad", "offsets"]
Reader = Literal["spark_dl", "petastorm"]


@dataclass(frozen=True, kw_only=True)
class Loader:
    """The order of rows, how they are read, and how batches are made of them."""

    num_streams: int = 16
    """Canonical streams of the plan: at least the number of ranks, best a multiple of it; divides the global batch."""
    shuffle: bool = True
    """Whether each epoch has an order of its own."""
    shuffle_window_rows: int = 65536
    """Rows that are shuffled together, divided among the streams."""
    memory_mib: int = 512
    """Memory of each rank's loader, in MiB: open windows, reading ahead, prefetched batches. The shuffle window is
    smaller where it needs more than a quarter of it; one row group for each stream is held in any case. Mixed datasets
    have equal shares of it."""
    reader_threads: int = may_change(2)
    """Most threads of each rank that read and decode; fewer where memory_mib has no room for a row group of each."""
    prefetch_batches: int = may_change(4)
    """Batches that each rank prefetches: fewer where they need more than a quarter of memory_mib, but at least one.
    Small ones are made up to 16 at a time."""
    ragged: Ragged = "pad"
    """Form of ragged columns in batches: `pad`, filled with zeros up to the longest row, with `name_mask`; `offsets`,
    all values end to end, with `name_offsets`."""
    proportions: dict[str, float] = field(default_factory=dict)
    """Share of each dataset in every global batch, by name, where several are mixed."""
    reader: Reader = "spark_dl"
    """What reads the shards. `petastorm` is the package of that name, for comparison, where it is installed."""

    def __post_init__(self) -> None:
        for name in ("num_streams", "shuffle_window_rows", "memory_mib", "reader_threads", "prefetch_batches"):
            check_number(self, name, 1, whole=True)
        check_bool(self, "shuffle")
        check_choices(self)
        is_mapping = isinstance(self.proportions, Mapping)
        check(is_mapping, "loader.proportions", "a mapping of names to numbers", self.proportions)
        for name, share in self.proportions.items():
            is_number = isinstance(share, (int, float)) and not isinstance(share, bool) and math.isfinite(share)
            check(is_number and share > 0, f"loader.proportions.{name}", "a finite number > 0", share)
