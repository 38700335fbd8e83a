"""`TorchModel`: a trained model as a stage of a Spark ML pipeline.

Save and load of estimators and models: Spark's metadata, and the format of `scoring/saved_model.py`. No pickle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pyspark
from pyspark.ml import Model
from pyspark.ml.param import Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import DataFrame
from pyspark.sql.types import DataType, StructField, StructType
from torch import nn

from spark_dl import storage
from spark_dl.config.checks import listed, suggestion
from spark_dl.config.load import build_config
from spark_dl.driver import TrainResult
from spark_dl.ml.params import TorchParams
from spark_dl.predict import add_predictions
from spark_dl.scoring import names, saved_model
from spark_dl.scoring.scorer import Scorer, saved_scorer
from spark_dl.scoring.tables import Outputs, added_fields, first_outputs
from spark_dl.spark_job import quoted
from spark_dl.spec import FUNCTIONS, ModelSpec, build_loss

if TYPE_CHECKING:
    from spark_dl.ml.estimator import TorchEstimator

_has_session = int(pyspark.__version__.split(".")[0]) >= 4
"""Whether Spark's writer of metadata takes a session; before Spark 4 it takes the SparkContext."""


def select(df: DataFrame, columns: list[str]) -> DataFrame:
    """Returns some columns of a DataFrame. Raises ValueError, with the nearest name, for a column that is missing."""
    for name in columns:
        if name not in df.columns:
            raise ValueError(
                f"no column {name!r} in the DataFrame{suggestion(name, df.columns)}; its columns are "
                f"[{listed(df.columns)}]"
            )
    return df.select(*map(quoted, columns))


class ModelWriter(MLWriter):
    """Writes a model."""

    def __init__(self, instance: TorchModel):
        super().__init__()
        self.instance = instance

    def save(self, path: str) -> None:
        """Writes the model. What cannot be saved is found before `overwrite` deletes anything.

        `overwrite` replaces a model of this class in place: a reader finds the model of before, the new one, or an
        error in the moment between the two.
        """
        _check_params(self.instance)
        self._packed = self._pack()
        stage = storage.join(storage.absolute(path), saved_model.STAGE)
        if self.shouldOverwrite and storage.exists(storage.join(stage, saved_model.DESCRIPTION)):
            sha256 = self._packed.write(stage, overwrite=True)
            self._handleOverwrite(f"{path}/metadata")
            self._write_metadata(path, sha256)
        else:
            super().save(path)

    def saveImpl(self, path: str) -> None:
        """Writes the weights, and then the metadata."""
        packed = getattr(self, "_packed", None) or self._pack()
        self._write_metadata(path, packed.write(storage.join(storage.absolute(path), saved_model.STAGE)))

    def _write_metadata(self, path: str, sha256: str) -> None:
        _write_metadata(self, path, {"facts": self.instance.facts, "model": sha256})

    def _pack(self) -> saved_model.PackedModel:
        trained, kind = self.instance.trained, self.instance.getOrDefault(self.instance.saveFormat)
        return saved_model.pack_model(trained.load(), trained.spec, trained.config, trained.columns, format=kind)


class ModelReader(MLReader["TorchModel"]):
    """Reads a model. Load only models that you trust: their functions are imported and called."""

    def __init__(self, cls: type[TorchModel]):
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> TorchModel:
        """Reads a model that `save` has written."""
        metadata = _read_metadata(self, path, self._cls)
        saved = saved_model.read_saved_model(storage.join(storage.absolute(path), saved_model.STAGE))
        if metadata.get("model", saved.sha256) != saved.sha256:  # models of before have no checksum there
            raise ValueError(
                f"{path}: the model is not that of its metadata; another program replaces it now, load it again, or "
                "has been stopped while it did, save it again"
            )
        model = self._cls(saved_scorer(saved), facts=metadata["facts"])
        model._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(model, metadata)
        return model


