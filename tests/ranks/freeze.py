"""Imported last by the server of which the ranks are forks, as Spark's daemon does: see `spark_dl/launch/daemon.py`."""

import gc

gc.freeze()
