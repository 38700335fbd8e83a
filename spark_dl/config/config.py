"""`Config`: all sections of settings."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from spark_dl.config import strategies
from spark_dl.config.checkpoint import Checkpoint
from spark_dl.config.checks import SettingError
from spark_dl.config.conflicts import check_conflicts
from spark_dl.config.data import Assembled, Data
from spark_dl.config.faults import Faults
from spark_dl.config.fields import named_settings
from spark_dl.config.launch import Launch
from spark_dl.config.loader import Loader
from spark_dl.config.parallel import Parallel
from spark_dl.config.sequences import Sequences
from spark_dl.config.shards import Shards
from spark_dl.config.track import Track
from spark_dl.config.train import Train


def _default_strategy() -> Parallel:
    return strategies.find(strategies.DEFAULT).settings()


@named_settings
@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run. Raises ValueError for invalid settings and for settings that exclude each other.

    Example:
        >>> spark_dl.Config(train=spark_dl.Train(lr=0.1), launch=spark_dl.Launch(num_ranks=2)).to_dict()["train"]["lr"]
    """

    data: Data = field(default_factory=Data)
    shards: Shards = field(default_factory=Shards)
    loader: Loader = field(default_factory=Loader)
    sequences: Sequences | None = None
    """Samples of consecutive rows; null: each row is a sample."""
    train: Train = field(default_factory=Train)
    parallel: Parallel = field(default_factory=_default_strategy)
    """Settings of the strategy, such as `spark_dl.DDP(bucket_mib=10)`."""
    launch: Launch = field(default_factory=Launch)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    track: Track = field(default_factory=Track)
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        self._check_sections()
        check_conflicts(self)
        try:
            self.to_dict()
        except TypeError as error:
            raise ValueError(f"the settings must be plain numbers, strings, lists and mappings: {error}") from None

    def _check_sections(self) -> None:
        """Raises ValueError for a section that is another object, such as a dict."""
        for section in dataclasses.fields(self):
            kind: Any = section.type
            if not isinstance(value := getattr(self, section.name), kind):
                kind = {Parallel: type(_default_strategy()), Sequences | None: Sequences}.get(kind, kind)
                example = ", or the settings of another strategy" if section.name == "parallel" else ""
                raise SettingError(
                    f"{section.name}",
                    f"expected a spark_dl.{kind.__name__}{example}, found a {type(value).__name__}; "
                    f"pass spark_dl.{kind.__name__}(...), or read settings by key with spark_dl.load_config",
                )

    @property
    def stored_columns(self) -> tuple[str, ...]:
        """Columns that a dataset must have: those that are read, and those that `sequences` uses."""
        return tuple(dict.fromkeys((*self.data.columns, *(self.sequences.columns if self.sequences else ()))))

    def without_sampling(self) -> "Config":
        """Returns the settings for rows that are all read once, such as those of an evaluation."""
        if self.data.sampling_weight is None:
            return self
        data = dataclasses.replace(self.data, sampling_weight=None)
        return dataclasses.replace(self, data=data, loader=dataclasses.replace(self.loader, epoch_size=None))

    def several_micro_batches(self, *, evaluates: bool = False) -> str:
        """Returns the setting by which a rank has several micro-batches in a step, with its value; empty if it has one.

        Args:
            evaluates: whether the step is one of an evaluation, which does not accumulate gradients.
        """
        if self.loader.max_tokens is not None:
            return f"loader.max_tokens={self.loader.max_tokens}"
        accumulated = 1 if evaluates else self.train.accumulation_steps
        return f"train.accumulation_steps={accumulated}" if accumulated > 1 else ""

    @property
    def inputs(self) -> tuple[str, ...] | Assembled:
        """The features as the model gets them: each by itself, or all as one tensor."""
        if self.data.assemble is None:
            return self.data.features
        return Assembled(self.data.features, cell_axis=1 if self.sequences is None else 2)

    @property
    def num_trainers(self) -> int:
        """Number of ranks that compute gradients."""
        return self.launch.num_ranks - self.parallel.servers

    @property
    def data_size(self) -> int:
        """Number of parts of each global batch: of ranks, or groups of ranks, that train on different rows."""
        return self.parallel.data_size(self.launch.num_ranks)

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as plain dicts, lists and scalars, the form of `config.yaml` and of checkpoints."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        plain["parallel"] = {"strategy": self.parallel.strategy, **plain["parallel"]}
        return plain
