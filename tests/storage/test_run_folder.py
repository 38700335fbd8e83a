"""overwrite on each kind of store: what our code wrote goes, by its names, and nothing else."""

import numpy as np

from spark_dl import Config, Data, storage
from spark_dl.data.write.arrays import write_arrays
from spark_dl.rundir.run_folder import begin_attempt, delete_run
from tests.unit.rundir.test_checkpoint import group as group
from tests.unit.rundir.test_checkpoint import save


def test_exactly_what_our_code_writes_is_deleted(folder, group):
    assert begin_attempt(folder, Config(), resume=False, overwrite=True) == (1, None)
    saved = save(folder, step=1, generation=1)
    write_arrays({"x": np.arange(5)}, storage.join(folder, "shards", "train"), Data())
    write_arrays({"x": np.arange(5)}, storage.join(folder, "shards", "validation"), Data())
    theirs = [storage.join(folder, *path) for path in (
        ("checkpoints", "best.ckpt"), (storage.name(saved), "model.pt"), ("shards", "mine", "x"),
        ("shards", "train", "notes.txt"), ("notes.txt",),
    )]  # fmt: skip
    for url in (*theirs, storage.join(folder, "metrics.jsonl")):
        storage.write_bytes(url, b"theirs")
    assert begin_attempt(folder, Config(), resume=False, overwrite=True) == (2, None)
    delete_run(folder, keep=[storage.join(folder, "shards", "validation")])
    assert all(storage.read_bytes(url) == b"theirs" for url in theirs)
    assert storage.list_names(storage.join(folder, "shards")) == ["mine", "train", "validation"]
    assert storage.list_names(storage.join(folder, "shards", "train")) == ["notes.txt"]
    assert "_manifest.json" in storage.list_names(storage.join(folder, "shards", "validation"))
    assert not storage.exists(saved)
    assert not storage.exists(storage.join(folder, "metrics.jsonl"))
    assert storage.list_names(storage.join(folder, "generations")) == ["000001", "000002"]
