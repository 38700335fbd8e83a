"""Cleaning rules: rows with nulls, NaN or Inf are an error, or are dropped or filled, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_dl.config.data import Data, Nonfinite, Nulls
from spark_dl.data.columns import images
from spark_dl.data.columns.cells import read_cells
from spark_dl.data.columns.elements import nonfinite_rows, null_rows, shape_source
from spark_dl.data.columns.encoding import MAX_VOCABULARY
from spark_dl.data.columns.ragged import Array, Ragged
from spark_dl.data.columns.source import BadCellsError, Shape, SourceColumn

Mask = npt.NDArray[np.bool_]

_DEFAULT_COUNTS = {"min_count": 1, "max_size": MAX_VOCABULARY}


@dataclass(frozen=True)
class Changes:
    """Rows that were dropped and filled when a dataset was written."""

    dropped_rows: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Dropped rows by column with a null, NaN or Inf. A row counts once in each such column."""
    filled: Mapping[str, int] = field(default_factory=dict)
    """Rows with at least one filled value, by column."""


@dataclass(frozen=True)
class CleaningRules:
    """Cleaning rules a dataset was written with (external data: is read with)."""

    nulls: str
    nonfinite: str
    fill: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """`min_count` and `max_size` by column, for vocabularies that were counted with them."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> CleaningRules:
        """Restores rules from `dataclasses.asdict` after a JSON round trip. Raises ValueError for invalid values."""
        for key, choices in (("nulls", get_args(Nulls)), ("nonfinite", get_args(Nonfinite))):
            if plain[key] not in choices:
                raise ValueError(f"rules: found the {key} {plain[key]!r:.200}, expected one of {list(choices)}")
        for key in ("fill", "counts"):
            if not isinstance(plain[key], Mapping):
                raise ValueError(f"rules: found the {key} {plain[key]!r:.200}, expected a mapping of columns")
        return cls(**plain)


def rules_of(data: Data, known: Collection[str] = ()) -> CleaningRules:
    """The cleaning rules of the settings. # known: columns whose vocabulary comes from another dataset"""
    counts = {
        name: {key: settings[key] for key, usual in _DEFAULT_COUNTS.items() if settings.get(key, usual) != usual}
        for name, settings in data.encode.items()
        if name not in known
    }
    return CleaningRules(data.nulls, data.nonfinite, dict(data.fill), {name: c for name, c in counts.items() if c})


