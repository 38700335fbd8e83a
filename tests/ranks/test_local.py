"""Training on rows that each rank has on its own disk equals a single process on the same global batches."""

import dataclasses
import functools
import os

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spark_dl import Data, Launch, Loader, ModelSpec, Shards, worker
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.source import SourceColumn
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.local import RowSettings
from spark_dl.data.plan import Plan
from spark_dl.data.write.writer import rows_per_file
from spark_dl.launch.rank.task import TaskInput
from spark_dl.rundir import checkpoint
from spark_dl.rundir.metrics import read_metrics
from spark_dl.spec import Run
from tests.builders.datasets import global_batches
from tests.builders.models import MLP, blobs, build_mlp, same_bits, small_config
from tests.ranks.launcher import run_ranks

SOURCE = (SourceColumn("features", "float32", "array", 1), SourceColumn("label", "int64", "scalar"))
LOCAL = {"storage": "local", "rows_per_row_group": 16}
RAGGED = (
    SourceColumn("clicks", "int64", "array", 1, ragged=True),
    SourceColumn("text", "uint8", "scalar", ragged=True, encoding=Encoding("bytes")),
    SourceColumn("label", "int64", "scalar"),
)


def columns_of(sizes):
    """The rows of each rank, in the order of the ranks."""
    columns = blobs(sum(sizes))
    cuts = np.cumsum(sizes)[:-1]
    return [
        dict(zip(columns, part, strict=True))
        for part in zip(*(np.split(c, cuts) for c in columns.values()), strict=True)
    ]


def task_input(part, sizes, folder):
    columns = columns_of(sizes)[part]
    offsets = pa.array(np.arange(sizes[part] + 1, dtype=np.int32) * 4)
    features = pa.ListArray.from_arrays(offsets, columns["features"].reshape(-1))
    batch = pa.RecordBatch.from_arrays([features, pa.array(columns["label"])], names=["features", "label"])
    return TaskInput(iter([batch]), part, folder)


def train_rank(run, sizes, folder, first_part=0):
    part = (int(os.environ["RANK"]) + first_part) % len(sizes)
    done = worker.main(run, columns=SOURCE, rows=task_input(part, sizes, folder))
    if done.refused:
        raise ValueError(done.refused)
    return done.result


def call_rank(fn, sizes, folder):
    rows = task_input(int(os.environ["RANK"]), sizes, folder)
    data, launch = Data(features=("features", "label"), label=None), Launch(num_ranks=len(sizes))
    return worker.call(fn, (), {}, launch, columns=SOURCE, settings=RowSettings(data=data), rows=rows).result


def make_run(tmp_path, config, name="run", **run):
    return Run(spec=MLP, config=config, train=ShardSet("", (), ()), run_dir=str(tmp_path / name), **run)


def reference(sizes, config):
    """A plain loop in one process over the same global batches."""
    torch.manual_seed(config.train.seed)
    model = build_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.train.lr)
    group = rows_per_file((), config.shards)[0]
    groups = [[min(group, n - start) for start in range(0, n, group)] for n in sizes]
    plan = Plan(
        group_rows=tuple(n for part in groups for n in part), global_batch_size=config.train.global_batch_size,
        num_streams=config.loader.num_streams, window_rows=config.loader.shuffle_window_rows, seed=config.train.seed,
        parts=tuple(map(len, groups)),
    )  # fmt: skip
    columns = {name: torch.from_numpy(values) for name, values in blobs(sum(sizes)).items()}
    losses, used = [], 0
    for epoch in range(config.train.epochs):
        for batch in global_batches(plan, epoch):
            ids = torch.tensor(batch)
            loss = F.cross_entropy(model(columns["features"][ids]), columns["label"][ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            used += len(ids)
    assert used == sum(sizes) * config.train.epochs
    return losses, model.state_dict()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", [
    (245,), (123, 122), (0, 50), (80, 82, 83), (0, 100, 0, 30), (1, 1, 1, 1),
], ids=str)  # fmt: skip
def test_F18_ranks_with_other_numbers_of_rows_take_the_same_steps_as_one_process(tmp_path, sizes):
    config = small_config(len(sizes), data=LOCAL)
    losses, weights = reference(sizes, config)
    results = run_ranks(train_rank, len(sizes), make_run(tmp_path, config), sizes, str(tmp_path))
    assert {r["rows"] for r in results} == {sum(sizes) * config.train.epochs}
    lines = [line for line in read_metrics(str(tmp_path / "run")) if line["kind"] == "step"]
    np.testing.assert_allclose([line["loss"] for line in lines], losses, rtol=1e-5)
    trained = checkpoint.load(checkpoint.find(str(tmp_path / "run")), "model.pt")["0"]
    for name, expected in weights.items():
        torch.testing.assert_close(trained[name], expected, rtol=1e-5, atol=1e-6)
    assert os.listdir(tmp_path) == ["run"]  # nothing is left of what was spilled


