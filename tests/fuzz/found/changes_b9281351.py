"""Found by `make fuzz`: RankFailed: rank 0: Traceback (most recent call last): File '/tmp/next/tests/ranks/launcher.py', line 112, in _serve connection.send((fn(*args), None)) ^^^^^^^^^ File '/tmp/next/tests/ranks/runs.py',"""

# ruff: noqa
# fmt: off
from tests.fuzz.changes import *

NAME = 'changes'
CASE = (Part(steps=1, layers=('first', 'second', 'head'), optimizer='AdamW', rates={'first': 0.01, 'second': 0.01, 'head': 0.01}, decay=0.0, groups=(), frozen=(), place='alone'), Part(steps=1, layers=('first', 'second', 'head'), optimizer='amsgrad', rates={'first': 0.01, 'second': 0.01, 'head': 0.01}, decay=0.0, groups=(), frozen=(), place='alone'))
