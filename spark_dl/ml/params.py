"""The params of the estimators: columns, and the settings that people tune. All other settings are in a `Config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasFeaturesCol, HasLabelCol, HasSeed, HasValidationIndicatorCol, HasWeightCol
from pyspark.sql.types import ArrayType, DoubleType, StructType

from spark_dl.config import Config, Data
from spark_dl.config.load import build_config

if TYPE_CHECKING:
    from typing_extensions import Self

_SETTINGS = {
    "epochs": "train.epochs",
    "globalBatchSize": "train.global_batch_size",
    "lr": "train.lr",
    "seed": "train.seed",
    "numRanks": "launch.num_ranks",
}
"""Keys of the settings that have a param of their own."""


class TorchParams(HasFeaturesCol, HasLabelCol, HasWeightCol, HasValidationIndicatorCol, HasSeed):
    """The params of the estimators and the models."""

    featuresCols = Param(
        Params._dummy(), "featuresCols", "feature columns, one argument of the model for each, instead of featuresCol.",
        TypeConverters.toListString,
    )  # fmt: skip
    labelCols = Param(
        Params._dummy(), "labelCols", "label columns; the loss then gets the whole batch. Instead of labelCol.",
        TypeConverters.toListString,
    )  # fmt: skip
    numRanks = Param(Params._dummy(), "numRanks", "number of ranks.", TypeConverters.toInt)
    epochs = Param(Params._dummy(), "epochs", "passes over the data.", TypeConverters.toInt)
    globalBatchSize = Param(
        Params._dummy(), "globalBatchSize", "rows of one optimizer step, over all ranks.", TypeConverters.toInt
    )
    lr = Param(Params._dummy(), "lr", "learning rate.", TypeConverters.toFloat)
    settings = Param(
        Params._dummy(), "settings", "any settings by key, such as {'train.optimizer': 'Adam'}.",
        TypeConverters.identity,
    )  # fmt: skip
    runDir = Param(
        Params._dummy(), "runDir", "folder or URL for the runs of fit; each call makes a folder there. All executors "
        "must have access to it.", TypeConverters.toString,
    )  # fmt: skip
    saveFormat = Param(
        Params._dummy(), "saveFormat", "how models are saved: weights, or export (torch.export).",
        TypeConverters.toString,
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(labelCol="label", runDir="runs", saveFormat="weights")  # type: ignore[attr-defined]

    def set_given(self, given: dict[str, Any]) -> None:
        """Sets the params that are not None. A list as `featuresCol` becomes `featuresCols`."""
        if isinstance(given.get("featuresCol"), (list, tuple)):
            given = {**given, "featuresCols": list(given["featuresCol"]), "featuresCol": None}
        self._set(**{name: value for name, value in given.items() if value is not None})  # type: ignore[attr-defined]

    def setFeaturesCol(self, value: str | Sequence[str]) -> Self:
        """Sets the feature column, or a list of feature columns."""
        return self._with(featuresCol=value)

    def setLabelCol(self, value: str) -> Self:
        """Sets the label column."""
        return self._with(labelCol=value)

    def setWeightCol(self, value: str) -> Self:
        """Sets the column with the weight of each row."""
        return self._with(weightCol=value)

    def setValidationIndicatorCol(self, value: str) -> Self:
        """Sets the boolean column that is true for validation rows."""
        return self._with(validationIndicatorCol=value)

    def setSaveFormat(self, value: str) -> Self:
        """Sets how models are saved: `weights` or `export`."""
        return self._with(saveFormat=value)

    def _with(self, **given: Any) -> Self:
        self.set_given(given)
        return self

    def feature_columns(self) -> tuple[str, ...]:
        """The columns that are passed to the model, in this order."""
        found = self.getOrDefault(self.featuresCols) if self.isSet(self.featuresCols) else [self.getFeaturesCol()]
        return tuple(found)

    def build_config(self, base: Config, schema: StructType, label_dtype: str | None) -> Config:
        """Returns the settings of a fit: those of `base`, and the params that are set.

        label_dtype: dtype of the label in batches; None keeps that of the column.
        """
        changed = base.to_dict()
        settings = self.getOrDefault(self.settings) if self.isSet(self.settings) else {}
        own = {key: self.getOrDefault(name) for name, key in _SETTINGS.items() if self.isSet(self.getParam(name))}
        for key, value in {**settings, **own}.items():
            section, _, name = key.partition(".")
            if section not in changed or not name:
                raise ValueError(f"settings: expected keys such as 'train.lr', found {key!r}")
            changed[section] = {**(changed[section] or {}), name: value}
        changed["data"] = {}  # its columns are checked together with the settings of the params, below
        return dataclasses.replace(build_config(changed), data=self._build_data(base.data, schema, label_dtype))

    def _build_data(self, base: Data, schema: StructType, label_dtype: str | None) -> Data:
        features = self.feature_columns()
        label, labels = (None, tuple(self.getOrDefault(self.labelCols))) if self.isSet(self.labelCols) else (
            self.getLabelCol(), ()
        )  # fmt: skip
        doubles = {field.name: "float32" for field in schema.fields if field.name in features and _is_double(field)}
        of_label = {} if label is None or label_dtype is None else {label: label_dtype}
        return dataclasses.replace(
            base, features=features, label=label, labels=labels,
            weight=self.getWeightCol() if self.isSet(self.weightCol) else None,
            cast={**doubles, **of_label, **base.cast},
        )  # fmt: skip

    def read_columns(self, config: Config) -> list[str]:
        """The columns of the DataFrame that are read: those of structs by their outermost name."""
        return list(dict.fromkeys(name if "." not in name else name.split(".")[0] for name in config.stored_columns))


def _is_double(field: Any) -> bool:
    kind = field.dataType
    while isinstance(kind, ArrayType):
        kind = kind.elementType
    return isinstance(kind, DoubleType) or type(kind).__name__ == "VectorUDT"
