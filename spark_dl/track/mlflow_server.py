"""An MLflow server or database, as the settings or MLflow itself name it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from spark_dl.config import Track
from spark_dl.storage.credentials import without_secrets

if TYPE_CHECKING:
    from mlflow import MlflowClient

_PROBE_S = 5.0
"""How long a server may take to answer before it counts as down."""


def connect(track: Track) -> tuple[MlflowClient, str]:
    """Returns a client, and the tracking URI. Called on the driver, before any data is read.

    Raises ValueError without the package, and RuntimeError if the server or the database cannot be used.
    """
    try:
        import mlflow
    except ModuleNotFoundError as error:
        raise ValueError(
            f"track.mlflow: needs the package mlflow on the driver ({error}); install spark_dl[mlflow], or set it to "
            "false"
        ) from error
    uri = track.mlflow_tracking_uri or mlflow.get_tracking_uri()
    if not answers(uri):
        raise RuntimeError(
            f"track.mlflow: the server {without_secrets(uri)} does not answer; start it, set "
            "track.mlflow_tracking_uri or MLFLOW_TRACKING_URI to another one, or set track.mlflow to false"
        )
    with explained(uri):
        client = mlflow.MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
    return client, uri


def answers(uri: str) -> bool:
    """Whether a tracking server answers within seconds. True for databases.

    MLflow itself repeats its calls for minutes.
    """
    if not uri.startswith(("http://", "https://")):
        return True
    import requests

    try:
        requests.get(f"{uri.rstrip('/')}/health", timeout=_PROBE_S)
    except (requests.exceptions.SSLError, requests.exceptions.ProxyError):
        return True  # MLflow has settings for these
    except requests.exceptions.RequestException:
        return False
    return True


@contextlib.contextmanager
def explained(uri: str) -> Iterator[None]:
    """Raises RuntimeError with the server for any error of MLflow, but not for errors of the settings."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # of HTTP, of a database or of MLflow
        why = without_secrets(uri, str(error))
        raise RuntimeError(f"track.mlflow: cannot use MLflow at {without_secrets(uri)}: {why}") from error
