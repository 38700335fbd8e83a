"""A dataset's folder: which of its files are ours, by their names, and how they are replaced and deleted."""

from __future__ import annotations

import re
from collections.abc import Collection

from spark_dl import storage
from spark_dl.data.dataset.manifest import MANIFEST
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.petastorm import metadata as petastorm_metadata

_PROBE = "_probe"
"""A file that is written to see whether one can be."""
STORED = "part-stored.json"
"""What stands in place of shards that are in the store."""
_OWN_SHARD = re.compile(r"part-[0-9a-f]{8}-(\d{4,}|(joined-)?\d{5,}-\d+-\d{4,})\.parquet")
"""The shards that `write_arrays` and `write_shards` name. Those of Spark and pyarrow begin with `part-`, too."""
_OWN_NAMES = (MANIFEST, petastorm_metadata.COMMON_METADATA, _PROBE, STORED)


def prepare_folder(url: str, overwrite: bool) -> list[str]:
    """Makes a folder ready for a dataset. Returns the names in it, which `delete_replaced` takes.

    A dataset that is there, and is to be overwritten, stays until there is another one; so does what a killed writer
    has left, as it may be another one's that still writes.
    """
    try:
        old = storage.list_names(url)
        if MANIFEST in old:
            if not overwrite:
                raise ValueError(f"{url} holds a dataset already; pass overwrite=True to replace it")
        elif external := [n for n in old if not is_dataset_file(n)]:
            raise ValueError(
                f"{url} is not empty and holds no dataset of spark_dl, but {external[:5]}, "
                "which stay as they are; name an empty folder"
            )
        storage.make_folder(url)
        storage.write_bytes(storage.join(url, _PROBE), b"")
        storage.delete_file(storage.join(url, _PROBE))
    except OSError as error:
        raise ValueError(f"cannot write to {url}: {error}") from error
    return old


def is_own_shard(name: str) -> bool:
    """Whether the name of a file is one that this package gives to shards."""
    return _OWN_SHARD.fullmatch(name) is not None


def is_shard_of(name: str, token: str) -> bool:
    """Whether the name of a file is that of a shard of one write."""
    return is_own_shard(name) and name.startswith(f"part-{token}-")


def is_dataset_file(name: str) -> bool:
    """Whether the name of a file is one that this package gives to the files of a dataset."""
    written, _, half = name.partition(".tmp-")  # `storage.write_bytes` writes under such a name first
    return is_own_shard(name) or (written in _OWN_NAMES and re.fullmatch("[0-9a-f]*", half) is not None)


def delete_dataset(url: str) -> None:
    """Deletes the files of a dataset by their names, the manifest first, and the folder if it is empty then.

    Raises OSError if the folder is a symbolic link, which is not followed.
    """
    storage.delete_known(url, is_dataset_file, first=MANIFEST)


def delete_replaced(url: str, old: Collection[str], shard_set: ShardSet, token: str) -> None:
    """Deletes the files of the dataset that a new one has replaced, and what failed tasks of the write left.

    `old` are the names that were there before the write. Other files are those of another write at the same time.
    """
    keep = {MANIFEST, petastorm_metadata.COMMON_METADATA, *(s.name for s in shard_set.shards)}
    for name in storage.list_names(url):
        if is_dataset_file(name) and name not in keep and (name in old or is_shard_of(name, token)):
            storage.delete_file(storage.join(url, name))


def abandon(url: str, token: str) -> None:
    """Deletes what a write has left that failed, whose shards are named `part-<token>-...`. On the driver.

    A dataset that it was to replace stays as it was, and so do the shards of another write at the same time.
    """
    manifest = storage.join(url, MANIFEST)
    is_dataset = storage.exists(manifest)
    if is_dataset and f'"part-{token}-'.encode() in storage.read_bytes(manifest):
        return  # it was written before the error came: the new dataset is whole
    for name in storage.list_names(url):
        if is_shard_of(name, token) or (name == petastorm_metadata.COMMON_METADATA and not is_dataset):
            storage.delete_file(storage.join(url, name))