class EstimatorWriter(MLWriter):
    """Writes an estimator: its functions by importable names, its settings and its params."""

    def __init__(self, instance: TorchEstimator):
        super().__init__()
        self.instance = instance

    def save(self, path: str) -> None:
        """Writes the estimator. What cannot be saved is found before `overwrite` deletes anything."""
        _check_params(self.instance)
        self._describe()
        super().save(path)

    def saveImpl(self, path: str) -> None:
        """Writes the metadata."""
        _write_metadata(self, path, self._describe())

    def _describe(self) -> dict[str, Any]:
        spec = self.instance.spec
        functions = {name: getattr(spec, name) for name in FUNCTIONS}
        return {
            "functions": {n: names.name_of(function, f"spec.{n}") for n, function in functions.items() if function},
            "metrics": {n: names.name_of(metric, f"spec.metrics[{n!r}]") for n, metric in spec.metrics.items()},
            "loss": _name_of_loss(spec),
            "config": self.instance.config.to_dict(),
            "progress": self.instance.progress,
        }


class EstimatorReader(MLReader["TorchEstimator"]):
    """Reads an estimator."""

    def __init__(self, cls: type[TorchEstimator]):
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> TorchEstimator:
        """Reads an estimator that `save` has written."""
        metadata = _read_metadata(self, path, self._cls)
        functions = {n: names.object_of(described, f"{path}: {n}") for n, described in metadata["functions"].items()}
        metrics = {n: names.object_of(described, f"{path}: metrics") for n, described in metadata["metrics"].items()}
        loss = metadata["loss"]
        loss = names.object_of(loss, f"{path}: loss") if ":" in (loss or "") else loss
        spec = ModelSpec(loss=loss, metrics=metrics, **functions)
        estimator = self._cls(spec, build_config(metadata["config"]), progress=metadata["progress"])
        estimator._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(estimator, metadata)
        return estimator


def _name_of_loss(spec: ModelSpec) -> Any:
    """Returns a loss of `torch.nn` by its name, if it has only default arguments; else the name of a function.

    None with `spec.batch_loss`.
    """
    if spec.loss is None:
        return None
    name = type(spec.loss).__name__
    if type(spec.loss).__module__.startswith("torch.nn."):
        if repr(vars(build_loss(name))) == repr(vars(spec.loss)):
            return name
        raise ValueError(
            f"spec.loss: {name} has arguments, which the files of an estimator cannot hold; write a function at the "
            "top of a module that calls it"
        )
    return names.name_of(spec.loss, "spec.loss")


def _check_params(instance: Params) -> None:
    """Raises ValueError for a param that JSON, in which Spark keeps them, cannot hold."""
    for param, value in instance.extractParamMap().items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{param.name}: cannot be saved, as {error}; found {value!r:.200}") from error


def _write_metadata(writer: MLWriter, path: str, extra: dict[str, Any]) -> None:
    instance: Any = writer.instance  # type: ignore[attr-defined]
    DefaultParamsWriter.saveMetadata(
        instance, path, writer.sparkSession if _has_session else writer.sc, extraMetadata=extra
    )


def _read_metadata(reader: MLReader[Any], path: str, cls: type) -> dict[str, Any]:
    metadata: dict[str, Any] = DefaultParamsReader.loadMetadata(
        path, reader.sparkSession if _has_session else reader.sc
    )
    name = f"{cls.__module__}.{cls.__name__}"
    if metadata["class"] != name:
        raise ValueError(f"{path} has a {metadata['class']}, found {name}.load; load it with the class that it has")
    return metadata


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
        select(dataset, [name if name in dataset.columns else name.split(".")[0] for name in features])
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

    def write(self) -> ModelWriter:
        """Returns a writer of the model, in the format of `saveFormat`."""
        return ModelWriter(self)

    @classmethod
    def read(cls) -> ModelReader:
        """Returns a reader of models."""
        return ModelReader(cls)
