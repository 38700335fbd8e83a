"""Spark's Python daemon, with torch imported before it forks.

Spark forks every Python worker from one daemon per executor. With `spark.python.daemon.module` set to this module, new
ranks do not need seconds to import torch, and the ranks of a host share its memory pages. The jobs set it. In other
sessions, set it before the session starts.

NOTE: importing torch starts no threads and does not initialize CUDA, so forking is safe. Run nothing else here.
"""

import gc
import importlib
import os

# A package that asks whether there is a GPU while it is imported must not start CUDA: forks cannot use it then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import pyarrow  # noqa: F401
import torch._dynamo  # the first optimizer of a process imports it, which takes a second
import torch.distributed
import torch.optim  # noqa: F401
from pyspark.daemon import manager

# What the tasks of ranks and of predictions run. By name, as nothing here depends on it.
for _name in ("spark_dl.worker", "spark_dl.open_dataset", "spark_dl.scoring.tables"):
    importlib.import_module(_name)

# Spark's workers collect garbage after every task. For the objects of torch, that takes 0.1 s of CPU time and writes to
# the pages that forks share. Frozen objects are skipped.
gc.freeze()

if __name__ == "__main__":
    manager()
