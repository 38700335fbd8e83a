"""What unit tests share."""

import pyarrow as pa
import pytest

_POOLS = []  # what was read may outlive the test


@pytest.fixture
def arrow_peak():
    """A function: the most bytes that Arrow had in the test so far."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    _POOLS.append(pool)
    pa.set_memory_pool(pool)
    yield pool.max_memory
    pa.set_memory_pool(before)
