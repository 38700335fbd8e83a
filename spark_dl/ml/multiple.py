"""The models of several param maps, which are trained together when the first of them is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.ml.base import _FitMultipleIterator


def models_together(fit_all: Callable[[], Sequence[Any]], count: int) -> Any:
    """Returns an iterator of (index, model) for `Estimator.fitMultiple`, which several threads can use.

    The first `next` calls `fit_all`. If that raises, each `next` raises the same error.
    """
    lock = threading.Lock()
    models: Sequence[Any] = ()
    failure: BaseException | None = None

    def fit(index: int) -> Any:
        nonlocal models, failure
        with lock:
            if not models and failure is None:
                try:
                    models = fit_all()
                except BaseException as error:
                    failure = error
        if failure is not None:
            raise failure
        return models[index]

    return _FitMultipleIterator(fit, count)
