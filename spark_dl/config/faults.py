"""The section `faults`: injected delays, to test the effect of slow ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from spark_dl.config.checks import SettingError, check, check_choices, check_number
from spark_dl.config.fields import named_settings

Straggler = Literal["none", "constant", "exponential", "shifted"]


@named_settings
@dataclass(frozen=True, kw_only=True)
class Faults:
    """Injected delays, to test the effect of slow ranks.

    Example:
        >>> faults = spark_dl.Faults(straggler="constant", straggler_s=0.05, straggler_ranks=(1,))
        >>> spark_dl.Config(launch=spark_dl.Launch(num_ranks=4), faults=faults)
    """

    MAY_CHANGE: ClassVar[bool] = True
    straggler: Straggler = "none"
    """Distribution of the delay of each gradient computation."""
    straggler_s: float = 0.0
    """Mean of the delay, in seconds; `shifted` waits for half of this mean, plus an exponentially distributed time with
    the other half as its mean."""
    straggler_ranks: tuple[int, ...] = ()
    """Ranks that are delayed. An empty list delays all ranks."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_number(self, "straggler_s", 0)
        check(
            (self.straggler_s > 0) == (self.straggler != "none"),
            "faults.straggler_s",
            f"a delay > 0 with a faults.straggler, 0 without (it is {self.straggler})",
            self.straggler_s,
        )
        is_list = isinstance(self.straggler_ranks, Sequence) and not isinstance(self.straggler_ranks, str)
        ranks = self.straggler_ranks if is_list else [None]
        is_ranks = all(type(r) is int and r >= 0 for r in ranks)
        check(is_ranks, "faults.straggler_ranks", "a list of ranks", self.straggler_ranks)
        object.__setattr__(self, "straggler_ranks", tuple(ranks))
        if self.straggler_ranks and self.straggler == "none":
            raise SettingError(
                "faults.straggler_ranks",
                f"expected an empty list with faults.straggler='none', found "
                f"{list(self.straggler_ranks)}; set faults.straggler, or remove it",
            )
