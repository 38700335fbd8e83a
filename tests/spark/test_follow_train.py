"""How many files of the package a reader enters who follows a plain `train`."""

import pytest

from tests.follow_train import files_of_train

MOST = 112
"""Measured with 280 files in the package. Fewer is better; more needs a reason."""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_plain_train_enters_few_files_before_its_first_step():
    driver, rank = files_of_train()
    assert {"spark_dl/driver.py", "spark_dl/prepare.py", "spark_dl/launch/barrier.py"} <= {*driver}
    assert {"spark_dl/worker.py", "spark_dl/loop.py", "spark_dl/parallel/ddp.py"} <= {*rank}
    assert len({*driver, *rank}) <= MOST, sorted({*driver, *rank})
