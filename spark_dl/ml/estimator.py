"""`TorchEstimator`: `spark_dl.train` as a stage of a Spark ML pipeline."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from torch import nn

from spark_dl import driver, storage
from spark_dl.config import Config
from spark_dl.data.dataset.manifest import delete_dataset
from spark_dl.data.write.shards import read_once
from spark_dl.data.write.vocabulary import NO_ROWS
from spark_dl.ml import model
from spark_dl.ml.model import TorchModel
from spark_dl.ml.multiple import models_together
from spark_dl.ml.params import TorchParams
from spark_dl.rundir.run_folder import SHARDS
from spark_dl.scoring.scorer import scorer_of
from spark_dl.spark_job import quoted, refuse_stream
from spark_dl.spec import ModelSpec
from spark_dl.trials.study import train_listed

if TYPE_CHECKING:
    from typing_extensions import Self


class TorchEstimator(Estimator[TorchModel], TorchParams, MLWritable, MLReadable["TorchEstimator"]):
    """Trains a model on the columns of a DataFrame. `fit` is `spark_dl.train`.

    The model adds the columns of `spec.predict`, for any number of outputs. With `train.early_stop_metric`, it is that
    of the best epoch, else that of the last one.

    Args:
        spec: the model, or only the function that builds it.
        config: settings; the params that are set override them.
        featuresCol: a vector column, an array column, or a list of columns, each of which is an argument of the model.
            Doubles become float32; `data.cast` of `config` sets other dtypes.
        labelCol: the label keeps its dtype.
        labelCols: several labels; the loss then gets the whole batch.
        weightCol, validationIndicatorCol: the weight of each row; a boolean column, true for validation rows.
        numRanks, epochs, globalBatchSize, lr, seed: the settings of these names in `config`.
        settings: any settings by key, such as `{"train.optimizer": "Adam"}`. All of them can be in a parameter grid.
        runDir: folder or URL for the runs, by default `runs` in the working directory. The checkpoints stay there.
        saveFormat: how models are saved, `weights` or `export`, as in `spark_dl.save_model`.
        parallelTrials: number of models that `CrossValidator` and `TrainValidationSplit` train at the same time, each
            on `numRanks` ranks, in one barrier job for all param maps. The default, 1, is a job for each of them.

    Example:
        >>> def build_model():
        ...     return torch.nn.Linear(2, 2)
        >>> spec = spark_dl.ModelSpec(build=build_model, loss="CrossEntropyLoss")
        >>> estimator = TorchEstimator(spec, featuresCol="features", labelCol="label", epochs=2, runDir="runs/ml")
        >>> estimator.fit(df).transform(df).show()
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
        parallelTrials: int | None = None,
        progress: bool = True,
    ):
        super().__init__()
        self.spec, self.config, self.progress = self._spec_of(spec), config or Config(), progress
        self._setDefault(**self.params_of(self.config))
        self.setParams(
            featuresCol=featuresCol, labelCol=labelCol, labelCols=labelCols, weightCol=weightCol,
            validationIndicatorCol=validationIndicatorCol, numRanks=numRanks, epochs=epochs,
            globalBatchSize=globalBatchSize, lr=lr, seed=seed, settings=settings, runDir=runDir, saveFormat=saveFormat,
            parallelTrials=parallelTrials,
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

    def setRunDir(self, value: str) -> Self:
        """Sets the folder or URL of the runs."""
        return self._with(runDir=value)

    def setNumRanks(self, value: int) -> Self:
        """Sets the number of ranks."""
        return self._with(numRanks=value)

    def setEpochs(self, value: int) -> Self:
        """Sets the number of passes over the data."""
        return self._with(epochs=value)

    def setGlobalBatchSize(self, value: int) -> Self:
        """Sets the rows of one optimizer step, over all ranks."""
        return self._with(globalBatchSize=value)

    def setLr(self, value: float) -> Self:
        """Sets the learning rate."""
        return self._with(lr=value)

    def setSeed(self, value: int) -> Self:
        """Sets the seed of the order of rows and of the random generators."""
        return self._with(seed=value)

    def setSaveFormat(self, value: str) -> Self:
        """Sets how models are saved: `weights` or `export`."""
        return self._with(saveFormat=value)

    def setParallelTrials(self, value: int) -> Self:
        """Sets the number of param maps whose models are trained at the same time."""
        return self._with(parallelTrials=value)

    def _with(self, **given: Any) -> Self:
        self.set_given(given)
        return self

    def _fit(self, dataset: DataFrame) -> TorchModel:
        config, run_dir = self._config_for(dataset), self._new_run_dir()
        rows = self._with_checked_label(dataset, config)
        with (
            _rows_deleted(run_dir),
            self._errors_of_params(),
            self._split(rows, self.read_columns(config, dataset.schema)) as (train, validation),
        ):
            result = driver.train(
                train, self._spec_to_train(config), config, validation=validation, run_dir=run_dir,
                progress=self.progress, spark=dataset.sparkSession,
            )  # fmt: skip
        return self._model_of(result, config, dataset)

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[Any]) -> Any:
        """Fits a model for each param map, `parallelTrials` of them at the same time.

        Returns an iterator of (index, model). With `parallelTrials` above 1, all models are trained when the first one
        is asked for.
        """
        if self.getOrDefault(self.parallelTrials) == 1:
            return super().fitMultiple(dataset, paramMaps)
        estimator = self.copy()
        return models_together(lambda: estimator._fit_together(dataset, paramMaps), len(paramMaps))

    def _fit_together(self, dataset: DataFrame, param_maps: Sequence[Any]) -> list[TorchModel]:
        copies = [self.copy(params) for params in param_maps]
        configs, run_dir = [copy._config_for(dataset) for copy in copies], self._new_run_dir()
        if len({copy._validation_column() for copy in copies}) > 1:
            raise ValueError("validationIndicatorCol: expected the same one in all param maps with parallelTrials")
        rows = self._with_checked_label(dataset, configs[0])
        specs = [c._spec_to_train(config) for c, config in zip(copies, configs, strict=True)]
        columns = self.read_columns(configs[0], dataset.schema)
        with (
            _rows_deleted(run_dir),
            self._errors_of_params(),
            copies[0]._split(rows, columns) as (train, validation),
        ):
            results = train_listed(
                dataset.sparkSession, train, specs, configs, validation=validation, run_dir=run_dir,
                parallel_trials=self.getOrDefault(self.parallelTrials), progress=self.progress,
            )  # fmt: skip
        return [c._model_of(*found, dataset) for c, *found in zip(copies, results, configs, strict=True)]

    @contextlib.contextmanager
    def _errors_of_params(self) -> Iterator[None]:
        """Raises ValueError that names the param for rows that do not fit it, in a block that computes them."""
        try:
            yield
        except ValueError as error:
            if not self.isSet(self.validationIndicatorCol) or NO_ROWS not in str(error):
                raise
            column = self.getValidationIndicatorCol()
            raise ValueError(
                "validationIndicatorCol: expected training rows (false or null) and validation rows (true) in "
                f"{column!r}, found rows of one kind only"
            ) from error

    def _config_for(self, dataset: DataFrame) -> Config:
        refuse_stream(dataset, "fit")
        config = self.build_config(self.config, dataset.schema, self._label_dtype())
        self._check_columns(dataset, config)
        if config.train.early_stop_metric is not None and config.checkpoint.keep_best == 0:
            config = replace(config, checkpoint=replace(config.checkpoint, keep_best=1))  # for `_model_of`
        return config

    def _new_run_dir(self) -> str:
        return storage.join(storage.absolute(self.getOrDefault(self.runDir)), f"{self.uid}-{uuid.uuid4().hex[:8]}")

    def _model_of(self, result: driver.TrainResult, config: Config, rows: DataFrame) -> TorchModel:
        # With early stopping, the last epochs are those that were no better.
        best = result.best_checkpoint if config.train.early_stop_metric is not None else None
        model = self._model(scorer_of(self.spec, best or result.checkpoint, config), result, rows=rows)
        model._resetUid(self.uid)  # so that the params of the estimator are those of the model, as in Spark ML
        copied: TorchModel = self._copyValues(model)
        return copied

    def _validation_column(self) -> str | None:
        return self.getValidationIndicatorCol() if self.isSet(self.validationIndicatorCol) else None

    def _check_columns(self, dataset: DataFrame, config: Config) -> None:
        """Raises ValueError for params that exclude each other, and for output columns that exist."""
        if config.sequences is not None:
            raise ValueError(
                "sequences: a fitted model scores the rows of a DataFrame, and this one would read windows of rows; "
                "train it with spark_dl.train, and call the model of TrainResult.load_model on your own sequences"
            )
        if self.isSet(self.validationIndicatorCol) and config.train.validation_fraction:
            raise ValueError(
                "validationIndicatorCol: found it together with train.validation_fraction="
                f"{config.train.validation_fraction}; set one of them"
            )
        names = list(self._added_columns().items())
        for param, name in names:
            if name in dataset.columns:
                raise ValueError(f"{param}: the DataFrame already has a column {name!r}; rename one of them")
            if [other for other, taken in names if taken == name] != [param]:
                raise ValueError(f"{param}: found {name!r} for several columns; expected a name for each")

    def _added_columns(self) -> dict[str, str]:
        """The names of the columns that the model adds, by their params, if params set them."""
        return {}

    def _with_checked_label(self, df: DataFrame, config: Config) -> DataFrame:
        """Returns the rows, with a label whose wrong values raise an error when they are computed."""
        return df

    def _label_dtype(self) -> str | None:
        """The dtype of the label in batches; None keeps that of the column."""
        return None

    def _spec_to_train(self, config: Config) -> ModelSpec:
        return self.spec

    @contextlib.contextmanager
    def _split(self, df: DataFrame, columns: list[str]) -> Iterator[tuple[DataFrame, DataFrame | None]]:
        """Yields the training and the validation rows, each row in one of them, also if a UDF decides.

        Raises ValueError for a column that is missing.
        """
        if not self.isSet(self.validationIndicatorCol):
            yield model.select(df, columns), None
            return
        indicator = self.getValidationIndicatorCol()
        rows = model.select(df, list(dict.fromkeys([indicator, *columns])))
        if (found := dict(rows.dtypes)[indicator]) != "boolean":
            raise ValueError(f"validationIndicatorCol: expected a boolean column, found {indicator!r} of type {found}")
        is_validation = F.coalesce(F.col(quoted(indicator)), F.lit(False))
        with read_once(rows, "validationIndicatorCol") as kept:
            train, validation = kept.filter(~is_validation), kept.filter(is_validation)
            yield model.select(train, columns), model.select(validation, columns)

    def write(self) -> model.EstimatorWriter:
        """Returns a writer of the estimator, by the importable names of its functions."""
        return model.EstimatorWriter(self)

    @classmethod
    def read(cls) -> model.EstimatorReader:
        """Returns a reader of estimators."""
        return model.EstimatorReader(cls)


@contextlib.contextmanager
def _rows_deleted(run_dir: str) -> Iterator[None]:
    """Deletes the shards of a fit at the end of the block, also if it failed: a fit is not resumed."""
    try:
        yield
    finally:
        for name in ("train", "validation"):
            delete_dataset(storage.within(run_dir, SHARDS, name))
