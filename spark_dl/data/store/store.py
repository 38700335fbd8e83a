"""A store of shards by content, so that runs reuse shards that another run has written.

    <store>/<key>/<name>/                     a dataset, committed by its manifest
    <store>/<key>/leases/<name>.<id>.json     a user of the dataset: host, pid, run, expiry

Object stores have no rename and not all have exclusive writes, so the store does not need them. Two writers of a key
both write a dataset, and the one with the older manifest wins: the other writer uses it and removes its own. A reader
writes its lease, and then checks the manifest again. A cleaner deletes the manifest, and then checks for leases again.
Therefore a dataset is not deleted while it is read, whatever the order of these steps.

A store can be shared with other users, who could put other rows under a key. So a dataset is used only if this user
wrote it, or a user that `shards.trusted_writers` names, and if nobody else can write to its folder. Object stores do
not say who wrote a file: there, everybody who can write to the bucket is trusted.
"""

from __future__ import annotations

import json
import logging
import os
import pwd
import re
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_dl import storage
from spark_dl.config import Data, Shards
from spark_dl.config.checks import check
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.manifest import MANIFEST, delete_dataset, read_shards
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.write.key import NoKeyError, store_key
from spark_dl.data.write.shards import write_shards
from spark_dl.storage import local_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("spark_dl")

LEASE_S = 600.0
"""Lifetime of a lease without renewal, in seconds: well above clock differences between hosts."""
_KEY = re.compile(r"[0-9a-f]{64}")
"""The folder of a key."""
HALF_WRITTEN_S = 86400.0
"""Age in seconds after which a dataset without manifest and lease is considered abandoned by a killed writer."""


_SHARE = (
    "a store of several users needs a group-writable folder with setgid (chmod g+rwxs), so that new files have the "
    "same group, and its permissions"
)


class NoLeaseError(ValueError):
    """This user cannot read the store, or cannot write a lease. The message says what to change."""