def check_rules(url: str, written: CleaningRules | None, data: Data, known: Collection[str] = ()) -> None:
    """Raises ValueError for cleaning settings that differ from those a dataset was written with.

    A written dataset is read unchanged, so these settings would have no effect. `written` is None if the dataset does
    not have its rules; `known` are columns whose vocabulary comes from another dataset.
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
            was = f"was written or opened with {expected!r}" if written else "does not have its cleaning rules"
            raise ValueError(
                f"data.{key}: found {found!r} for the dataset {url}, which {was} and is read unchanged; remove the "
                "setting, or write the dataset again with it (write_shards, spark-dl prepare)"
            )


def add_changes(parts: Iterable[Changes]) -> Changes:
    """Sums up changes."""
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
    """Reads a batch of rows with `data.nulls`, `data.nonfinite` and `data.fill` applied. Called in Spark tasks.

    Returns the cells of each column, with the same rows (possibly none), and the changes. `shapes` are the expected
    shapes of cells, None where unknown. With `may_drop=False`, `drop` behaves like `error`.
    Raises BadCellsError for values that the settings do not allow and for cells that cannot be stored; its row counts
    from the start of the batch.
    """
    arrays = [_empty_as_null(a) if c.empty_is_null else a for c, a in zip(columns, arrays, strict=True)]
    arrays, dropped = _without_bad_images(columns, arrays, data, may_drop)
    keep: Mask = np.ones(len(arrays[0]), dtype=bool)
    for bad in dropped.values():
        keep &= ~bad
    filled: dict[str, Mask] = {}
    for column, array in zip(columns, arrays, strict=True):
        for what, find_rows in (("nulls", null_rows), ("nonfinite", nonfinite_rows)):
            rows = find_rows(array)
            policy = _checked_policy(column, what, rows, getattr(data, what), may_drop)
            if rows is None or policy not in ("drop", "fill"):
                continue
            tally = dropped if policy == "drop" else filled
            tally[column.name] = rows | tally.get(column.name, False)
            if policy == "drop":
                keep &= ~rows
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


def _empty_as_null(array: pa.Array) -> pa.Array:
    return pc.if_else(pc.equal(pc.binary_length(array), 0), pa.scalar(None, array.type), array)


def _without_bad_images(
    columns: Sequence[SourceColumn], arrays: Sequence[pa.Array], data: Data, may_drop: bool
) -> tuple[list[pa.Array], dict[str, Mask]]:
    """Returns the cells with nulls for bad images, where `bad` says so, and the rows that it drops, by column."""
    arrays, dropped = list(arrays), {}
    for i, column in enumerate(columns):
        policy = data.encode.get(column.name, {}).get("bad", "raise")
        if policy == "null":
            bad = pa.array(_bad_images(column, arrays[i]))
            arrays[i] = pc.if_else(bad, pa.scalar(None, arrays[i].type), arrays[i])
        elif policy == "drop" and may_drop and (rows := _bad_images(column, arrays[i])).any():
            dropped[column.name] = rows
    return arrays, dropped


def _bad_images(column: SourceColumn, array: pa.Array) -> Mask:
    """Returns which cells are no whole image of the settings; nulls are not among them."""

    def is_bad(cell: pa.Scalar) -> bool:
        if not cell.is_valid:
            return False
        try:
            images.image_shape(np.frombuffer(cell.as_buffer(), np.uint8), column.encoding)
        except ValueError:
            return True
        return False

    return np.fromiter(map(is_bad, array), bool, len(array))


def _check_images(column: SourceColumn, cells: Array | Ragged, known: Shape | None) -> None:
    assert isinstance(cells, Ragged)
    first = known
    for row in range(len(cells)):  # Pillow opens one image at a time
        try:
            shape = images.image_shape(cells[row : row + 1].own_values, column.encoding)
        except ValueError as error:
            expected = f"whole 8-bit images (data.encode.{column.name}.bad: drop leaves the others out)"
            raise BadCellsError(column.name, row, str(error), expected) from None
        first = first or shape
        if shape != first:
            resize = (
                "" if len(shape) != len(first) else f"; data.encode.{column.name}.resize: [height, width] scales them"
            )
            expected = f"one shape; {shape_source(known)} {first}{resize}"
            raise BadCellsError(column.name, row, f"an image of shape {shape}", expected)


def _checked_policy(column: SourceColumn, what: str, rows: Mask | None, policy: str, may_drop: bool) -> str:
    """The policy for these bad rows. Raises BadCellsError if it does not allow them."""
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
    """The first row of decoded cells with NaN or Inf; None if there is none."""
    values = cells.own_values if isinstance(cells, Ragged) else cells
    if values.dtype.kind not in "fc":
        return None
    # NOTE: one pass without a mask: a sum keeps NaN and Inf; otherwise only values near the maximum make it overflow.
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
    """The error message for NaN or Inf in a column of a dataset that is read unchanged."""
    return (
        f"column {name!r}: found NaN or Inf, expected none in a dataset that is read unchanged; set data.nonfinite to "
        f"allow; for external data also to drop, or to fill with data.fill.{name}; a dataset of spark_dl must be "
        "written again with drop or fill (write_shards, spark-dl prepare)"
    )


def with_finite_values(cells: Array | Ragged, fill: Any) -> Array | Ragged:
    """Replaces NaN and Inf in decoded cells by `fill`; returns the cells unchanged if it is None."""
    values: Any = cells.values if isinstance(cells, Ragged) else cells
    if values.dtype.kind not in "fc" or fill is None or np.isfinite(values).all():
        return cells
    filled = np.where(np.isfinite(values), values, values.dtype.type(fill))
    return Ragged(filled, cells.offsets) if isinstance(cells, Ragged) else filled
