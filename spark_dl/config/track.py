"""The section `track`: where the metrics of a run go beside its folder, and profiles of its ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from spark_dl.config.checks import check, check_bool
from spark_dl.config.fields import named_settings
from spark_dl.storage.credentials import secrets_of

_TEXTS = ("mlflow_tracking_uri", "mlflow_experiment_name", "mlflow_run_name", "mlflow_registered_model_name")
_OF_MLFLOW = (*_TEXTS, "mlflow_tags", "mlflow_log_model", "mlflow_log_checkpoint")


@named_settings
@dataclass(frozen=True, kw_only=True)
class Track:
    """TensorBoard and MLflow, which the driver writes to during training, and profiles of the ranks."""

    MAY_CHANGE: ClassVar[bool] = True
    OF_CALLER: ClassVar[bool] = True
    tensorboard: bool = False
    """Whether to write event files for TensorBoard, to the folder `tensorboard` of the run folder."""
    mlflow: bool = False
    """Whether to log settings, metrics and the URL of the last checkpoint to MLflow: to the run that is active in the
    thread that calls `train`, else to a new run."""
    mlflow_tracking_uri: str = ""
    """MLflow's tracking server or database. The default is MLflow's own, such as that of `MLFLOW_TRACKING_URI`."""
    mlflow_experiment_name: str = ""
    """MLflow's experiment, which is created if it does not exist. The default is MLflow's own, such as that of
    `mlflow.set_experiment`."""
    mlflow_run_name: str = ""
    """Name of a new MLflow run. The default is the name of the run folder."""
    mlflow_tags: dict[str, str] = field(default_factory=dict)
    """Tags of the MLflow run."""
    mlflow_log_model: bool = False
    """Whether to log the trained model at the end, as a program of `torch.export` with a signature. Nothing is
    pickled."""
    mlflow_registered_model_name: str = ""
    """Name in MLflow's model registry, of which the logged model becomes a new version."""
    mlflow_log_checkpoint: bool = False
    """Whether to upload the files of the last checkpoint at the end. The default uploads only its manifest."""
    profile_steps: tuple[int, int] | None = None
    """First and last step to record with `torch.profiler`, such as `[20, 24]`, counted over the whole run from 1. The
    ranks write traces to the folder `profile` of the run folder."""
    profile_ranks: tuple[int, ...] = ()
    """Ranks that are profiled. An empty list profiles all ranks."""

    def __post_init__(self) -> None:
        check_bool(self, "tensorboard", "mlflow", "mlflow_log_model", "mlflow_log_checkpoint")
        for name in _TEXTS:
            check(isinstance(getattr(self, name), str), f"track.{name}", "a string", getattr(self, name))
        self._check_tags()
        self._check_mlflow()
        self._check_profile()

    def _check_tags(self) -> None:
        is_mapping = isinstance(self.mlflow_tags, Mapping)
        check(is_mapping, "track.mlflow_tags", "a mapping of names to strings", self.mlflow_tags)
        for name, value in self.mlflow_tags.items():
            check(isinstance(name, str) and name != "", "track.mlflow_tags", "names that are strings", name)
            check(isinstance(value, str), f"track.mlflow_tags.{name}", "a string", value)

    def _check_mlflow(self) -> None:
        for name in _OF_MLFLOW:
            if getattr(self, name) and not self.mlflow:
                raise ValueError(
                    f"track.{name}: found {getattr(self, name)!r}, which needs track.mlflow; set track.mlflow to true, "
                    "or remove it"
                )
        if secrets_of(self.mlflow_tracking_uri):
            raise ValueError(
                "track.mlflow_tracking_uri: found a URL with a password, a key or a token, which would be stored in "
                "the run folder; remove it, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD on the "
                "driver, or for a database MLFLOW_TRACKING_URI"
            )
        if self.mlflow_registered_model_name and not self.mlflow_log_model:
            raise ValueError(
                "track.mlflow_registered_model_name: expected an empty string without track.mlflow_log_model, found "
                f"{self.mlflow_registered_model_name!r}; set track.mlflow_log_model to true, or remove it"
            )

    def _check_profile(self) -> None:
        if self.profile_steps is not None:
            steps = _integers(self.profile_steps)
            is_range = steps is not None and len(steps) == 2 and 1 <= steps[0] <= steps[1]
            check(is_range, "track.profile_steps", "[first step, last step], from 1", self.profile_steps)
            object.__setattr__(self, "profile_steps", steps)
        ranks = _integers(self.profile_ranks)
        check(
            ranks is not None and min(ranks, default=0) >= 0,
            "track.profile_ranks",
            "a list of ranks",
            self.profile_ranks,
        )
        object.__setattr__(self, "profile_ranks", ranks)
        if self.profile_ranks and self.profile_steps is None:
            raise ValueError(
                f"track.profile_ranks: expected an empty list without track.profile_steps, found "
                f"{list(self.profile_ranks)}; set track.profile_steps, or remove it"
            )


def _integers(value: Any) -> tuple[int, ...] | None:
    """Returns a list of integers as a tuple; None for anything else."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple(value) if is_list and all(type(number) is int for number in value) else None
