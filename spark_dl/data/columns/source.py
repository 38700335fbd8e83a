"""Source columns: the Spark and Parquet types that can become tensors, and how `data.encode` encodes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from spark_dl.config.checks import suggestion
from spark_dl.data.columns.encoding import Encoding

HAS_DOT = (
    "a struct field has a dot in its name, and dots separate the names of a path; rename the field, or select it as a "
    "column of its own, in Spark"
)


Shape = tuple[int | None, ...]
"""The shape of a cell; None stands for an axis of varying length."""
NO_NULLS = "no nulls; set data.nulls to drop or fill"


@dataclass(frozen=True)
class SourceColumn:
    """A column of a DataFrame or of an external Parquet file, before the shape of its cells is known."""

    name: str
    dtype: str
    """NumPy dtype of the stored elements."""
    kind: str
    """`scalar`, `array` or `vector`."""
    depth: int = 0
    """Nesting depth of arrays; 0 for scalars."""
    ragged: bool = False
    """Whether the length of the first axis varies from row to row."""
    encoding: Encoding = Encoding()
    path: tuple[str, ...] = ()
    """Names from the outermost struct to the field; a top-level column has one."""
    fill: Any = None
    """Value of `data.fill` that replaces nulls, NaN and Inf, in the source type; None if they are not filled."""
    empty_is_null: bool = False
    """Whether an empty cell is a null: the pixels of a file that Spark's image source could not read."""
    mean_size: float | None = None
    """Mean number of elements per cell where it varies; for images, mean bytes of the file."""


class BadCellsError(ValueError):
    """Cells that cannot be stored. The writer adds the partition. # row: the first bad row"""

    def __init__(self, column: str, row: int, found: str, expected: str):
        super().__init__(f"column {column!r}: found {found}, expected {expected}")
        self.row, self.found, self.expected = row, found, expected


def check_batch_names(names: Sequence[str], ragged: Sequence[str], weight: str | None = None) -> None:
    """Raises ValueError for column names that batches reserve. # ragged: the ragged columns among the names

    A batch has the weights of its rows as `weight`, and the mask or the offsets of each ragged column.

    Args:
        weight: the column of `data.weight`, which may have this name.
    """
    taken = {} if weight == "weight" else {"weight": "the weights of its rows"}
    for name in ragged:
        taken |= {f"{name}_mask": f"the mask of {name!r}", f"{name}_offsets": f"the offsets of {name!r}"}
    for name in names:
        if name in taken:
            raise ValueError(
                f"column {name!r}: a batch uses this name for {taken[name]}; rename the column, "
                f"df.withColumnRenamed({name!r}, ...), or leave it out of data.features"
            )


def check_names(key: str, settings: Iterable[str], names: Sequence[str]) -> None:
    """Raises ValueError for settings `data.<key>` of a column that is not read, with the nearest name that is."""
    for name in settings:
        if name not in names:
            raise ValueError(f"data.{key}.{name}: no such column is read{suggestion(name, list(names))}")