def test_the_part_decides_on_the_order_not_the_rank(tmp_path):
    """Spark may run the tasks on other hosts next time, and so deal the ranks otherwise."""
    config, sizes = small_config(3, data=LOCAL), (80, 40, 83)
    for first in (0, 1):
        run_ranks(train_rank, 3, make_run(tmp_path, config, f"run{first}"), sizes, str(tmp_path), first)
    a, b = (checkpoint.load(checkpoint.find(str(tmp_path / f"run{i}")), "model.pt")["0"] for i in (0, 1))
    for name, expected in a.items():
        torch.testing.assert_close(b[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "stop_at", [pytest.param(3, marks=pytest.mark.slow), 5, pytest.param(7, marks=pytest.mark.slow)]
)
def test_resumed_run_equals_uninterrupted_one_bit_for_bit(tmp_path, stop_at):
    sizes, config = (110, 135), small_config(2, data={**LOCAL, "validation_fraction": 0.1})
    run_ranks(train_rank, 2, make_run(tmp_path, config, "whole"), sizes, str(tmp_path))
    cut = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=stop_at))
    run_ranks(train_rank, 2, make_run(tmp_path, cut, "cut"), sizes, str(tmp_path))
    saved = checkpoint.latest(str(tmp_path / "cut"))
    assert saved.step == stop_at
    generation = checkpoint.start_generation(str(tmp_path / "cut"))
    again = make_run(tmp_path, config, "cut", checkpoint=saved.url, generation=generation)
    with pytest.raises(Exception, match=r"cannot resume: .* made with \[110, 135\] rows .* now they have \[111, 134\]"):
        run_ranks(train_rank, 2, again, (111, 134), str(tmp_path))
    run_ranks(train_rank, 2, again, sizes, str(tmp_path))
    whole, resumed = (checkpoint.latest(str(tmp_path / name)) for name in ("whole", "cut"))
    assert whole.step == resumed.step
    assert same_bits(*(checkpoint.load(s, "model.pt")["0"] for s in (whole, resumed)))


def test_a_rank_without_validation_rows_evaluates_exactly(tmp_path):
    config = small_config(4, data={**LOCAL, "validation_fraction": 0.02})
    results = run_ranks(train_rank, 4, make_run(tmp_path, config), (60, 60, 3, 0), str(tmp_path))
    assert len({str(r["metrics"]) for r in results}) == 1
    assert {r["rows"] for r in results} == {2 * (123 - 2)}


def test_a_fraction_that_leaves_no_row_to_validate_with_is_refused(tmp_path):
    config = small_config(2, data={**LOCAL, "validation_fraction": 0.004})
    with pytest.raises(Exception, match=r"train.validation_fraction=0.004 of 120 rows is 0 rows.* raise it"):
        run_ranks(train_rank, 2, make_run(tmp_path, config), (60, 60), str(tmp_path))


