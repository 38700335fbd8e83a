"""Found by `make fuzz`: AssertionError: key 'a': 2 of 8 values differ from the table's"""

# ruff: noqa
# fmt: off
from tests.fuzz.tables import *

CASE = Case(columns=(Column(name='a', type='date', cells=(0, 0, 0, 0, 0, None, None, 0), depth=0, encode={}, fill=0, raw_fill=0, cast=None, struct=None),), nulls='fill', nonfinite='error', zone='UTC', ansi=False, writer='spark', partition=None, filters=(), partitions=1, group_rows=1, ragged='pad', through_ml=False)


def test_tables_71df4541(spark, tmp_path):
    check(spark, tmp_path / "case", CASE)
