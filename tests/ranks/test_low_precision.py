"""Weights in bfloat16, steps of copies in float32, and an optimizer in the memory of the host."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from spark_dl import CombinedOptimizer, MasterWeights, ModelSpec, Optimization
from spark_dl.config.checks import SettingError
from spark_dl.parallel.low_precision import to_bfloat16
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.rundir.metrics import read_metrics
from tests.builders.models import blobs, small_config
from tests.builders.reference import reference
from tests.builders.settings import parallel
from tests.ranks.launcher import RankFailed
from tests.ranks.runs import assert_same_to_the_bit, cut_at, make_run, resume, train


class Net(nn.Module):
    """With a norm that keeps statistics, one that keeps none, and tied weights."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.plain = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LayerNorm(8)
        self.again, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.again.weight

    def forward(self, x):
        assert x.dtype == self.first.weight.dtype  # the model itself casts, too
        return self.last(self.tied(self.plain(self.again(self.norm(self.first(x).relu())))))


SPEC = ModelSpec(build=Net)
OPTIMIZERS = {
    "SGD": {"optimizer_args": {"momentum": 0.9}}, "AdamW": {"optimizer": "AdamW", "lr": 0.01},
    "Adagrad": {"optimizer": "Adagrad", "lr": 0.05},
    "groups": {"optimizer": "AdamW", "lr": 0.01, "param_groups": ({"match": "first", "optimizer": "SGD", "lr": 0.1},)},
}  # fmt: skip


def two_optimizers(model):
    named = list(model.parameters())
    adam, sgd = torch.optim.AdamW(named[:2], lr=0.01), torch.optim.SGD(named[2:], lr=0.1, momentum=0.9)
    both = CombinedOptimizer([adam, sgd])
    schedule = torch.optim.lr_scheduler.ExponentialLR(both, 0.9)
    return Optimization(optimizer=both, scheduler=schedule, interval="step")


def run_of(tmp_path, name, spec=SPEC, num_ranks=2, settings=None, **more):
    config = small_config(num_ranks, train={"lr": 0.1, "epochs": 2, **more}, **(settings or {}))
    return make_run(tmp_path, config, spec=spec, name=name)


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "of the spec"])
def test_an_optimizer_in_the_memory_of_the_host_steps_the_same_bits(tmp_path, optimizer):
    spec = dataclasses.replace(SPEC, optimizer=two_optimizers) if optimizer == "of the spec" else SPEC
    more = OPTIMIZERS.get(optimizer, {})
    runs = {
        is_there: run_of(tmp_path, str(is_there), spec, offload_optimizer=is_there, **more)
        for is_there in (True, False)
    }
    saved = {is_there: train(run) for is_there, run in runs.items()}
    assert_same_to_the_bit(saved[True], saved[False])
    # A run that was cut goes on either way.
    cut = dataclasses.replace(runs[True], run_dir=str(tmp_path / "cut"), config=cut_at(runs[True].config, 5))
    assert_same_to_the_bit(saved[False], resume(cut, train(cut), runs[False].config))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_in_bfloat16_come_close_to_those_of_float32(tmp_path, optimizer):
    """The bound is a few of the roundings of a step: the weights themselves are rounded once, by 2 ** -9."""
    found, expected = (
        load_weights(train(run_of(tmp_path, p, precision=p, **OPTIMIZERS[optimizer]))) for p in ("bf16", "float32")
    )
    for name, value in expected.items():
        is_norm = name.startswith("norm.") or not value.is_floating_point()
        assert found[name].dtype == (value.dtype if is_norm else torch.bfloat16), name
        torch.testing.assert_close(found[name].to(value.dtype), value, rtol=0.05, atol=0.05)
    assert torch.equal(found["tied.weight"], found["again.weight"])


def test_small_steps_are_not_lost(tmp_path):
    """A step of 1e-4 of a weight is less than half of the last digit of bfloat16."""
    runs = [run_of(tmp_path, p, precision=p, lr=1e-4, epochs=6, optimizer="AdamW") for p in ("bf16", "float32")]

    def matrices(run):
        return torch.cat([p.float().flatten() for p in load_weights(train(run)).values() if p.ndim == 2])

    starts = [dataclasses.replace(run, run_dir=f"{run.run_dir}-1", config=cut_at(run.config, 1)) for run in runs]
    first, last = [matrices(run) for run in starts], [matrices(run) for run in runs]
    moved = [(b - a).norm() for a, b in zip(first, last, strict=True)]
    assert moved[0] == pytest.approx(float(moved[1]), rel=0.1)


