"""`data.filters`: conditions on columns, evaluated on statistics or row by row. Pure functions.

As in SQL, nulls pass no operator. NaN passes only `!=` and `not in`. Bounds are Parquet statistics: all values that are
neither null nor NaN are within them, and the bounds need not occur as values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_dl.config.checks import suggestion
from spark_dl.data.columns.elements import nonfinite_rows, null_rows
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.types import compare_time, compared, to_decimal
from spark_dl.data.parquet.file import chunks_of, is_string_or_binary

Mask = npt.NDArray[np.bool_]
_ORDER = {"<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}
_COMPLEMENT = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_NEGATED = ("!=", "not in")
_NOT_NULL, _FINITE = "is not null", "is finite"
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
"""Hive's name of the partition of nulls."""


@dataclass(frozen=True)
class Condition:
    """A condition on one column."""

    column: str
    op: str
    """`==`, `!=`, `<`, `<=`, `>`, `>=`, `in`, `not in`; `is not null` and `is finite` also apply to elements of arrays.
    Nulls pass `is finite`."""
    values: pa.Array
    """Values of the stored type of the column. `<`, `<=`, `>` and `>=` use the first one."""

    @property
    def is_of_any_type(self) -> bool:
        """Whether it has no values to compare with."""
        return self.op in (_NOT_NULL, _FINITE)


AnyOf = tuple[tuple[Condition, ...], ...]
"""A row passes if all conditions of any inner tuple hold. No row passes `()`, and all rows pass `((),)`."""


@dataclass(frozen=True, eq=False)
class Filtered:
    """The rows of a dataset that pass `data.filters`."""

    conditions: AnyOf
    group_rows: npt.NDArray[np.int64]
    """Number of passing rows of each row group. # (row groups,)"""


@dataclass(frozen=True)
class Bounds:
    """Statistics of a column in a row group or page."""

    low: pa.Scalar | None = None
    high: pa.Scalar | None = None
    has_nulls: bool = True
    """Whether there can be nulls."""
    only_nulls: bool = False


def simplify(any_of: AnyOf, decide: Callable[[Condition], bool | None]) -> AnyOf:
    """Removes decided conditions. decide: whether a condition holds for all rows, for none, or None if unknown."""
    left = []
    for all_of in any_of:
        answers = [(condition, decide(condition)) for condition in all_of]
        if all(answer is not False for _, answer in answers):
            left.append(tuple(condition for condition, answer in answers if answer is None))
    return ((),) if () in left else tuple(left)


def holds_within(condition: Condition, bounds: Bounds) -> bool | None:
    """Whether a condition holds for all values within bounds (True), for none (False), or None if unknown.

    A float column can have NaN, which statistics do not show.
    """
    if condition.op == _FINITE:
        return None
    if bounds.only_nulls:
        return False
    if condition.op == _NOT_NULL:
        return None if bounds.has_nulls else True
    if bounds.low is None or bounds.high is None:
        return None
    every, none = _holds_between(condition, bounds.low, bounds.high)
    if condition.op in _NEGATED:
        every, none = none, every
    has_nan = pa.types.is_floating(condition.values.type)
    if none and not (has_nan and condition.op in _NEGATED):
        return False
    if every and not bounds.has_nulls and not (has_nan and condition.op not in _NEGATED):
        return True
    return None


def _holds_between(condition: Condition, low: pa.Scalar, high: pa.Scalar) -> tuple[bool, bool]:
    """Whether all values within bounds meet a condition, and whether none does, ignoring a negation."""
    if condition.op not in _ORDER:
        outside = pc.or_(pc.less(condition.values, low), pc.greater(condition.values, high))
        single = pc.and_(pc.equal(condition.values, low), pc.equal(condition.values, high))
        return bool(pc.any(single).as_py()), bool(pc.all(outside).as_py())
    value = condition.values[0]
    nearest, farthest = (low, high) if condition.op in ("<", "<=") else (high, low)
    every, none = _ORDER[condition.op](farthest, value), _ORDER[_COMPLEMENT[condition.op]](nearest, value)
    return bool(every.as_py()), bool(none.as_py())


def of_partition(conditions: AnyOf, partition: Sequence[tuple[str, str]]) -> AnyOf:
    """Removes the conditions that a file's Hive partition decides. partition: column names and values"""
    values = dict(partition)

    def decide(condition: Condition) -> bool | None:
        if condition.column not in values:
            return None
        value = values[condition.column]
        cell = pa.array([None if value == NULL_PARTITION else value], pa.string()).cast(condition.values.type)
        return bool(_rows_that_hold(condition, cell)[0])

    return simplify(conditions, decide)


def passing_rows(any_of: AnyOf, column: Callable[[str], pa.ChunkedArray], rows: int) -> Mask:
    """Returns which rows pass. column: returns the stored cells of a column by name. # (rows,)"""
    passed = np.zeros(rows, dtype=np.bool_)
    for all_of in any_of:
        each = np.ones(rows, dtype=np.bool_)
        for condition in all_of:
            each &= _rows_that_hold(condition, column(condition.column))
        passed |= each
    return passed