class Lease:
    """Protects a dataset of the store from deletion until `release`. A thread renews it. Used on the driver.

    Raises NoLeaseError if it cannot be written.
    """

    def __init__(self, folder: str, name: str, run: str):
        self.name = name
        self._url = storage.join(folder, "leases", f"{name}.{uuid.uuid4().hex[:8]}.json")
        self._holder = {"host": socket.gethostname(), "pid": os.getpid(), "run": run}
        self._stop = threading.Event()
        try:
            self._write(LEASE_S)
        except OSError as error:
            raise NoLeaseError(
                f"shards.store: cannot write the lease {self._url}, without which the shards could be deleted while "
                f"they are read: {error}; {_SHARE}"
            ) from error
        self._thread = threading.Thread(target=self._renew, name="spark_dl lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Releases the dataset. The file stays until the store is cleaned, as the time of the last use."""
        self._stop.set()
        self._thread.join()
        try:
            self._write(0.0)
        except OSError as error:  # the lease expires, and this must not hide an error of the run
            _log.warning("the lease %s cannot be released: %s", self._url, error)

    def drop(self) -> None:
        """Releases the dataset and deletes the file."""
        self._stop.set()
        self._thread.join()
        storage.delete_file(self._url)

    def _renew(self) -> None:
        while not self._stop.wait(LEASE_S / 5):
            try:
                self._write(LEASE_S)
            except OSError as error:  # retried; readers also fail if the store is unavailable
                _log.warning("the lease %s cannot be renewed: %s", self._url, error)

    def _write(self, seconds: float) -> None:
        content = {**self._holder, "expires": time.time() + seconds}
        storage.write_bytes(self._url, json.dumps(content).encode())


def store_shards(
    df: DataFrame,
    data: Data,
    url: str | None = None,
    *,
    shards: Shards | None = None,
    columns: Sequence[str] = (),
    key: str | None = None,
    run: str = "",
    reference_columns: Sequence[Column] = (),
    before_commit: Callable[[], None] | None = None,
) -> tuple[ShardSet, Lease | None]:
    """Returns the shards of a DataFrame in the store `shards.store`, and writes them if no run has written them before.

    Called on the driver. Without a store, without a key, or without permission to write a lease, the shards are written
    at `url`, and the log says why. The lease protects the shards until it is released.

    Raises as `write_shards` does; ValueError if shards cannot be stored and there is no `url`; RuntimeError if the
    source files change while they are read.

    Args:
        key: a name for the rows, if the plan of the DataFrame gives no key: a plan that is not deterministic, or Spark
            Connect. DataFrames with the same name, schema and settings have the same shards, so the name must change
            whenever the rows change.
        run: owner of the lease, for people.
        reference_columns, before_commit: as for `write_shards`.

    Example:
        >>> shards, lease = spark_dl.store_shards(df, config.data, shards=spark_dl.Shards(store="store"), key="points")
        >>> lease.release()
    """
    layout, columns = shards or Shards(), columns or data.columns
    reason = "shards.store is not set"
    if layout.store:
        try:
            shards_key = store_key(df, data, layout, columns, reference_columns, name=key)

            def write(target: str) -> ShardSet:
                written = write_shards(
                    df, target, data, shards=layout, columns=columns, reference_columns=reference_columns
                )
                if key is None and store_key(df, data, layout, columns, reference_columns) != shards_key:
                    raise RuntimeError(
                        "the source files of the DataFrame changed while its shards were written, which may have rows "
                        "of both versions; run again"
                    )
                return written

            return find_or_write(layout.store, shards_key, write, run=run, trusted=layout.trusted_writers)
        except NoKeyError as error:
            reason = f"the store cannot be used for this DataFrame: {error}"
            _log.info("%s", reason)
        except NoLeaseError as error:
            reason = str(error)
            if url is not None:
                _log.warning("the shards are written to the run: %s", reason)
    if url is None:
        raise ValueError(f"there is no folder to write the shards to, and {reason}; pass url, or set shards.store")
    return write_shards(
        df,
        url,
        data,
        shards=layout,
        columns=columns,
        overwrite=True,
        reference_columns=reference_columns,
        before_commit=before_commit,
    ), None


def find_or_write(
    store: str, key: str, write: Callable[[str], ShardSet], *, run: str, trusted: Sequence[str] = ()
) -> tuple[ShardSet, Lease]:
    """Returns the dataset of a key, from the store or from `write(url)`, and a lease. Called on the driver.

    Args:
        trusted: `shards.trusted_writers`.
    """
    user_ids = _trusted_ids(store, trusted)
    folder = storage.join(storage.absolute(store), key)
    try:
        if opened := _open(folder, run, user_ids):
            return opened
    except PermissionError as error:
        raise NoLeaseError(f"shards.store: cannot read {folder}: {error}; {_SHARE}") from error
    lease = Lease(folder, uuid.uuid4().hex[:12], run)
    url = storage.join(folder, lease.name)
    try:
        if user_ids is not None:
            local_files.make_folder(storage.absolute(url), own=True)
        shards = write(url)
        first = _committed(folder, user_ids)[0][1]
        if first != lease.name and (opened := _open(folder, run, user_ids)):
            _log.info("another run has written the same shards at the same time; using them")
            lease.drop()
            _remove(folder, lease.name)
            return opened
    except BaseException:
        lease.drop()
        _remove(folder, lease.name)
        raise
    return shards, lease


def _trusted_ids(store: str, trusted: Sequence[str]) -> frozenset[int] | None:
    """Returns the ids of the users whose datasets are used; None for everybody who can write to the store."""
    if not storage.is_local(store):
        expected = f"nothing for {store}, as an object store does not say which user wrote a file: all are trusted"
        check(not trusted or [*trusted] == ["*"], "shards.trusted_writers", expected, list(trusted))
        return None
    names = [name for name in trusted if name != "*"]
    ids = frozenset({os.geteuid(), 0, *map(_user_id, names)})
    return None if len(names) < len(trusted) else ids


def _is_usable(url: str, user_ids: frozenset[int] | None) -> bool:
    """Whether the users of `_trusted_ids` have written a dataset, and nobody else can change it. Logs why not."""
    if user_ids is None:
        return True
    for path in (url, storage.join(url, MANIFEST)):
        try:
            status = os.lstat(storage.absolute(path))
        except FileNotFoundError:  # another process has cleaned it
            return False
        if status.st_uid not in user_ids:
            why = f"was written by {_user_name(status.st_uid)}"
        elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            why = f"can be changed by other users (mode {stat.filemode(status.st_mode)})"
        else:
            continue
        _log.warning(
            "the shards %s are not used: %s %s; to use what other users can write, set shards.trusted_writers",
            url, path, why,
        )  # fmt: skip
        return False
    return True


def _user_id(name: str) -> int:
    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except KeyError:
        raise ValueError(
            f"shards.trusted_writers: expected users that the driver's host knows, or user ids, found {name!r}"
        ) from None


def _user_name(user_id: int) -> str:
    try:
        return f"the user {pwd.getpwuid(user_id).pw_name}"
    except KeyError:
        return f"the user with the id {user_id}"


def reopen(url: str, *, run: str, trusted: Sequence[str] = ()) -> tuple[ShardSet, Lease]:
    """Opens a dataset of the store by its URL for a resumed run, and takes a lease. trusted: as for `find_or_write`.

    Raises ValueError if it was deleted, or is of another user.
    """
    if storage.exists(storage.join(url, MANIFEST)) and not _is_usable(url, _trusted_ids(url, trusted)):
        raise ValueError(
            f"the shards that this run was trained on, {url}, were written by another user, or others can change them; "
            "set shards.trusted_writers, or start again with overwrite, or in another run_dir"
        )
    lease = Lease(storage.dirname(url), storage.name(url), run)
    try:
        return read_shards(url), lease
    except (RuntimeError, ValueError) as error:
        lease.drop()
        if isinstance(error, RuntimeError):  # an outage
            raise
        raise ValueError(
            f"the shards that this run was trained on are no longer in the store: {error}; "
            "start again with overwrite, or in another run_dir"
        ) from error


def _open(folder: str, run: str, user_ids: frozenset[int] | None) -> tuple[ShardSet, Lease] | None:
    """Returns the oldest dataset of a key that may be used with a lease, or None."""
    for mtime_s, name in _committed(folder, user_ids):
        lease = Lease(folder, name, run)
        url = storage.join(folder, name)
        if storage.exists(storage.join(url, MANIFEST)):
            _log.info("shards found in the store, written %s ago: %s", _age(time.time() - mtime_s), url)
            try:
                return read_shards(url), lease
            except (RuntimeError, ValueError) as error:
                lease.drop()
                if isinstance(error, RuntimeError):  # an outage
                    raise
                raise ValueError(f"{error}; it is in the store: delete the folder {url}, and run again") from error
        lease.drop()
    return None


def _committed(folder: str, user_ids: frozenset[int] | None) -> list[tuple[float, str]]:
    """Returns (time of the manifest, name) of the datasets of a key that may be used, oldest first."""
    dated = []
    for name in _names(folder):
        manifest = storage.info(storage.join(folder, name, MANIFEST))
        if manifest.size is not None and _is_usable(storage.join(folder, name), user_ids):
            dated.append((manifest.mtime_ns / 1e9, name))
    return sorted(dated)


def _names(folder: str) -> list[str]:
    return [name for name in storage.list_names(folder) if re.fullmatch(r"[0-9a-f]{12}", name)]


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


@dataclass(frozen=True)
class _LeaseFile:
    url: str
    expires: float


def _leases(folder: str, name: str) -> list[_LeaseFile]:
    """Returns the lease files of a dataset by expiry. Files that cannot be parsed expire after a day."""
    leases = []
    inner = storage.join(folder, "leases")
    for file in storage.list_infos(inner):
        if not file.base_name.startswith(f"{name}."):
            continue
        url = storage.join(inner, file.base_name)
        try:
            expires = float(json.loads(storage.read_bytes(url))["expires"])
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError, RecursionError):
            expires = file.mtime_ns / 1e9 + HALF_WRITTEN_S
        leases.append(_LeaseFile(url, expires))
    return sorted(leases, key=lambda lease: lease.expires)


