"""Settings of a run: frozen dataclasses that check their values on the driver, before any Spark job."""

from spark_dl.config.checkpoint import Checkpoint
from spark_dl.config.config import Config
from spark_dl.config.data import Data
from spark_dl.config.faults import Faults
from spark_dl.config.launch import Launch
from spark_dl.config.loader import Loader
from spark_dl.config.parallel import Parallel
from spark_dl.config.sequences import Sequences
from spark_dl.config.shards import Shards
from spark_dl.config.track import Track
from spark_dl.config.train import Train

__all__ = [
    "Checkpoint",
    "Config",
    "Data",
    "Faults",
    "Launch",
    "Loader",
    "Parallel",
    "Sequences",
    "Shards",
    "Track",
    "Train",
]
