"""Settings of parameter servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from spark_dl.config.checks import SettingError, check_bool, check_choices, check_number
from spark_dl.config.fields import named_settings
from spark_dl.config.parallel import Parallel

if TYPE_CHECKING:
    from spark_dl.config import Config

ServerMode = Literal["sync", "k_sync", "k_batch_sync", "async", "k_async", "k_batch_async"]


@named_settings
@dataclass(frozen=True, kw_only=True)
class ParameterServer(Parallel):
    """Parameter servers: the last ranks store the weights; the other ranks send gradients and receive weights.

    Example:
        >>> servers = spark_dl.ParameterServer(num_servers=1, server_mode="async", max_staleness=4)
        >>> spark_dl.Config(launch=spark_dl.Launch(num_ranks=4), parallel=servers)
    """

    strategy: ClassVar[str] = "parameter_server"
    common_steps: ClassVar[bool] = False
    num_servers: int = 1
    """Number of ranks that are parameter servers; the other ranks train."""
    server_mode: ServerMode = "sync"
    """When the servers update the weights, as in Dutta et al. 2018."""
    server_k: int = 0
    """Number of gradients (K) that the servers wait for, in the modes whose names contain `k_`. 0 means the number of
    ranks that train."""
    max_staleness: int | None = None
    """Maximum staleness of a gradient: the number of updates by which it lags behind the weights. A gradient with a
    larger staleness is computed again."""
    staleness_lr: bool = False
    """Divide the learning rate for a gradient by 1 + its staleness."""

    def __post_init__(self) -> None:
        check_number(self, "num_servers", 1, whole=True)
        check_choices(self)
        check_number(self, "server_k", 0, whole=True)
        if self.max_staleness is not None:
            check_number(self, "max_staleness", 0, whole=True)
        check_bool(self, "staleness_lr")
        if self.server_k and self.server_mode in ("sync", "async"):
            raise SettingError(
                "parallel.server_k",
                f"only supported in the modes whose names contain k_, found {self.server_k} with "
                f"parallel.server_mode={self.server_mode!r}; remove it, or choose another mode",
            )
        for name, given in (("max_staleness", self.max_staleness is not None), ("staleness_lr", self.staleness_lr)):
            if given and self.server_mode in ("sync", "k_sync", "k_batch_sync"):
                raise SettingError(
                    f"parallel.{name}",
                    f"only supported in the asynchronous modes; with parallel.server_mode="
                    f"{self.server_mode!r} no gradient is stale; remove it, or choose another mode",
                )

    @property
    def servers(self) -> int:
        return self.num_servers


def settings_of(config: Config) -> ParameterServer:
    """Returns `config.parallel`, which must be a `ParameterServer`."""
    assert isinstance(config.parallel, ParameterServer)
    return config.parallel
