"""The section `shards`: how the rows of a DataFrame are laid out in files, and where these are kept."""

from dataclasses import dataclass
from typing import Literal

from spark_dl.config.checks import check, check_choices, check_number
from spark_dl.config.fields import may_change

Storage = Literal["shared", "local"]


@dataclass(frozen=True, kw_only=True)
class Shards:
    """How the rows of a DataFrame are laid out in files, and where these are kept."""

    rows_per_row_group: int = 0
    """Rows of each row group; 0 chooses about 4 MiB."""
    rows_per_shard: int = 0
    """Rows of each file, rounded up to whole row groups; 0 chooses about 64 MiB."""
    storage: Storage = "shared"
    """Where shards are written: `shared`, to the run's folder, which all executors reach; `local`, to the disk of each
    rank's host, dealt round-robin, for the time of the run."""
    store: str | None = may_change(None)
    """Folder or URL where shards are kept by content, for other runs and users to find."""
    store_ttl_days: float = may_change(30.0)
    """Days without use after which `jobs/prepare.py --clean` deletes shards from the store."""
    cache_dir: str | None = may_change(None)
    """Folder on each host's local disk for copies of remote shards, shared by the ranks of the host and later runs."""
    cache_mib: int = may_change(0)
    """MiB that the copies may take up; 0 keeps none."""

    @property
    def has_layout(self) -> bool:
        """Whether the rows of row groups and files are given, so that the size of cells need not be known."""
        return bool(self.rows_per_row_group and self.rows_per_shard)

    def __post_init__(self) -> None:
        for name in ("rows_per_row_group", "rows_per_shard", "cache_mib"):
            check_number(self, name, 0, whole=True)
        check_choices(self)
        is_url = self.store is None or (isinstance(self.store, str) and self.store != "")
        check(is_url, "shards.store", "a folder or URL", self.store)
        check_number(self, "store_ttl_days", 0)
        is_path = self.cache_dir is None or (isinstance(self.cache_dir, str) and self.cache_dir.startswith("/"))
        check(is_path, "shards.cache_dir", "an absolute path on the local disk", self.cache_dir)
        check(not self.cache_mib or bool(self.cache_dir), "shards.cache_dir", "a folder for shards.cache_mib", None)
        check(
            not self.cache_dir or self.cache_mib > 0, "shards.cache_mib", "MiB > 0 for shards.cache_dir", self.cache_mib
        )
