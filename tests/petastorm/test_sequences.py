"""Sequences are those of Petastorm's NGram, and the ones that pass from row group to row group besides."""

import numpy as np
import pytest

from spark_dl.data.load.loader import ShardLoader
from tests.builders.batches import steps
from tests.builders.datasets import write_dataset
from tests.builders.settings import make_config

ROWS, GROUP_ROWS = 200, 40
CASES = [(length, max_gap, stride) for length in (1, 2, 5) for max_gap in (1, 3, 100) for stride in (1, length)]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """The same rows in five row groups and in one, which NGram reads as a whole."""
    rng = np.random.default_rng(0)
    columns = {"id": np.arange(ROWS), "time": np.cumsum(rng.choice([1, 2, 5], ROWS, p=[0.7, 0.2, 0.1]))}
    root = tmp_path_factory.mktemp("ngrams")
    return {rows: write_dataset(str(root / str(rows)), columns, rows, rows * 2) for rows in (GROUP_ROWS, ROWS)}


@pytest.fixture(scope="module")
def ngrams(datasets, run_petastorm):
    asked = [(rows, *case) for rows in datasets for case in CASES]
    request = [{"url": datasets[rows].url, "length": length, "max_gap": gap, "overlap": stride == 1 and length > 1}
               for rows, length, gap, stride in asked]  # fmt: skip
    return dict(zip(asked, run_petastorm("read_ngrams", request), strict=True))


@pytest.mark.parametrize(("length", "max_gap", "stride"), CASES)
def test_sequences_are_those_of_ngram_across_row_groups(datasets, ngrams, length, max_gap, stride):
    config = make_config(
        features=("id",), label=None, num_streams=4, sequence_length=length, sequence_stride=stride,
        sequence_order="time", sequence_max_gap=max_gap, global_batch_size=16,
    )  # fmt: skip
    loader = ShardLoader(datasets[GROUP_ROWS], config, rank=0, world_size=1)
    ours = sorted(row for _, _, b in steps(loader) for row in b["id"][b["weight"] > 0].tolist())
    assert ours == sorted(ngrams[ROWS, length, max_gap, stride])
    if stride == 1:
        within = [row for row in ours if row[0] // GROUP_ROWS == row[-1] // GROUP_ROWS]
        assert within == sorted(ngrams[GROUP_ROWS, length, max_gap, stride])
        assert length == 1 or max_gap < 100 or len(ours) == len(within) + 4 * (length - 1)
