"""The folder of a dataset: the names of its files, and how they are replaced and deleted."""

from __future__ import annotations

import re
from collections.abc import Collection

from spark_dl import storage
from spark_dl.data.dataset.manifest import MANIFEST
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.petastorm import metadata as petastorm_metadata

_PROBE = "_probe"
"""A file that is written to check for write access."""
STORED = "part-stored.json"
"""The file with the URL of shards in a store, instead of shards."""
SOURCE = "_source.json"
"""The file that says which DataFrame a run has written, by which a resumed run knows it again."""
_OWN_SHARD = re.compile(r"part-[0-9a-f]{8}-(\d{4,}|(joined-)?\d{5,}-\d+-\d{4,})\.parquet")
"""Names of shards by `write_arrays` and `write_shards`. Files of Spark and pyarrow also start with `part-`."""
_OWN_NAMES = (MANIFEST, petastorm_metadata.COMMON_METADATA, _PROBE, STORED, SOURCE)


def prepare_folder(url: str, overwrite: bool) -> list[str]:
    """Creates and checks the folder of a new dataset. Returns the names in it, for `delete_replaced`.

    An existing dataset is deleted only after the new one is committed. So are files of unfinished writes, because
    another process may still be writing.
    Raises ValueError for a dataset without `overwrite`, for other files, and without write access.
    """
    try:
        old = storage.list_names(url)
        if MANIFEST in old:
            if not overwrite:
                raise ValueError(f"{url} already has a dataset; pass overwrite=True to replace it")
        elif external := [n for n in old if not is_dataset_file(n)]:
            raise ValueError(
                f"{url} is not empty and has no dataset of spark_dl, but {external[:5]}; "
                "nothing was changed: use an empty folder"
            )
        storage.make_folder(url)
        storage.write_bytes(storage.join(url, _PROBE), b"")
        storage.delete_file(storage.join(url, _PROBE))
    except OSError as error:
        raise storage.error_class(error)(f"cannot write to {url}: {error}") from error
    return old


def is_own_shard(name: str) -> bool:
    """Whether this is the name of a shard of spark_dl."""
    return _OWN_SHARD.fullmatch(name) is not None


def is_shard_of(name: str, token: str) -> bool:
    """Whether this is the name of a shard of one write."""
    return is_own_shard(name) and name.startswith(f"part-{token}-")


def is_dataset_file(name: str) -> bool:
    """Whether this is the name of a file of a dataset of spark_dl."""
    written, _, half = name.partition(".tmp-")  # temporary names of `storage.write_bytes`
    return is_own_shard(name) or (written in _OWN_NAMES and re.fullmatch("[0-9a-f]*", half) is not None)


def delete_dataset(url: str) -> None:
    """Deletes the files of a dataset by their names, the manifest first, and then the folder if it is empty.

    Raises OSError if the folder is a symbolic link.
    """
    storage.delete_known(url, is_dataset_file, first=MANIFEST)


def delete_replaced(url: str, old: Collection[str], shard_set: ShardSet, token: str) -> None:
    """Deletes the files of the replaced dataset, and files of failed tasks of this write.

    old: names in the folder before this write. Other files may be of another write at the same time.
    """
    keep = {MANIFEST, petastorm_metadata.COMMON_METADATA, *(s.name for s in shard_set.shards)}
    for name in storage.list_names(url):
        if is_dataset_file(name) and name not in keep and (name in old or is_shard_of(name, token)):
            storage.delete_file(storage.join(url, name))


def abandon(url: str, token: str) -> None:
    """Deletes the files of a failed write, named `part-<token>-...`. Called on the driver.

    An existing dataset and the shards of other writes are not changed.
    """
    manifest = storage.join(url, MANIFEST)
    is_dataset = storage.exists(manifest)
    if is_dataset and f'"part-{token}-'.encode() in storage.read_bytes(manifest):
        return  # the error came after the commit: the new dataset is complete
    for name in storage.list_names(url):
        if is_shard_of(name, token) or (name == petastorm_metadata.COMMON_METADATA and not is_dataset):
            storage.delete_file(storage.join(url, name))
