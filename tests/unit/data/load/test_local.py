"""Rows on the disks of ranks: spilled in bounded memory, for this user alone, and gone however the process ends."""

import base64
import contextlib
import io
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pytest

from spark_dl import Data, Launch
from spark_dl.data.columns.policies import Changes
from spark_dl.data.dataset.records import Shard
from spark_dl.data.load import local
from spark_dl.data.load.loader import ShardLoader
from spark_dl.data.write.partition import PartitionResult
from tests.builders.local_rows import SHARDS, SOURCE, batches_of

SETTINGS = local.RowSettings(data=Data())


def spill_parts(stack, folder, sizes):
    """The parts of several ranks, spilled one after another."""
    firsts = np.cumsum([0, *sizes])
    return [
        stack.enter_context(
            local.spill(batches_of(n, int(first)), SOURCE, Data(), layout=SHARDS, task=i, folder=str(folder))
        )
        for i, (n, first) in enumerate(zip(sizes, firsts, strict=False))
    ]  # fmt: skip


def assemble_all(spilled):
    """What every rank assembles: the ranks as threads that tell each other their values."""
    barrier, table = threading.Barrier(len(spilled), timeout=20), {}

    def gather(rank, name, value):
        table[name, rank] = json.loads(json.dumps(value))
        barrier.wait()
        return [table[name, r] for r in range(len(spilled))]

    found = [None] * len(spilled)

    def work(rank):
        try:
            found[rank] = spilled[rank].assemble(lambda name, value: gather(rank, name, value))
        except ValueError as error:
            found[rank] = error

    threads = [threading.Thread(target=work, args=(r,)) for r in range(len(spilled))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("sizes", [(100, 100), (70, 200, 33), (0, 5), (1, 0, 0), (64, 128, 0, 17)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_once_in_equal_steps_on_all_ranks(tmp_path, sizes, shuffle):
    with contextlib.ExitStack() as stack:
        ranks = [local.RankRows(s, SETTINGS) for s in assemble_all(spill_parts(stack, tmp_path, sizes))]
        for epoch in (0, 1):
            loaders = [r.loader(8, shuffle=shuffle) for r in ranks]
            steps = [list(loader.epoch(epoch)) for loader in loaders]
            assert {len(s) for s in steps} == {-(-max(sizes) // 8)}
            seen = []
            for t, of_ranks in enumerate(zip(*steps, strict=True)):
                batches = [s.micro_batches[0] for s in of_ranks]
                assert all(b["features"].shape == (8, 3) for b in batches)
                for b in batches:  # filled places hold true rows too
                    assert bool((b["features"] == b["label"][:, None]).all())
                true = [int(x) for b in batches for x in b["label"][b["weight"] == 1]]
                assert {s.rows for s in of_ranks} == {len(true)} == {loaders[0].plan.batch_rows(t)}
                seen += true
            assert sorted(seen) == list(range(sum(sizes)))
        assert [r.shards.rows for r in ranks] == list(sizes)
        own = [sum(int(b["weight"].sum()) for b in r.batches(8)) for r in ranks]
        assert own == list(sizes)


def test_batches_are_those_of_the_first_epoch_with_seed_0_unless_others_are_asked_for(tmp_path):
    with contextlib.ExitStack() as stack:
        (rows,) = assemble_all(spill_parts(stack, tmp_path, (90,)))
        rows = local.RankRows(rows, SETTINGS)

        def order(**which):
            return [x for batch in rows.batches(8, **which) for x in batch["label"].tolist()]

        assert order() == order(epoch=0, seed=0)
        assert order() not in (order(epoch=1), order(seed=1), order(shuffle=False))


def test_a_rank_reads_the_part_that_is_on_its_disk(tmp_path):
    """Which is another one than its number says, where ranks are placed anew."""
    with contextlib.ExitStack() as stack:
        parts = [local.RankRows(rows, SETTINGS) for rows in assemble_all(spill_parts(stack, tmp_path, (40, 40)))]
        for part, rows in enumerate(parts):
            config = replace(rows.config(8, seed=0), launch=Launch(num_ranks=2))
            loader = ShardLoader(rows.dataset, config, rank=1 - part, world_size=2, shuffle=False)
            read = [int(x) for step in loader.epoch(0) for x in step.micro_batches[0]["label"]]
            assert read == [*range(40 * part, 40 * part + 40)]


def test_a_fraction_for_validation_is_exact_over_all_ranks(tmp_path):
    with contextlib.ExitStack() as stack:
        spilled = assemble_all(spill_parts(stack, tmp_path, (90, 4, 0)))
        ranks = [local.RankRows(rows, replace(SETTINGS, validation_fraction=0.1)) for rows in spilled]
        seen = {}
        for split in ("train", "validation"):
            loaders = [r.loader(4, split=split) for r in ranks]
            assert len({loader.plan.steps for loader in loaders}) == 1
            batches = [s.micro_batches[0] for loader in loaders for s in loader.epoch(0)]
            seen[split] = sorted(int(x) for b in batches for x in b["label"][b["weight"] == 1])
    assert len(seen["validation"]) == round(0.1 * 94)
    assert sorted(seen["train"] + seen["validation"]) == list(range(94))


def test_resuming_an_epoch_goes_on_with_the_same_batches(tmp_path):
    with contextlib.ExitStack() as stack:
        for rows in assemble_all(spill_parts(stack, tmp_path, (90, 30))):
            loader = local.RankRows(rows, SETTINGS).loader(8)
            whole = [s.micro_batches[0] for s in loader.epoch(1)]
            for start in range(loader.plan.steps):
                again = [s.micro_batches[0] for s in loader.epoch(1, start)]
                for a, b in zip(whole[start:], again, strict=True):
                    assert a["weight"].tolist() == b["weight"].tolist()
                    true = a["weight"] == 1
                    assert a["label"][true].tolist() == b["label"][true].tolist()


def ragged(first, lengths):
    lists = pa.array([[0.0] * n for n in lengths], pa.list_(pa.float32()))
    return iter([pa.RecordBatch.from_arrays([lists, pa.array(range(len(lengths)))], names=["features", "label"])])


@pytest.mark.parametrize(("inputs", "message"), [
    ([ragged(0, [3, 3]), ragged(0, [4])], r"column 'features': cells have shape \(3,\) in partition 0 and \(4,\) in"),
    ([ragged(0, [3]), ragged(0, [3, 4])], r"column 'features': found arrays of lengths \[3, 4\].* in partition 1, row"),
    ([iter([]), iter([])], "the DataFrame has no rows"),
])  # fmt: skip
def test_what_does_not_fit_is_the_same_error_on_all_ranks(tmp_path, inputs, message):
    with contextlib.ExitStack() as stack:
        spilled = [
            stack.enter_context(local.spill(batches, SOURCE, Data(), layout=SHARDS, task=i, folder=str(tmp_path)))
            for i, batches in enumerate(inputs)
        ]
        errors = assemble_all(spilled)
    assert len({str(e) for e in errors}) == 1
    with pytest.raises(ValueError, match=message):
        raise errors[0]


def test_the_input_is_consumed_even_if_it_is_bad(tmp_path):
    batches = iter([*ragged(0, [3, 4]), *batches_of(100)])
    with local.spill(batches, SOURCE, Data(), layout=SHARDS, task=0, folder=str(tmp_path)) as spilled:
        assert spilled.result.error
    assert next(batches, None) is None


def test_S13_files_are_for_this_user_alone_and_gone_at_the_end(tmp_path):
    umask = os.umask(0)
    try:
        with local.spill(batches_of(300), SOURCE, Data(), layout=SHARDS, task=0, folder=str(tmp_path)) as spilled:
            assert stat.S_IMODE(os.stat(spilled.url).st_mode) == 0o700
            files = os.listdir(spilled.url)
            assert len(files) == 5
            assert {stat.S_IMODE(os.stat(f"{spilled.url}/{f}").st_mode) for f in files} == {0o600}
            assert os.umask(0) == 0  # what the rank writes later has the user's own mode
        assert os.listdir(tmp_path) == []
        with (
            pytest.raises(ValueError, match="after an error"),
            local.spill(batches_of(300), SOURCE, Data(), layout=SHARDS, task=0, folder=str(tmp_path)),
        ):
            raise ValueError("after an error")
        assert os.listdir(tmp_path) == []
    finally:
        os.umask(umask)


KILLED = """
import sys, time
from spark_dl.data.load import local
from spark_dl import Data
from tests.builders.local_rows import SHARDS, SOURCE, batches_of
with local.spill(batches_of(300), SOURCE, Data(), layout=SHARDS, task=0, folder=sys.argv[1]) as spilled:
    print(spilled.url, flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_files_are_gone_after_a_kill(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    url = process.stdout.readline().strip()
    assert len(os.listdir(url)) == 5
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    end = time.monotonic() + 20
    while os.listdir(tmp_path) and time.monotonic() < end:
        time.sleep(0.05)
    assert os.listdir(tmp_path) == []


LIMITED = """
import resource, sys
from spark_dl.data.load import local
from tests.builders.local_rows import SOURCE, batches_of
from spark_dl import Data, Shards
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with local.spill(batches_of(5000, width=784), SOURCE, Data(), layout=Shards(), task=3, folder=sys.argv[1]):
    pass
"""


@pytest.mark.slow
def test_a_disk_that_takes_no_more_is_named(tmp_path):
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert f"RuntimeError: cannot spill the rows of task 3 to {tmp_path}/spark_dl-" in done.stderr
    assert "free space there" in done.stderr
    assert os.listdir(tmp_path) == []


MEASURED = """
import sys, threading, time, psutil
from spark_dl import Data, Shards
from spark_dl.data.load import local
from tests.builders.local_rows import SOURCE, batches_of
process, peak, done = psutil.Process(), 0, False
settings = {"layout": Shards(), "task": 0, "folder": sys.argv[1]}
def watch():
    global peak
    while not done:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.005)
with local.spill(batches_of(20_000, size=10_000, width=784), SOURCE, Data(), **settings):
    before = process.memory_info().rss  # all is imported, and one shard was written
thread = threading.Thread(target=watch)
thread.start()
rows = int(sys.argv[2])
with local.spill(batches_of(rows, size=10_000, width=784), SOURCE, Data(), **settings) as spilled:
    done = True
    thread.join()
    print(spilled.result.shards and sum(s.bytes for s in spilled.result.shards), peak - before)
"""


@pytest.mark.long
@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path):
    """Batches of 10,000 rows of 784 float32, 31 MB each, as Spark sends them: 0.2 GB and 0.6 GB of rows."""
    growth = {}
    for rows in (60_000, 200_000):
        command = [sys.executable, "-c", MEASURED, str(tmp_path), str(rows)]
        out = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
        written, growth[rows] = map(int, out.split())
        assert written > rows * 784 * 4
    assert growth[200_000] < 256 << 20
    assert growth[200_000] < growth[60_000] + (64 << 20)


def test_a_part_travels_as_json():
    shard = Shard("0", (5,), 40, "a")
    part = PartitionResult(3, (None, (None, 2), (3,)), (0, 9, 15), (shard,), Changes(2, {"x": 2}, {}))
    assert PartitionResult.from_plain(json.loads(json.dumps(asdict(part)))) == part


def test_a_row_for_padding_travels_as_text_and_is_never_unpickled():
    row = [np.arange(3, dtype=np.int16), np.array("é"), np.array(2.5)]
    found = local._unpack(json.loads(json.dumps(local._pack(row))))
    assert [(cell.dtype, cell.tolist()) for cell in found] == [(cell.dtype, cell.tolist()) for cell in row]
    pickled = io.BytesIO()
    np.lib.format.write_array(pickled, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        local._unpack([base64.b64encode(pickled.getvalue()).decode()])
