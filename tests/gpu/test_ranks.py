"""Ranks on a GPU, without Spark: backends, the same training as on the CPU, layouts, checkpoints, memory."""

import dataclasses
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spark_dl import DDP, Checkpoint, DPSingleProcess, LocalSGD, ModelSpec, Single, worker
from spark_dl.evaluate import load_model
from spark_dl.launch.rank.rendezvous import join
from spark_dl.rundir import checkpoint
from spark_dl.rundir.metrics import read_metrics
from tests.builders.models import MLP, blobs, small_config
from tests.faults import BuildGated, row_of
from tests.ranks.launcher import RankFailed, run_ranks
from tests.ranks.runs import make_run, resume, train, train_rank

MOMENTUM = {"optimizer_args": {"momentum": 0.9}}
METRICS = {"accuracy": {"class": "MulticlassAccuracy", "num_classes": 3}}


def config_on(device, num_ranks=1, *, gpus_per_rank=None, parallel=None, data=None, **settings):
    launch = {"device": device, "collective_timeout_s": 120, "start_timeout_s": 60}
    if num_ranks > 1 or gpus_per_rank is not None:
        launch["gpus_per_rank"] = gpus_per_rank or 0.5  # two ranks on one GPU
    return small_config(num_ranks, train={**MOMENTUM, **settings}, data=data, launch=launch, parallel=parallel or DDP())


def weights_of(saved):
    return checkpoint.load(saved, "model.pt")["0"]


