"""Found by `make fuzz`: AssertionError: key 'tick`s': 2 of 7 values differ from the table's"""

# ruff: noqa
# fmt: off
from tests.fuzz.tables import *

CASE = Case(columns=(Column(name='p.q', type='boolean', cells=(False, False, False, False, False, False, False), depth=0, encode={}, fill=False, raw_fill=False, cast=None, struct=None), Column(name='a', type='date', cells=(1, 1, 0, -72, 1, 1, 1), depth=0, encode={}, fill=None, raw_fill=None, cast=None, struct=None), Column(name='B', type='timestamp', cells=(2590994, -5725000000, 0, 2665, 6926, 141012, 0), depth=0, encode={'as': 'timestamp', 'unit': 's'}, fill=0, raw_fill=0, cast=None, struct=None), Column(name='x y', type='float', cells=(None, 5.966154103259136e+16, 0.20000000298023224, None, -2.8825432488935424e+16, -1.484146350227456e+16, None), depth=0, encode={}, fill=None, raw_fill=None, cast=None, struct=None), Column(name='tick`s', type='int', cells=(None, 438591, -1, -573353391, 1, None, 1367), depth=0, encode={}, fill=0, raw_fill=0, cast='float64', struct=None)), nulls='fill', nonfinite='error', zone='Asia/Kathmandu', ansi=True, writer='pyarrow', partition=None, filters=(), partitions=1, group_rows=3, ragged='offsets', through_ml=False)


def test_tables_41b8db2e(spark, tmp_path):
    check(spark, tmp_path / "case", CASE)
