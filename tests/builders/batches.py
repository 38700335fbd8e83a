"""What a loader gives, as arrays that can be compared."""

import numpy as np
import torch

from spark_dl.data.load.build import build_loader
from spark_dl.data.plan import Segment
from spark_dl.data.read.rows import Rows
from spark_dl.inputs import shards_of
from tests.builders.settings import make_config


def rows_of(url, until_done, **data):
    """All rows, by column, in the order of `id`, as a run reads them. # each (rows, ...)"""
    config = make_config(label=None, num_streams=2, **data, global_batch_size=4, num_ranks=1)
    shards = shards_of(str(url), "", config, until_done, reuse=False)
    batches = [
        batch
        for step in build_loader(shards, config, rank=0, world_size=1, shuffle=False).epoch(0)
        for batch in step.micro_batches
    ]
    found = {
        name: [row for b in batches for row, w in zip(b[name].numpy(), b["weight"].numpy(), strict=True) if w]
        for name in batches[0]
    }
    order = np.argsort(found["id"])
    return {name: [rows[i] for i in order] for name, rows in found.items()}


def steps(loader, epoch=0, start=0):
    """(step, true rows, columns) of every step; the columns of all micro-batches together."""
    return [
        (s.step, s.rows, {name: torch.cat([m[name] for m in s.micro_batches]) for name in s.micro_batches[0]})
        for s in loader.epoch(epoch, start)
    ]


def assert_same(a, b):
    assert [(step, rows) for step, rows, _ in a] == [(step, rows) for step, rows, _ in b]
    for (_, _, left), (_, _, right) in zip(a, b, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


def read_all(shards):
    """All columns as arrays, in the order of the dataset."""
    out = [np.empty((shards.rows, *c.shape), dtype=c.dtype) for c in shards.columns]
    segments = [Segment(g, 0, n) for g, n in enumerate(shards.shards.group_rows.tolist())]
    Rows(shards, shards.columns, 0.0, 0, "all").read_into(segments, out)
    return dict(zip([c.name for c in shards.columns], out, strict=True))