def assert_close(expected, found, tolerance=1e-4):
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(
            found[name], weight, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def losses_of(run):
    """The loss of the validation rows after each epoch."""
    return [line["metrics"]["loss"] for line in read_metrics(run.run_dir) if line["kind"] == "epoch"]


class OnTwo(nn.Module):
    """Its layers are on two GPUs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 16).to("cuda:0"), nn.Linear(16, 3).to("cuda:1")

    def forward(self, x):
        return self.second(self.first(x).tanh().to("cuda:1")).to(x.device)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_that_is_laid_on_two_gpus_stays_there_and_trains_as_on_one(tmp_path):
    trained = []
    for name, build in (("two", OnTwo), ("one", lambda: OnTwo().to("cuda:0"))):
        config = config_on("cuda", gpus_per_rank=2, parallel=Single())
        trained.append(weights_of(train(make_run(tmp_path, config, spec=ModelSpec(build=build), name=name))))
    assert_close(*trained)


# Process groups


def meet(launch):
    with join(launch) as world:
        total = torch.full((1000,), float(world.rank + 1), device=world.device)
        dist.all_reduce(total)
        first = torch.full((3,), float(world.rank), device=world.device)
        dist.broadcast(first, 0)
        return {"backend": dist.get_backend(), "world": world.backend, "device": str(world.device),
                "current": torch.cuda.current_device() if world.gpus else None,
                "sum": set(total.tolist()), "first": set(first.tolist())}  # fmt: skip


def test_one_rank_uses_nccl(device):
    [found] = run_ranks(meet, 1, config_on(device).launch)
    backend = "nccl" if device == "cuda" else "gloo"
    place = ("cuda:0", 0) if device == "cuda" else ("cpu", None)
    assert (found["backend"], found["world"]) == (backend, backend)
    assert (found["device"], found["current"]) == place
    assert (found["sum"], found["first"]) == ({1.0}, {0.0})


def test_two_ranks_on_one_gpu_use_gloo(device):
    found = run_ranks(meet, 2, config_on(device, 2).launch)
    for rank in found:
        assert (rank["backend"], rank["world"]) == ("gloo", "gloo")
        assert rank["device"] == ("cuda:0" if device == "cuda" else "cpu")
        assert (rank["sum"], rank["first"]) == ({3.0}, {0.0})


def test_one_rank_after_another_leaves_the_gpu_free(device):
    """In the same process, as Spark uses its Python workers again."""
    for _ in range(3):
        [found] = run_ranks(meet, 1, config_on(device).launch)
        assert found["sum"] == {1.0}


def test_two_ranks_on_one_gpu_without_a_word_are_an_error(gpu):
    count = torch.cuda.device_count()
    with pytest.raises(RankFailed, match=rf"local rank {count} has no GPU: this host has {count} GPU.*gpus_per_rank"):
        run_ranks(meet, count + 1, small_config(count + 1, launch={"device": "cuda"}).launch)


# Training


@pytest.mark.parametrize(("num_ranks", "parallel"), [
    (1, DDP()), (1, DDP(all_reduce="ring")), (1, DDP(compression="fp16")), (1, Single()), (1, DPSingleProcess()),
    (1, LocalSGD(sync_every_steps=2)), (2, DDP()), (2, DDP(bucket_mib="auto")),
], ids=str)  # fmt: skip
def test_weights_are_those_of_the_cpu(tmp_path, device, num_ranks, parallel):
    settings = {"metrics": METRICS, "validation_fraction": 0.2, "clip_grad_norm": 1.0, "accumulation_steps": 2}
    on_cpu = make_run(tmp_path, config_on("cpu", parallel=Single(), **settings), name="cpu")
    on_device = make_run(tmp_path, config_on(device, num_ranks, parallel=parallel, **settings), name="device")
    expected, found = train(on_cpu), train(on_device)
    tolerance = 1e-2 if getattr(parallel, "compression", "none") == "fp16" else 1e-4
    assert_close(weights_of(expected), weights_of(found), tolerance)
    cpu, other = losses_of(on_cpu), losses_of(on_device)
    assert len(cpu) == len(other) == 2
    assert other == pytest.approx(cpu, abs=max(1e-3, tolerance))


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_F22_a_step_with_nan_is_left_out_and_F23_replicas_stay_equal(tmp_path, device, num_ranks, policy):
    config = config_on(device, num_ranks, on_nonfinite=policy, check_replicas_every=1, epochs=1)
    config = dataclasses.replace(config, checkpoint=Checkpoint(every_steps=2))
    run = make_run(tmp_path, config, rows=288)
    rows = row_of(run, num_ranks - 1, 3, num_ranks)
    run = dataclasses.replace(run, spec=ModelSpec(build=BuildGated(rows)))
    results = run_ranks(train_rank, num_ranks, run)
    assert [(r["skipped_steps"], r["rollbacks"]) for r in results] == [(1, int(policy == "rollback"))] * num_ranks
    assert all(weight.isfinite().all() for weight in weights_of(checkpoint.latest(run.run_dir)).values())


@pytest.mark.parametrize("compression", ["bf16", "fp16"])
def test_ranks_that_share_a_gpu_compress_by_type(tmp_path, device, compression):
    plain = train(make_run(tmp_path, config_on(device, 2), name="plain"))
    other = train(make_run(tmp_path, config_on(device, 2, parallel=DDP(compression=compression)), name="other"))
    assert_close(weights_of(plain), weights_of(other), 3e-2)


@pytest.mark.parametrize("compression", ["powersgd", "topk", "threshold"])
def test_one_rank_compresses_on_its_gpu(tmp_path, device, compression):
    saved = train(make_run(tmp_path, config_on(device, parallel=DDP(compression=compression)), name=compression))
    assert all(weight.isfinite().all() for weight in weights_of(saved).values())


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_lower_precision_comes_close(tmp_path, device, precision):
    plain = train(make_run(tmp_path, config_on(device), name="plain"))
    other = train(make_run(tmp_path, config_on(device, precision=precision), name="other"))
    assert_close(weights_of(plain), weights_of(other), 5e-2)
    assert {weight.dtype for weight in weights_of(other).values()} == {torch.float32}


def build_cnn():
    return nn.Sequential(
        nn.Unflatten(1, (2, 1, 2)), nn.Conv2d(2, 8, 2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(48, 3),
    )  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bf16_with_compile_and_channels_last_comes_close(tmp_path, device, num_ranks):
    spec, fast = ModelSpec(build=build_cnn), {"precision": "bf16-mixed", "compile": True, "channels_last": True}
    settings = {"validation_fraction": 0.2, "epochs": 4}
    plain = make_run(tmp_path, config_on(device, num_ranks, **settings), spec=spec, name="plain")
    other = make_run(tmp_path, config_on(device, num_ranks, **settings, **fast), spec=spec, name="fast")
    run_ranks(train_rank, num_ranks, plain)
    run_ranks(train_rank, num_ranks, other, timeout_s=250)
    losses = [
        [e["metrics"]["loss"] for e in read_metrics(run.run_dir) if e["kind"] == "epoch"] for run in (plain, other)
    ]
    assert losses[1][-1] == pytest.approx(losses[0][-1], abs=0.05)
    assert losses[1][-1] < losses[1][0]
    assert weights_of(checkpoint.latest(other.run_dir)).keys() == build_cnn().state_dict().keys()


# Checkpoints


def test_a_checkpoint_of_a_gpu_is_read_on_the_cpu(tmp_path, device):
    saved = train(make_run(tmp_path, config_on(device)))
    assert {tensor.device.type for tensor in weights_of(saved).values()} == {"cpu"}
    model = load_model(MLP, saved.url)
    assert all(torch.equal(weight, weights_of(saved)[name]) for name, weight in model.state_dict().items())
    with torch.inference_mode():
        assert model(torch.from_numpy(blobs(8)["features"])).shape == (8, 3)


@pytest.mark.parametrize("first_on_device", [True, False])
def test_a_run_goes_on_on_another_device(tmp_path, device, first_on_device):
    devices = (device, "cpu") if first_on_device else ("cpu", device)
    whole = train(make_run(tmp_path, config_on("cpu", epochs=2), name="whole"))
    first, then = (config_on(d, epochs=epochs) for d, epochs in zip(devices, (1, 2), strict=True))
    run = make_run(tmp_path, first, name="cut")
    saved = train(run)
    assert saved.step < whole.step
    assert_close(weights_of(whole), weights_of(resume(run, saved, then)))


# Errors


class Hungry(nn.Module):
    """Asks for an exbibyte."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, features):
        return self.linear(features) + torch.empty(1 << 58, device=features.device).sum()


def test_without_memory_the_error_says_what_to_change(tmp_path, device):
    run = make_run(tmp_path, config_on(device, accumulation_steps=2), spec=ModelSpec(build=Hungry))
    with pytest.raises(RankFailed) as failed:
        train(run)
    name = "cuda:0" if device == "cuda" else "cpu"
    assert f"{name} has no memory left, with about 24 rows in a micro-batch; raise train.accumulation_steps" in str(
        failed.value
    )


def refused(run):
    try:
        return worker.main(run).result
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("parallel", [DDP(all_reduce="ring"), DDP(compression="topk")], ids=str)
def test_what_gloo_cannot_do_between_gpus_is_an_error_that_names_the_setting(tmp_path, gpu, parallel):
    config = config_on("cuda", 2)
    object.__setattr__(config, "parallel", parallel)  # the driver would refuse it
    found = run_ranks(refused, 2, make_run(tmp_path, config))
    assert all(text.startswith("parallel.") and "needs NCCL" in text for text in found)


def meet_and_listen(launch):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("spark_dl").addHandler(handler)
    try:
        with join(launch):
            return lines
    finally:
        logging.getLogger("spark_dl").removeHandler(handler)


def test_rank_0_says_that_ranks_share_a_gpu(gpu):
    found = run_ranks(meet_and_listen, 2, config_on("cuda", 2).launch)
    assert [len(lines) for lines in found] == [1, 0]
    assert "ranks 0 and 1 share a GPU; Gloo sends their gradients" in found[0][0]
