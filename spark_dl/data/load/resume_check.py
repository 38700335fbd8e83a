"""Checks that a run resumes with the rows it was trained on, by a digest of the dataset in its checkpoints.

The order of an epoch follows from the row groups of the dataset. With other row groups, an epoch that resumes in the
middle would repeat some rows and skip others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
from collections.abc import Mapping
from typing import Any, overload

from spark_dl.config import Config
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.mixture import Mixture
from spark_dl.data.plan import check_held_out

_log = logging.getLogger("spark_dl")
VALIDATION = "validation"
"""In a checkpoint's `rows`: the digest of the validation dataset, or None."""


def dataset_digest(data: ShardSet | Mixture) -> dict[str, Any]:
    """Returns a digest of the rows and their places, for a checkpoint: a hash, and counts for messages. Pure.

    A mixture has one digest per dataset. Files written by spark_dl are identified by checksum, external files by name
    and size. The URL is not part of the digest, so a dataset can be moved. An external file that is replaced by one of
    the same size is not detected.
    """
    if isinstance(data, Mixture):
        return {"datasets": {name: dataset_digest(dataset) for name, dataset in data.datasets.items()}}
    if data.digest is not None:
        return dict(data.digest)
    files = _files(data)
    columns = [c.to_plain() for c in data.columns]
    if data.placement is None:
        passing = data.filtered.group_rows.tolist() if data.filtered else None
        return {"rows": data.rows, "shards": len(files), "sha256": _digest(columns, files, passing)}
    counts, rows = data.placement.part_shards, iter([sum(groups) for groups, _ in files])
    part_rows = [sum(itertools.islice(rows, n)) for n in counts]
    return {"part_rows": part_rows, "sha256": _digest(columns, files, counts)}


def _files(data: ShardSet) -> list[tuple[list[int], Any]]:
    """Returns the row group sizes and the identity of each file: its checksum, or its name and size."""
    table = data.shards
    names, sizes, digests = (table.column(name) for name in ("name", "bytes", "sha256"))
    rows, firsts = table.group_rows.tolist(), itertools.pairwise(table.first_groups.tolist())
    files = zip(firsts, digests, names, sizes, strict=True)
    return [(rows[first:end], digest or [name, size]) for (first, end), digest, name, size in files]


@overload
def for_ranks(data: ShardSet, config: Config) -> ShardSet: ...
@overload
def for_ranks(data: ShardSet | Mixture, config: Config) -> ShardSet | Mixture: ...
def for_ranks(data: ShardSet | Mixture, config: Config) -> ShardSet | Mixture:
    """Returns a dataset as it is sent to the ranks: without the parts that they do not use, and with its digest.

    Called on the driver. Only the cache of `shards.cache_dir` needs the checksums of whole files. Of the counts per row
    group, ranks need those of the columns that are read.
    """
    if isinstance(data, Mixture):
        return Mixture({name: for_ranks(dataset, config) for name, dataset in data.datasets.items()})
    if not data.shards:  # the ranks write the shards
        return data
    table = data.shards.for_columns(config.data.columns, checksums=config.shards.cache_dir is not None)
    return dataclasses.replace(data, shards=table, digest=dataset_digest(data))


def _digest(*content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def check_rows(shards: ShardSet | Mixture, config: Config, saved: Mapping[str, Any] | None) -> None:
    """Checks that a run can train on these rows. Called on the driver, or with shards.storage="local" on the ranks.

    Args:
        saved: manifest of the checkpoint to resume from, if any.

    Raises:
        ValueError: If `train.validation_fraction` leaves no training or no validation rows, and as `check_same_rows`
            does.
    """
    check_held_out(shards.rows, config.train.validation_fraction, config.train.validation_fold)
    if saved is not None:
        check_same_rows(saved.get("rows"), shards, validation_fraction=config.train.validation_fraction)


def check_same_rows(saved: Mapping[str, Any] | None, shards: ShardSet | Mixture, *, validation_fraction: float) -> None:
    """Checks that a run can resume from a checkpoint with the current rows. `saved` is the checkpoint's `rows`.

    Called on the driver, and with shards.storage="local" on the ranks, once they have their rows. At the end of an
    epoch a run without `train.validation_fraction` can resume with any rows. In all other cases raises ValueError if
    the rows or their places differ.
    """
    if saved is None:
        _log.warning("the checkpoint has no digest of its rows, so they cannot be compared with the current rows")
        return
    now = dataset_digest(shards)
    before = {key: value for key, value in saved.items() if key not in ("step_of_epoch", VALIDATION)}
    if before == now:
        return
    if saved.get("step_of_epoch") == 0 and not validation_fraction:
        _log.warning(
            "the rows differ from those of the checkpoint; training resumes with them at the start of an epoch"
        )
        return
    if "part_rows" in now:
        raise ValueError(
            f"cannot resume: the checkpoint was made with {before.get('part_rows')} rows on the ranks, now they "
            f"have {now['part_rows']}, or other values or another order (shards.storage='local'); use the same number "
            "of ranks and a DataFrame with the same rows each time, resume from the end of an epoch (without "
            "train.validation_fraction), or set shards.storage to 'shared', which keeps the rows with the run"
        )
    name, now, before = _first_difference(now, before)
    raise ValueError(
        f"cannot resume: the dataset {name}has changed since the checkpoint was saved in the middle of an epoch, or "
        f"with train.validation_fraction: found {_described(now)}, expected {_described(before)}, with the same "
        "columns, files, row groups and data.filters; rows would be repeated or skipped; restore the dataset, or start "
        "again in another run_dir; a run without train.validation_fraction can resume with other rows at the end of "
        "an epoch"
    )


def _first_difference(now: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Returns the name of the first changed dataset, for a message, and its digests now and before."""
    if "datasets" not in now:
        return "", dict(now), dict(before)
    known = before.get("datasets", {})
    name = next(name for name, dataset in now["datasets"].items() if dataset != known.get(name))
    return f"{name!r} ", now["datasets"][name], known.get(name, {})


def _described(rows: Mapping[str, Any]) -> str:
    return f"{rows.get('rows')} rows in {rows.get('shards')} files ({str(rows.get('sha256'))[:8]})"