def test_stochastic_rounding_is_exact_in_the_mean_and_keeps_no_copies():
    weight = nn.Parameter(torch.full((20_000,), 1.0).bfloat16())
    optimizer = MasterWeights(torch.optim.SGD([weight], lr=1.0), stochastic=True)
    for _ in range(8):  # of an eighth of the last digit, 2 ** -7
        weight.grad = torch.full_like(weight.detach(), -(2.0**-10))
        optimizer.step()
    assert float(weight.double().mean()) == pytest.approx(1 + 2.0**-7, abs=1e-4)
    assert {*weight.tolist()} <= {1 + k * 2.0**-7 for k in range(9)}
    assert "master" not in optimizer.state_dict()["state"][0]
    weight.grad = torch.full_like(weight.detach(), -float("inf"))
    optimizer.step()
    assert bool((weight == float("inf")).all())


@pytest.mark.parametrize("rounding", [False, True])
@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad"])
def test_a_resume_goes_on_with_the_same_bits(tmp_path, optimizer, rounding):
    more = {"precision": "bf16", "ema_decay": 0.9, "stochastic_rounding": rounding, **OPTIMIZERS[optimizer]}
    whole = run_of(tmp_path, "whole", **more)
    cut = dataclasses.replace(whole, run_dir=str(tmp_path / "cut"), config=cut_at(whole.config, 5))
    trained = train(whole)
    assert_same_to_the_bit(trained, resume(cut, train(cut), whole.config))
    masters = [state["master"] for state in checkpoint.load(trained, "training.pt")["optimizer"]["state"].values()
               if "master" in state]  # fmt: skip
    assert {master.dtype for master in masters} == (set() if rounding else {torch.float32})
    average = checkpoint.load(trained, "model.pt")["average"]
    assert average["first.weight"].dtype == torch.float32


def test_the_number_of_ranks_and_micro_batches_changes_roundings_alone(tmp_path):
    spec = ModelSpec(build=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    found = []
    for ranks, parts in ((1, 1), (2, 1), (2, 2)):
        run = run_of(tmp_path, f"{ranks}-{parts}", spec, ranks, precision="bf16", accumulation_steps=parts)
        found.append(load_weights(train(run)))
    for other in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(other[name], value, rtol=0.02, atol=0.02)


class Low(nn.Linear):
    def forward(self, x):
        # The first step is compared with that of the whole model, in float32.
        assert x.dtype == self.weight.dtype == (torch.bfloat16 if isinstance(self, FSDPModule) else torch.float32)
        return super().forward(x)


def build_linears():
    return nn.Sequential(Low(4, 8), nn.BatchNorm1d(8), nn.ReLU(), Low(8, 8), nn.LayerNorm(8), Low(8, 3))


def test_zero_3_gathers_weights_in_bfloat16_and_keeps_its_shards_in_float32(tmp_path):
    more = {"optimizer": "AdamW", "lr": 0.01, "precision": "bf16", "accumulation_steps": 2, "ema_decay": 0.9}
    spec = ModelSpec(build=build_linears)
    whole = run_of(tmp_path, "whole", spec, settings={"parallel": parallel("mesh", zero_stage=3)}, **more)
    found = load_weights(train(whole))
    assert {value.dtype for value in found.values() if value.is_floating_point()} == {torch.float32}
    expected = load_weights(train(run_of(tmp_path, "plain", spec, **{**more, "precision": "float32"})))
    for name, value in expected.items():
        if name != "0.bias":  # before BatchNorm: its gradient is rounding alone, which Adam scales up
            torch.testing.assert_close(found[name], value, rtol=0.05, atol=0.05)
    cut = dataclasses.replace(whole, run_dir=str(tmp_path / "cut"), config=cut_at(whole.config, 5))
    again = load_weights(resume(cut, train(cut), whole.config))
    assert all(torch.equal(value, again[name]) for name, value in found.items())


def test_one_rank_of_zero_3_has_nothing_to_gather(tmp_path):
    run = run_of(tmp_path, "run", num_ranks=1, precision="bf16", settings={"parallel": parallel("mesh", zero_stage=3)})
    with pytest.raises(RankFailed, match="expected float32 or bf16-mixed with one data rank in a mesh; use single"):
        train(run)


def test_another_strategy_is_an_error():
    for more in ({"precision": "bf16"}, {"offload_optimizer": True}):
        with pytest.raises(SettingError, match="with another strategy than ddp"):
            small_config(2, train=more, parallel=parallel("mesh", zero_stage=1))


def test_the_losses_are_those_of_a_plain_loop_in_bfloat16(tmp_path):
    """A plain loop with a model in bfloat16 and an optimizer of float32 copies, by torch alone."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    run = run_of(tmp_path, "run", ModelSpec(build=build), 1, precision="bf16", log_every=1, epochs=1)
    train(run)
    losses = [line["loss"] for line in read_metrics(run.run_dir) if line["kind"] == "step"]

    class Plain(nn.Module):
        """The float32 copies; the forward pass rounds them."""

        def __init__(self):
            super().__init__()
            self.net = build()

        def forward(self, x):
            low = {name: p.bfloat16() for name, p in self.net.named_parameters()}
            return torch.func.functional_call(self.net, low, (x.bfloat16(),)).float()

    group_rows = tuple(n for s in run.train.shards for n in s.row_groups)
    expected, _ = reference(blobs(245), run.config, group_rows, Plain)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-3, atol=1e-4)


class Positions(nn.Module):
    """A model with positions in a buffer, and tokens, and parts that are called by themselves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.randn(3, 8))
        self.register_parameter("start", nn.Parameter(torch.randn(8)))
        self.embed = nn.Embedding(5, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 2)

    def encode(self, tokens, *, scale):
        return self.encoder(self.embed(tokens) * scale + self.positions + self.start)

    def forward(self, tokens, *, scale):
        return {"scores": self.head(self.encode(tokens, scale=scale).mean(1)), "tokens": tokens}


