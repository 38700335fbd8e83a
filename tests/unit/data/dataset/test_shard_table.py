"""Shards as columns: the same shards, and what of them travels to the ranks."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from spark_dl import Config
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.data.dataset.records import LocalPlacement, Shard, ShardSet, ShardTable
from spark_dl.data.load.mixture import Mixture
from spark_dl.data.load.resume_check import dataset_digest, for_ranks
from tests.builders.datasets import write_dataset
from tests.builders.settings import make_config

SHARDS = (
    Shard("part-a.parquet", (3, 4, 5), 100, "ab" * 32, 10, 2**32 - 1, elements={"x": (1, 2, 3)}),
    Shard("year=2024/b ü.parquet", (0,), 2**40, partition=(("year", "2024"), ("kind", "a=b"))),
    Shard("empty.parquet", (), 1),
    Shard("c.parquet", (2**40, 1), 5, elements={"x": (0, 7)}, stored={"image": (2**40, 9)}),
)


def test_the_shards_of_a_table_are_those_that_it_was_made_of():
    table = ShardTable.of(SHARDS)
    assert (tuple(table), len(table), table[-1], table[1:3]) == (SHARDS, 4, SHARDS[3], SHARDS[1:3])
    assert ShardTable.of(table) is table
    assert pickle.loads(pickle.dumps(table)) == table == SHARDS != SHARDS[:3]
    assert tuple(ShardTable.of(())) == ()
    with pytest.raises(IndexError):
        table[4]
    for shard in table:
        assert all(type(n) is int for n in (*shard.row_groups, shard.bytes, shard.footer_bytes, shard.footer_crc32))


def test_a_row_group_is_found_by_its_number_in_the_dataset():
    places = [(s, g, rows) for s, shard in enumerate(SHARDS) for g, rows in enumerate(shard.row_groups)]
    table = ShardTable.of(SHARDS)
    assert [table.place_of(number) for number in range(6)] == places


def test_the_bytes_of_row_groups_are_their_own_where_they_are_known_and_else_those_of_the_mean():
    ragged, image = Column("x", "float32", (None,), "list", mean_size=2.5), Column("image", "uint8", (4,), "image")
    image = replace(image, mean_size=1.25)
    shards = ShardSet("/nowhere", (ragged, image), (SHARDS[0], Shard("d", (2, 3), 1), SHARDS[3]))
    decoded = [8 * 3 + 4, 8 * 4 + 8, 8 * 5 + 12, 2 * 18, 3 * 18, 8 * 2**40, 8 + 28]
    assert shards.decoded_bytes([ragged]).tolist() == decoded
    assert shards.group_bytes([image]).tolist() == [
        12 + 4, 16 + 5, 20 + 7, 8 + 3, 12 + 4, 4 * 2**40 + 2**40, 4 + 9
    ]  # fmt: skip


def test_the_parts_of_a_dataset_on_the_ranks_have_their_row_groups():
    placement = LocalPlacement(0, (1, 0, 3), {})
    assert ShardSet("/nowhere", (), SHARDS, placement=placement).part_groups == (3, 0, 3)


@pytest.mark.parametrize("cache_dir", [None, "/cache"])
def test_to_the_ranks_goes_what_they_read_and_what_was_made_of_the_rest(tmp_path, cache_dir):
    rng = np.random.default_rng(0)
    columns = {"x": rng.random(64), "y": rng.random(64)}
    shards = write_dataset(str(tmp_path / "d"), columns, 8, 16)
    shards = replace(
        shards, shards=ShardTable.of(replace(s, elements={"x": (1, 1), "y": (2, 2)}) for s in shards.shards)
    )
    config = make_config(features=("x",), label=None, cache_dir=cache_dir, cache_mib=1 if cache_dir else 0)
    sent = for_ranks(shards, config)
    assert dataset_digest(sent) == dataset_digest(shards)
    assert {bool(s.sha256) for s in sent.shards} == {cache_dir is not None}
    assert tuple(sent.shards) == tuple(
        replace(s, elements={"x": (1, 1)}, sha256=s.sha256 if cache_dir else "") for s in shards.shards
    )
    mixed = Mixture({"a": shards, "b": read_shards(shards.url)})
    assert dataset_digest(for_ranks(mixed, config)) == dataset_digest(mixed)


def test_a_dataset_that_the_ranks_make_stays_as_it_is():
    empty = ShardSet("", (), ())
    assert for_ranks(empty, Config()) is empty
