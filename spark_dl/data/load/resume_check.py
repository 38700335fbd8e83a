"""Which rows a run was trained on: a digest in its checkpoints, and whether the run can go on with the rows of now.

The order of an epoch follows from the row groups of the dataset. Where these are others, an epoch that goes on in its
middle would repeat some rows and leave others out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, overload

from spark_dl.config import Config
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.mixture import Mixture
from spark_dl.data.plan import check_held_out

_log = logging.getLogger("spark_dl")


def dataset_digest(data: ShardSet | Mixture) -> dict[str, Any]:
    """Which rows lie where, for a checkpoint: counts, for messages, and a hash of all; of a mixture by dataset. Pure.

    The files of our own datasets count by their checksums, those of others by their names and sizes. Where the dataset
    lies does not matter, so that it can be moved; a file of others that is replaced by one as long is not seen.
    """
    if isinstance(data, Mixture):
        return {"datasets": {name: dataset_digest(dataset) for name, dataset in data.datasets.items()}}
    if data.digest is not None:
        return dict(data.digest)
    files = _files(data)
    columns = [asdict(c) for c in data.columns]
    if data.placement is None:
        passing = data.filtered.group_rows.tolist() if data.filtered else None
        return {"rows": data.rows, "shards": len(files), "sha256": _digest(columns, files, passing)}
    counts, rows = data.placement.part_shards, iter([sum(groups) for groups, _ in files])
    part_rows = [sum(itertools.islice(rows, n)) for n in counts]
    return {"part_rows": part_rows, "sha256": _digest(columns, files, counts)}


def _files(data: ShardSet) -> list[tuple[list[int], Any]]:
    """The rows of the row groups of each file, and what tells it from others."""
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
    """A dataset as it travels to the ranks: without what they do not read, and with what `dataset_digest` makes of it.

    Called on the driver. Checksums of whole files are for the cache of `shards.cache_dir`; the counts of row groups for
    the columns that are read.
    """
    if isinstance(data, Mixture):
        return Mixture({name: for_ranks(dataset, config) for name, dataset in data.datasets.items()})
    if not data.shards:  # the ranks make it
        return data
    table = data.shards.without(checksums=config.shards.cache_dir is not None, counts_but_of=config.data.columns)
    return dataclasses.replace(data, shards=table, digest=dataset_digest(data))


def _digest(*content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def check_rows(shards: ShardSet | Mixture, config: Config, saved: Mapping[str, Any] | None) -> None:
    """Whether a run can train on these rows. Called on the driver, or with shards.storage="local" on the ranks.

    saved: manifest of the checkpoint to go on from, if any. Raises ValueError if `train.validation_fraction` leaves no
    rows for one side, and as `check_same_rows` does.
    """
    check_held_out(shards.rows, config.train.validation_fraction)
    if saved is not None:
        check_same_rows(saved.get("rows"), shards, validation_fraction=config.train.validation_fraction)


def check_same_rows(saved: Mapping[str, Any] | None, shards: ShardSet | Mixture, *, validation_fraction: float) -> None:
    """Whether a run can go on from a checkpoint with the rows of now. `saved` is its `rows`.

    Called on the driver, and with shards.storage="local" on the ranks, once they have their rows. Raises ValueError for
    other rows, or the same in other places, in the middle of an epoch or where a part of them is held out for
    validation. At the end of an epoch training can go on with any rows.
    """
    if saved is None:
        _log.warning("the checkpoint does not say which rows it was made with, so that they cannot be compared")
        return
    now = dataset_digest(shards)
    before = {key: value for key, value in saved.items() if key != "step_of_epoch"}
    if before == now:
        return
    if saved.get("step_of_epoch") == 0 and not validation_fraction:
        _log.warning("the rows are not those of the checkpoint; training goes on with them, at the start of an epoch")
        return
    if "part_rows" in now:
        raise ValueError(
            f"cannot resume: the checkpoint was made with {before.get('part_rows')} rows on the ranks, now they "
            f"have {now['part_rows']}, or other values or another order (shards.storage='local'); use the same number "
            "of ranks and a DataFrame that gives the same rows each time, resume from the end of an epoch (without "
            "train.validation_fraction), or set shards.storage to 'shared', which keeps the rows with the run"
        )
    name, now, before = _first_difference(now, before)
    raise ValueError(
        f"cannot resume: the dataset {name}has changed since the checkpoint was saved in the middle of an epoch, or "
        f"with train.validation_fraction: found {_described(now)}, expected {_described(before)}, with the same "
        "columns, files, row groups and data.filters; other rows would be repeated or skipped; restore the dataset, "
        "or start again in another run_dir; at the end of an epoch and without train.validation_fraction a run can "
        "resume with other rows"
    )


def _first_difference(now: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The name of a dataset that has changed, for a message, and what is known of it now and before."""
    if "datasets" not in now:
        return "", dict(now), dict(before)
    known = before.get("datasets", {})
    name = next(name for name, dataset in now["datasets"].items() if dataset != known.get(name))
    return f"{name!r} ", now["datasets"][name], known.get(name, {})


def _described(rows: Mapping[str, Any]) -> str:
    return f"{rows.get('rows')} rows in {rows.get('shards')} files ({str(rows.get('sha256'))[:8]})"
