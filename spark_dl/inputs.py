"""The data of a job on the driver. DataFrames and URLs become datasets before ranks start."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from spark_dl import storage
from spark_dl.config import Config, Data, Loader, Shards
from spark_dl.config.data import Nonfinite
from spark_dl.data.columns.policies import check_rules
from spark_dl.data.columns.ragged import check_lengths
from spark_dl.data.columns.schema import Column, check_reference_columns, check_settings, vocabularies_of
from spark_dl.data.columns.source import check_batch_names
from spark_dl.data.dataset.manifest import MANIFEST, SOURCE, STORED, delete_dataset, read_shards
from spark_dl.data.dataset.memory import check_memory, warn_of_memory
from spark_dl.data.dataset.records import ShardSet, ShardTable
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.external.files import filter_rows
from spark_dl.data.load.mixture import batch_shares
from spark_dl.data.plan import rows_held_out
from spark_dl.data.read.sequences import with_runs
from spark_dl.data.write.key import NoKeyError, store_key
from spark_dl.data.write.shards import write_shards

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("spark_dl")
Reuse: TypeAlias = Literal["no", "same", "any"]


def as_source(data: Any) -> Any:
    """Returns a DataFrame, a dataset or a URL unchanged, a path as a string. Raises ValueError for other types."""
    if isinstance(data, os.PathLike):
        return storage.text_of(data)
    if not isinstance(data, (str, ShardSet)) and not hasattr(data, "sparkSession"):
        raise ValueError(
            "expected a DataFrame of Spark, the path or URL of a dataset, or the result of read_shards, found a "
            f"{type(data).__module__}.{type(data).__name__}; spark.createDataFrame converts lists and pandas"
        )
    return data


def check_storage(config: Config, data: Any, validation: Any = None) -> None:
    """Raises ValueError for data that `shards.storage` or `data.filters` do not support."""
    check_unfiltered(config.data, data, validation)
    if config.shards.storage == "shared":
        return
    if isinstance(data, (str, ShardSet)):
        raise ValueError(
            "shards.storage: 'local' is for DataFrames, found a dataset, which is read in place; set it to 'shared'"
        )
    if validation is not None and not isinstance(validation, (str, ShardSet)):
        raise ValueError(
            "shards.storage: 'local' supports one DataFrame, found a second one for validation; set "
            "train.validation_fraction instead, pass a dataset that all executors can access, or set shards.storage to "
            "'shared'"
        )


def check_mixture(config: Config, data: Any) -> None:
    """Raises ValueError unless `loader.proportions` has a share for each of several datasets."""
    proportions = config.loader.proportions
    names = list(data) if isinstance(data, Mapping) else []
    if sorted(names) != sorted(proportions):
        found = f"datasets {names}" if names else "one dataset"
        raise ValueError(
            f"loader.proportions: expected a share for each dataset, found {dict(proportions)} for {found}; several "
            "datasets are passed as a mapping of names to datasets"
        )
    if proportions:
        shares = batch_shares(proportions, config.train.global_batch_size, config.loader.num_streams)
        _log.info("rows of each global batch: %s", shares)


def warn_of_few_rows(rows: int, config: Config) -> None:
    """Logs a warning if the training rows do not fill one global batch. Called on the driver."""
    size = config.train.global_batch_size
    rows -= sum(rows_held_out((rows,), config.train.validation_fraction))
    if rows < size:
        _log.warning(
            "%d training rows are fewer than a global batch of %d over %d ranks: each epoch is one step, with %d "
            "rows of padding; lower train.global_batch_size",
            rows, size, config.launch.num_ranks, size - rows,
        )  # fmt: skip


def check_unfiltered(data: Data, *sources: Any) -> None:
    """Raises ValueError for `data.filters` with a DataFrame, as they are for datasets."""
    several = [list(source.values()) if isinstance(source, Mapping) else [source] for source in sources]
    if data.filters and not all(s is None or isinstance(s, (str, ShardSet)) for found in several for s in found):
        raise ValueError("data.filters: expected a dataset, found a DataFrame; filter the DataFrame: df.filter(...)")


def check_rank_rows(df: DataFrame, data: Data, shards: Shards, loader: Loader) -> None:
    """Raises ValueError for settings that `run_on_dataframe` does not support."""
    check_unfiltered(data, df)
    for key, found, usual in (
        ("loader.proportions", loader.proportions, {}),
        ("shards.store", shards.store, None),
        ("shards.cache_dir", shards.cache_dir, None),
    ):
        if found != usual:
            raise ValueError(
                f"{key}: found {found!r} with run_on_dataframe, which streams the rows of one DataFrame to "
                f"the local disks of ranks; expected {usual!r}, remove it"
            )


def as_written(data: Data, source: str | ShardSet) -> Data:
    """Returns settings for a dataset written by spark_dl, without those that clean rows when it is written.

    An external dataset is cleaned when it is read.
    """
    if source.external if isinstance(source, ShardSet) else not is_ours(source):
        return data
    nonfinite: Nonfinite = "allow" if data.nonfinite == "allow" else "error"
    return dataclasses.replace(data, nulls="error", nonfinite=nonfinite, fill={})


def shards_of(
    data: DataFrame | str | ShardSet,
    url: str,
    config: Config,
    until_done: contextlib.ExitStack,
    reference_columns: Sequence[Column] = (),
    *,
    reuse: Reuse,
    num_datasets: int = 1,
    before_commit: Callable[[], None] | None = None,
) -> ShardSet:
    """Opens a dataset, or writes a DataFrame as one. A resumed run opens the dataset that it wrote before.

    Args:
        reuse: "no" writes the DataFrame; "same" uses the rows that the run has written, and refuses a DataFrame of
            other rows; "any" uses them if the DataFrame is known to have the same, and else writes it.
        reference_columns: columns of the training dataset. The columns must match them, and have their vocabularies.
        until_done: shards of a store are not deleted until this stack is closed.
        num_datasets: number of datasets that share the memory of a loader.
        before_commit: as for `write_shards`.
    """
    if config.shards.storage == "local" and not isinstance(data, (str, ShardSet)):
        return ShardSet("", (), ShardTable.of(()))  # the ranks write it
    if isinstance(data, str) and is_ours(data):
        data = read_shards(data)
    elif isinstance(data, str):
        data = open_parquet(data, config.stored_columns, data=config.data, reference_columns=reference_columns)
    if isinstance(data, ShardSet):
        check_rules(data.url, data.rules, config.data, vocabularies_of(reference_columns))
    else:
        data = _shards_of_rows(
            data, url, config, until_done, reference_columns, reuse=reuse, before_commit=before_commit
        )
    data = filter_rows(data, config)
    columns = data.select(config.data.columns)
    check_batch_names(config.data.columns, [c.name for c in columns if c.is_ragged], config.data.weight)
    check_reference_columns(columns, reference_columns)
    check_settings(columns, config.data.encode)
    _check_weight(columns, config.data.weight)
    num_readers = config.data_size
    check_lengths(columns, config.loader)
    check_memory(data, columns, config, num_readers, num_datasets)
    warn_of_memory(data, columns, config.loader, num_readers, num_datasets)
    return with_runs(data, config.sequences, config.data.columns)


def _check_weight(columns: Sequence[Column], weight: str | None) -> None:
    """Raises ValueError for weights that are stored as other numbers than their values."""
    for column in columns:
        if column.name == weight and column.encoding.kind == "decimal" and column.encoding.scale:
            raise ValueError(
                f"data.weight: the column {weight!r} is stored as integers, its decimals times "
                f"10^{column.encoding.scale}; remove data.encode.{weight}, which then stores their values, and write "
                "the dataset again"
            )


def is_ours(url: str) -> bool:
    """Whether spark_dl wrote the dataset: it has a manifest."""
    try:
        return storage.exists(storage.join(url, MANIFEST))
    except OSError as error:
        raise storage.error_class(error)(f"cannot read the dataset {url}: {error}; check its permissions") from error


def _stored_at(pointer: str, store: str | None) -> str:
    """Returns the URL of a run's shards in the store. Which store it is, the settings say, and not the run folder."""
    url = str(json.loads(storage.read_bytes(pointer))["url"])
    if store is None or storage.dirname(storage.dirname(url)) != storage.absolute(store):
        raise ValueError(
            f"shards.store: found {store!r}, but {pointer} says that the rows of this run are at {url}; set "
            "shards.store to the store of the run, if you trust it, or begin again with overwrite"
        )
    return url


