"""A store of shards by content: what one run has written is found by every other run that would write the same.

    <store>/<key>/<name>/                     a dataset, there once its manifest is, as everywhere
    <store>/<key>/leases/<name>.<id>.json     who uses it: host, pid, run, and until when

There is no rename and no exclusive write on object stores, so nothing here needs them. Two writers of a key write a
dataset each, and the one whose manifest is older wins: the other finds it, uses it, and removes its own. A reader
writes its lease first and looks for the manifest again; who removes a dataset deletes its manifest first and looks for
leases again. So whatever the order, no dataset goes while someone reads it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_dl import storage
from spark_dl.config import Data, Shards
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.folder import delete_dataset
from spark_dl.data.dataset.manifest import MANIFEST, read_shards
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.store.key import NoKeyError, store_key
from spark_dl.data.write.shards import write_shards

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("spark_dl")

LEASE_S = 600.0
"""How long a lease holds without being renewed, in seconds: well above the differences between the clocks of hosts."""
HALF_WRITTEN_S = 86400.0
"""Age from which a dataset without a manifest and without a lease is taken for the rest of a killed writer."""


class NoLeaseError(ValueError):
    """This user may not write a lease; the text says what to change."""


class Lease:
    """Keeps a dataset of the store from being removed, until it is released. A thread renews it; on the driver.

    Raises NoLeaseError where it cannot be written.
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
                f"they are read: {error}; a store that several users share needs a group-writable folder, with setgid "
                "so that what is made in it is of the same group (chmod g+rwxs), and umask 002 for its users"
            ) from error
        self._thread = threading.Thread(target=self._renew, name="spark_dl lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Lets the dataset go. The file stays until the store is cleaned: it tells when the dataset was last used."""
        self._stop.set()
        self._thread.join()
        try:
            self._write(0.0)
        except OSError as error:  # it expires by itself, and must not hide why the run ended
            _log.warning("the lease %s cannot be released: %s", self._url, error)

    def drop(self) -> None:
        """Releases without a trace."""
        self._stop.set()
        self._thread.join()
        storage.delete_file(self._url)

    def _renew(self) -> None:
        while not self._stop.wait(LEASE_S / 5):
            try:
                self._write(LEASE_S)
            except OSError as error:  # tried again in time; a store that stays away is an error of its readers too
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
    """The shards of a DataFrame in the store `shards.store`: those that another run has written, else written now.

    Called on the driver. With `key` the user names the rows, in place of what their plan tells, as where it is not
    deterministic, and over Spark Connect, where it cannot be seen: a DataFrame with the same name, schema and settings
    is found again, so a name must change whenever the rows do.

    Where there is no store, the DataFrame has no key, or this user may not write a lease to the store, they are written
    at `url`; the log says why. The lease keeps them until it is released; `run` says whose it is. `like` is as for
    `write_shards`, and so is `before_commit`, for shards at `url`. Raises as `write_shards` does, ValueError if they
    cannot be stored and there is no `url`, RuntimeError if the source files change meanwhile.
    """
    layout, columns = shards or Shards(), columns or data.columns
    reason = "shards.store is not set"
    if layout.store:
        try:
            found = store_key(df, data, layout, columns, reference_columns, name=key)

            def write(target: str) -> ShardSet:
                written = write_shards(
                    df, target, data, shards=layout, columns=columns, reference_columns=reference_columns
                )
                if key is None and store_key(df, data, layout, columns, reference_columns) != found:
                    raise RuntimeError(
                        "the source files of the DataFrame changed while its shards were written, which may hold rows "
                        "of both versions; run again"
                    )
                return written

            return find_or_write(layout.store, found, write, run=run)
        except NoKeyError as error:
            reason = f"the store cannot be used for this DataFrame: {error}"
            _log.info("%s", reason)
        except NoLeaseError as error:
            reason = str(error)
            if url is not None:
                _log.warning("the shards are written to the run: %s", reason)
    if url is None:
        raise ValueError(f"there is no folder to write the shards to, and {reason}")
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


def find_or_write(store: str, key: str, write: Callable[[str], ShardSet], *, run: str) -> tuple[ShardSet, Lease]:
    """The dataset of a key, found in the store or written by `write(url)`, and a lease on it. Called on the driver."""
    folder = storage.join(storage.absolute(store), key)
    if found := _open(folder, run):
        return found
    own = Lease(folder, uuid.uuid4().hex[:12], run)
    url = storage.join(folder, own.name)
    try:
        shards = write(url)
        first = _committed(folder)[0][1]
        if first != own.name and (found := _open(folder, run)):
            _log.info("another run has written the same shards meanwhile; these are used")
            own.drop()
            _remove(folder, own.name)
            return found
    except BaseException:
        own.drop()
        _remove(folder, own.name)
        raise
    return shards, own


def reopen(url: str, *, run: str) -> tuple[ShardSet, Lease]:
    """A dataset of the store by its URL, as a resumed run needs it, and a lease on it.

    Raises ValueError if it has been cleaned away.
    """
    lease = Lease(storage.dirname(url), storage.name(url), run)
    try:
        return read_shards(url), lease
    except ValueError as error:
        lease.drop()
        raise ValueError(
            f"the shards that this run was trained on are no longer in the store (shards.store_ttl_days): {error}; "
            "start anew with overwrite, or in another run_dir"
        ) from error


def _open(folder: str, run: str) -> tuple[ShardSet, Lease] | None:
    """The oldest dataset of a key, with a lease, if there is one."""
    for mtime_s, name in _committed(folder):
        lease = Lease(folder, name, run)
        url = storage.join(folder, name)
        if storage.exists(storage.join(url, MANIFEST)):
            _log.info("shards found in the store, written %s ago: %s", _age(time.time() - mtime_s), url)
            try:
                return read_shards(url), lease
            except ValueError as error:
                lease.drop()
                raise ValueError(f"{error}; it is in the store: delete the folder {url}, and run again") from error
        lease.drop()
    return None


def _committed(folder: str) -> list[tuple[float, str]]:
    """(Time of the manifest, name) of the datasets of a key, oldest first."""
    found = []
    for name in _names(folder):
        manifest = storage.info(storage.join(folder, name, MANIFEST))
        if manifest.size is not None:
            found.append((manifest.mtime_ns / 1e9, name))
    return sorted(found)


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
    """The lease files of a dataset, the last to expire last. One that cannot be read holds for a day."""
    found = []
    inner = storage.join(folder, "leases")
    for file in storage.list_infos(inner):
        if not file.base_name.startswith(f"{name}."):
            continue
        url = storage.join(inner, file.base_name)
        try:
            expires = float(json.loads(storage.read_bytes(url))["expires"])
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError):
            expires = file.mtime_ns / 1e9 + HALF_WRITTEN_S
        found.append(_LeaseFile(url, expires))
    return sorted(found, key=lambda lease: lease.expires)


