"""Spark ML: estimators that train with `spark_dl.train`, and models that add predictions to a DataFrame."""

from spark_dl.ml.classification import TorchClassificationModel, TorchClassifier
from spark_dl.ml.estimator import TorchEstimator
from spark_dl.ml.model import TorchModel
from spark_dl.ml.regression import TorchRegressionModel, TorchRegressor
from spark_dl.ml.tokenizer import TextTokenizer

__all__ = [
    "TextTokenizer",
    "TorchClassificationModel",
    "TorchClassifier",
    "TorchEstimator",
    "TorchModel",
    "TorchRegressionModel",
    "TorchRegressor",
]
