"""`TorchEstimator`: `spark_dl.train` as a stage of a Spark ML pipeline."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from torch import nn

from spark_dl import driver, storage
from spark_dl.config import Config
from spark_dl.data.dataset.folder import delete_dataset
from spark_dl.ml import persistence
from spark_dl.ml.model import TorchModel
from spark_dl.ml.params import TorchParams
from spark_dl.rundir.folder import SHARDS
from spark_dl.scoring.scorer import scorer_of
from spark_dl.spec import ModelSpec


class TorchEstimator(Estimator[TorchModel], TorchParams, MLWritable, MLReadable["TorchEstimator"]):
    """Trains a model on the columns of a DataFrame. `fit` is `spark_dl.train`.

    spec: the model, or only the function that builds it. config: settings; the params that are set override them.

    featuresCol: a vector column, an array column, or a list of columns, each of which is an argument of the model.
        Doubles become float32; `data.cast` of `config` sets other dtypes.

    labelCol: the label keeps its dtype. labelCols: several labels; the loss then gets the whole batch.

    weightCol, validationIndicatorCol: the weight of each row; a boolean column, true for validation rows.

    numRanks, epochs, globalBatchSize, lr, seed: the settings of these names in `config`. settings: any settings by key,
    such as `{"train.optimizer": "Adam"}`. All of them can be in a parameter grid.

    runDir: folder or URL for the runs, by default `runs` in the working directory. The checkpoints stay there.

    saveFormat: how models are saved, `weights` or `export`, as in `spark_dl.save_model`.

    The model adds the columns of `spec.predict`, for any number of outputs.
    """

    _model = TorchModel

    def __init__(
        self,
        spec: ModelSpec | Callable[[], nn.Module],
        config: Config | None = None,
        *,
        featuresCol: str | Sequence[str] | None = None,
        labelCol: str | None = None,
        labelCols: Sequence[str] | None = None,
        weightCol: str | None = None,
        validationIndicatorCol: str | None = None,
        numRanks: int | None = None,
        epochs: int | None = None,
        globalBatchSize: int | None = None,
        lr: float | None = None,
        seed: int | None = None,
        settings: dict[str, Any] | None = None,
        runDir: str | None = None,
        saveFormat: str | None = None,
        progress: bool = True,
    ):
        super().__init__()
        self.spec, self.config, self.progress = self._spec_of(spec), config or Config(), progress
        self.setParams(
            featuresCol=featuresCol, labelCol=labelCol, labelCols=labelCols, weightCol=weightCol,
            validationIndicatorCol=validationIndicatorCol, numRanks=numRanks, epochs=epochs,
            globalBatchSize=globalBatchSize, lr=lr, seed=seed, settings=settings, runDir=runDir, saveFormat=saveFormat,
        )  # fmt: skip

    def _spec_of(self, spec: Any) -> ModelSpec:
        if isinstance(spec, ModelSpec):
            return spec
        if not callable(spec) or isinstance(spec, nn.Module):
            raise ValueError(f"spec: expected a ModelSpec, or a function that returns the model, found {spec!r:.200}")
        return ModelSpec(build=spec)

    def setParams(self, **given: Any) -> TorchEstimator:
        """Sets params by name. None keeps the value."""
        self.set_given(given)
        return self

    def _fit(self, dataset: DataFrame) -> TorchModel:
        config = self.build_config(self.config, dataset.schema, self._label_dtype())
        train, validation = self._split(dataset, self.read_columns(config))
        base = self.getOrDefault(self.runDir)
        run_dir = storage.join(storage.absolute(base), f"{self.uid}-{uuid.uuid4().hex[:8]}")
        result = driver.train(
            train, self._spec_to_train(config), config, validation=validation, run_dir=run_dir, progress=self.progress,
            spark=dataset.sparkSession,
        )  # fmt: skip
        for name in ("train", "validation"):  # a fit is not resumed, so its rows are not needed any more
            delete_dataset(storage.join(run_dir, SHARDS, name))
        model: TorchModel = self._copyValues(self._model(scorer_of(self.spec, result.checkpoint, config), result))
        return model

    def _label_dtype(self) -> str | None:
        """The dtype of the label in batches; None keeps that of the column."""
        return None

    def _spec_to_train(self, config: Config) -> ModelSpec:
        return self.spec

    def _split(self, df: DataFrame, columns: list[str]) -> tuple[DataFrame, DataFrame | None]:
        """Returns the training and the validation rows. Raises ValueError for a column that is missing."""
        if not self.isSet(self.validationIndicatorCol):
            return persistence.select(df, columns), None
        indicator = self.getValidationIndicatorCol()
        rows = persistence.select(df, list(dict.fromkeys([indicator, *columns])))
        if (found := dict(rows.dtypes)[indicator]) != "boolean":
            raise ValueError(f"validationIndicatorCol: expected a boolean column, found {indicator!r} of type {found}")
        is_validation = F.coalesce(F.col(f"`{indicator}`"), F.lit(False))
        train, validation = rows.filter(~is_validation), rows.filter(is_validation)
        return persistence.select(train, columns), persistence.select(validation, columns)

    def write(self) -> persistence.EstimatorWriter:
        """Returns a writer of the estimator, by the importable names of its functions."""
        return persistence.EstimatorWriter(self)

    @classmethod
    def read(cls) -> persistence.EstimatorReader:
        """Returns a reader of estimators."""
        return persistence.EstimatorReader(cls)
