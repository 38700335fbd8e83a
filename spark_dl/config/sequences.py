"""The section `sequences`: samples of consecutive rows."""

from dataclasses import dataclass

from spark_dl.config.checks import check, check_number
from spark_dl.config.fields import named_settings


@named_settings
@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Samples that consist of consecutive rows. The columns of a batch then have the shape [samples, length, ...].

    Example:
        >>> spark_dl.Config(sequences=spark_dl.Sequences(length=128, order="position"))
    """

    length: int
    """Number of rows in each sample."""
    stride: int = 1
    """Number of rows from the start of a sample to the start of the next sample."""
    order: str | None = None
    """Column that gives the order of rows, such as a time. It must not decrease within a group."""
    group: str | None = None
    """Column that has the same value in all rows of a sample, such as a device number."""
    max_gap: float | None = None
    """Largest difference of `order` between consecutive rows of a sample."""

    def __post_init__(self) -> None:
        for name in ("length", "stride"):
            check_number(self, name, 1, whole=True)
        for name in ("order", "group"):
            value = getattr(self, name)
            check(
                value is None or (isinstance(value, str) and value != ""), f"sequences.{name}", "a column name", value
            )
        if self.max_gap is not None:
            check_number(self, "max_gap", 0)
            check(self.order is not None, "sequences.order", "a column for sequences.max_gap", None)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns `order` and `group`, if they are set."""
        return tuple(name for name in (self.order, self.group) if name is not None)