def _remove(folder: str, name: str) -> bool:
    """Deletes a dataset without leases. With leases deletes only its manifest, so that no other run uses it."""
    url = storage.join(folder, name)
    if storage.is_link(url):
        raise OSError(f"{url} is a symbolic link, which is not followed")
    storage.delete_file(storage.join(url, MANIFEST))
    leases = _leases(folder, name)
    if leases and leases[-1].expires > time.time():
        return False
    delete_dataset(url)
    for lease in leases:
        storage.delete_file(lease.url)
    return True


def is_store(url: str) -> bool:
    """Whether a folder has the datasets of a store."""
    return any(_KEY.fullmatch(name) for name in storage.list_names(url))


def expired(store: str, *, ttl_days: float) -> list[tuple[str, int, float]]:
    """Returns the URL, the size in bytes and the time of the last use of each dataset that `clean_store` would delete.

    Called on the driver. Deletes nothing. Folders that this user cannot read are left out, with a warning.
    """
    found, now = [], time.time()
    for key in storage.list_names(store):
        folder = storage.join(store, key)
        if not _KEY.fullmatch(key) or storage.is_link(folder):
            continue
        try:
            for name in _names(folder):
                url = storage.join(folder, name)
                last, is_old = _last_use(folder, name, now, ttl_days * 86400)
                if is_old:
                    found.append((url, sum(file.size or 0 for file in storage.list_infos(url)), last))
        except OSError as error:
            _log.warning("this user cannot read %s: %s", folder, error)
    return found