def test_a_model_with_buffers_takes_and_returns_what_it_did_before():
    torch.manual_seed(0)
    model = Positions()
    tokens, scale = torch.randint(0, 5, (4, 3)), torch.tensor(0.5)
    expected = model(tokens, scale=scale)["scores"]
    to_bfloat16(model)
    found = model(tokens, scale=scale)
    assert found["scores"].dtype == torch.float32
    assert found["tokens"] is tokens
    torch.testing.assert_close(found["scores"], expected, rtol=0.05, atol=0.05)
    assert model.head(model.encode(tokens, scale=scale).mean(1)).dtype == torch.bfloat16
    assert model.positions.dtype == model.start.dtype == torch.float32
    assert {p.dtype for p in model.encoder.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_copies_of_whole_precision_keep_it(dtype):
    weights = [nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2)]
    plain = torch.optim.Adam([weights[0]], lr=0.3)
    master = MasterWeights(torch.optim.Adam([weights[1]], lr=0.3), "cpu")
    for step in range(3):
        for weight, optimizer in zip(weights, (plain, master), strict=True):
            weight.grad = torch.full_like(weight.detach(), 0.1 * step + 1 / 3)
            optimizer.step()
    assert torch.equal(weights[0], weights[1])
    assert "master" not in master.state_dict()["state"][0]


def test_weights_that_were_written_between_steps_are_stepped():
    layer = nn.Linear(2, 1, bias=False).bfloat16()
    optimizer = MasterWeights(torch.optim.SGD(layer.parameters(), lr=0.5))

    def step():
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        return layer.weight.tolist()

    with torch.no_grad():
        layer.weight.fill_(1.0)
    assert step() == [[0.5, 0.5]]
    with torch.no_grad():
        layer.weight.fill_(4.0)
    assert step() == [[3.5, 3.5]]
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(("optimizer", "problem"), [
    (lambda p: torch.optim.LBFGS(p), "takes one gradient per step, found LBFGS"),
    (lambda p: 3, "takes one gradient per step, found int"),
    (lambda p: MasterWeights(torch.optim.SGD(p, lr=1.0)), "takes one gradient per step, found MasterWeights"),
])  # fmt: skip
def test_what_has_no_copies_is_an_error(optimizer, problem):
    with pytest.raises(ValueError, match=problem):
        MasterWeights(optimizer(nn.Linear(1, 1).parameters()))
    with pytest.raises(ValueError, match="step takes no closure"):
        MasterWeights(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)).step(lambda: 0.0)
