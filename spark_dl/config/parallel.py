"""The section `parallel`: the base class of the settings of all strategies, which are in the strategies' modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from spark_dl.config.conflicts import Conflict

if TYPE_CHECKING:
    from spark_dl.world import World


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Base class of the settings of a strategy, a frozen dataclass.

    The class variables declare what the strategy needs. The driver checks them before any Spark job.
    """

    SECTION: ClassVar[str] = "parallel"
    strategy: ClassVar[str] = ""
    """Name of the strategy in `parallel.strategy`."""
    has_group: ClassVar[bool] = True
    """Whether the ranks form a `torch.distributed` process group."""
    one_rank: ClassVar[bool] = False
    """Whether the strategy needs exactly one rank."""
    all_gpus: ClassVar[bool] = False
    """Whether a rank uses all GPUs of its task, and not only the first one."""
    common_steps: ClassVar[bool] = True
    """Whether all ranks take each step together."""
    by_spark: ClassVar[bool] = False
    """Whether Spark aggregates the gradients: the driver runs the loop, with jobs of stateless tasks."""
    planned: ClassVar[bool] = False
    """Whether the driver replaces these settings by those of another strategy before ranks start."""
    resumes: ClassVar[tuple[str, ...]] = ()
    """Other strategies whose runs these settings can resume, as they plan the same settings again."""
    cuts_model: ClassVar[bool] = False
    """Whether ranks have parts of a model, which can be larger than the memory of one."""
    own_optimizer: ClassVar[bool] = False
    """Whether the strategy builds its own optimizer, so that it cannot train with `spec.optimizer`."""
    has_master_weights: ClassVar[bool] = False
    """Whether the optimizer may step copies of the weights (`train.precision: bf16`, `train.offload_optimizer`): each
    rank steps whole parameters, and nothing else writes them."""
    excludes: ClassVar[tuple[Conflict, ...]] = ()
    """Settings of other sections that the strategy does not support, beyond those in `conflicts.CONFLICTS`."""

    @property
    def takes_bf16(self) -> bool:
        """Whether the model can compute with weights in bfloat16 (`train.precision: bf16`)."""
        return self.has_master_weights

    @property
    def servers(self) -> int:
        """Number of ranks that hold weights and do not train."""
        return 0

    def data_size(self, num_ranks: int) -> int:
        """Returns the number of parts of each global batch. Raises ValueError if the ranks cannot be arranged so."""
        return num_ranks - self.servers

    def place(self, world: World) -> World:
        """Returns the world with this rank's part of each global batch. Called on every rank, before training."""
        return world
