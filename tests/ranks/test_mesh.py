"""The strategy `mesh` gives the weights of one process, and its checkpoints go from any mesh to any other."""

import dataclasses
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spark_dl import Auto, Launch, Mesh, ModelSpec
from spark_dl.data.load.build import build_loader
from spark_dl.evaluate import load_model
from spark_dl.launch.rank import rendezvous
from spark_dl.parallel.loss import weighted_loss_sum
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.rundir.checkpoint_files import DamagedError
from tests.builders.models import build_mlp, small_config
from tests.ranks.launcher import RankFailed, run_ranks
from tests.ranks.runs import cut_at, make_run, resume, train, train_rank
from tests.ranks.test_parity import assert_same_training

MOMENTUM = {"optimizer_args": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, "clip_grad_norm": 0.3}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_shards_change_nothing(tmp_path, num_ranks, zero_stage, accumulation_steps):
    train = {**MOMENTUM, "accumulation_steps": accumulation_steps}
    mesh = Mesh(zero_stage=zero_stage, bucket_mib=0.0001 if num_ranks == 4 else 25)
    assert_same_training(tmp_path, small_config(num_ranks, train=train, parallel=mesh), 245)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_shards_with_replicas(tmp_path, zero_stage):
    config = small_config(4, train=MOMENTUM, parallel=Mesh(zero_stage=zero_stage, replicas=2))
    assert_same_training(tmp_path, config, 245)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad"])
def test_optimizers_with_state(tmp_path, optimizer, zero_stage):
    config = small_config(3, train={"optimizer": optimizer}, parallel=Mesh(zero_stage=zero_stage))
    assert_same_training(tmp_path, config, 245)


MESHES_OF_MODELS = [
    (2, {"pipeline": 2}),
    (2, {"tensor": 2}),
    (4, {"pipeline": 2}),
    (4, {"pipeline": 2, "zero_stage": 1}),
    (4, {"pipeline": 2, "zero_stage": 3, "schedule": "gpipe"}),
    (4, {"tensor": 2}),
    *((4, {"tensor": 2, "zero_stage": stage}) for stage in (1, 2, 3)),
    pytest.param(8, {"tensor": 2, "zero_stage": 3, "replicas": 2}, marks=pytest.mark.slow),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("num_ranks", "mesh"), MESHES_OF_MODELS)
def test_models_that_are_cut(tmp_path, num_ranks, mesh):
    train = {**MOMENTUM, "accumulation_steps": 2}
    assert_same_training(tmp_path, small_config(num_ranks, train=train, parallel=Mesh(**mesh)), 245)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("vertical_sync", [False, True])
def test_pipedream_trains_on_data_ranks_as_on_one(tmp_path, vertical_sync):
    """Its weights are those of delayed SGD; here, those of 2 x 2 ranks are those of 2 x 1."""
    trained = []
    for num_ranks in (2, 4):
        mesh = Mesh(pipeline=2, schedule="pipedream", vertical_sync=vertical_sync)
        config = small_config(num_ranks, train={"optimizer_args": {"momentum": 0.9}}, parallel=mesh)
        trained.append(load_weights(train(make_run(tmp_path, config, name=f"run-{num_ranks}"))))
    one, two = trained
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-5, atol=1e-6)


def draws(batch):
    return {**batch, "features": batch["features"] + torch.rand(1)}


def test_rows_that_differ_within_a_copy_of_the_model_are_an_error(tmp_path):
    spec = ModelSpec(build=build_wide, transform=draws)
    config = small_config(2, parallel=Mesh(pipeline=2, schedule="gpipe"))
    with pytest.raises(RankFailed, match=r"different batches, ranks \[0, 1\]; spec.transform must not draw"):
        train(make_run(tmp_path, config, spec=spec))


def with_mesh(config, num_ranks, **mesh):
    launch = dataclasses.replace(config.launch, num_ranks=num_ranks)
    return dataclasses.replace(config, parallel=Mesh(**mesh), launch=launch)


