"""`TorchRegressor` and its model, with Spark's output column."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.ml.param.shared import HasPredictionCol
from pyspark.sql.types import DataType, DoubleType
from torch import nn

from spark_dl.config import Config
from spark_dl.ml.estimator import TorchEstimator
from spark_dl.ml.model import TorchModel
from spark_dl.scoring.outputs import Squeezed, ValueColumn
from spark_dl.scoring.scorer import Scorer
from spark_dl.scoring.tables import Outputs, trial
from spark_dl.spec import ModelSpec

if TYPE_CHECKING:
    from typing_extensions import Self


class _RegressorParams(HasPredictionCol):
    """Name of the column that the model adds."""

    def setPredictionCol(self, value: str) -> Self:
        """Sets the name of the column with the predicted value."""
        return self._set(predictionCol=value)  # type: ignore[no-any-return]


class TorchRegressionModel(TorchModel, _RegressorParams):
    """Adds `prediction` (double)."""

    def _find_facts(self, of_first_rows: Callable[[], Outputs] | None) -> dict[str, Any]:
        ValueColumn("prediction")(trial(self.trained, of_first_rows))
        return {"outputs": 1}

    @property
    def scorer(self) -> Scorer:
        """The model with the function that computes its column."""
        spec = dataclasses.replace(self.trained.spec, predict=ValueColumn(self.getPredictionCol()))
        return dataclasses.replace(self.trained, spec=spec)

    def _arrow_fields(self) -> dict[str, DataType]:
        return {self.getPredictionCol(): DoubleType()}


class TorchRegressor(TorchEstimator, _RegressorParams):
    """Trains a regressor: a model with one output per row, [rows] or [rows, 1].

    The arguments are those of `TorchEstimator`, and `predictionCol`. The label is of any numeric type; in batches it is
    float32. The default loss is `MSELoss`.

    Example:
        >>> regressor = TorchRegressor(lambda: torch.nn.Linear(2, 1), featuresCol="features", labelCol="label", lr=1e-6)
        >>> regressor.setRunDir("runs/regression").fit(df).transform(df).select("prediction").show()
    """

    _model = TorchRegressionModel

    def __init__(
        self,
        spec: ModelSpec | Callable[[], nn.Module],
        config: Config | None = None,
        *,
        predictionCol: str | None = None,
        **params: Any,
    ):
        super().__init__(spec, config, **params)
        self.setParams(predictionCol=predictionCol)

    def _spec_of(self, spec: Any) -> ModelSpec:
        base = super()._spec_of(spec)
        if base is not spec:
            return ModelSpec(build=base.build, loss="MSELoss")
        if base.predict is not None:
            raise ValueError(
                "spec.predict: expected none for a regressor, which adds Spark's column; use TorchEstimator"
            )
        if isinstance(base.loss, nn.CrossEntropyLoss):
            raise ValueError('spec.loss: found CrossEntropyLoss for a regressor; set a loss, such as loss="MSELoss"')
        return spec

    def _added_columns(self) -> dict[str, str]:
        return {"predictionCol": self.getPredictionCol()}

    def _label_dtype(self) -> str | None:
        return "float32"

    def _spec_to_train(self, config: Config) -> ModelSpec:
        return dataclasses.replace(self.spec, forward=Squeezed(self.spec, config.inputs))
