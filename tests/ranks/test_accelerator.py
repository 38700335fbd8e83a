"""The simulated accelerator under real DDP: averages, buckets, overlap, and the package's own loop."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.exchange.accelerator import accelerator_spec, build_accelerator
from benchmarks.exchange.breakdown import break_down, recording_hook, shared_intervals
from benchmarks.model.profiles import PROFILES
from spark_dl import DDP, Checkpoint, worker
from spark_dl.parallel.exchange.buckets import assign_buckets
from spark_dl.rundir import checkpoint
from spark_dl.rundir.metrics import read_metrics
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.models import blobs, small_config
from tests.ranks.launcher import run_ranks


def rows_of(rank):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def ddp_rank(name, scale, bucket_mib, backward_s, num_steps):
    dist.init_process_group("gloo")
    try:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        arguments = {"forward_s": 0.0, "backward_s": backward_s, "scale": scale}
        profile = PROFILES[name]()
        alone = [build_accelerator(profile, **{**arguments, "backward_s": 0.0}) for _ in range(world_size)]
        model = build_accelerator(profile, **arguments)
        ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True)
        records, steps = [], []
        ddp.register_comm_hook(None, recording_hook(records))
        for _ in range(num_steps):
            records.clear()
            ddp.zero_grad(set_to_none=True)
            dist.barrier()
            start = time.perf_counter()
            ddp(rows_of(rank)).sum().backward()
            end = time.perf_counter()
            gradients = []
            for r, single in enumerate(alone):
                single.zero_grad(set_to_none=True)
                single(rows_of(r)).sum().backward()
                gradients.append([p.grad for p in single.parameters()])
            means = [torch.stack(g).mean(0) for g in zip(*gradients, strict=True)]
            for (parameter_name, parameter), mean in zip(model.named_parameters(), means, strict=True):
                torch.testing.assert_close(parameter.grad, mean, msg=lambda m, n=parameter_name: f"{n}: {m}")
            assert not torch.equal(gradients[0][0], gradients[1][0])
            steps.append((model.steps[-1], (start, end), sorted(records, key=lambda b: b.index)))
        return steps
    finally:
        dist.destroy_process_group()


def sizes_of(name, scale):
    return [layer.gradient_bytes for layer in PROFILES[name]().shrunk(scale).backward_layers()]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "bucket_mib"),
    [
        pytest.param("resnet50", 0.05, marks=pytest.mark.slow),
        pytest.param("resnet50", 0.5, marks=pytest.mark.slow),
        ("resnet50", 100),
        ("bert_base", 0.5),
    ],
)
def test_ddp_averages_the_ranks_gradients_in_the_buckets_that_are_foretold(name, bucket_mib):
    scale = 0.01
    for steps in run_ranks(ddp_rank, 2, name, scale, bucket_mib, 0.0, 2):
        sizes = sizes_of(name, scale)
        buckets = assign_buckets(sizes, int(bucket_mib * 2**20))
        for _, _, records in steps[1:]:  # DDP's buckets are final after the first step
            assert [b.num_bytes for b in records] == [sum(sizes[i] for i in bucket) for bucket in buckets]


def test_buckets_are_sent_while_backward_goes_on():
    backward_s, bucket_mib, scale = 0.5, 0.05, 0.01
    by_rank = run_ranks(ddp_rank, 2, "resnet50", scale, bucket_mib, backward_s, 3)
    sizes = sizes_of("resnet50", scale)
    buckets = assign_buckets(sizes, int(bucket_mib * 2**20))
    for steps in by_rank:
        for times, _, records in steps[1:]:
            for bucket, record in zip(buckets, records, strict=True):
                assert record.start >= times.ready[bucket[-1]]
                if bucket[-1] + 1 < len(times.ready):
                    assert record.start <= times.ready[bucket[-1] + 1]
                assert record.end > record.start
            assert records[0].end < times.backward_end  # it is reduced long before the last gradient is there
    last = [[records for _, _, records in steps][-1] for steps in by_rank]
    for rank, steps in enumerate(by_rank):
        times, whole, _ = steps[-1]
        communication, waits = shared_intervals(last, rank)
        found = break_down(whole, times, communication, waits=waits)
        assert found.backward_s >= backward_s
        assert found.hidden_s > 0
        assert found.step_s == pytest.approx(whole[1] - whole[0])


def train_rank(run):
    return worker.main(run).result


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_package_s_own_loop_trains_it(tmp_path, num_ranks):
    shards = write_dataset(str(tmp_path / "data"), blobs(96), group_rows=40, shard_rows=120)
    spec = accelerator_spec(PROFILES["resnet50"](), forward_s=0.0, backward_s=0.0, scale=0.005)
    config = small_config(num_ranks, parallel=DDP(bucket_mib=0.1), checkpoint=Checkpoint(keep=3))
    run = Run(spec=spec, config=config, train=shards, run_dir=str(tmp_path / "run"))
    results = run_ranks(train_rank, num_ranks, run)
    lines = [line for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    assert [line["loss"] for line in lines] == [0.0] * results[0]["steps"]
    trained = checkpoint.load(checkpoint.find(run.run_dir), "model.pt")["0"]
    before = spec.build().state_dict()
    assert all((trained[name] != weight).float().mean() > 0.9 for name, weight in before.items())
