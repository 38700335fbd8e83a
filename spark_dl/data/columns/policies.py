"""What becomes of rows with nulls, NaN and Inf: an error, or they are dropped or filled, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_dl.config.data import Data, Nonfinite, Nulls
from spark_dl.data.columns import images
from spark_dl.data.columns.cells import Shape, read_cells, whose
from spark_dl.data.columns.encoding import MAX_WORDS
from spark_dl.data.columns.nested import nonfinite_rows, null_rows
from spark_dl.data.columns.ragged import Array, Ragged
from spark_dl.data.columns.source import BadCellsError, SourceColumn

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Changes:
    """How the rows of a dataset differ from those of its DataFrame."""

    dropped_rows: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    """By column: dropped rows with a null, NaN or Inf in it. A row counts in each column that has one."""
    filled: Mapping[str, int] = field(default_factory=dict)
    """By column: rows with at least one filled value."""


@dataclass(frozen=True)
class Rules:
    """The settings by which the rows and values of a dataset were chosen when it was written."""

    nulls: str
    nonfinite: str
    fill: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By column `min_count` and `max_size` of a vocabulary that was counted then, where they were set."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Rules:
        """Rules from the dict that `dataclasses.asdict` made of them, after a way through JSON."""
        for key, choices in (("nulls", get_args(Nulls)), ("nonfinite", get_args(Nonfinite))):
            if plain[key] not in choices:
                raise ValueError(f"rules: found the {key} {plain[key]!r:.200}, expected one of {list(choices)}")
        for key in ("fill", "counts"):
            if not isinstance(plain[key], Mapping):
                raise ValueError(f"rules: found the {key} {plain[key]!r:.200}, expected a mapping of columns")
        return cls(**plain)


_DEFAULT_COUNTS = {"min_count": 1, "max_size": MAX_WORDS}


def rules_of(data: Data, known: Collection[str] = ()) -> Rules:
    """The rules that the settings ask for. `known` are columns that get the words of another dataset."""
    counts = {
        name: {key: settings[key] for key, usual in _DEFAULT_COUNTS.items() if settings.get(key, usual) != usual}
        for name, settings in data.encode.items()
        if name not in known
    }
    return Rules(data.nulls, data.nonfinite, dict(data.fill), {name: c for name, c in counts.items() if c})


def check_rules(url: str, written: Rules | None, data: Data, known: Collection[str] = ()) -> None:
    """Raises ValueError for settings that choose rows or values with which a dataset was not written.

    It is read as it is, so that they would do nothing. `written` is None where the dataset does not tell; `known` are
    columns that get the words of another dataset.
    """
    asked = rules_of(data, known)
    pairs: list[tuple[str, Any, Any, bool]] = [
        ("nulls", asked.nulls, written and written.nulls, asked.nulls in ("drop", "fill")),
        ("nonfinite", asked.nonfinite, written and written.nonfinite, asked.nonfinite in ("drop", "fill")),
        ("fill", asked.fill, written and dict(written.fill), bool(asked.fill)),
    ]
    for name, counts in asked.counts.items():
        before = written.counts.get(name, {}) if written else {}
        pairs += [(f"encode.{name}.{k}", n, before.get(k, _DEFAULT_COUNTS[k]), True) for k, n in counts.items()]
    for key, found, expected, is_set in pairs:
        if is_set and found != expected:
            was = f"was written or opened with {expected!r}" if written else "does not say with what it was written"
            raise ValueError(
                f"data.{key}: found {found!r} for the dataset {url}, which {was} and is read as it is; leave the "
                "setting out, or write the dataset with it (write_shards, jobs/prepare.py)"
            )


def add_changes(parts: Iterable[Changes]) -> Changes:
    rows, dropped, filled = 0, Counter[str](), Counter[str]()
    for part in parts:
        rows += part.dropped_rows
        dropped.update(part.dropped)
        filled.update(part.filled)
    return Changes(rows, dict(dropped), dict(filled))


def clean_batch(
    columns: Sequence[SourceColumn],
    arrays: Sequence[pa.Array],
    data: Data,
    *,
    shapes: Sequence[Shape | None] | None = None,
    may_drop: bool = True,
) -> tuple[list[Array | Ragged], Changes]:
    """The cells of a batch of rows, as `data.nulls`, `data.nonfinite` and `data.fill` say. Called in Spark tasks.

    All columns come out with the same rows, which can be none. `shapes` are those of the cells, where they are known.
    Where none may be dropped, `drop` is as `error`.
    Raises BadCellsError for what these settings do not allow and for cells that cannot be stored; its row counts from
    the start of the batch.
    """
    keep: Mask = np.ones(len(arrays[0]), dtype=bool)
    dropped: dict[str, Mask] = {}
    filled: dict[str, Mask] = {}
    for column, array in zip(columns, arrays, strict=True):
        for policy, rows in (
            (_checked_policy(column, "nulls", nulls := null_rows(array), data.nulls, may_drop), nulls),
            (
                _checked_policy(column, "nonfinite", nonfinite := nonfinite_rows(array), data.nonfinite, may_drop),
                nonfinite,
            ),
        ):
            if rows is not None and policy in ("drop", "fill"):
                found = dropped if policy == "drop" else filled
                found[column.name] = rows | found.get(column.name, False)
                keep &= ~rows if policy == "drop" else True
    if not keep.all():
        arrays = [a.filter(pa.array(keep)) for a in arrays]
    try:
        fills = [c if data.nulls == "fill" else replace(c, fill=None) for c in columns]
        shapes = shapes or [None] * len(columns)
        values = [read_cells(c, a, shape) for c, a, shape in zip(fills, arrays, shapes, strict=True)]
        for column, cells, shape in zip(columns, values, shapes, strict=True):
            if column.encoding.kind == "image":
                _check_images(column, cells, shape)
    except BadCellsError as error:
        error.row = int(np.flatnonzero(keep)[error.row])
        raise
    if data.nonfinite == "fill":
        values = [with_finite_values(v, c.fill) for c, v in zip(columns, values, strict=True)]
    counts = {name: int((rows & keep).sum()) for name, rows in filled.items()}
    changes = Changes(
        dropped_rows=int((~keep).sum()),
        dropped={name: int(rows.sum()) for name, rows in dropped.items()},
        filled={name: n for name, n in counts.items() if n},
    )
    return values, changes


def _check_images(column: SourceColumn, cells: Array | Ragged, known: Shape | None) -> None:
    assert isinstance(cells, Ragged)
    first = known
    for row in range(len(cells)):  # Pillow opens one at a time
        try:
            shape = images.image_shape(cells[row : row + 1].own_values, column.encoding.resize)
        except ValueError as error:
            raise BadCellsError(column.name, row, str(error), "8-bit PNG or JPEG images") from None
        first = first or shape
        if shape != first:
            resize = (
                "" if len(shape) != len(first) else f"; data.encode.{column.name}.resize: [height, width] scales them"
            )
            expected = f"one shape; {whose(known)} {first}{resize}"
            raise BadCellsError(column.name, row, f"an image of shape {shape}", expected)


def _checked_policy(column: SourceColumn, what: str, rows: Mask | None, policy: str, may_drop: bool) -> str:
    """The policy, if it can deal with these bad rows."""
    can_do = policy == "allow" or (policy == "drop" and may_drop) or (policy == "fill" and column.fill is not None)
    if rows is None or can_do:
        return policy
    found = f"{'null(s)' if what == 'nulls' else 'NaN or Inf'} in {int(rows.sum())} row(s) of a batch of {len(rows)}"
    others = [*(["drop"] if may_drop else []), *(["allow"] if what == "nonfinite" else [])]
    choices = f"{', '.join(others)}{' or ' if others else ''}fill"
    expected = f"none; set data.{what} to {choices}, or change the DataFrame"
    if policy == "fill":
        is_number = column.encoding.kind not in ("bytes", "image")
        instead = f"a value for them in data.fill.{column.name}"
        drop = f"set data.{what} to drop" if may_drop else "drop them in the DataFrame"
        expected = instead if is_number else f"none in {column.encoding.kind}; {drop}"
    raise BadCellsError(column.name, int(np.argmax(rows)), found, expected)


def first_nonfinite_row(cells: Array | Ragged) -> int | None:
    """The first row of decoded cells with NaN or Inf in it; None where there is none, or they cannot be."""
    values = cells.own_values if isinstance(cells, Ragged) else cells
    if values.dtype.kind not in "fc":
        return None
    # NOTE: one pass without a mask: NaN and Inf stay in a sum, which only values near the largest number overflow too.
    with np.errstate(all="ignore"):
        if np.isfinite(values.sum()):
            return None
    is_bad = ~np.isfinite(values)
    if not is_bad.any():
        return None
    first = int(np.argmax(is_bad.reshape(len(values), -1).any(axis=1)))
    if isinstance(cells, Ragged):
        return int(np.searchsorted(cells.offsets - cells.offsets[0], first, side="right")) - 1
    return first


def nonfinite_as_read(name: str) -> str:
    """For an error: what is found in a column of a dataset that is read as it is, and what to change."""
    return (
        f"column {name!r}: found NaN or Inf, expected none in a dataset that is read as it is; set data.nonfinite to "
        f"allow, or, if others wrote it, to drop, or to fill with data.fill.{name}; if we did, write it anew with one "
        "of these (write_shards, jobs/prepare.py)"
    )


def with_finite_values(cells: Array | Ragged, fill: Any) -> Array | Ragged:
    """The cells with a value of `data.fill` in place of NaN and Inf; as they are where it is None."""
    values: Any = cells.values if isinstance(cells, Ragged) else cells
    if values.dtype.kind not in "fc" or fill is None or np.isfinite(values).all():
        return cells
    filled = np.where(np.isfinite(values), values, values.dtype.type(fill))
    return Ragged(filled, cells.offsets) if isinstance(cells, Ragged) else filled
