"""`parallel.bucket_mib: auto` on real ranks: what is measured, and one size for all ranks and for a whole run."""

import dataclasses
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from spark_dl import ModelSpec, worker
from spark_dl.parallel import ddp
from spark_dl.parallel.exchange import bucket_choice, collectives
from spark_dl.rundir import checkpoint
from tests.builders.models import build_mlp, small_config
from tests.ranks.launcher import run_ranks
from tests.ranks.runs import cut_at, make_run
from tests.ranks.test_parity import assert_same_training

MLP_BYTES = [4 * p.numel() for p in build_mlp().parameters()]


def train_and_look(run, choice=None):
    """What this rank measured, [bytes of each gradient], and the sizes of DDP's buckets. It finds `choice` + rank best
    where that is given."""
    measured, wrap = [], mock.Mock(wraps=ddp.DistributedDataParallel)
    time_gradients, choose = bucket_choice.time_gradients, bucket_choice.choose_bucket_mib

    def noted(*args):
        found = time_gradients(*args)
        measured.append(found[1])
        return found

    def chosen(*args, **options):
        found = choose(*args, **options)
        return found if choice is None else choice + dist.get_rank()

    with (
        mock.patch.object(bucket_choice, "time_gradients", noted),
        mock.patch.object(bucket_choice, "choose_bucket_mib", chosen),
        mock.patch.object(ddp, "DistributedDataParallel", wrap),
    ):
        worker.main(run)
    return measured, [call.kwargs["bucket_cap_mb"] for call in wrap.call_args_list]


def auto(num_ranks, accumulation_steps=1, **parallel):
    train = {"accumulation_steps": accumulation_steps}
    return small_config(num_ranks, train=train, parallel=ddp.DDP(bucket_mib="auto", **parallel))


@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_same_as_one_process(tmp_path, num_ranks, accumulation_steps):
    assert_same_training(tmp_path, auto(num_ranks, accumulation_steps), 245)


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_the_size_is_measured_once_and_is_that_of_all_ranks_and_of_a_resumed_run(tmp_path, accumulation_steps):
    """Ranks that find other sizes best take that of rank 0. Micro-batches whose gradients are not sent do not count."""
    config = auto(2, accumulation_steps)
    run = make_run(tmp_path, cut_at(config, 3))
    for measured, used in run_ranks(train_and_look, 2, run, 3.5):
        assert [sorted(sizes) for sizes in measured] == [sorted(MLP_BYTES)]
        assert used == [3.5]
    saved = checkpoint.latest(run.run_dir)
    assert checkpoint.load(saved, "training.pt")["extra"]["bucket_size"] == {"mib": 3.5}
    generation = checkpoint.start_generation(run.run_dir)
    resumed = dataclasses.replace(run, config=config, checkpoint=saved.url, generation=generation)
    assert run_ranks(train_and_look, 2, resumed) == [([], [3.5])] * 2
    assert checkpoint.latest(run.run_dir).step == 12


def bytes_of_our_sums(run):
    with mock.patch.object(collectives, "all_reduce", wraps=collectives.all_reduce) as spy:
        worker.main(run)
    return {call.args[0].nbytes for call in spy.call_args_list}


@pytest.mark.parametrize("algorithm", ["ring", pytest.param("tree", marks=pytest.mark.slow)])
def test_what_is_timed_is_the_all_reduce_that_trains(tmp_path, algorithm):
    found = run_ranks(bytes_of_our_sums, 2, make_run(tmp_path, cut_at(auto(2, all_reduce=algorithm), 2)))
    probes = {16 << 10, 256 << 10, 1 << 20}
    assert [sizes - {sum(MLP_BYTES)} for sizes in found] == [probes] * 2


class LargeOnOneRank(nn.Module):
    """2.5 MiB of parameters that rank 1 alone uses."""

    def __init__(self):
        super().__init__()
        self.small, self.large = build_mlp(), nn.Linear(4, 1 << 17)

    def forward(self, features):
        out = self.small(features)
        return out + self.large(features)[:, :3] if dist.get_rank() == 1 else out


def test_ranks_that_use_other_parameters_measure_the_same_all_reduces(tmp_path):
    config = cut_at(auto(2, find_unused_parameters=True), 2)
    run = make_run(tmp_path, config, spec=ModelSpec(build=LargeOnOneRank))
    (first, used), (second, used_by_second) = run_ranks(train_and_look, 2, run)
    assert sum(first[0]) < sum(second[0])
    assert used == used_by_second
