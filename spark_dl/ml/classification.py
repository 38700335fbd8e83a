"""`TorchClassifier` and its model, with Spark's output columns."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import VectorUDT
from pyspark.ml.param.shared import HasPredictionCol, HasProbabilityCol, HasRawPredictionCol
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, DoubleType, NumericType
from torch import nn

from spark_dl.config import Config
from spark_dl.ml.estimator import TorchEstimator
from spark_dl.ml.model import TorchModel
from spark_dl.scoring.outputs import ClassColumns, Squeezed, single_output
from spark_dl.scoring.scorer import Scorer
from spark_dl.scoring.tables import Outputs, trial
from spark_dl.spark_job import quoted
from spark_dl.spec import ModelSpec

if TYPE_CHECKING:
    from typing_extensions import Self


_NO_CLASS = "labelCol: expected classes 0, 1, 2 ..."


class _ClassifierParams(HasPredictionCol, HasProbabilityCol, HasRawPredictionCol):
    """Names of the columns that the model adds. An empty name leaves out the column."""

    def setPredictionCol(self, value: str) -> Self:
        """Sets the name of the column with the predicted class."""
        return self._set(predictionCol=value)  # type: ignore[no-any-return]

    def setProbabilityCol(self, value: str) -> Self:
        """Sets the name of the column with the probability of each class."""
        return self._set(probabilityCol=value)  # type: ignore[no-any-return]

    def setRawPredictionCol(self, value: str) -> Self:
        """Sets the name of the column with the outputs of the model."""
        return self._set(rawPredictionCol=value)  # type: ignore[no-any-return]

    def output_columns(self) -> dict[str, str]:
        """The names of the added columns, by what they have."""
        columns = {
            "rawPrediction": self.getRawPredictionCol(),
            "probability": self.getProbabilityCol(),
            "prediction": self.getPredictionCol(),
        }
        return {kind: name for kind, name in columns.items() if name}


class TorchClassificationModel(TorchModel, _ClassifierParams):
    """Adds `prediction` (double), `probability` and `rawPrediction` (vectors with one entry per class)."""

    def _find_facts(self, of_first_rows: Callable[[], Outputs] | None) -> dict[str, Any]:
        output = single_output(trial(self.trained, of_first_rows))
        return {"numClasses": 2 if output.ndim == 1 or output.shape[1] == 1 else int(output.shape[1])}

    @property
    def numClasses(self) -> int:
        """Number of classes."""
        return int(self.facts["numClasses"])

    @property
    def scorer(self) -> Scorer:
        """The model with the functions that compute its columns."""
        spec = dataclasses.replace(self.trained.spec, predict=ClassColumns(self.output_columns()))
        return dataclasses.replace(self.trained, spec=spec)

    def _types(self, of_vectors: DataType) -> dict[str, DataType]:
        columns = self.output_columns().items()
        return {name: DoubleType() if kind == "prediction" else of_vectors for kind, name in columns}

    def _arrow_fields(self) -> dict[str, DataType]:
        return self._types(ArrayType(DoubleType()))

    def _fields(self) -> dict[str, DataType]:
        return self._types(VectorUDT())

    def _transform(self, dataset: DataFrame) -> DataFrame:
        predicted = super()._transform(dataset)
        vectors = [name for kind, name in self.output_columns().items() if kind != "prediction"]
        return (
            predicted.withColumns({name: array_to_vector(F.col(quoted(name))) for name in vectors})
            if vectors
            else predicted
        )


class TorchClassifier(TorchEstimator, _ClassifierParams):
    """Trains a classifier: a model whose output are logits, one per class, or one per row for two classes.

    The arguments are those of `TorchEstimator`, and `predictionCol`, `probabilityCol` and `rawPredictionCol`, whose
    names can be empty. The label has the values 0 to classes - 1, of any numeric type; in batches it is int64, or
    float32 for `BCEWithLogitsLoss`. The default loss is `CrossEntropyLoss`.

    Example:
        >>> classifier = TorchClassifier(lambda: torch.nn.Linear(2, 2), config, runDir="runs/ml")
    """

    _model = TorchClassificationModel

    def __init__(
        self,
        spec: ModelSpec | Callable[[], nn.Module],
        config: Config | None = None,
        *,
        predictionCol: str | None = None,
        probabilityCol: str | None = None,
        rawPredictionCol: str | None = None,
        **params: Any,
    ):
        super().__init__(spec, config, **params)
        self.setParams(predictionCol=predictionCol, probabilityCol=probabilityCol, rawPredictionCol=rawPredictionCol)

    def _spec_of(self, spec: Any) -> ModelSpec:
        base = super()._spec_of(spec)
        if base.predict is not None:
            raise ValueError(
                "spec.predict: expected none for a classifier, which adds Spark's columns; use TorchEstimator"
            )
        if isinstance(base.loss, nn.BCELoss):
            raise ValueError("spec.loss: a classifier needs logits, found BCELoss; use BCEWithLogitsLoss")
        return base

    def _added_columns(self) -> dict[str, str]:
        return {f"{kind}Col": name for kind, name in self.output_columns().items()}

    @contextlib.contextmanager
    def _errors_of_params(self) -> Iterator[None]:
        with super()._errors_of_params():
            try:
                yield
            except Exception as error:  # of Spark, which has computed the label
                if match := re.search(rf"{re.escape(_NO_CLASS)} .*, found \S+", str(error)):
                    raise ValueError(match.group()) from error
                raise

    def _with_checked_label(self, df: DataFrame, config: Config) -> DataFrame:
        name = config.data.label
        if name is None or name not in df.columns or not isinstance(df.schema[name].dataType, NumericType):
            return df
        label = F.col(quoted(name))  # CrossEntropyLoss ignores -100 without a word
        message = F.concat(F.lit(f"{_NO_CLASS} in {name!r}, found "), label.cast("string"))
        is_class = label.isNull() | ((label >= 0) & (label == F.floor(label)))
        return df.withColumn(name, F.when(is_class, label).otherwise(F.raise_error(message)))

    def _label_dtype(self) -> str | None:
        return "float32" if isinstance(self.spec.loss, nn.BCEWithLogitsLoss) else "int64"

    def _spec_to_train(self, config: Config) -> ModelSpec:
        return dataclasses.replace(self.spec, forward=Squeezed(self.spec, config.inputs))
