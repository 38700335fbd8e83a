"""The section `shards`: the layout of a DataFrame's rows in files, and the location of these files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from spark_dl.config.checks import check, check_choices, check_number
from spark_dl.config.fields import named_settings, of_caller

Storage = Literal["shared", "local"]


@named_settings
@dataclass(frozen=True, kw_only=True)
class Shards:
    """The layout of a DataFrame's rows in files, and the location of these files.

    Example:
        >>> spark_dl.Config(shards=spark_dl.Shards(store="/data/store"))
    """

    rows_per_row_group: int = 0
    """Number of rows in each row group; 0 selects a number that gives about 4 MiB."""
    rows_per_shard: int = 0
    """Number of rows in each file, rounded up to whole row groups; 0 selects a number that gives about 64 MiB."""
    storage: Storage = "shared"
    """Where shards are written. `shared`: to the run folder, which all executors can access. `local`: to the local
    disks of the ranks' hosts, where the rows are distributed round-robin and deleted at the end of the run."""
    store: str | None = of_caller(None)
    """Folder or URL of a store for shards. Other runs and users can reuse the shards in it. A key that is computed
    from the DataFrame and the settings identifies the shards."""
    trusted_writers: tuple[str, ...] = of_caller(())
    """Other users whose shards in a store on local disks or NFS are used, by name or user id; `["*"]` for everybody who
    can write there. By default, only what this user has written is used, and what only this user can change."""
    cache_dir: str | None = of_caller(None)
    """Folder on each host's local disk for copies of remote shards, shared by the ranks of the host and later runs."""
    cache_mib: int = of_caller(0)
    """Maximum size of the copies in MiB; 0 for no copies."""

    @property
    def has_layout(self) -> bool:
        """Whether the rows per row group and per file are set, so that the size of cells is not needed."""
        return bool(self.rows_per_row_group and self.rows_per_shard)

    def __post_init__(self) -> None:
        for name in ("rows_per_row_group", "rows_per_shard", "cache_mib"):
            check_number(self, name, 0, whole=True)
        check_choices(self)
        is_url = self.store is None or (isinstance(self.store, str) and self.store != "")
        check(is_url, "shards.store", "a folder or URL", self.store)
        is_list = isinstance(self.trusted_writers, Sequence) and not isinstance(self.trusted_writers, str)
        is_names = is_list and all(isinstance(name, str) and name for name in self.trusted_writers)
        check(is_names, "shards.trusted_writers", "a list of names of users", self.trusted_writers)
        object.__setattr__(self, "trusted_writers", tuple(self.trusted_writers))
        is_path = self.cache_dir is None or (isinstance(self.cache_dir, str) and self.cache_dir.startswith("/"))
        check(is_path, "shards.cache_dir", "an absolute path on the local disk", self.cache_dir)
        check(not self.cache_mib or bool(self.cache_dir), "shards.cache_dir", "a folder for shards.cache_mib", None)
        check(
            not self.cache_dir or self.cache_mib > 0, "shards.cache_mib", "MiB > 0 for shards.cache_dir", self.cache_mib
        )
