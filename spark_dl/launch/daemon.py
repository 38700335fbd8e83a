"""Spark's Python daemon, with torch imported before it forks.

Spark starts every Python worker as a fork of one daemon per executor. With `spark.python.daemon.module` set to this
module a new rank has torch at once, instead of importing it for seconds, and the ranks of a host share its pages.
The jobs set it; in a session of your own, set it before the session starts.

NOTE: importing torch starts no threads and does not touch a GPU, so a fork of it is sound; nothing else may run here.
"""

import gc

import pyarrow  # noqa: F401
import torch.distributed
import torch.optim  # noqa: F401
from pyspark.daemon import manager

import spark_dl  # noqa: F401

# Spark's workers collect garbage after every task. Of the objects that torch brings, that takes 0.1 s of a core, and it
# writes to the pages that forks share. What is frozen is passed by.
gc.freeze()

if __name__ == "__main__":
    manager()
