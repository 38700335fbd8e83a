"""Batches: ragged columns padded or end to end, and what transforms make of them."""

import contextlib
import dataclasses
import functools
import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyspark.sql import types as t
from torch import nn

from spark_dl import Config, Data, ModelSpec, Shards
from spark_dl.data.columns.batch import BatchBuilder, StepRows
from spark_dl.data.columns.ragged import from_lengths
from spark_dl.data.columns.schema import Column
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.load.loader import ShardLoader
from spark_dl.data.write.arrays import write_arrays
from spark_dl.data.write.spark_types import source_columns
from spark_dl.inputs import shards_of
from tests.builders.settings import make_config

ROWS = 100


@pytest.fixture
def shards(tmp_path):
    """Row i has i % 7 tokens, all i, and points of two numbers, i % 3 of them."""
    ids = np.arange(ROWS)
    tokens = from_lengths(np.repeat(ids, ids % 7), ids % 7)
    points = from_lengths(np.repeat(ids[:, None] * [1.0, -1.0], ids % 3, axis=0), ids % 3)
    return write_arrays(
        {"tokens": tokens, "points": points, "id": ids},
        str(tmp_path / "d"),
        shards=Shards(rows_per_row_group=9, rows_per_shard=27),
    )


def loaders(shards, world_size=1, ragged="pad", window=20, **options):
    config = make_config(
        features=("tokens", "points"), label="id", num_streams=4, shuffle_window_rows=window, ragged=ragged,
        validation_fraction=options.pop("validation_fraction", 0.0), global_batch_size=12,
    )  # fmt: skip
    return [ShardLoader(shards, config, rank=r, world_size=world_size, **options) for r in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("window", [1, 20, 1000])
def test_padded_rows_have_their_values_where_the_mask_is_true(shards, world_size, micro_batches, window):
    seen = []
    for loader in loaders(shards, world_size, window=window, micro_batches=micro_batches):
        for step in loader.epoch(1):
            for batch in step.micro_batches:
                ids = batch["id"]
                longest = int((ids % 7).max())
                assert batch["tokens"].shape == batch["tokens_mask"].shape == (len(ids), longest)
                assert torch.equal(batch["tokens_mask"].sum(1), ids % 7)
                assert torch.equal(batch["tokens"], ids[:, None] * batch["tokens_mask"])
                assert batch["points"].shape == (len(ids), int((ids % 3).max()), 2)
                assert torch.equal(batch["points"][..., 0], ids[:, None] * batch["points_mask"].double())
                seen += ids[batch["weight"] > 0].tolist()
    assert sorted(seen) == list(range(ROWS))


def test_values_end_to_end_have_offsets(shards):
    (loader,) = loaders(shards, ragged="offsets", micro_batches=3)
    for step in loader.epoch(0):
        for batch in step.micro_batches:
            ids, offsets = batch["id"], batch["tokens_offsets"]
            assert torch.equal(offsets.diff(), ids % 7)
            assert int(offsets[0]) == 0
            assert torch.equal(batch["tokens"], torch.repeat_interleave(ids, ids % 7))
            assert batch["points"].shape == (int((ids % 3).sum()), 2)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_ragged_rows_are_split_for_validation(shards, split):
    (loader,) = loaders(shards, validation_fraction=0.3, split=split)
    batches = [b for step in loader.epoch(0) for b in step.micro_batches]
    assert sum(float(b["weight"].sum()) for b in batches) == (30 if split == "validation" else 70)
    assert all(torch.equal(b["tokens"], b["id"][:, None] * b["tokens_mask"]) for b in batches)


def test_an_epoch_with_ragged_columns_can_be_taken_up_at_any_step(shards):
    (loader,) = loaders(shards)
    whole = [step.micro_batches[0] for step in loader.epoch(2)]
    for start in range(len(whole)):
        again = [step.micro_batches[0] for step in loader.epoch(2, start)]
        assert all(torch.equal(a[n], b[n]) for a, b in zip(again, whole[start:], strict=True) for n in b)


def spec(**functions):
    return ModelSpec(build=nn.Identity, loss=lambda output, batch: output, **functions)


def noise(batch, generator):
    return {**batch, "noise": torch.rand(len(batch["id"]), generator=generator)}


def test_transform_is_called_with_each_batch_and_keeps_its_weights(shards):
    prepare = spec(transform=lambda b: {"twice": b["id"] * 2, "id": b["id"]}).prepare
    (loader,) = loaders(shards, prepare=prepare, micro_batches=2)
    for step in loader.epoch(0):
        for batch in step.micro_batches:
            assert batch.keys() == {"twice", "id", "weight"}
            assert torch.equal(batch["twice"], batch["id"] * 2)


def test_augment_draws_the_same_numbers_in_a_run_that_is_resumed_and_others_elsewhere(shards):
    def drawn(epoch=0, start=0, seed=1, rank=0):
        prepare = functools.partial(spec(augment=noise).prepare, augment_seed=seed)
        loader = loaders(shards, 2, prepare=prepare)[rank]
        return torch.cat([s.micro_batches[0]["noise"] for s in loader.epoch(epoch, start)])

    whole = drawn()
    assert torch.equal(drawn(start=3), whole[-len(drawn(start=3)) :])
    for other in (drawn(epoch=1), drawn(seed=2), drawn(rank=1)):
        assert not torch.isin(whole, other).any()
    assert len(whole.unique()) == len(whole)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_augment_draws_the_same_numbers_for_a_row_on_any_number_of_ranks(shards, ranks, micro_batches):
    def drawn(ranks, micro_batches):
        prepare, numbers = functools.partial(spec(augment=noise).prepare, augment_seed=1), {}
        for loader in loaders(shards, ranks, prepare=prepare, micro_batches=micro_batches):
            for batch in itertools.chain.from_iterable(step.micro_batches for step in loader.epoch(0)):
                true = batch["weight"] > 0
                numbers |= dict(zip(batch["id"][true].tolist(), batch["noise"][true].tolist(), strict=True))
        return numbers

    assert drawn(ranks, micro_batches) == drawn(1, 1)


def test_a_stream_that_is_cut_draws_other_numbers_for_each_part(shards):
    prepare = functools.partial(spec(augment=noise).prepare, augment_seed=1)
    (loader,) = loaders(shards, prepare=prepare, micro_batches=8)
    numbers = torch.cat([batch["noise"] for step in loader.epoch(0) for batch in step.micro_batches])
    assert len(numbers.unique()) == len(numbers)


def test_results_of_streams_that_do_not_fit_together_are_an_error(shards):
    sizes = itertools.count(3)
    spec_of_sizes = spec(augment=lambda b, _: {"x": torch.zeros(len(b["id"]), next(sizes))})
    prepare = functools.partial(spec_of_sizes.prepare, augment_seed=1)
    with pytest.raises(
        ValueError, match=r"spec\.augment: it is called with the rows of each stream .*their columns or shapes differ"
    ):
        next(loaders(shards, prepare=prepare)[0].epoch(0))


def test_augment_is_for_training_only(shards):
    (loader,) = loaders(shards, prepare=spec(augment=noise).prepare)
    assert "noise" not in next(loader.epoch(0)).micro_batches[0]


@pytest.mark.parametrize("name", ["transform", "augment"])
@pytest.mark.parametrize("result", [None, torch.zeros(3), {"x": [1.0]}])
def test_a_result_that_is_not_a_batch_is_an_error_that_names_the_function(shards, name, result):
    prepare = functools.partial(spec(**{name: lambda *args: result}).prepare, augment_seed=0)
    with pytest.raises(ValueError, match=rf"spec\.{name}: expected a mapping of names to tensors"):
        list(loaders(shards, prepare=prepare)[0].epoch(0))


@pytest.mark.parametrize("name", ["weight", "tokens_mask", "tokens_offsets"])
def test_a_column_by_the_name_of_something_else_in_batches_is_an_error_before_any_rank_starts(tmp_path, shards, name):
    match = rf"column '{name}': a batch uses this name for .*; rename the column, df.withColumnRenamed\('{name}', ...\)"
    data = Data(features=("tokens", name), label=None, encode={"tokens": {"ragged": True}})
    spark = t.StructType([t.StructField("tokens", t.ArrayType(t.LongType())), t.StructField(name, t.LongType())])
    with pytest.raises(ValueError, match=match):
        source_columns(spark, data.features, data.encode)
    pq.write_table(pa.table({"tokens": [[1], [2, 3]], name: [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=match):
        open_parquet(str(tmp_path / "a.parquet"), data.features, data=data)
    with pytest.raises(ValueError, match=match):
        write_arrays(
            {"tokens": from_lengths(np.arange(3), np.array([1, 2])), name: np.arange(2)}, str(tmp_path / "new")
        )
    assert not (tmp_path / "new").exists()
    named = [dataclasses.replace(c, name=name) if c.name == "id" else c for c in shards.columns]
    stored = dataclasses.replace(shards, columns=tuple(named))
    with pytest.raises(ValueError, match=match):
        shards_of(stored, "", Config(data=data), contextlib.ExitStack(), reuse=False)


def test_the_mask_and_the_offsets_of_a_column_of_one_shape_are_free_names(tmp_path):
    rows = {"x": np.arange(6).reshape(3, 2), "x_mask": np.arange(3), "x_offsets": np.arange(3), "weights": np.arange(3)}
    assert write_arrays(rows, str(tmp_path)).rows == 3


def ragged_rows(lengths, dtype=np.float32, inner=()):
    lengths = np.asarray(lengths)
    return from_lengths(np.ones((lengths.sum(), *inner), dtype), lengths)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("ragged", ["pad", "offsets"])
@pytest.mark.parametrize("datasets", [1, 2])
def test_the_bytes_of_a_step_are_those_of_its_batches(micro_batches, ragged, datasets):
    """Also where columns are cast, and where a dataset has the longest rows."""
    columns = (
        Column("fixed", "int16", (3,), "list"), Column("words", "int64", (None,), "list"),
        Column("points", "float32", (None, 2), "list"),
    )  # fmt: skip
    data = Data(features=("fixed", "words", "points"), label=None, cast={"fixed": "float64", "words": "int32"})
    builder = BatchBuilder(columns, data, micro_batches, ragged)
    parts = [
        StepRows([np.ones((6, 3), np.int16), ragged_rows([i, 2, 0, 5, 1, 4 * i], np.int64),
                  ragged_rows([1, 0, 3, 2, 2, i], inner=(2,))], np.ones(6, np.float32))
        for i in range(1, datasets + 1)
    ]  # fmt: skip
    built = sum(tensor.nbytes for batch in builder.build(parts, (0, 0, 0)) for tensor in batch.values())
    assert builder.bytes_of(parts, (0, 0, 0)) == built
    within = dataclasses.replace(builder, memory=built)
    assert within.bytes_of(parts, (0, 0, 0)) == built
    with pytest.raises(ValueError, match=rf"column '\w+': the {6 * datasets} rows of rank 7 in step 5 of epoch 3 take"):
        dataclasses.replace(builder, memory=built - 1, memory_setting="none is left").bytes_of(parts, (3, 5, 7))
