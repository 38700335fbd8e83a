"""The folder of a dataset, its files, and its manifest: columns, shards, and the rows of every row group.

`_manifest.json` is written last. It commits the dataset: a folder without it is not a dataset.

The manifest of 100,000 files with 2.5 million row groups has 41 MiB of JSON, which the driver reads and checks once,
in seconds (`jobs/bench.py scale`). Ranks do not read it. They receive a `ShardTable`, which is 1.4 MiB compressed. A
columnar file would save the driver these seconds, at the cost of a second format, a second file to commit and a read
on every rank.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from spark_dl import storage
from spark_dl._version import __version__
from spark_dl.data.columns import cell_codec, schema
from spark_dl.data.columns.policies import Changes, CleaningRules
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.records import Shard, ShardSet, ShardTable
from spark_dl.data.petastorm import metadata as petastorm_metadata

_log = logging.getLogger("spark_dl")

MANIFEST = "_manifest.json"
"""Name of the manifest. Spark, Petastorm and pyarrow ignore names with a leading underscore."""
FORMAT = "spark_dl.shards"
VERSION = 3
_FIRST_WITH_CRC32 = 3
CANNOT_WRITE = "cannot write to"

_PROBE = "_probe"
"""A file that is written to check for write access."""
STORED = "part-stored.json"
"""The file with the URL of shards in a store, instead of shards."""
SOURCE = "_source.json"
"""The file that says which DataFrame a run has written, by which a resumed run knows it again."""
_OWN_SHARD = re.compile(r"part-[0-9a-f]{8}-(\d{4,}|(joined-)?\d{5,}-\d+-\d{4,})\.parquet")
"""Names of shards by `write_arrays` and `write_shards`. Files of Spark and pyarrow also start with `part-`."""
_OWN_NAMES = (MANIFEST, petastorm_metadata.COMMON_METADATA, _PROBE, STORED, SOURCE)


def read_shards(url: str | os.PathLike[str]) -> ShardSet:
    """Opens a dataset by its manifest. Called on the driver.

    Raises ValueError without a manifest, and for a manifest that is damaged or of a newer version.

    Example:
        >>> spark_dl.read_shards("points").rows
    """
    url = storage.absolute(url)
    path = storage.join(url, MANIFEST)
    try:
        manifest = json.loads(storage.read_bytes(path))
    except FileNotFoundError:
        what = "a folder without a manifest" if storage.exists(url) else "nothing"
        raise ValueError(
            f"no dataset at {url}: found {what}; write it with spark_dl.write_shards(df, url) or spark-dl prepare"
        ) from None
    except OSError as error:
        raise storage.error_class(error)(f"cannot read the dataset {url}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a manifest: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is not a manifest of {FORMAT}")
    if type(version := manifest.get("version")) is not int or not 1 <= version <= VERSION:
        raise ValueError(f"{path} has version {version!r:.200}; this spark_dl reads up to {VERSION}")
    found = manifest.pop("crc32", None)
    if (found is not None or version >= _FIRST_WITH_CRC32) and found != crc32_of(manifest):
        raise ValueError(f"{path} is damaged: found the crc32 {found!r:.40}, expected {crc32_of(manifest)}")
    try:
        columns = tuple(Column.from_plain(c) for c in manifest["columns"])
        shards = tuple(shard_from_plain(s) for s in manifest["shards"])
        _check_once("column", [c.name for c in columns])
        _check_once("shard", [s.name for s in shards])
        if other := [c for c in columns if c.codec not in schema.OWN_CODECS]:
            raise ValueError(f"column {other[0].name!r}: found the invalid codec {other[0].codec!r:.200}")
        rules = CleaningRules.from_plain(manifest["rules"]) if "rules" in manifest else None
        shard_set = ShardSet(url, columns, ShardTable.of(shards), Changes(**manifest.get("changes", {})), rules)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a manifest: {error!r}") from error
    _check_files(shard_set, "write it again, or restore the file")
    return shard_set


def crc32_of(manifest: Mapping[str, Any]) -> int:
    """Returns the checksum of a manifest's values, which does not depend on the layout of the JSON."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _check_once(what: str, names: Sequence[str]) -> None:
    if not names:
        raise ValueError(f"found no {what}")
    if len({*names}) < len(names):
        raise ValueError(f"found the {what} {max(names, key=names.count)!r:.200} twice")