def _shards_of_rows(
    df: DataFrame,
    url: str,
    config: Config,
    until_done: contextlib.ExitStack,
    reference_columns: Sequence[Column],
    *,
    reuse: Reuse,
    before_commit: Callable[[], None] | None,
) -> ShardSet:
    pointer = storage.join(url, STORED)
    is_stored = storage.exists(pointer)
    source: dict[str, Any] | None = None
    if reuse != "no" and (is_stored or storage.exists(storage.join(url, MANIFEST))):
        source = _source_of(df, config)
        if is_stored:
            from spark_dl.data.store.store import reopen

            at = _stored_at(pointer, config.shards.store)
            found_before, lease = reopen(at, run=url, trusted=config.shards.trusted_writers)
            until_done.callback(lease.release)
        else:
            found_before = read_shards(url)
        if _is_used_again(df, source, url, found_before, config, reuse):
            return found_before
    source = source or _source_of(df, config)
    if config.shards.store is None:
        shards = write_shards(
            df, url, config.data, shards=config.shards, columns=config.stored_columns, overwrite=True,
            reference_columns=reference_columns, before_commit=before_commit,
        )  # fmt: skip
    else:
        from spark_dl.data.store.store import store_shards

        shards, store_lease = store_shards(
            df, config.data, url, shards=config.shards, columns=config.stored_columns, run=url,
            reference_columns=reference_columns, before_commit=before_commit,
        )  # fmt: skip
        if store_lease is not None:
            until_done.callback(store_lease.release)
            delete_dataset(url)  # an earlier attempt without the store may have written it
            storage.write_bytes(pointer, json.dumps({"url": shards.url}).encode())
    storage.write_bytes(storage.join(url, SOURCE), json.dumps(source).encode())
    return shards


