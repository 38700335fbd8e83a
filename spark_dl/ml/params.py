"""The params of the estimators: columns, and the settings that people tune. All other settings are in a `Config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasFeaturesCol, HasLabelCol, HasSeed, HasValidationIndicatorCol, HasWeightCol
from pyspark.sql.types import ArrayType, DecimalType, DoubleType, StructType

from spark_dl.config import Config
from spark_dl.config.load import build_config, with_settings
from spark_dl.scoring.saved_model import FORMATS

_SETTINGS = {
    "epochs": "train.epochs",
    "globalBatchSize": "train.global_batch_size",
    "lr": "train.lr",
    "seed": "train.seed",
    "numRanks": "launch.num_ranks",
}
"""Keys of the settings that have a param of their own."""


def _to_settings(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected settings by key, such as {{'train.optimizer': 'Adam'}}, found {value!r}")
    return {key: of_key.item() if isinstance(of_key, np.generic) else of_key for key, of_key in value.items()}


def _to_format(value: Any) -> str:
    if value not in FORMATS:
        raise TypeError(f"expected one of {list(FORMATS)}, found {value!r}")
    return str(value)


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
        Params._dummy(), "settings", "any settings by key, such as {'train.optimizer': 'Adam'}.", _to_settings,
    )  # fmt: skip
    runDir = Param(
        Params._dummy(), "runDir", "folder or URL for the runs of fit; each call makes a folder there. All executors "
        "must have access to it.", TypeConverters.toString,
    )  # fmt: skip
    parallelTrials = Param(
        Params._dummy(), "parallelTrials", "with several param maps, such as those of CrossValidator: number of models "
        "that are trained at the same time, each by numRanks ranks, in one barrier job.", TypeConverters.toInt,
    )  # fmt: skip
    saveFormat = Param(
        Params._dummy(), "saveFormat", "how models are saved: weights, or export (torch.export).", _to_format,
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self._defaultParamMap.pop(self.seed)  # type: ignore[attr-defined]  # Spark's own default, which is not used
        self._setDefault(labelCol="label", runDir="runs", saveFormat="weights", parallelTrials=1)  # type: ignore[attr-defined]

    def getNumRanks(self) -> int:
        """Returns the number of ranks."""
        return int(self.getOrDefault(self.numRanks))

    def getEpochs(self) -> int:
        """Returns the number of passes over the data."""
        return int(self.getOrDefault(self.epochs))

    def getGlobalBatchSize(self) -> int:
        """Returns the rows of one optimizer step, over all ranks."""
        return int(self.getOrDefault(self.globalBatchSize))

    def getLr(self) -> float:
        """Returns the learning rate."""
        return float(self.getOrDefault(self.lr))

    def getRunDir(self) -> str:
        """Returns the folder or URL of the runs."""
        return str(self.getOrDefault(self.runDir))

    def getSettings(self) -> dict[str, Any]:
        """Returns the settings by key; empty if they are not set."""
        return dict(self.getOrDefault(self.settings)) if self.isSet(self.settings) else {}

    def getFeaturesCols(self) -> list[str]:
        """Returns the feature columns, also if there is one."""
        return list(self.feature_columns())

    def getLabelCols(self) -> list[str]:
        """Returns the label columns, also if there is one."""
        return list(self.getOrDefault(self.labelCols)) if self.isSet(self.labelCols) else [self.getLabelCol()]

    def getSaveFormat(self) -> str:
        """Returns how models are saved."""
        return str(self.getOrDefault(self.saveFormat))

    def getParallelTrials(self) -> int:
        """Returns the number of param maps whose models are trained at the same time."""
        return int(self.getOrDefault(self.parallelTrials))

    def set_given(self, given: dict[str, Any]) -> None:
        """Sets the params that are not None. A list as `featuresCol` becomes `featuresCols`."""
        if isinstance(given.get("featuresCol"), (list, tuple)):
            given = {**given, "featuresCols": list(given["featuresCol"]), "featuresCol": None}
        elif given.get("featuresCol") is not None:
            self.clear(self.featuresCols)
        self._set(**{name: value for name, value in given.items() if value is not None})  # type: ignore[attr-defined]

    def params_of(self, config: Config) -> dict[str, Any]:
        """Returns the settings that have a param of their own, as the defaults of the params."""
        values = {}
        for name, key in _SETTINGS.items():
            section, _, setting = key.partition(".")
            values[name] = getattr(getattr(config, section), setting)
        return values

    def feature_columns(self) -> tuple[str, ...]:
        """The columns that are passed to the model, in this order."""
        names = self.getOrDefault(self.featuresCols) if self.isSet(self.featuresCols) else [self.getFeaturesCol()]
        return tuple(names)

    def build_config(self, base: Config, schema: StructType, label_dtype: str | None) -> Config:
        """Returns the settings of a fit: those of `base`, and the params that are set.

        Args:
            label_dtype: dtype of the label in batches; None keeps that of the column.
        """
        settings = self.getSettings()
        param_values = {
            key: self.getOrDefault(name) for name, key in _SETTINGS.items() if self.isSet(self.getParam(name))
        }
        changed = with_settings(base.to_dict(), {**settings, **param_values})
        if self.isSet(self.weightCol) and "data.weight_mean" not in settings:
            changed["data"]["weight_mean"] = "weights"  # as Spark ML does
        changed["data"] |= self._columns(changed["data"])
        self._add_conversions(changed["data"], schema, label_dtype)
        return build_config(changed)

    def _columns(self, data: dict[str, Any]) -> dict[str, Any]:
        """The columns of the params that are set, which override those of the settings."""
        columns: dict[str, Any] = {}
        if self.isSet(self.featuresCols) or self.isSet(self.featuresCol):
            columns["features"] = list(self.feature_columns())
        if self.isSet(self.labelCols):
            columns |= {"label": None, "labels": list(self.getOrDefault(self.labelCols))}
        elif self.isSet(self.labelCol):
            columns |= {"label": self.getLabelCol(), "labels": []}
        if self.isSet(self.weightCol):
            columns["weight"] = self.getWeightCol()
        return columns

    def _add_conversions(self, data: dict[str, Any], schema: StructType, label_dtype: str | None) -> None:
        """Makes doubles and decimals float32 features, and gives the label the dtype that the loss needs.

        Decimals with `as: decimal` are integers, whose digits float32 may not have.
        """
        types = {name: _type_of(schema, name) for name in (*data["features"], data["label"], *data["labels"])}
        decimals = [name for name, kind in types.items() if isinstance(_element(kind), DecimalType)]
        encode = {name: {"as": "float", **data["encode"].get(name, {})} for name in decimals}  # of every scale
        data["encode"] = {**data["encode"], **encode}
        doubles = [name for name, settings in encode.items() if settings["as"] == "float"]
        floats = [name for name in data["features"] if name in doubles or _is_double(types[name])]
        of_label = {} if data["label"] is None or label_dtype is None else {data["label"]: label_dtype}
        data["cast"] = {**dict.fromkeys(floats, data["assemble"] or "float32"), **of_label, **data["cast"]}

    def read_columns(self, config: Config, schema: StructType) -> list[str]:
        """The columns of the DataFrame that are read: those of structs by their outermost name."""
        return list(dict.fromkeys(_path_of(name, schema)[0] for name in config.stored_columns))


def _path_of(name: str, schema: StructType) -> list[str]:
    """Returns the names from a top-level column to a field; a column with a dot in its name comes first."""
    return [name] if name in schema.names else name.split(".")


def _type_of(schema: StructType, name: str | None) -> Any:
    """Returns the type of a column, or of a field of a struct as `struct.field`; None if there is none."""
    kind: Any = schema
    for part in _path_of(name or "", schema):
        fields = {field.name: field.dataType for field in getattr(kind, "fields", ())}
        kind = fields.get(part)
    return kind


def _element(kind: Any) -> Any:
    while isinstance(kind, ArrayType):
        kind = kind.elementType
    return kind


def _is_double(kind: Any) -> bool:
    return isinstance(_element(kind), DoubleType) or type(kind).__name__ == "VectorUDT"
