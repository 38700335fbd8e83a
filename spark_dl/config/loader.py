"""The section `loader`: the order of rows, reading, and batches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from spark_dl.config.checks import check, check_bool, check_choices, check_number, integers
from spark_dl.config.fields import may_change, named_settings

Ragged = Literal["pad", "offsets"]
PredictPrecision = Literal["float32", "bf16-mixed", "fp16-mixed"]


@named_settings
@dataclass(frozen=True, kw_only=True)
class Loader:
    """The order of rows, how they are read, and how batches are built.

    Example:
        >>> spark_dl.Loader(memory_mib=1024, reader_threads=4)
    """

    num_streams: int = 16
    """Number of streams that the rows are divided into. It must divide the global batch size and be at least the
    number of ranks. A multiple of the number of ranks is best."""
    shuffle: bool = True
    """Whether rows are shuffled, in a different order in each epoch."""
    shuffle_window_rows: int = 65536
    """Number of rows that are shuffled together, over all streams."""
    memory_mib: int = 512
    """Memory of each rank's loader, in MiB: open shuffle windows, read-ahead, prefetched batches. The shuffle window is
    reduced if it needs more than a quarter of this memory. The loader always keeps one row group per stream in
    memory. When several datasets are mixed, each gets an equal share of the memory."""
    reader_threads: int = may_change(2)
    """Maximum number of threads of each rank that read and decode; fewer if `memory_mib` is too small for a row group
    per thread."""
    prefetch_batches: int = may_change(4)
    """Batches that each rank prefetches; fewer if they need more than a quarter of `memory_mib`, but at least one.
    Small batches are built together, at most 16 at a time."""
    ragged: Ragged = "pad"
    """Form of ragged columns in batches. `pad` pads each row with zeros to the length of the longest row, and adds
    `<name>_mask`. `offsets` concatenates the values, and adds `<name>_offsets`."""
    group_by_length: bool = False
    """Whether a global batch has rows of similar lengths, so that little of it is padding. Rows are sorted by length
    within a quarter of the shuffle window (at most half of an epoch), and the batches that they make come in a random
    order. Every row is still used once per epoch, in the same order on any number of ranks. The length of a row is that
    of its longest ragged column. `predict` always sorts the rows that it gets at once."""
    max_tokens: int | None = None
    """Values of a micro-batch in its longest ragged column, with padding: rows times the length of the longest one. The
    rows of a rank in a step are sorted by length, and as many micro-batches as this takes share them, which does not
    change the step. A longer row is a micro-batch by itself. In the place of `train.accumulation_steps`; `predict` uses
    it, too."""
    pad_to: tuple[int, ...] = ()
    """Lengths that ragged columns are padded to, in ascending order: the first one that is enough, or a multiple of the
    last one. Then `train.compile` sees few shapes. Empty: the length of the longest row."""
    rows_at_once: int | None = may_change(None)
    """Rows that `predict` passes to the model at once. Null: as `max_tokens` says; without it at most 1,024, and no
    more than 32 MiB of padded rows, where a value of a ragged column counts as 1 KiB on a GPU and 16 KiB on a CPU
    (a byte: 1 KiB), because models keep vectors for each."""
    predict_precision: PredictPrecision = may_change("float32")
    """Precision in which `predict` computes the model: `bf16-mixed` and `fp16-mixed` use autocast, and the predictions
    are float32 again. Evaluations have that of `train.precision`."""
    proportions: dict[str, float] = field(default_factory=dict)
    """Share of each dataset in every global batch, by name, for training on several datasets."""
    epoch_size: int | None = None
    """Number of rows of an epoch of several datasets, rounded up to whole global batches. Each dataset goes on in the
    next epoch where it was at the end of this one. Null: an epoch ends with the dataset that takes the most steps, and
    all begin again. With `data.sampling_weight`: number of rows that are drawn for an epoch; null: as many as the
    dataset has."""

    def __post_init__(self) -> None:
        for name in ("num_streams", "shuffle_window_rows", "memory_mib", "reader_threads", "prefetch_batches"):
            check_number(self, name, 1, whole=True)
        for name in ("max_tokens", "rows_at_once", "epoch_size"):
            if getattr(self, name) is not None:
                check_number(self, name, 1, whole=True)
        check_bool(self, "shuffle", "group_by_length")
        lengths = integers(self.pad_to)
        is_ascending = lengths is not None and min(lengths, default=1) > 0 and [*lengths] == sorted(set(lengths))
        check(is_ascending, "loader.pad_to", "a list of whole numbers > 0 in ascending order", self.pad_to)
        object.__setattr__(self, "pad_to", lengths)
        check_choices(self)
        for name in ("max_tokens", "pad_to"):
            is_padded = self.ragged == "pad" or not getattr(self, name)
            check(is_padded, f"loader.{name}", "null with loader.ragged='offsets', which does not pad",
                  getattr(self, name))  # fmt: skip
        is_mapping = isinstance(self.proportions, Mapping)
        check(is_mapping, "loader.proportions", "a mapping of names to numbers", self.proportions)
        for name, share in self.proportions.items():
            is_number = isinstance(share, (int, float)) and not isinstance(share, bool) and math.isfinite(share)
            check(is_number and share > 0, f"loader.proportions.{name}", "a finite number > 0", share)