def _source_of(df: DataFrame, config: Config) -> dict[str, Any]:
    """Returns what a resumed run knows a DataFrame by: its columns, and the key of its rows, if its plan has one."""
    try:
        key = store_key(df, config.data, config.shards, config.stored_columns)
    except NoKeyError:
        key = None
    stored = config.stored_columns
    fields = [f for f in df.schema.fields if any(c == f.name or c.startswith(f"{f.name}.") for c in stored)]
    return {"key": key, "columns": [[field.name, field.dataType.simpleString()] for field in fields]}


def _is_used_again(
    df: DataFrame, source: Mapping[str, Any], url: str, written: ShardSet, config: Config, reuse: Reuse
) -> bool:
    """Whether a run goes on with the rows that it has written, and not with those of the DataFrame.

    Args:
        source: that of the DataFrame now.

    Raises:
        ValueError: If it needs the rows that it has written and the DataFrame has others.
    """
    path = storage.join(url, SOURCE)
    before = json.loads(storage.read_bytes(path)) if storage.exists(path) else {"key": None, "columns": None}
    why = ""
    if None not in (source["key"], before["key"]):
        if source["key"] == before["key"]:
            _log.info(
                "the DataFrame is not read: the run goes on with the %d rows that it has written to %s, which are the "
                "same by its plan and its files", written.rows, url,
            )  # fmt: skip
            return True
        why = "its plan, its files or settings of the session have changed"
    if before["columns"] not in (None, source["columns"]):
        why = "its columns have changed"
    if reuse == "any":
        _log.warning(
            "%s: the rows of the DataFrame are %s the %d that the run was on; it goes on with those of the DataFrame",
            url, "others than" if why else "not known to be", written.rows,
        )  # fmt: skip
        return False
    if not why and not _drops_rows(config.data) and (rows := df.count()) != written.rows:
        why = f"it has {rows} rows"
    if why:
        raise ValueError(
            f"cannot resume: the DataFrame has other rows than the {written.rows} that the run has written to {url} "
            f"({why}), which it needs in the middle of an epoch, with train.validation_fraction, and for the other "
            f"trials of a study; pass {url!r} in the place of the DataFrame to go on with these, or resume from the "
            "end of an epoch without train.validation_fraction, after which other rows are trained on"
        )
    _log.warning(
        "the DataFrame is not read: the run goes on with the %d rows that it has written to %s; that they are the same "
        "is known of their number and columns only", written.rows, url,
    )  # fmt: skip
    return True


def _drops_rows(data: Data) -> bool:
    return "drop" in (data.nulls, data.nonfinite) or any(how.get("bad") == "drop" for how in data.encode.values())
