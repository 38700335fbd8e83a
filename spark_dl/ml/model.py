"""`TorchModel`: a trained model as a stage of a Spark ML pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame
from pyspark.sql.types import DataType, StructField, StructType
from torch import nn

from spark_dl.driver import TrainResult
from spark_dl.ml import persistence
from spark_dl.ml.params import TorchParams
from spark_dl.predict import add_predictions
from spark_dl.scoring.scorer import Scorer
from spark_dl.scoring.tables import Outputs, added_fields, first_outputs


class TorchModel(Model, TorchParams, MLWritable, MLReadable["TorchModel"]):
    """Adds the predictions of a model that was trained by `TorchEstimator`. `transform` is lazy.

    Rows keep their partition and order. Each Python worker loads the model once, and uses the GPU that Spark assigned
    to the task, if any. The DataFrame can be a streaming DataFrame.
    """

    def __init__(
        self,
        trained: Scorer,
        result: TrainResult | None = None,
        facts: Mapping[str, Any] | None = None,
        *,
        rows: DataFrame | None = None,
    ):
        """Called by the estimator, with the rows that it was trained on, and by the reader, with the facts."""
        super().__init__()
        self.trained = trained
        self.result = result
        """The result of the training, with the history of its losses; None for a model that was loaded."""
        self.facts = dict(facts or self._find_facts(None if rows is None else first_outputs(rows, trained)))
        """What is known of the outputs, as JSON, so that `transform` need not load the model on the driver."""

    def _find_facts(self, of_first_rows: Callable[[], Outputs] | None) -> dict[str, Any]:
        added = added_fields(self.trained, of_first_rows)
        return {"added": {name: kind.jsonValue() for name, kind in added.items()}}

    @property
    def scorer(self) -> Scorer:
        """The model with the functions that compute its columns, as `spark_dl.predict_udf` uses it."""
        return self.trained

    def _arrow_fields(self) -> dict[str, DataType]:
        """The types of the new columns as the tasks compute them."""
        fields = {"name": "", "nullable": True, "metadata": {}}
        added = self.facts["added"].items()
        return {name: StructField.fromJson({**fields, "type": kind}).dataType for name, kind in added}

    def _fields(self) -> dict[str, DataType]:
        """The types of the new columns."""
        return self._arrow_fields()

    def load_model(self) -> nn.Module:
        """Returns the trained model, on the CPU, in evaluation mode."""
        return self.trained.load()

    def _transform(self, dataset: DataFrame) -> DataFrame:
        features = self.trained.config.data.features
        persistence.select(dataset, [name if name in dataset.columns else name.split(".")[0] for name in features])
        return add_predictions(dataset, self.scorer, self._arrow_fields())

    def transformSchema(self, schema: StructType) -> StructType:
        """Returns the schema of `transform`."""
        out = StructType(list(schema.fields))
        for name, data_type in self._fields().items():
            out = out.add(name, data_type)
        return out

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model to a folder that does not exist, as `write().save(path)` does."""
        self.write().save(os.fspath(path))

    def write(self) -> persistence.ModelWriter:
        """Returns a writer of the model, in the format of `saveFormat`."""
        return persistence.ModelWriter(self)

    @classmethod
    def read(cls) -> persistence.ModelReader:
        """Returns a reader of models."""
        return persistence.ModelReader(cls)
