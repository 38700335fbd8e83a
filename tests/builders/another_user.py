"""Folders of a test that a process of another user can enter."""

import os
import tempfile
from pathlib import Path

import pytest


def let_others_in(folder):
    """Opens a folder of a test, and those above it. Skips the test where no process of another user can be started."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    below = folder.relative_to(tempfile.gettempdir()).parts
    for depth in range(len(below)):
        os.chmod(Path(tempfile.gettempdir(), *below[: depth + 1]), 0o755)
