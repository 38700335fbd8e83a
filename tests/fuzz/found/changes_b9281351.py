"""Found by `make fuzz`: RankFailed: KeyError: 'max_exp_avg_sq'"""

# ruff: noqa
# fmt: off
from tests.fuzz.changes import *

NAME = 'changes'
CASE = (Part(steps=1, layers=('first', 'second', 'head'), optimizer='AdamW', rates={'first': 0.01, 'second': 0.01, 'head': 0.01}, decay=0.0, groups=(), frozen=(), place='alone'), Part(steps=1, layers=('first', 'second', 'head'), optimizer='amsgrad', rates={'first': 0.01, 'second': 0.01, 'head': 0.01}, decay=0.0, groups=(), frozen=(), place='alone'))
