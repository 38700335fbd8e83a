"""Random pairs of sessions and files that have the same key of the store: their rows are the same, too."""

import functools
from dataclasses import dataclass

from hypothesis import strategies as st

from spark_dl.config import Data, Shards
from spark_dl.data.write.key import _HARMLESS, NoKeyError, store_key
from tests.fuzz.errors import note

EXPRESSIONS = (
    "id", "CAST(text AS double)", "CAST(text AS int)", "CAST(text AS date)", "CAST(text AS timestamp)",
    "to_timestamp(day, 'dd/MM/yyyy')", "to_date(day, 'MM/dd/yyyy')", "CAST(at AS string)", "hour(at)",
    "unix_timestamp(day, 'dd/MM/yyyy')", "CAST(CAST(text AS timestamp) AS long)", "date_format(at, 'E')",
    "round(number, 1)", "number / 3", "CAST(number AS decimal(5, 2)) * 1.234", "CAST(number * 1e18 AS int)",
    "number % 0", "array(1, 2, 3)[id]", "element_at(array(1, 2), 3)", "CAST(array(1, NULL) AS string)",
    "CAST(struct(number) AS string)", "concat(text, NULL)", "TEXT", "size(CAST(NULL AS array<int>))", "'a' = 'a '",
    "substr(text, 0, 2)", "CAST(p AS string)", "CAST(p AS double)", "p", "greatest(text, '1')", "nullif(number, 0)",
    "like(text, '1%')", "CAST('1' || CAST(id AS string) AS binary)", "rank() OVER (ORDER BY number)",
    "row_number() OVER (ORDER BY text)", "format_number(number, 2)", "CAST(-1 AS tinyint)", "bround(number)",
    "CAST(text AS boolean)", "months_between(at, TIMESTAMP'2024-02-29 00:00:00')", "split(text, '')[0]",
    "collect_list(id) OVER (PARTITION BY p ORDER BY id)", "sum(number) OVER (ORDER BY id)", "hash(text, number, at)",
)  # fmt: skip
"""Columns whose values depend on a setting, or could."""
FORMATS = ("parquet", "csv", "json", "orc")
FOLDERS = (("1", "2"), ("01", "1"), ("2024-01-01", "2024-01-02"), ("a", "B"), ("1", "1.0"), ("x y", "%41"))
_CHOSEN = {
    "spark.sql.ansi.enabled": ("true", "false"),
    "spark.sql.session.timeZone": ("UTC", "Europe/Berlin", "America/New_York"),
    "spark.sql.legacy.timeParserPolicy": ("LEGACY", "CORRECTED", "EXCEPTION"),
    "spark.sql.parquet.datetimeRebaseModeInRead": ("LEGACY", "CORRECTED"),
    "spark.sql.parquet.outputTimestampType": ("INT96", "TIMESTAMP_MICROS"),
    "spark.sql.storeAssignmentPolicy": ("ANSI", "LEGACY"),
    "spark.sql.timestampType": ("TIMESTAMP_LTZ", "TIMESTAMP_NTZ"),
    "spark.sql.mapKeyDedupPolicy": ("EXCEPTION", "LAST_WIN"),
    "spark.sql.shuffle.partitions": ("1", "5"),
    "spark.sql.columnNameOfCorruptRecord": ("_corrupt_record", "text"),
    "spark.sql.adaptive.coalescePartitions.initialPartitionNum": ("1", "7"),
    "spark.sql.files.maxPartitionBytes": ("1000", "128m"),
    "spark.sql.autoBroadcastJoinThreshold": ("-1", "10m"),
}
"""Settings with other values than true and false."""


@dataclass(frozen=True)
class Case:
    """A table, two sets of settings, and what happens to its files between two readings."""

    form: str
    folders: tuple[str, str] | None
    columns: tuple[str, ...]
    flags: tuple[tuple[int, ...], tuple[int, ...]]
    """Numbers of the flags that a session turns over: of those that the key takes for harmless."""
    chosen: dict
    """Settings of both sessions."""
    change: dict
    """What the second one has in their place."""
    swaps: bool
    """Whether the two partitions change their names."""


