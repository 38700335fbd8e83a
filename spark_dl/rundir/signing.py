"""Signatures of checkpoints: an HMAC-SHA256 (RFC 2104) in the manifest, over all of its other values.

The manifest has the SHA-256 of every file, so its signature covers all of the checkpoint. Checksums alone find what
has been damaged; somebody who can write to the folder can compute them again. The signature needs the key. It covers
the id of the run, which is also in the files of its attempts, so that a checkpoint of another run is none of this one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import stat
from collections.abc import Mapping
from typing import Any

_log = logging.getLogger("spark_dl")
FIELD = "hmac_sha256"
_MIN_KEY_BYTES = 32
_warned: set[str] = set()
"""Files of keys that this process has warned of."""


class SignatureError(ValueError):
    """A checkpoint has no signature, or not that of the key. Its files need not be damaged.

    Args:
        found: the manifest, and what was found.
        advice: what to do.
    """

    def __init__(self, path: str, found: str, advice: str):
        super().__init__(f"{path}: {found}; {advice}")
        self.found, self.advice = f"{path}: {found}", advice


def read_key(path: str) -> bytes:
    """Reads the key of `checkpoint.signing_key_file`. Called on the driver, and on rank 0.

    Raises ValueError if the file cannot be read, has less than 32 bytes, or can be changed by another user, who could
    sign what he likes. Logs a warning, once, if every user of the host can read it.
    """
    try:
        with open(path, "rb") as file:
            status, key = os.fstat(file.fileno()), file.read()
    except OSError as error:
        raise ValueError(
            f"checkpoint.signing_key_file: cannot read {path}: {error}; the driver and the host of rank 0 need it"
        ) from error
    if len(key) < _MIN_KEY_BYTES:
        raise ValueError(
            f"checkpoint.signing_key_file: expected at least {_MIN_KEY_BYTES} bytes in {path}, found {len(key)}; make "
            f"one with: head -c {_MIN_KEY_BYTES} /dev/urandom > {path}"
        )
    mode = f"mode {stat.filemode(status.st_mode)}, user id {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_uid not in (os.geteuid(), 0):
        raise ValueError(
            f"checkpoint.signing_key_file: other users can change {path} ({mode}), and sign with a key of theirs; make "
            "a new key in a file of your own, with mode 0600"
        )
    if status.st_mode & stat.S_IROTH and path not in _warned:
        _warned.add(path)
        _log.warning(
            "checkpoint.signing_key_file: every user of this host can read %s (%s), and sign with it; chmod 0600, and "
            "make a new key if somebody may have read it", path, mode,
        )  # fmt: skip
    return key


def signature(manifest: Mapping[str, Any], key: bytes) -> str:
    """Returns the signature of a manifest: of all values but its checksum and its signature."""
    rest = {name: value for name, value in manifest.items() if name not in (FIELD, "sha256")}
    return hmac.new(key, json.dumps(rest, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def check(path: str, manifest: Mapping[str, Any], key_file: str, *, run_id: str | None) -> None:
    """Raises SignatureError unless the manifest at `path` is signed with the key in the file.

    Args:
        run_id: of the run that it must be of; None: of any run.
    """
    signed = manifest.get(FIELD)
    if signed is None:
        raise SignatureError(
            path, f"it has no signature, and checkpoint.signing_key_file is set to {key_file}",
            "a run that was begun without a key is resumed and loaded without checkpoint.signing_key_file; if it had "
            "this key from its start, somebody may have changed the checkpoint",
        )  # fmt: skip
    if not hmac.compare_digest(str(signed), signature(manifest, read_key(key_file))):
        raise SignatureError(
            path, f"its signature is not of the key in {key_file}",
            "set checkpoint.signing_key_file to the key that signed it; if that is this key, somebody has changed the "
            "checkpoint",
        )  # fmt: skip
    if run_id is not None and manifest.get("run") != run_id:
        raise SignatureError(
            path, f"it was signed for the run {manifest.get('run')}, and this is the folder of the run {run_id}",
            "somebody has put the checkpoint of another run here: restore that of this run; to use the other one, name "
            "it where its own run has saved it",
        )  # fmt: skip


def warn_if_ignored(url: str, manifest: Mapping[str, Any], key_file: str | None) -> None:
    """Logs a warning if a training begins with a signed checkpoint without a key to check it. Called on the driver."""
    if key_file is None and FIELD in manifest:
        _log.warning(
            "the checkpoint %s is signed, and its signature is not checked; the new checkpoints are not signed: set "
            "checkpoint.signing_key_file to the key that signed it", url,
        )  # fmt: skip
