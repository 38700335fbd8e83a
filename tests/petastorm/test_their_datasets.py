"""We read what Petastorm wrote, of today's version and of old ones, with the values that Petastorm reads."""

import contextlib
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spark_dl import ModelSpec
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.load.loader import ShardLoader
from spark_dl.parallel.loss import weighted_loss_sum
from tests.builders.batches import rows_of
from tests.builders.petastorm import read_dataset
from tests.builders.settings import make_config
from tests.petastorm.exchange import cells, plain, plain_rows
from tests.unit.data.external.test_dataset import columns_of

ROWS = 61
TENSORS = ("id", "small", "ratio", "wide", "flag", "matrix", "packed", "png", "deep_png", "jpeg", "year")
"""The columns of one shape without nulls."""


pytestmark = pytest.mark.slow  # Petastorm writes them in a Spark session of its own environment


@pytest.fixture(scope="module")
def written(run_petastorm, tmp_path_factory):
    """The folder of a dataset, its rows before they were written, and as Petastorm reads them."""
    root = tmp_path_factory.mktemp("theirs") / "dataset"
    answer = run_petastorm("write_dataset", {"url": str(root), "rows": ROWS})
    return root, answer["written"], answer["read"]


def pixels(cell):
    return cells(cell).astype(int)


def assert_same_rows(found, expected):
    """All values are equal to the bit, save those of JPEG, whose decoders round differently."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if name == "jpeg":
                assert np.abs(pixels(ours[name]) - pixels(value)).max() <= 3
            else:
                assert ours[name] == value, name


def test_petastorm_reads_what_it_wrote(written):
    _, before, after = written
    for row, read in zip(before, after, strict=True):
        assert {n: v for n, v in row.items() if n != "jpeg"} == {n: v for n, v in read.items() if n != "jpeg"}


def test_every_codec_null_shape_and_partition_is_read_as_petastorm_reads_it(written):
    root, _, read = written
    _, rows = read_dataset(root)
    assert_same_rows([{name: plain(value) for name, value in row.items()} for row in rows], read)


def test_the_loader_gives_the_tensors_of_petastorm(written):
    root, _, read = written
    found = plain_rows(columns_of(open_parquet(str(root), TENSORS), *TENSORS))
    for row, theirs in zip(found, read, strict=True):
        assert_same_rows([row], [{name: theirs[name] for name in row}])


ENCODE = {
    "price": {"as": "float"}, "ragged": {"ragged": True}, "tags": {"as": "hash", "buckets": 97, "ragged": True},
    "kind": {"as": "vocabulary", "values": ["a b2", "a b0"]},
}  # fmt: skip


def test_text_decimals_and_ragged_fields_become_numbers_by_encode(written):
    """Beside what Petastorm reads, which are texts, decimals and arrays of several lengths."""
    root, _, read = written
    names = ["id", "price", "ragged", "kind", "tags"]
    config = make_config(
        features=tuple(names), label=None, num_streams=4, encode=ENCODE, ragged="offsets", global_batch_size=20
    )
    shards = open_parquet(str(root), names, data=config.data)
    found = {}
    for step in ShardLoader(shards, config, rank=0, world_size=1).epoch(0):
        (batch,) = step.micro_batches
        for i in np.flatnonzero(batch["weight"].numpy()):
            offsets = batch["ragged_offsets"]
            values = batch["ragged"][offsets[i] : offsets[i + 1]].tolist()
            offsets = batch["tags_offsets"]
            tags = batch["tags"][offsets[i] : offsets[i + 1]].tolist()
            found[int(batch["id"][i])] = (float(batch["price"][i]), values, int(batch["kind"][i]), tags)
    assert len(found) == len(read)
    index = {"a b2": 1, "a b0": 2, "a b1": 0}
    for row in read:
        price, ragged, kind, tags = found[int(cells(row["id"]))]
        assert price == float(row["price"]["decimal"])
        assert ragged == cells(row["ragged"]).tolist()
        assert kind == index[row["kind"]]
        assert tags == [zlib.crc32(tag.encode()) % 97 for tag in cells(row["tags"]).tolist()]


@pytest.mark.parametrize("name", ["name", "ragged", "any_png", "kind", "packed_ragged", "tags"])
def test_what_is_no_tensor_is_an_error_that_names_the_column(written, name):
    with pytest.raises(ValueError, match=f"column '{name}'"):
        open_parquet(str(written[0]), [name])


@pytest.mark.parametrize("name", ["count", "maybe"])
def test_nulls_are_an_error_that_names_the_column(written, name):
    with pytest.raises(ValueError, match=f"'{name}'.*null"):
        open_parquet(str(written[0]), [name])


RESIZED = {"packed_ragged": {"ragged": True}, "any_png": {"as": "image", "resize": [4, 3]}}


def test_rows_with_null_fields_are_dropped_and_images_of_several_shapes_scaled(written):
    root, _, read = written
    names = ("id", "count", "maybe", "packed_ragged", "any_png")
    with contextlib.ExitStack() as until_done:
        found = rows_of(root, until_done, features=names, encode=RESIZED, nulls="drop")
    kept = [row for row in read if None not in [row[name] for name in names]]
    assert 0 < len(kept) < len(read)
    assert [int(i) for i in found["id"]] == [int(cells(row["id"])) for row in kept]
    same_size = 0
    for i, row in enumerate(kept):
        for name in ("count", "maybe"):
            np.testing.assert_array_equal(found[name][i], cells(row[name]))
        mask = found["packed_ragged_mask"][i]
        np.testing.assert_array_equal(found["packed_ragged"][i][mask], cells(row["packed_ragged"]))
        assert found["any_png"][i].shape == (4, 3, 3)
        if (image := cells(row["any_png"])).shape == (4, 3, 3):
            np.testing.assert_array_equal(found["any_png"][i], image)
            same_size += 1
    assert same_size


def test_null_fields_are_filled(written):
    root, _, read = written
    names, fill = ("id", "count", "maybe", "packed_ragged"), {"count": -1, "maybe": 0.5, "packed_ragged": 0}
    encode = {"packed_ragged": {"ragged": True}}
    with contextlib.ExitStack() as until_done:
        found = rows_of(root, until_done, features=names, encode=encode, nulls="fill", fill=fill)
    assert len(found["id"]) == len(read)
    for i, row in enumerate(read):
        assert found["count"][i] == (-1 if row["count"] is None else cells(row["count"]))
        np.testing.assert_array_equal(found["maybe"][i], [0.5] * 3 if row["maybe"] is None else cells(row["maybe"]))
        values = found["packed_ragged"][i][found["packed_ragged_mask"][i]]
        expected = np.empty((0, 2)) if row["packed_ragged"] is None else cells(row["packed_ragged"])
        np.testing.assert_array_equal(values, expected)


# --- Datasets that old versions wrote ---


def legacy(version):
    folder = os.environ.get("SPARK_DL_TEST_DATA")
    if not folder or not (Path(folder) / "petastorm_legacy" / version).is_dir():
        pytest.skip("SPARK_DL_TEST_DATA names no folder with petastorm_legacy/ (data/legacy of Petastorm's own tests)")
    return Path(folder) / "petastorm_legacy" / version


def test_0_7_6_is_read_as_petastorm_reads_it(run_petastorm):
    root = legacy("0.7.6")
    (read,) = run_petastorm("read_rows", [{"url": str(root), "rows": 100, "reader": "make_reader"}])
    _, rows = read_dataset(root)
    assert_same_rows([{name: plain(value) for name, value in row.items()} for row in rows], read)


def test_0_4_0_is_read_by_us_alone(run_petastorm):
    root = legacy("0.4.0")
    (read,) = run_petastorm("read_rows", [{"url": str(root), "rows": 100, "reader": "make_reader"}])
    assert "error" in read, "Petastorm opens it after all: compare the values"
    assert len(read_dataset(root)[1]) == 100


@pytest.mark.parametrize("version", ["0.4.0", "0.7.6"])
def test_old_datasets_train(version):
    config = make_config(features=("matrix",), label="id2", num_streams=4, global_batch_size=20)
    torch.manual_seed(0)
    spec = ModelSpec(
        build=lambda: nn.Sequential(nn.Flatten(), nn.Linear(32 * 16 * 3, 2)),
        loss=lambda output, label: F.cross_entropy(output, label.long(), reduction="none"),
    )
    model = spec.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = ShardLoader(open_parquet(str(legacy(version)), config.data.columns), config, rank=0, world_size=1)
    losses = []
    for epoch in range(4):
        for step in loader.epoch(epoch):
            (batch,) = step.micro_batches
            _, loss = weighted_loss_sum(spec, model, batch, config)
            optimizer.zero_grad()
            (loss / step.rows).backward()
            optimizer.step()
            losses.append(loss.item() / step.rows)
    assert len(losses) == 4 * 5
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) / 2