def _check_files(shard_set: ShardSet, change: str) -> None:
    """Raises ValueError unless every shard is in the folder and has the size in the manifest. One listing.

    Names of other forms, and links that lead outside of the folder, are refused. change: advice for a missing shard.
    """
    url, is_local = shard_set.url, storage.is_local(shard_set.url)
    found = {info.base_name: info.size for info in storage.list_infos(url)}
    for name, size in zip(shard_set.shards.column("name"), shard_set.shards.column("bytes"), strict=True):
        if not re.fullmatch(r"part-[0-9a-z-]+\.parquet", str(name)):
            raise ValueError(
                f"{storage.join(url, MANIFEST)} names the shard {name!r:.200}, expected part-<name>.parquet in "
                "its own folder; the manifest was not written by spark_dl; do not trust it"
            )
        path = os.path.join(url, name)
        if is_local and os.path.islink(path) and os.path.dirname(os.path.realpath(path)) != os.path.realpath(url):
            raise ValueError(
                f"{path} is a link to {os.path.realpath(path)}, expected a file in the folder of its dataset; replace "
                "the link with the file"
            )
        if found.get(name) != size:
            what = f"{found[name]} bytes" if name in found else "nothing"
            raise ValueError(
                f"the dataset {url} is incomplete: found {what} at {name}, expected {size} bytes; {change}"
            )


def commit(shard_set: ShardSet) -> ShardSet:
    """Writes Petastorm's metadata, and then the manifest, which commits the dataset."""
    _check_files(shard_set, "use storage that the driver and all executors share")
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "spark_dl": __version__,
        "rows": shard_set.rows,
        "columns": [c.to_plain() for c in shard_set.columns],
        "shards": [{"rows": s.rows, **vars(s)} for s in shard_set.shards],
        "changes": asdict(shard_set.changes),
        **({"rules": asdict(shard_set.rules)} if shard_set.rules else {}),
    }
    manifest["crc32"] = crc32_of(json.loads(json.dumps(manifest)))  # the values after a JSON round trip
    common = storage.join(shard_set.url, petastorm_metadata.COMMON_METADATA)
    replaced = storage.read_bytes(common) if storage.exists(common) else None
    try:
        _write_petastorm_metadata(shard_set)
        storage.write_bytes(storage.join(shard_set.url, MANIFEST), json.dumps(manifest).encode())
    except OSError:
        if replaced is not None:  # the existing dataset was not replaced
            storage.write_bytes(common, replaced)
        raise
    return shard_set


def _write_petastorm_metadata(shard_set: ShardSet) -> None:
    arrow = pa.schema([cell_codec.arrow_field(c) for c in shard_set.columns])
    row_groups = {s.name: len(s.row_groups) for s in shard_set.shards}
    try:
        unischema = petastorm_metadata.unischema_of(shard_set.columns)
        petastorm_metadata.write_common_metadata(
            shard_set.url, arrow, unischema=unischema, row_groups_per_file=row_groups
        )
    except ValueError as error:  # for example, a column name with a space
        _log.info("Petastorm's make_reader cannot open %s, and spark_dl can: %s", shard_set.url, error)
        # Metadata of the replaced dataset would be wrong.
        storage.delete_file(storage.join(shard_set.url, petastorm_metadata.COMMON_METADATA))


def shard_from_plain(plain: Mapping[str, Any]) -> Shard:
    """Restores a shard from `dataclasses.asdict` after a JSON round trip.

    Raises ValueError for invalid values, LookupError for a missing key.
    """
    name, size, digest, groups = plain["name"], plain["bytes"], plain["sha256"], plain["row_groups"]
    footer = plain.get("footer_bytes", 0), plain.get("footer_crc32", 0)
    is_size = type(size) is int and 0 < size < 2**63
    for what, value, is_value in (
        ("name", name, type(name) is str),
        ("bytes", size, is_size),
        ("sha256", digest, type(digest) is str and re.fullmatch("[0-9a-f]{0,64}", digest)),
        ("row_groups", groups, isinstance(groups, list) and groups and all(type(n) is int for n in groups)),
        ("footer_bytes", footer[0], type(footer[0]) is int and is_size and 0 <= footer[0] <= size),
        ("footer_crc32", footer[1], type(footer[1]) is int and 0 <= footer[1] < 2**32),
    ):
        if not is_value:
            raise ValueError(f"the shard {name!r:.200}: found the invalid {what} {value!r:.200}")
    if bad := [n for n in groups if not 0 < n < 2**31]:
        raise ValueError(f"shard {name!r:.200}: found a row group of {bad[0]!r} rows, expected 1 to 2**31 - 1 rows")
    elements, stored = (_counts_from_plain(plain, what) for what in ("elements", "stored"))
    return Shard(name, tuple(groups), size, digest, *footer, elements=elements, stored=stored)


def _counts_from_plain(plain: Mapping[str, Any], what: str) -> dict[str, tuple[int, ...]]:
    """Returns counts by column; none for shards of earlier versions."""
    by_column = plain.get(what, {})
    for name, counts in by_column.items():
        if [type(n) is int and 0 <= n < 2**63 for n in counts] != [True] * len(plain["row_groups"]):
            raise ValueError(
                f"the shard {plain['name']!r:.200}: found the invalid {what} {counts!r:.200} of {name!r:.99}"
            )
    return {name: tuple(counts) for name, counts in by_column.items()}


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

    Args:
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