def all_labels(rows):
    torch.distributed.init_process_group("gloo")
    steps = list(rows.loader(8).epoch(0))
    labels = torch.cat([b["label"][b["weight"] == 1] for b in rows.batches(8)])
    total = torch.tensor(sum(len(s.micro_batches[0]["weight"]) for s in steps))
    torch.distributed.all_reduce(total)
    return {"labels": len(labels), "steps": len(steps), "true": sum(s.rows for s in steps), "places": int(total)}


def test_a_function_of_the_user_s_gets_the_rows_of_its_rank(tmp_path):
    found = run_ranks(call_rank, 2, all_labels, (20, 33), str(tmp_path))
    assert [f["labels"] for f in found] == [20, 33]
    assert {(f["steps"], f["true"], f["places"]) for f in found} == {(5, 53, 80)}


def ragged_input(part, sizes, folder):
    """Row i has i % 4 clicks, all i, and a text of i % 3 letters."""
    ids = np.arange(sizes[part]) + sum(sizes[:part])
    clicks = pa.array([[i] * (i % 4) for i in ids.tolist()], pa.list_(pa.int64()))
    text = pa.array([b"x" * (i % 3) for i in ids.tolist()], pa.binary())
    return TaskInput(iter([pa.RecordBatch.from_arrays([clicks, text, pa.array(ids)], names=list("abc"))]), part, folder)


def call_ragged(fn, sizes, folder, ragged):
    rows = ragged_input(int(os.environ["RANK"]), sizes, folder)
    data, launch = Data(features=("clicks", "text", "label"), label=None), Launch(num_ranks=len(sizes))
    shards, loader = Shards(rows_per_row_group=16), Loader(ragged=ragged)
    return worker.call(
        fn, (), {}, launch, columns=RAGGED, settings=RowSettings(data=data, shards=shards, loader=loader), rows=rows
    ).result


def true_labels(rows):
    """The labels of the true rows; the cells of all places, true or filled, must be those of their labels."""
    found = []
    for batch in rows.batches(4):
        ids = batch["label"]
        is_padded = "clicks_mask" in batch
        for name, lengths in (("clicks", ids % 4), ("text", ids % 3)):
            counted = batch[f"{name}_mask"].sum(1) if is_padded else batch[f"{name}_offsets"].diff()
            assert torch.equal(counted, lengths)
        clicks = batch["clicks"][batch["clicks_mask"]] if is_padded else batch["clicks"]
        assert torch.equal(clicks, torch.repeat_interleave(ids, ids % 4))
        assert batch["text"].dtype == torch.uint8
        found += ids[batch["weight"] == 1].tolist()
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ragged", ["pad", "offsets"])
@pytest.mark.parametrize("sizes", [(20, 33), (0, 50), (3, 0, 0), (1, 18, 0)], ids=str)
def test_ragged_rows_fill_the_places_of_ranks_with_fewer_or_none(tmp_path, sizes, ragged):
    found = run_ranks(call_ragged, len(sizes), true_labels, sizes, str(tmp_path), ragged)
    assert [len(f) for f in found] == list(sizes)
    assert sorted(i for f in found for i in f) == list(range(sum(sizes)))


def lengths_and_sums(model, batch):
    return model(torch.stack([batch["clicks"].sum(1) / 50, batch["text_mask"].sum(1)], dim=1).float())


def train_ragged(run, sizes, folder):
    done = worker.main(run, columns=RAGGED, rows=ragged_input(int(os.environ["RANK"]), sizes, folder))
    assert not done.refused
    return done.result


def test_training_on_ragged_rows(tmp_path):
    sizes = (0, 50)
    config = small_config(2, data={**LOCAL, "features": ("clicks", "text")})
    spec = ModelSpec(build=functools.partial(nn.Linear, 2, 50), forward=lengths_and_sums)
    run = Run(spec=spec, config=config, train=ShardSet("", (), ()), run_dir=str(tmp_path / "run"))
    results = run_ranks(train_ragged, 2, run, sizes, str(tmp_path))
    assert {r["rows"] for r in results} == {50 * config.train.epochs}
    assert len({r["train_loss"] for r in results}) == 1
