"""The section `loader`: the order of rows, reading, and batches."""

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
    """The order of rows, how they are read, and how batches are built."""

    num_streams: int = 16
    """Number of streams that the rows are divided into. It must be at least the number of ranks, preferably a multiple,
    and must divide the global batch size."""
    shuffle: bool = True
    """Whether rows are shuffled, in a different order in each epoch."""
    shuffle_window_rows: int = 65536
    """Number of rows that are shuffled together, over all streams."""
    memory_mib: int = 512
    """Memory of each rank's loader, in MiB: open shuffle windows, read-ahead, prefetched batches. The shuffle window is
    reduced if it needs more than a quarter of this. One row group per stream is always kept. Mixed datasets have equal
    shares."""
    reader_threads: int = may_change(2)
    """Maximum number of threads of each rank that read and decode; fewer if `memory_mib` is too small for a row group
    per thread."""
    prefetch_batches: int = may_change(4)
    """Batches that each rank prefetches; fewer if they need more than a quarter of `memory_mib`, but at least one.
    Small batches are built up to 16 at a time."""
    ragged: Ragged = "pad"
    """Form of ragged columns in batches: `pad`, padded with zeros to the longest row, with `<name>_mask`; `offsets`,
    concatenated values, with `<name>_offsets`."""
    proportions: dict[str, float] = field(default_factory=dict)
    """Share of each dataset in every global batch, by name, for training on several datasets."""
    reader: Reader = "spark_dl"
    """Reader of shards. `petastorm` uses the package of that name, for comparison; it must be installed."""

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
