"""The section `track`: where the metrics of a run go beside its folder, and profiles of its ranks."""

from dataclasses import dataclass
from typing import ClassVar

from spark_dl.config.checks import SettingError, check, check_bool, integers
from spark_dl.config.fields import named_settings

_OF_MLFLOW = ("mlflow_registered_model_name", "mlflow_log_model", "mlflow_log_checkpoint")


@named_settings
@dataclass(frozen=True, kw_only=True)
class Track:
    """TensorBoard and MLflow, which the driver writes to during training, and profiles of the ranks.

    Example:
        >>> spark_dl.Track(mlflow=True, tensorboard=True)
    """

    MAY_CHANGE: ClassVar[bool] = True
    OF_CALLER: ClassVar[bool] = True
    tensorboard: bool = False
    """Whether to write event files for TensorBoard, to the folder `tensorboard` of the run folder."""
    mlflow: bool = False
    """Whether to log settings, metrics and the URL of the last checkpoint to MLflow: to the run that is active in the
    thread that calls `train`, else to a new run. The server and the experiment are MLflow's own settings, such as
    `MLFLOW_TRACKING_URI` and `MLFLOW_EXPERIMENT_NAME` on the driver."""
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
        name = self.mlflow_registered_model_name
        check(isinstance(name, str), "track.mlflow_registered_model_name", "a string", name)
        self._check_mlflow()
        self._check_profile()

    def _check_mlflow(self) -> None:
        for name in _OF_MLFLOW:
            if getattr(self, name) and not self.mlflow:
                raise SettingError(
                    f"track.{name}",
                    f"found {getattr(self, name)!r}, which needs track.mlflow; set track.mlflow to true, or remove it",
                )
        if self.mlflow_registered_model_name and not self.mlflow_log_model:
            raise SettingError(
                "track.mlflow_registered_model_name",
                "expected an empty string without track.mlflow_log_model, found "
                f"{self.mlflow_registered_model_name!r}; set track.mlflow_log_model to true, or remove it",
            )

    def _check_profile(self) -> None:
        if self.profile_steps is not None:
            steps = integers(self.profile_steps)
            is_range = steps is not None and len(steps) == 2 and 1 <= steps[0] <= steps[1]
            check(is_range, "track.profile_steps", "[first step, last step], from 1", self.profile_steps)
            object.__setattr__(self, "profile_steps", steps)
        ranks = integers(self.profile_ranks)
        check(
            ranks is not None and min(ranks, default=0) >= 0,
            "track.profile_ranks",
            "a list of ranks",
            self.profile_ranks,
        )
        object.__setattr__(self, "profile_ranks", ranks)
        if self.profile_ranks and self.profile_steps is None:
            raise SettingError(
                "track.profile_ranks",
                f"expected an empty list without track.profile_steps, found "
                f"{list(self.profile_ranks)}; set track.profile_steps, or remove it",
            )
