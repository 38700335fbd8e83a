"""Whatever is written is read back, by us and by Petastorm: random schemas, values and layouts."""

import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spark_dl.data.dataset.manifest import read_shards
from spark_dl.data.load.loader import ShardLoader
from tests.builders.datasets import write_dataset
from tests.builders.settings import make_config
from tests.petastorm.exchange import plain_rows

SCALARS = ("bool", "int8", "uint8", "int16", "uint16", "int32", "int64", "float32", "float64")
OF_ARRAYS = (*SCALARS, "uint32", "uint64", "float16")
FOR_PETASTORM = 12
"""Datasets of the sample that Petastorm reads."""

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True).map(lambda name: f"c_{name}")  # no word of Python


@st.composite
def columns(draw, rows):
    """One column of a random dtype and shape, with NaN, infinities and the ends of ranges among its values."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    dtype = draw(st.sampled_from(OF_ARRAYS if shape else SCALARS))
    elements = None
    if np.dtype(dtype).kind == "f":
        width = 8 * np.dtype(dtype).itemsize
        elements = st.floats(width=width).map(lambda x: float("nan") if x != x else x)  # NaN of one kind
    return draw(hnp.arrays(dtype, (rows, *shape), elements=elements))


@st.composite
def datasets(draw):
    rows = draw(st.integers(1, 40))
    drawn = draw(st.dictionaries(NAMES, columns(rows), min_size=1, max_size=4))
    return {
        "columns": {"id": np.arange(rows), **drawn},
        "group_rows": draw(st.integers(1, 20)),
        "shard_rows": draw(st.integers(1, 40)),
    }


def through_the_loader(url, names):
    """All rows of a dataset, in its order."""
    config = make_config(features=tuple(names), label=None, num_streams=3, nonfinite="allow", global_batch_size=6)
    steps = ShardLoader(read_shards(url), config, rank=0, world_size=1, shuffle=False).epoch(0)
    batches = [batch for step in steps for batch in step.micro_batches]
    true_rows = [batch["weight"].numpy() == 1 for batch in batches]
    return {n: np.concatenate([b[n].numpy()[t] for b, t in zip(batches, true_rows, strict=True)]) for n in names}


QUICK = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@settings(QUICK, max_examples=60)
@given(dataset=datasets())
def test_any_dataset_is_read_back_by_us(dataset):
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(f"{folder}/x", **dataset, nonfinite="allow")
        found = through_the_loader(f"{folder}/x", dataset["columns"])
    assert plain_rows(found) == plain_rows(dataset["columns"])


@pytest.mark.slow
def test_a_sample_is_read_back_by_petastorm(run_petastorm, tmp_path):
    expected = []

    @settings(QUICK, max_examples=FOR_PETASTORM)
    @given(dataset=datasets())
    def write(dataset):
        write_dataset(str(tmp_path / str(len(expected))), **dataset, nonfinite="allow")
        expected.append(plain_rows(dataset["columns"]))

    write()
    asked = [{"url": str(tmp_path / str(i)), "rows": len(r), "reader": "make_reader"} for i, r in enumerate(expected)]
    assert run_petastorm("read_rows", asked) == expected