def _remove(folder: str, name: str) -> bool:
    """Removes a dataset, unless someone holds it; then only its manifest, so that nobody else finds it."""
    url = storage.join(folder, name)
    if storage.is_link(url):
        raise OSError(f"{url} is a symbolic link, through which nothing is deleted")
    storage.delete_file(storage.join(url, MANIFEST))
    leases = _leases(folder, name)
    if leases and leases[-1].expires > time.time():
        return False
    delete_dataset(url)
    for lease in leases:
        storage.delete_file(lease.url)
    return True


def clean_store(store: str, *, ttl_days: float) -> dict[str, int]:
    """Deletes what nobody holds and has not used for `ttl_days`, and what killed writers left. Called on the driver.

    Returns the number of datasets `deleted`, `kept`, and `denied`, which expired but this user may not delete (the log
    names them), and the `bytes` that were deleted. Raises ValueError for a store that does not exist.
    """
    store, now = storage.absolute(store), time.time()
    if not storage.exists(store):
        raise ValueError(f"shards.store: found nothing to clean at {store}, expected a store")
    result = {"deleted": 0, "kept": 0, "denied": 0, "bytes": 0}
    for key in storage.list_names(store):
        if not re.fullmatch(r"[0-9a-f]{64}", key):
            continue
        folder = storage.join(store, key)
        if storage.is_link(folder):
            _log.warning("%s is a symbolic link, through which nothing is deleted", folder)
            result["denied"] += len(_names(folder))
            continue
        for name in _names(folder):
            try:
                size = sum(file.size or 0 for file in storage.list_infos(storage.join(folder, name)))
                if _is_expired(folder, name, now, ttl_days * 86400) and _remove(folder, name):
                    result["deleted"] += 1
                    result["bytes"] += size
                else:
                    result["kept"] += 1
            except OSError as error:
                _log.warning("%s may not be deleted by this user: %s", storage.join(folder, name), error)
                result["denied"] += 1
        try:
            _delete_stray_leases(folder, now)
        except OSError as error:
            _log.warning("old leases in %s may not be deleted by this user: %s", folder, error)
    return result


def _delete_stray_leases(folder: str, now: float) -> None:
    """Those of datasets that are gone, such as a lease that was released while its dataset was cleaned."""
    names, inner = _names(folder), storage.join(folder, "leases")
    for file in storage.list_infos(inner):
        if file.base_name.split(".")[0] not in names and now - (file.mtime_ns or 0) / 1e9 > HALF_WRITTEN_S:
            storage.delete_file(storage.join(inner, file.base_name))


def _is_expired(folder: str, name: str, now: float, ttl_s: float) -> bool:
    leases = _leases(folder, name)
    if leases and leases[-1].expires > now:
        return False
    for lease in leases[:-1]:  # the last one tells when the dataset was last used
        storage.delete_file(lease.url)
    files = storage.list_infos(storage.join(folder, name))
    is_whole = any(file.base_name == MANIFEST for file in files)
    last = max([0.0, *(lease.expires for lease in leases), *(file.mtime_ns / 1e9 for file in files if file.mtime_ns)])
    return bool(now - last > (ttl_s if is_whole else HALF_WRITTEN_S))