MESHES = [(4, {"zero_stage": 3}), (4, {"tensor": 2}), (4, {"pipeline": 2, "zero_stage": 1}), (1, {}),
          (2, {"zero_stage": 2}), (2, {"pipeline": 2, "schedule": "gpipe"}), (4, {"tensor": 2, "zero_stage": 1}),
          (3, {}), (4, {"zero_stage": 3, "replicas": 2})]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_run_goes_on_on_another_mesh(tmp_path, optimizer):
    args = {"momentum": 0.9} if optimizer == "SGD" else {}
    config = small_config(
        1, train={"optimizer": optimizer, "optimizer_args": args, "accumulation_steps": 2}, parallel=Mesh()
    )
    whole = train(make_run(tmp_path, config, name="whole"))
    steps = range(1, len(MESHES) + 1)
    run, saved = make_run(tmp_path, config), None
    for step, (num_ranks, mesh) in zip(steps, MESHES, strict=True):
        now = cut_at(with_mesh(config, num_ranks, **mesh), step)
        run = dataclasses.replace(run, config=now)
        saved = train(run) if saved is None else resume(run, saved)
    last = resume(run, saved, config)
    assert last.step == whole.step
    for name, weight in load_weights(whole).items():
        torch.testing.assert_close(load_weights(last)[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [{"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}])
def test_a_run_that_is_resumed_on_the_same_mesh_has_the_same_bits(tmp_path, mesh):
    config = small_config(3, train={"optimizer": "Adam"}, parallel=Mesh(**mesh))
    whole = train(make_run(tmp_path, config, name="whole"))
    run = make_run(tmp_path, config)
    again = resume(run, train(dataclasses.replace(run, config=cut_at(config, 4))))
    expected, found = load_weights(whole), load_weights(again)
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


class Touch:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_S03_a_pickled_file_among_the_checkpoints_of_a_mesh_is_never_opened(tmp_path):
    config = small_config(2, train={"accumulation_steps": 2}, parallel=Mesh(pipeline=2))
    run = make_run(tmp_path, config)
    saved = train(dataclasses.replace(run, config=cut_at(config, 4)))
    folder, was_here = Path(saved.url), tmp_path / "was here"
    names = ("model.pt", "model-00002.pt", "optimizer-00002.pt", "rank-00002.pt", ".metadata", "__0_0.distcp")
    pickled = [folder / name for name in names] + [folder.parent / "state.pt", tmp_path / "read"]
    for path in pickled:
        assert not path.exists()
        path.write_bytes(pickle.dumps(Touch(was_here)))
        os.utime(path, (1, 2))
    load_weights(saved)
    load_model(run.spec, saved.url)
    last = resume(run, saved, with_mesh(config, 4, tensor=2, zero_stage=1))
    assert last.step == 12
    *unread, control = pickled
    control.read_bytes()
    assert [path.name for path in unread if path.exists() and path.stat().st_atime != 1] == []
    assert control.stat().st_atime != 1, "this file system does not say when a file was read"
    in_place = Path(last.url) / "model-00001.pt"
    assert in_place.exists()
    in_place.write_bytes(pickle.dumps(Touch(was_here)))
    with pytest.raises(DamagedError, match=r"model-00001\.pt is damaged"):
        load_weights(last)
    assert not was_here.exists()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + self.norm(self.inner(x).relu())


class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.inner(x)


def build_wide():
    return nn.Sequential(nn.Linear(4, 16), Wide(16), nn.LayerNorm(16), Wide(16), nn.Linear(16, 3))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("num_ranks", "mesh"), [
    (4, {"pipeline": 2, "tensor": 2}),
    (4, {"pipeline": 2, "tensor": 2, "schedule": "interleaved", "stages_per_rank": 2}),
    (4, {"pipeline": 4, "schedule": "gpipe", "stages": (1, 2, 1, 1)}),
    (4, {"pipeline": 2, "schedule": "zero_bubble"}),
    pytest.param(8, {"tensor": 2, "pipeline": 2, "zero_stage": 1}, marks=pytest.mark.slow),
    pytest.param(8, {"tensor": 2, "pipeline": 2, "zero_stage": 3}, marks=pytest.mark.slow),
])  # fmt: skip
def test_deeper_models_that_are_cut(tmp_path, num_ranks, mesh):
    config = small_config(num_ranks, train={**MOMENTUM, "accumulation_steps": 2}, parallel=Mesh(**mesh))
    assert_same_training(tmp_path, config, 245, spec=ModelSpec(build=build_wide))


def build_deep():
    return nn.Sequential(nn.Linear(4, 16), *(Block(16) for _ in range(3)), nn.BatchNorm1d(16), nn.Linear(16, 3))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_validation_and_its_metrics_are_those_of_ddp(tmp_path, zero_stage):
    options = {"validation_fraction": 0.2, "metrics": {"accuracy": {"class": "MulticlassAccuracy", "num_classes": 3}}}
    spec = ModelSpec(build=build_deep)
    results = []
    for name, parallel in (("ddp", Mesh()), ("mesh", Mesh(zero_stage=zero_stage))):
        config = small_config(3, train=options, parallel=parallel)
        run = make_run(tmp_path, config, spec=spec, name=name)
        results.append(run_ranks(train_rank, 3, run)[0])
    expected, found = results
    for before, after in zip(expected["history"], found["history"], strict=True):
        assert after["train_loss"] == pytest.approx(before["train_loss"], rel=1e-5)
        assert after["metrics"]["loss"] == pytest.approx(before["metrics"]["loss"], rel=1e-5)
        assert after["metrics"]["accuracy"] == pytest.approx(before["metrics"]["accuracy"], abs=0.01)
    assert evaluate(run, found["checkpoint"]) == pytest.approx(found["metrics"]["loss"], rel=1e-5)


def evaluate(run, checkpoint_url):
    """The loss of the validation rows with the weights of a checkpoint, in one process."""
    model = load_model(run.spec, checkpoint_url)
    loader = build_loader(run.train, run.config, rank=0, world_size=1, split="validation", shuffle=False)
    total = 0.0
    for step in loader.epoch(0):
        for batch in step.micro_batches:
            with torch.no_grad():
                total += float(weighted_loss_sum(run.spec, model, batch, run.config)[1])
    return total / loader.plan.rows


def places_of_shards():
    """Where this process has the shards of `fully_shard`, by torch's mesh and by ours."""
    from torch.distributed.device_mesh import DeviceMesh

    from spark_dl.parallel.mesh.flat import shard_fully

    with rendezvous.join(Launch(device="cpu")) as world:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("shards",))
        shard_fully(model, list(model), mesh)
        return os.getpid(), world.rank, [p.device_mesh.get_coordinate()[0] for p in model.parameters()]


def test_a_process_that_has_another_rank_in_the_next_run_has_other_shards():
    runs = [run_ranks(places_of_shards, 3) for _ in range(2)]
    for run in runs:
        assert [places for _, _, places in run] == [[rank] * 4 for rank in range(3)]
    ranks = [{pid: rank for pid, rank, _ in run} for run in runs]
    assert any(ranks[0].get(pid) not in (None, rank) for pid, rank in ranks[1].items()), "no process has another rank"


class Unused(nn.Module):
    """Has a layer that no step uses, and one for rows far out alone, which most batches do not have."""

    def __init__(self):
        super().__init__()
        self.for_all, self.never, self.for_few = build_mlp(), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, features):
        out, few = self.for_all(features), features[:, 0] > 4.0
        return out.index_add(0, few.nonzero()[:, 0], self.for_few(features[few])) if few.any() else out


UNUSED = ModelSpec(build=Unused)


@pytest.mark.parametrize("optimizer", [{"momentum": 0.9, "weight_decay": 0.1}])
@pytest.mark.parametrize(("zero", "num_ranks"), [(0, 2), (1, 2), (1, 3), (2, 2), (2, 3)])
def test_parameters_that_no_rank_has_used_stay_as_they_are(tmp_path, zero, num_ranks, optimizer):
    parallel = Mesh(zero_stage=zero, find_unused_parameters=True, bucket_mib=0.0001)
    train = {"optimizer_args": optimizer, "accumulation_steps": 2}
    config = small_config(num_ranks, train=train, parallel=parallel)
    assert_same_training(tmp_path, config, 480, spec=UNUSED)


class WithMore(nn.Sequential):
    """Keeps something that is not a tensor in its state."""

    def get_extra_state(self):
        return {"calls": 1}

    def set_extra_state(self, state):
        pass


class Counting(torch.optim.SGD):
    """Keeps something that is not a tensor in the state of each parameter."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["calls"] = self.state[parameter].get("calls", 0) + 1


@pytest.mark.parametrize(("spec", "parallel", "expected"), [
    (ModelSpec(build=lambda: WithMore(*build_mlp())), Mesh(zero_stage=1),
     r"spec.build: the model has a state that is not a tensor, '_extra_state', which parallel.strategy='mesh' cannot"),
    (ModelSpec(build=build_mlp, optimizer=lambda model: Counting(model.parameters(), lr=0.1)), Mesh(),
     r"train.optimizer: the state 'calls' of Counting is not a tensor, which parallel.strategy='mesh' cannot save"),
    (ModelSpec(build=build_mlp), Auto(),
     r"parallel.strategy: found 'auto' on a rank; spark_dl.train plans the mesh on the driver"),
], ids=["model", "optimizer", "no plan"])  # fmt: skip
def test_what_a_mesh_cannot_train_or_save_is_an_error(tmp_path, spec, parallel, expected):
    with pytest.raises(RankFailed, match=expected):
        train(make_run(tmp_path, small_config(2, parallel=parallel), spec=spec))


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_parameters_that_a_step_has_not_used_are_named_with_a_setting_that_there_is(tmp_path, zero):
    config = small_config(2, parallel=Mesh(zero_stage=zero))
    run = make_run(tmp_path, config, spec=UNUSED)
    expected = r"does not depend on the parameters .*never.weight.*, set parallel.find_unused_parameters to true"
    with pytest.raises(RankFailed, match=expected):
        run_ranks(train_rank, 2, run)


class ByRank(nn.Module):
    """Calls a layer on one rank alone."""

    def __init__(self):
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, features):
        out = self.first(features)
        return self.last(self.extra(out) if os.environ["RANK"] == "1" else out)


def test_zero_3_names_layers_that_some_ranks_do_not_call_before_the_first_step(tmp_path):
    run = make_run(tmp_path, small_config(2, parallel=Mesh(zero_stage=3)), spec=ModelSpec(build=ByRank))
    with pytest.raises(RankFailed, match=r"rank 0 calls 'last', rank 1 calls 'extra'; use zero_stage 2"):
        run_ranks(train_rank, 2, run)
    with pytest.raises(ValueError, match=r"parallel.find_unused_parameters: expected false with parallel.zero_stage 3"):
        small_config(2, parallel=Mesh(zero_stage=3, find_unused_parameters=True))


def scalar(batch):
    return {**batch, "temperature": torch.tensor(2.0)}


def with_temperature(model, batch):
    return model(batch["features"]) / batch["temperature"]


@pytest.mark.parametrize("parallel", [Mesh(tensor=2), Mesh(zero_stage=1)])
def test_a_scalar_in_a_batch_is_no_error(tmp_path, parallel):
    spec = ModelSpec(build=build_mlp, transform=scalar, forward=with_temperature)
    run = make_run(tmp_path, small_config(2, parallel=parallel, train={"epochs": 1}), spec=spec)
    assert run_ranks(train_rank, 2, run)[0]["steps"] == 6