@st.composite
def cases(draw):
    def settings(most):
        names = draw(st.lists(st.sampled_from(sorted(_CHOSEN)), max_size=most, unique=True))
        return {name: draw(st.sampled_from(_CHOSEN[name])) for name in names}

    flags = st.lists(st.integers(0, 10_000), max_size=12).map(tuple)
    columns = draw(st.lists(st.sampled_from(EXPRESSIONS), min_size=2, max_size=8, unique=True))
    folders = draw(st.one_of(st.none(), st.sampled_from(FOLDERS)))
    swaps = folders is not None and draw(st.booleans())
    return Case(
        draw(st.sampled_from(FORMATS)), folders, tuple(columns), (draw(flags), draw(flags)),
        settings(2), settings(1), swaps,
    )  # fmt: skip


@functools.cache
def flags_of(spark):
    """The settings that change no key and are true or false, with their usual values."""
    companion = getattr(getattr(spark._jvm.org.apache.spark.sql.internal, "SQLConf$"), "MODULE$")
    entries = companion.getConfigEntries().iterator()
    found = {}
    while entries.hasNext():
        entry = entries.next()
        if entry.defaultValueString() in ("true", "false"):
            found[entry.key()] = entry.defaultValueString()
    return sorted(
        (name, value)
        for name, value in found.items()
        if name.removeprefix("spark.sql.").startswith(_HARMLESS) and spark.conf.isModifiable(name)
    )


def write(spark, folder, case):
    rows = spark.sql(
        "SELECT id, element_at(array('1', ' 2 ', '1e3', 'abc', '', '2024-03-31 02:30:00', '0012', 'true'), "
        "CAST(id % 8 + 1 AS int)) AS text, element_at(array('01/02/2024', '31/12/2023', '2/3/24'), "
        "CAST(id % 3 + 1 AS int)) AS day, timestamp_seconds(1711846800 + id * 1800) AS at, "
        "id * 0.37 - 2 AS number FROM range(16)"
    ).coalesce(1)
    if case.folders is None:
        rows.selectExpr("*", "id AS p").write.format(case.form).save(str(folder))
        return
    for i, name in enumerate(case.folders):
        rows.filter(f"id % 2 = {i}").write.format(case.form).save(str(folder / f"p={name}"))


def read(spark, folder, case, number):
    """The key and the rows of a session; None without a key, or if the session cannot compute them."""
    session = spark.newSession()
    session.conf.set("spark.sql.ansi.enabled", "false")  # most values are then null in place of an error
    flags = flags_of(spark)
    for flag in case.flags[number]:
        name, usual = flags[flag % len(flags)]
        session.conf.set(name, "false" if usual == "true" else "true")
    for name, value in {**case.chosen, **(case.change if number else {})}.items():
        session.conf.set(name, value)
    try:
        reader = session.read.option("header", "false") if case.form == "csv" else session.read
        if case.form == "csv":
            reader = reader.schema("id long, text string, day string, at timestamp, number double, p string")
        df = reader.format(case.form).load(str(folder))
        df = df.selectExpr("id AS id_", *(f"{column} AS c{i}" for i, column in enumerate(case.columns)))
        key = store_key(df, Data(features=("id_",), label=None), Shards())
        return key, sorted(str(row) for row in df.collect())
    except NoKeyError as error:
        note(f"no key: {str(error)[:80]}")
    except Exception as error:  # Spark's, of an expression or a file that these settings refuse
        note(f"keys: {type(error).__name__}")
    return None


def check(spark, folder, case):
    write(spark, folder, case)
    found = [read(spark, folder, case, 0)]
    if case.swaps:
        a, b = (folder / f"p={name}" for name in case.folders)
        aside = folder.parent / f"{folder.name}-aside"
        for path, name in ((a, aside), (b, a), (aside, b)):
            path.rename(name)
    found.append(read(spark, folder, case, 1))
    if None in found:
        return
    (key, rows), (other_key, other_rows) = found
    if case.flags[0] == case.flags[1] and not case.change and not case.swaps:
        assert key == other_key, "the same settings and files have two keys"
    if key == other_key:
        differing = [pair for pair in zip(rows, other_rows, strict=True) if pair[0] != pair[1]]
        assert not differing, f"one key, and other rows: {differing[:3]}"
        note("keys: the same")
    else:
        note(f"keys: {'others for the same rows' if rows == other_rows else 'others for other rows'}")