def _rows_that_hold(condition: Condition, stored: pa.ChunkedArray | pa.Array) -> Mask:
    """Returns which cells meet a condition. # (rows,)"""
    if pa.types.is_dictionary(stored.type):
        if is_string_or_binary(stored.type.value_type) and not condition.is_of_any_type:
            of_chunks = [_rows_by_dictionary(condition, chunk) for chunk in chunks_of(stored)]
            return np.concatenate([np.empty(0, np.bool_), *of_chunks])
        if condition.op != _NOT_NULL:
            stored = stored.cast(stored.type.value_type)
    if pa.types.is_null(stored.type) and not condition.is_of_any_type:
        return np.zeros(len(stored), dtype=np.bool_)
    if str(stored.type) == "string_view":
        stored = stored.cast(pa.string())
    if not condition.is_of_any_type and stored.type != condition.values.type:
        stored = stored.cast(condition.values.type)  # with 32-bit and 64-bit offsets
    if condition.is_of_any_type:
        bad_rows = null_rows if condition.op == _NOT_NULL else nonfinite_rows
        bad = bad_rows(stored.combine_chunks() if isinstance(stored, pa.ChunkedArray) else stored)
        return np.ones(len(stored), dtype=np.bool_) if bad is None else ~bad
    if condition.op in _ORDER:
        held = _ORDER[condition.op](stored, condition.values[0])
    else:
        held = pc.is_in(stored, value_set=condition.values)
        if condition.op in _NEGATED:
            held = pc.and_(pc.invert(held), pc.is_valid(stored))
    return np.asarray(pc.fill_null(held, False), dtype=np.bool_)


def _rows_by_dictionary(condition: Condition, stored: pa.Array) -> Mask:
    """Returns which cells of a dictionary array meet a condition, evaluated once per dictionary value. # (rows,)"""
    held = np.append(_rows_that_hold(condition, stored.dictionary.cast(condition.values.type)), False)
    words = pc.fill_null(stored.indices.cast(pa.int64()), len(held) - 1).to_numpy(zero_copy_only=False)
    rows: Mask = held[words]
    return rows


def without_nulls(any_of: AnyOf, types: Mapping[str, pa.DataType]) -> AnyOf:
    """Adds conditions that columns have no nulls. # types: stored types by column name"""
    return _with(any_of, _NOT_NULL, types)


def without_nonfinite(any_of: AnyOf, types: Mapping[str, pa.DataType]) -> AnyOf:
    """Adds conditions that columns have neither NaN nor Inf. # types: stored types by column name"""
    return _with(any_of, _FINITE, types)


def _with(any_of: AnyOf, op: str, types: Mapping[str, pa.DataType]) -> AnyOf:
    more = tuple(Condition(name, op, pa.nulls(0, arrow)) for name, arrow in types.items())
    return tuple((*all_of, *more) for all_of in any_of)


def columns_of(any_of: AnyOf) -> list[str]:
    """Returns the distinct columns of conditions."""
    return list(dict.fromkeys(condition.column for all_of in any_of for condition in all_of))


def typed_conditions(
    filters: Sequence[Sequence[tuple[str, str, Any]]],
    types: Mapping[str, pa.DataType],
    encodings: Mapping[str, Encoding] | None = None,
) -> AnyOf:
    """Converts the values of `data.filters` to the types of the columns. # types: stored types by column name

    Args:
        encodings: encodings of our shards, where strings are converted to ticks or vocabulary indices.

    Raises:
        ValueError: For a value that does not match its column.
    """
    return tuple(
        tuple(
            _typed(name, op, value, types[name], (encodings or {}).get(name, Encoding())) for name, op, value in all_of
        )
        for all_of in filters
    )


def _typed(name: str, op: str, value: Any, arrow: pa.DataType, encoding: Encoding) -> Condition:
    if pa.types.is_dictionary(arrow):
        arrow = arrow.value_type
    if encoding.vocabulary is not None and op in _ORDER:
        raise ValueError(f"data.filters: {name!r} is stored as positions of words, which have no order; found {op!r}")
    values = value if op in ("in", "not in") else [value]
    try:
        stored = pa.concat_arrays([_stored_value(v, arrow, encoding) for v in values])
    except (pa.ArrowException, ValueError, TypeError, ArithmeticError) as error:
        what = f"{arrow} ({encoding.kind})" if encoding.kind != "number" else str(arrow)
        raise ValueError(
            f"data.filters: expected for column {name!r} a value that fits its type {what}, found {value!r} ({error})"
        ) from error
    if pa.types.is_floating(stored.type):  # `is_in` tells the two zeros apart, which are equal
        stored = pa.concat_arrays([stored, pc.negate(stored.filter(pc.equal(stored, 0)))])
    return Condition(name, op, stored)


def _stored_value(value: Any, arrow: pa.DataType, encoding: Encoding) -> pa.Array:
    """A plain value as the column stores it. # (1,)"""
    if encoding.vocabulary is not None:
        if value not in encoding.vocabulary:
            raise ValueError(f"no such word{suggestion(str(value), encoding.vocabulary)}")
        return pa.array([encoding.vocabulary.index(value) + (encoding.unknown == "zero")], arrow)
    if encoding.kind == "timestamp" and isinstance(value, str):
        ticks = pa.date32() if encoding.unit == "D" else pa.timestamp(encoding.unit, "UTC")
        return compare_time(value, ticks).cast(pa.int32() if encoding.unit == "D" else pa.int64()).cast(arrow)
    if encoding.kind == "decimal":
        return compared(to_decimal(value).scaleb(encoding.scale or 0), pa.decimal128(38, 0)).cast(arrow)
    if encoding.kind == "float" and isinstance(value, str):  # of a decimal
        return compared(float(Decimal(value)), arrow)
    return compared(value, arrow)
