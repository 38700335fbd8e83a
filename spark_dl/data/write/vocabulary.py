"""Statistics of a DataFrame that are computed before its rows are written: vocabularies and mean cell sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spark_dl.data.columns.encoding import MAX_VOCABULARY, Settings
from spark_dl.data.columns.source import SourceColumn
from spark_dl.spark_job import collect

if TYPE_CHECKING:
    from pyspark.sql import Column as Expression
    from pyspark.sql import DataFrame

NO_ROWS = "the DataFrame has no rows"
_SAMPLE_ROWS = 1000


def with_vocabularies(
    df: DataFrame, columns: Sequence[SourceColumn], encode: Settings, known: Mapping[str, tuple[str, ...]]
) -> tuple[SourceColumn, ...]:
    """The columns with their vocabularies: configured, known from another dataset, or counted in the DataFrame.

    Args:
        df: the columns, in their order, as c0, c1 ... One aggregation counts the strings of all columns without a
            vocabulary, ordered by count, then by code point.

    Raises:
        ValueError: If more than `max_size` strings occur `min_count` times, if none does, and if there are no rows.
    """
    columns = [
        replace(c, encoding=replace(c.encoding, vocabulary=known[c.name]))
        if c.encoding.kind == "vocabulary" and c.encoding.vocabulary is None and c.name in known
        else c
        for c in columns
    ]
    open_ones = {i: c for i, c in enumerate(columns) if counts_words(c, {})}
    if open_ones:
        for i, words in _count_vocabularies(df, open_ones, encode).items():
            columns[i] = replace(columns[i], encoding=replace(columns[i].encoding, vocabulary=words))
    return tuple(columns)


def _text(column: str, word: bytes) -> str:
    try:
        return word.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.encode.{column}: found the bytes {word[:40].hex(' ')}, which are no UTF-8, expected strings; decode "
            "the column in Spark (decode, or to_varchar), or read it as: bytes"
        ) from error


def counts_words(column: SourceColumn, known: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether the vocabulary of a column is counted in the DataFrame. known: vocabularies of another dataset."""
    return column.encoding.kind == "vocabulary" and column.encoding.vocabulary is None and column.name not in known


def _count_vocabularies(
    df: DataFrame, columns: Mapping[int, SourceColumn], encode: Settings
) -> dict[int, tuple[str, ...]]:
    from pyspark.sql import functions as F

    settings = {i: encode.get(c.name, {}) for i, c in columns.items()}
    most = {i: s.get("max_size", MAX_VOCABULARY) for i, s in settings.items()}
    pairs = []
    for i, column in columns.items():
        number = F.lit(i).alias("i")
        pairs.append(F.transform(_leaves(F.col(f"c{i}"), column.depth), _pair_with(number)))
    empty = F.array().cast("array<struct<i:int,word:binary>>")
    pair = F.explode(F.concat(*[F.coalesce(p, empty) for p in pairs]))
    counts = df.select(pair.alias("p")).select("p.*").filter("word IS NOT NULL").groupBy("i", "word").count()
    least = F.lit(1)
    for i, s in settings.items():
        least = F.when(F.col("i") == i, s.get("min_count", 1)).otherwise(least)
    rows = collect(
        counts.filter(F.col("count") >= least).limit(sum(most.values()) + 1), "spark_dl: counting words of vocabularies"
    )
    strings: dict[int, list[tuple[int, str]]] = {i: [] for i in columns}
    for row in rows:
        strings[row["i"]].append((-row["count"], _text(columns[row["i"]].name, bytes(row["word"]))))
    for i, words in strings.items():  # before columns without words: the limit can have cut those off
        key = f"data.encode.{columns[i].name}"
        if len(words) > most[i]:
            raise ValueError(
                f"{key}: found more than {most[i]} strings; raise {key}.max_size or {key}.min_count, or set as: hash"
            )
    for i, words in strings.items():
        key = f"data.encode.{columns[i].name}"
        if not words:
            if df.isEmpty():
                raise ValueError(f"{NO_ROWS}; training needs at least one")
            raise ValueError(
                f"{key}: found no string that occurs {settings[i].get('min_count', 1)} time(s) or more; lower min_count"
            )
    return {i: tuple(word for _, word in sorted(words)) for i, words in strings.items()}


def _pair_with(number: Expression) -> Callable[[Expression], Expression]:
    from pyspark.sql import functions as F

    # As bytes: words of columns with other collations have other types, and equal strings there can differ in bytes.
    return lambda word: F.struct(number, word.cast("binary").alias("word"))


def with_mean_sizes(df: DataFrame, columns: Sequence[SourceColumn]) -> tuple[SourceColumn, ...]:
    """The columns with the mean number of elements per cell, where it varies, estimated from a sample of rows.

    Args:
        df: the columns, in their order, as c0, c1 ...
    """
    from pyspark.sql import functions as F

    varying = {i: c for i, c in enumerate(columns) if c.ragged or c.encoding.kind == "image"}
    if not varying:
        return tuple(columns)
    sizes = [
        F.array_size(_leaves(F.col(f"c{i}"), c.depth)) if c.depth else F.octet_length(F.col(f"c{i}"))
        for i, c in varying.items()
    ]
    sample = df.select(*(size.alias(f"s{i}") for i, size in zip(varying, sizes, strict=True))).limit(_SAMPLE_ROWS)
    means = collect(
        sample.agg(*(F.avg(f"s{i}").alias(f"s{i}") for i in varying)), "spark_dl: sampling the sizes of cells"
    )[0]
    return tuple(replace(c, mean_size=means[f"s{i}"]) if i in varying else c for i, c in enumerate(columns))


def expression(column: SourceColumn) -> Expression:
    """The Spark expression of a column or a struct field."""
    from pyspark.sql import functions as F

    return F.col(".".join("`" + part.replace("`", "``") + "`" for part in column.path))


def _leaves(array: Any, depth: int) -> Any:
    """The Spark expression of all elements of a cell as one array."""
    from pyspark.sql import functions as F

    if depth == 0:
        return F.array(array)
    for _ in range(depth - 1):
        array = F.flatten(array)
    return array
