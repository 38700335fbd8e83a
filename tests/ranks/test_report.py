"""What ranks measure of their own time, and the report that names the slow one."""

import dataclasses
import importlib.util
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import spark_dl
from spark_dl import DDP, Faults, Horovod, LocalSGD, ModelSpec
from spark_dl.rundir import environment
from spark_dl.rundir.metrics import read_metrics
from spark_dl.track.time_split import find_stragglers, split_of
from tests.builders.models import DROPOUT_MLP, small_config
from tests.ranks.runs import assert_same_to_the_bit, make_run, train

DELAY_S, STEPS, EVERY = 0.03, 18, 3
has_horovod = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="horovod is not installed")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("parallel", "slow"), [
    (DDP(), 0),  # which sends its buffers, so the others wait before the forward pass
    (DDP(), 1),
    (DDP(sync_batchnorm=True), 0),
    (DDP(all_reduce="ring"), 1),
    (LocalSGD(sync_every_steps=3, sync_start_step=6), 1),
    pytest.param(Horovod(), 1, marks=has_horovod),
], ids=["buffers", "ddp", "sync_batchnorm", "ring", "local_sgd", "horovod"])  # fmt: skip
def test_the_others_wait_for_a_rank_that_is_delayed(tmp_path, parallel, slow):
    faults = Faults(straggler="constant", straggler_s=DELAY_S, straggler_ranks=(slow,))
    more = {"log_every": EVERY, "epochs": 3, "max_steps": STEPS}
    run = make_run(tmp_path, small_config(2, parallel=parallel, faults=faults, train=more), spec=DROPOUT_MLP, rows=288)
    train(run)
    split = split_of([line for line in read_metrics(run.run_dir) if line["kind"] == "step"])
    assert split.last_steps == list(range(EVERY, STEPS + 1, EVERY))
    compute, wait, delay = split.totals("compute"), split.totals("wait"), DELAY_S * STEPS
    assert compute[slow] >= delay
    assert compute[1 - slow] < delay
    assert wait[1 - slow] > 0.7 * delay
    assert wait[slow] < 0.5 * delay
    # But for the first interval, which a rank may begin earlier than the one that logs.
    parts = split.data + split.compute + split.communication + split.wait
    assert parts[1:] == pytest.approx(np.repeat(split.seconds[1:, None], 2, axis=1), rel=0.1, abs=0.01)
    assert find_stragglers(split)[0].rank == slow
    (attempt,), _ = environment.read(run.run_dir)
    assert [rank["threads"] for rank in attempt.ranks["ranks"]] == [1, 1]
    assert attempt.ranks["outcome"] == environment.FINISHED


def test_F20_the_report_of_a_run_names_the_slow_rank_and_its_host(tmp_path):
    pytest.importorskip("matplotlib", reason="the report needs matplotlib")
    faults = Faults(straggler="constant", straggler_s=DELAY_S, straggler_ranks=(2,))
    more = {"log_every": EVERY, "validation_fraction": 0.2}
    run = make_run(tmp_path, small_config(3, faults=faults, train=more), rows=600)
    train(run)
    page = Path(spark_dl.report(run.run_dir)).read_text()
    (attempt,), _ = environment.read(run.run_dir)
    host = attempt.ranks["ranks"][2]["host"]
    first = re.search(r"<h3>Stragglers</h3>\s*<p>(.*?)</p>", page)[1]
    assert re.match(rf"Rank 2 on {re.escape(host)} was busy \d.* mostly to compute", first)
    assert "All steps were done." in page
    assert "validation loss" in page


QUOTA = 'while kill -STOP "$0"; do sleep 0.06; kill -CONT "$0"; sleep 0.02; done 2>/dev/null'


@dataclasses.dataclass(frozen=True)
class QuarterOfACore:
    """`ModelSpec.set_position` of a model whose rank has a fourth of a core from the first step to the last."""

    rank: str
    last_step: int

    def __call__(self, model, position):
        if os.environ["RANK"] != self.rank:
            return
        if position.global_step == 0:
            model.quota = subprocess.Popen(["sh", "-c", QUOTA, str(os.getpid())])
        elif position.global_step + 1 == self.last_step:
            model.quota.kill()
            model.quota.wait()


def work(model, batch):
    rows = batch["features"]
    for _ in range(4):  # some milliseconds
        rows = rows + 0 * (rows.repeat(40, 64) @ torch.ones(256, 256)).mean()
    return model(rows)


@pytest.mark.slow
@pytest.mark.parametrize("slow", [1])
def test_F20_a_rank_with_a_fourth_of_a_core_is_named_and_changes_no_weights(tmp_path, slow):
    config = small_config(2, train={"log_every": EVERY, "epochs": 5})
    twin = make_run(tmp_path, config, spec=dataclasses.replace(DROPOUT_MLP, forward=work), rows=288, name="twin")
    spec = ModelSpec(build=DROPOUT_MLP.build, forward=work, set_position=QuarterOfACore(str(slow), 30))
    run = make_run(tmp_path, config, spec=spec, rows=288)
    assert_same_to_the_bit(train(twin), train(run))
    split = split_of([line for line in read_metrics(run.run_dir) if line["kind"] == "step"])
    straggler = find_stragglers(split)[0]
    assert straggler.rank == slow
    assert split.totals("compute")[slow] > 1.5 * split.totals("compute")[1 - slow]
    assert split.totals("wait")[1 - slow] > 2 * split.totals("wait")[slow]
