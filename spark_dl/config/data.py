"""The section `data`: which columns are read, how they are encoded as numbers, and how rows are cleaned."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from spark_dl.config.checks import (
    SettingError,
    check,
    check_bool,
    check_choices,
    check_encoding,
    full_filters,
    suggestion,
)
from spark_dl.config.fields import named_settings

Nulls = Literal["error", "drop", "fill"]
Nonfinite = Literal["error", "drop", "fill", "allow"]
WeightMean = Literal["rows", "weights"]
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
"""Values of `data.cast`: the NumPy dtypes that torch has too."""


@dataclass(frozen=True)
class Assembled:
    """Features that the model gets as one tensor (`data.assemble`)."""

    names: tuple[str, ...]
    cell_axis: int
    """The first axis of a cell: 1, or 2 in samples of several rows (`sequences`)."""


@named_settings
@dataclass(frozen=True, kw_only=True)
class Data:
    """Which columns are read, how they become numbers, and how rows are cleaned.

    The settings that determine the contents of shards are also part of the key of the shards in a store
    (`shards.store`).

    Example:
        >>> spark_dl.Data(features=("city", "age"), label="bought", encode={"city": {"as": "vocabulary"}})
    """

    features: tuple[str, ...] = ("features",)
    """Columns that are passed to the model, in this order."""
    label: str | None = "label"
    """Column that is passed to the loss; null if the loss gets the whole batch instead of one column."""
    labels: tuple[str, ...] = ()
    """Further columns for the loss (with `data.label: null`) and for the metrics. They are not passed to the model, and
    `predict` does not need them."""
    weight: str | None = None
    """Column with the weight of each row, a finite number >= 0, by which its loss is multiplied. A row of weight 0 does
    not count in metrics. Classes of torchmetrics do not use the weights; functions of `ModelSpec.metrics` are averaged
    with them."""
    weight_mean: WeightMean = "rows"
    """What divides the sum of the weighted losses of a step. `rows`: the number of rows, so that weights of 10 act as a
    learning rate ten times as large. `weights`: the sum of the weights of the global batch, over all ranks, as
    scikit-learn and Spark ML do. Evaluations always divide by the sum of the weights. See
    [exactness](exactness.md#what-the-loss-is-a-mean-over)."""
    sampling_weight: str | None = None
    """Column with the weight of each row, a finite number >= 0, by which the rows of an epoch of the training are
    drawn. A row with twice the weight is drawn twice as often: on average weight / sum of weights * rows of an epoch
    times, which each epoch rounds up or down at random, so that a row is drawn at most once if this is at most 1. An
    epoch has as many rows as the dataset, or `loader.epoch_size`. The draws depend on `train.seed`, the epoch and the
    weights alone. Null: each row once."""
    cast: dict[str, str] = field(default_factory=dict)
    """NumPy dtypes, by column, in which batches have the columns: `{features: float32, label: int64}`. Stored columns
    keep their dtypes. Spark ML vectors are float64, and most models are float32."""
    assemble: str | None = None
    """NumPy dtype in which the model gets all features as one tensor, `[rows, n]`, as from Spark's `VectorAssembler`:
    `float32` for most models. A column of numbers is one of its columns, a vector of k is k of them, in the order of
    `features`. With `sequences` the tensor is `[rows, length, n]`. It sets `cast` of the features. Null: the model gets
    each feature as an argument of its own."""
    encode: dict[str, dict[str, Any]] = field(default_factory=dict)
    """How columns become numbers, for columns that can be converted in several ways: `{city: {as: vocabulary,
    min_count: 2}, name: {as: hash, buckets: 1000}, text: {as: bytes}, photo: {as: image, resize: [224, 224]}, price:
    {as: float}, when: {as: timestamp, unit: ms}, clicks: {ragged: true}}`."""
    nulls: Nulls = "error"
    """What to do with rows that contain a null, including nulls inside arrays: `error` raises an error, `drop` drops
    the rows, `fill` uses the values in `data.fill`."""
    nonfinite: Nonfinite = "error"
    """What to do with rows that contain NaN or Inf: `error`, `drop` and `fill` as for `data.nulls`; `allow` keeps
    them."""
    fill: dict[str, Any] = field(default_factory=dict)
    """Values, by column, that replace nulls, NaN and Inf if `data.nulls` or `data.nonfinite` is `fill`: `{age: 0, city:
    unknown}`."""
    filters: Sequence[Any] = ()
    """Conditions that select the rows of a dataset: `[[age, ">", 30], [city, in, [Rome, Oslo]]]`. A row must meet all
    conditions of the list. With a list of such lists, a row must meet all conditions of at least one of them.
    Operators: == != < <= > >= in, not in. A null never meets a condition. Times are in ISO 8601 format."""
    require_success: bool = True
    """Whether a folder of Parquet files from Spark must contain `_SUCCESS`, the last file that Spark writes."""

    def __post_init__(self) -> None:
        is_list = isinstance(self.features, Sequence) and not isinstance(self.features, str)
        check(is_list, "data.features", "a list of column names", self.features)
        object.__setattr__(self, "features", tuple(self.features))
        are_labels = isinstance(self.labels, Sequence) and not isinstance(self.labels, str)
        check(are_labels, "data.labels", "a list of column names", self.labels)
        object.__setattr__(self, "labels", tuple(self.labels))
        check(len(self.features) > 0, "data.features", "at least one column name", self.features)
        check(self.weight is None or isinstance(self.weight, str), "data.weight", "a column name", self.weight)
        check(self.weight != "", "data.weight", "a column name", self.weight)
        is_name = self.sampling_weight is None or (isinstance(self.sampling_weight, str) and self.sampling_weight != "")
        check(is_name, "data.sampling_weight", "a column name", self.sampling_weight)
        if self.weight_mean == "weights" and self.weight is None:
            raise SettingError(
                "data.weight_mean", "found 'weights' without data.weight; name the column of the weights"
            )
        for name in self.columns:
            is_name = isinstance(name, str) and name != ""
            check(is_name, "data.features, data.label and data.labels", "column names", name)
        check(len(set(self.columns)) == len(self.columns), "data.features", "each column once", self.columns)
        self._check_cast()
        self._check_assemble()
        check_bool(self, "require_success")
        check_choices(self)
        check(isinstance(self.encode, Mapping), "data.encode", "a mapping of columns to settings", self.encode)
        for name, settings in self.encode.items():
            check_encoding(f"data.encode.{name}", settings)
        self._scale_labels_by_nearest()
        object.__setattr__(self, "filters", full_filters(self.filters))
        self._check_fill()

    def _scale_labels_by_nearest(self) -> None:
        """Sets `interpolation` of labels that are images: between class 0 and class 4 there is no class 2."""
        encode = dict(self.encode)
        for name in (self.label, *self.labels):
            if name is not None and (settings := encode.get(name, {})).get("resize"):
                encode[name] = {"interpolation": "nearest", **settings}
        object.__setattr__(self, "encode", encode)

    def _check_cast(self) -> None:
        check(isinstance(self.cast, Mapping), "data.cast", "a mapping of columns to dtypes", self.cast)
        for name, dtype in self.cast.items():
            if name not in self.columns:
                raise SettingError(f"data.cast.{name}", f"no such column is read{suggestion(name, list(self.columns))}")
            check(dtype in DTYPES, f"data.cast.{name}", f"one of {list(DTYPES)}", dtype)

    def _check_assemble(self) -> None:
        if self.assemble is None:
            return
        check(self.assemble in DTYPES, "data.assemble", f"one of {list(DTYPES)}", self.assemble)
        object.__setattr__(self, "cast", {**dict.fromkeys(self.features, self.assemble), **self.cast})
        for name in self.features:
            check(self.cast[name] == self.assemble, f"data.cast.{name}", f"{self.assemble}, as data.assemble makes one "
                  "tensor of all features", self.cast[name])  # fmt: skip

    def _check_fill(self) -> None:
        check(isinstance(self.fill, Mapping), "data.fill", "a mapping of columns to values", self.fill)
        for name, value in self.fill.items():
            fits = isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
            check(fits, f"data.fill.{name}", "a finite number, true, false or a string", value)
        if self.fill and "fill" not in (self.nulls, self.nonfinite):
            raise SettingError(
                "data.fill",
                f"found {dict(self.fill)} while neither data.nulls nor data.nonfinite is fill, so "
                "nothing would be filled; set one of them to fill, or remove data.fill",
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read: the features, the label, the other labels and the weights."""
        others = (name for name in (self.label, *self.labels, self.weight) if name is not None)
        names = (*self.features, *others)
        return names if self.sampling_weight in (None, *names) else (*names, str(self.sampling_weight))

    @property
    def not_in_batch(self) -> list[str]:
        """The columns that are read and are not in a batch by their name."""
        weights = dict.fromkeys(name for name in (self.weight, self.sampling_weight) if name is not None)
        return [name for name in weights if name not in (*self.features, self.label, *self.labels)]
