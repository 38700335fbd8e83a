"""Random sequences: the samples of `sequences` are those that Spark's window functions find."""

from collections import Counter
from dataclasses import dataclass
from decimal import Decimal

from hypothesis import strategies as st

import spark_dl
from tests.builders.settings import make_config
from tests.fuzz.errors import clear_text, note, without_digits
from tests.fuzz.recorded import recorded, recording

ORDERS = {"int": 1, "bigint": 1, "double": 0.5, "decimal(10,1)": Decimal("0.1"), "timestamp": 1_000_000, "date": 1}
"""Types of the column `order`, with the value of one tick."""


@dataclass(frozen=True)
class Case:
    """Rows in their order, and the settings of their windows."""

    ticks: tuple[int, ...]
    """Of the column `order`, by row."""
    groups: tuple[int, ...]
    kind: str = "int"
    length: int = 2
    stride: int = 1
    by_order: bool = True
    by_group: bool = True
    max_gap: int | None = None
    """In ticks."""
    group_rows: int = 4
    ranks: int = 1
    in_place: bool = False


@st.composite
def cases(draw):
    """Up to 40 rows in a few groups; the order grows within a group, but for some cases."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    steps = draw(
        st.lists(st.integers(-1 if draw(st.integers(0, 9)) == 9 else 0, 4), min_size=sum(sizes), max_size=sum(sizes))
    )
    ticks, groups = [], []
    for group, size in enumerate(sizes):
        at = draw(st.integers(0, 50))
        for _ in range(size):
            at = max(0, at + steps[len(ticks)])
            ticks.append(at)
            groups.append(group % 3)
    by_order = draw(st.booleans())
    max_gap = draw(st.one_of(st.none(), st.integers(0, 4))) if by_order else None
    return Case(
        tuple(ticks), tuple(groups), draw(st.sampled_from(sorted(ORDERS))), draw(st.integers(1, 5)),
        draw(st.integers(1, 4)), by_order, draw(st.booleans()), max_gap, draw(st.integers(1, 9)),
        draw(st.integers(1, 2)), draw(st.booleans()),
    )  # fmt: skip


def table(spark, case):
    rows = [(i, tick, group) for i, (tick, group) in enumerate(zip(case.ticks, case.groups, strict=True))]
    df = spark.createDataFrame(rows, "id bigint, tick bigint, device int").coalesce(1)
    made = {
        "timestamp": "timestamp_micros(tick * 1000000)", "date": "date_from_unix_date(CAST(tick AS INT))",
    }.get(case.kind, f"CAST(tick * {ORDERS[case.kind]} AS {case.kind})")  # fmt: skip
    return df.selectExpr("id", "device", f"{made} AS at")


def samples(df, case):
    """The ids of each sample, as Spark finds them."""
    ends = ["false"]
    if case.by_group:
        ends.append("device <> lag(device) OVER (ORDER BY id)")
    if case.max_gap is not None:
        number = {"timestamp": "unix_micros(at)", "date": "unix_date(at)"}.get(case.kind, "at")
        ends.append(f"{number} - lag({number}) OVER (ORDER BY id) > {case.max_gap * ORDERS[case.kind]}")
    df = df.selectExpr("*", f"CASE WHEN coalesce({' OR '.join(ends)}, false) THEN 1 ELSE 0 END AS is_new")
    df = df.selectExpr("*", "sum(is_new) OVER (ORDER BY id) AS run")
    df = df.selectExpr(
        "*", "row_number() OVER (PARTITION BY run ORDER BY id) - 1 AS n", "count(*) OVER (PARTITION BY run) AS rows"
    )
    starts = df.filter(f"n % {case.stride} = 0 AND n + {case.length} <= rows").select("id").collect()
    return Counter(tuple(range(row["id"], row["id"] + case.length)) for row in starts)


def check(spark, folder, case):
    folder.mkdir()
    df = table(spark, case)
    expected = samples(df, case)
    settings = {"order": "at" if case.by_order else None, "group": "device" if case.by_group else None}
    if case.max_gap is not None:
        settings["max_gap"] = float(case.max_gap * ORDERS[case.kind])
    config = make_config(
        features=("id",), label=None, rows_per_row_group=case.group_rows, num_ranks=case.ranks, num_streams=case.ranks,
        global_batch_size=2 * case.ranks, epochs=1, max_restarts=0, check_batch_loss=False, sequence_length=case.length,
        sequence_stride=case.stride, **{f"sequence_{name}": value for name, value in settings.items()},
    )  # fmt: skip
    source = df
    if case.in_place:
        source = str(folder / "files")
        df.write.parquet(source)
    try:
        spark_dl.train(source, recording(folder / "seen"), config, run_dir=str(folder / "run"))
    except Exception as error:
        text = clear_text(error)
        if text is None:
            raise
        note(f"windows: {without_digits(text)}")
        assert expected == Counter() or "order" in text or "at" in text, f"refused: {text}"
        return
    found = recorded(folder / "seen").get(0, Counter())
    assert found == expected, f"twice: {found - expected}, never: {expected - found}"
