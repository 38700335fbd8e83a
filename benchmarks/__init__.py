"""Measurements of spark_dl beside its peers, run by `jobs/bench.py`. Not part of the package that is installed."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""Folder in which processes are started, so that `python -m benchmarks...` finds the module."""
