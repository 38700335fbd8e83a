"""The public names for writing a strategy. The built-in strategies are made of the same ones.

See `docs/strategies.md`, "A strategy of your own".
"""

from spark_dl.config.conflicts import Conflict
from spark_dl.config.fields import may_change
from spark_dl.config.parallel import Parallel
from spark_dl.config.strategies import Strategy
from spark_dl.parallel.single import train_alone
from spark_dl.parallel.trainable import Trainable, build_optimization

__all__ = ["Conflict", "Parallel", "Strategy", "Trainable", "build_optimization", "may_change", "train_alone"]
