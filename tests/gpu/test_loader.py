"""Batches on their way to a GPU: page-locked, read ahead, and whole when they arrive."""

import numpy as np
import pytest
import torch

from spark_dl.data.load.build import build_train_loader
from spark_dl.parallel.modules import to_device
from tests.builders.datasets import write_dataset
from tests.builders.models import MLP, small_config

ROWS = 960


@pytest.fixture
def shards(tmp_path):
    rng = np.random.default_rng(0)
    columns = {"features": rng.normal(size=(ROWS, 4)).astype(np.float32), "label": np.arange(ROWS)}
    return write_dataset(str(tmp_path / "data"), columns, group_rows=40, shard_rows=240)


def epoch_of(shards, device, **settings):
    loader = build_train_loader(shards, MLP, small_config(1, data=settings), rank=0, world_size=1, pin=device == "cuda")
    return [batch for step in loader.epoch(0) for batch in step.micro_batches]


def test_batches_for_a_gpu_are_in_page_locked_memory(device, shards):
    batches = epoch_of(shards, device)
    assert len(batches) == ROWS // 48
    assert {tensor.is_pinned() for batch in batches for tensor in batch.values()} == {device == "cuda"}


@pytest.mark.parametrize("prefetch_batches", [1, 4])
def test_every_row_arrives_whole_while_the_next_batches_are_read(device, shards, prefetch_batches):
    """Copies do not wait, and buffers are used again: a copy that came too late would have rows of another batch."""
    expected = {label: row for batch in epoch_of(shards, "cpu") for label, row in _rows(batch)}
    assert len(expected) == ROWS
    config = small_config(1, data={"prefetch_batches": prefetch_batches})
    loader = build_train_loader(shards, MLP, config, rank=0, world_size=1, pin=device == "cuda")
    busy = torch.randn(2048 if device == "cuda" else 64, 2048 if device == "cuda" else 64, device=device)
    for epoch in range(3):
        moved = []
        for step in loader.epoch(epoch):
            busy = busy @ busy / busy.norm()  # the device is behind the loader
            moved += [to_device(batch, torch.device(device), config) for batch in step.micro_batches]
        found = {label: row for batch in moved for label, row in _rows(batch)}
        assert found == expected


def _rows(batch):
    features, labels = batch["features"].cpu().tolist(), batch["label"].cpu().tolist()
    return [(label, tuple(row)) for label, row in zip(labels, features, strict=True)]