def clean_store(store: str, *, ttl_days: float) -> dict[str, int]:
    """Deletes datasets without leases that were not used for `ttl_days`, and files of killed writers.

    Called on the driver. Returns the numbers of datasets `deleted`, `kept` and `denied`, and the `bytes` deleted.
    `denied` datasets have expired, but this user has no permission to delete them; they are logged.
    Raises ValueError for a store that does not exist, and for a number of days below 0.

    Example:
        >>> spark_dl.clean_store("store", ttl_days=30)
    """
    if not ttl_days >= 0:
        raise ValueError(f"ttl_days: expected a number of at least 0, found {ttl_days}")
    store, now = storage.absolute(store), time.time()
    if not storage.exists(store):
        raise ValueError(f"shards.store: found nothing at {store}, expected a store")
    result = {"deleted": 0, "kept": 0, "denied": 0, "bytes": 0}
    for key in storage.list_names(store):
        if not _KEY.fullmatch(key):
            continue
        folder = storage.join(store, key)
        if storage.is_link(folder):
            _log.warning("%s is a symbolic link, which is not followed", folder)
            result["denied"] += len(_names(folder))
            continue
        try:
            names = _names(folder)
        except PermissionError as error:
            _log.warning("this user cannot read %s: %s", folder, error)
            result["denied"] += 1
            continue
        for name in names:
            try:
                size = sum(file.size or 0 for file in storage.list_infos(storage.join(folder, name)))
                if _is_expired(folder, name, now, ttl_days * 86400) and _remove(folder, name):
                    result["deleted"] += 1
                    result["bytes"] += size
                else:
                    result["kept"] += 1
            except OSError as error:
                _log.warning("this user cannot delete %s: %s", storage.join(folder, name), error)
                result["denied"] += 1
        try:
            _delete_stray_leases(folder, now)
        except OSError as error:
            _log.warning("this user cannot delete old leases in %s: %s", folder, error)
    return result


def _delete_stray_leases(folder: str, now: float) -> None:
    """Deletes leases of deleted datasets, for example released during the deletion."""
    names, inner = _names(folder), storage.join(folder, "leases")
    for file in storage.list_infos(inner):
        if file.base_name.split(".")[0] not in names and now - (file.mtime_ns or 0) / 1e9 > HALF_WRITTEN_S:
            storage.delete_file(storage.join(inner, file.base_name))


def _is_expired(folder: str, name: str, now: float, ttl_s: float) -> bool:
    leases = _leases(folder, name)
    if not (leases and leases[-1].expires > now):
        for lease in leases[:-1]:  # the last one has the time of the last use
            storage.delete_file(lease.url)
    return _last_use(folder, name, now, ttl_s)[1]


def _last_use(folder: str, name: str, now: float, ttl_s: float) -> tuple[float, bool]:
    """Returns the time of the last use of a dataset, and whether it has expired: it has not been used for `ttl_s`."""
    leases = _leases(folder, name)
    if leases and leases[-1].expires > now:
        return now, False
    files = storage.list_infos(storage.join(folder, name))
    is_committed = any(file.base_name == MANIFEST for file in files)
    last = max([0.0, *(lease.expires for lease in leases), *(file.mtime_ns / 1e9 for file in files if file.mtime_ns)])
    return last, bool(now - last > (ttl_s if is_committed else HALF_WRITTEN_S))
