"""Hooks: when a run calls them, what they get, their state in checkpoints, and gradients that they change."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from spark_dl import Checkpoint, Hooks, ModelSpec
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.rundir.metrics import read_metrics
from tests.builders.models import build_mlp, small_config
from tests.builders.settings import parallel
from tests.ranks.launcher import RankFailed
from tests.ranks.runs import assert_same_to_the_bit, cut_at, make_run, on_ranks, resume, train, train_rank


@dataclasses.dataclass
class Recorder(Hooks):
    """Writes each call of each rank to a file, and counts the steps of the run."""

    folder: str
    steps: int = 0

    def _write(self, step, kind, **more):
        position = step.position
        line = {"kind": kind, "step": position.global_step, "epoch": position.epoch, "steps": self.steps, **more}
        with open(f"{self.folder}/{step.rank}-of-{step.world_size}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def before_step(self, step):
        assert step.loss_sum is None
        assert step.model.training
        self._write(step, "before")

    def after_gradients(self, step):
        norm = sum(float(p.grad.square().sum()) for p in step.model.parameters()) ** 0.5
        self._write(step, "gradients", norm=norm)

    def after_step(self, step):
        self.steps += 1
        self._write(step, "after", loss=float(step.loss_sum) / float(step.count))

    def after_validation(self, step, metrics):
        self._write(step, "validation", loss=metrics["loss"])

    def after_checkpoint(self, step, url):
        assert Path(url, checkpoint.MANIFEST).exists()
        self._write(step, "checkpoint", name=Path(url).name)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def recorded(folder, rank, ranks):
    path = folder / f"{rank}-of-{ranks}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def config(num_ranks=2, **train):
    return small_config(num_ranks, train={"validation_fraction": 0.2, "log_every": 1, "epochs": 2, **train})


def test_all_ranks_are_called_around_steps_validations_and_checkpoints(tmp_path):
    folder = tmp_path / "calls"
    folder.mkdir()
    spec = ModelSpec(build=build_mlp, hooks=lambda: Recorder(str(folder)))
    run = make_run(tmp_path, config(validate_every_steps=2), spec=spec)
    train(run)
    calls = [recorded(folder, rank, 2) for rank in range(2)]
    kinds = [line["kind"] for line in calls[0]]
    assert kinds == [line["kind"] for line in calls[1]]
    lines = read_metrics(run.run_dir)
    steps = [line for line in lines if line["kind"] == "step"]
    assert kinds[:7] == ["before", "gradients", "after", "before", "gradients", "after", "validation"]
    assert kinds.count("before") == kinds.count("gradients") == kinds.count("after") == len(steps)
    epochs = [line for line in lines if line["kind"] == "epoch"]
    within = [line for line in lines if line["kind"] == "validation"]
    expected = sorted((line["step"], line["metrics"]["loss"]) for line in (*within, *epochs))
    for of_rank in calls:
        found = [(line["step"], line["loss"]) for line in of_rank if line["kind"] == "validation"]
        assert sorted(found) == expected
        written = {Path(line["url"]).name for line in lines if line["kind"] == "checkpoint"}
        assert {line["name"] for line in of_rank if line["kind"] == "checkpoint"} == written
    losses = zip(*([line["loss"] for line in of_rank if line["kind"] == "after"] for of_rank in calls), strict=True)
    assert [sum(pair) for pair in losses] == pytest.approx([line["loss"] for line in steps], rel=1e-5)
    norms = [[line["norm"] for line in of_rank if line["kind"] == "gradients"] for of_rank in calls]
    assert norms[0] == norms[1], "the gradients are those of the global batch"


def test_their_state_is_in_checkpoints_and_hooks_may_be_new_in_a_resume(tmp_path):
    folder = tmp_path / "calls"
    folder.mkdir()
    spec, settings = ModelSpec(build=build_mlp, hooks=lambda: Recorder(str(folder))), config()
    cut = train(make_run(tmp_path, cut_at(settings, 3), spec=spec))
    saved = resume(make_run(tmp_path, settings, spec=spec), cut)
    after = [line for line in recorded(folder, 0, 2) if line["kind"] == "after"]
    assert [line["steps"] for line in after] == [*range(1, saved.step + 1)]
    plain = ModelSpec(build=build_mlp)
    cut = train(make_run(tmp_path, cut_at(settings, 3), spec=plain, name="plain"))
    resume(make_run(tmp_path, settings, spec=spec, name="plain"), cut)
    added = [line["steps"] for line in recorded(folder, 0, 2) if line["kind"] == "after"][len(after) :]
    assert added == [*range(1, saved.step - 2)], "it begins anew"
    more = dataclasses.replace(settings, train=dataclasses.replace(settings.train, epochs=3))
    resume(make_run(tmp_path, more, spec=plain), saved)  # without them


class NoisyGradients(Hooks):
    """Adds the noise of Neelakantan et al. 2015."""

    def after_gradients(self, step):
        generator = step.generator()
        for parameter in step.model.parameters():
            parameter.grad.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def test_gradient_noise_is_the_same_on_any_number_of_ranks_and_after_a_resume(tmp_path):
    spec = ModelSpec(build=build_mlp, hooks=NoisyGradients)
    found = [train(make_run(tmp_path, config(n), spec=spec, name=f"on {n}")) for n in (1, 2, 3)]
    expected = load_weights(found[0])
    for saved in found[1:]:
        for name, value in load_weights(saved).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    plain = load_weights(train(make_run(tmp_path, config(1), name="plain")))
    assert not torch.allclose(plain["0.weight"], expected["0.weight"], atol=1e-3)
    cut = train(make_run(tmp_path, cut_at(config(2), 3), spec=spec, name="cut"))
    assert_same_to_the_bit(found[1], resume(make_run(tmp_path, config(2), spec=spec, name="cut"), cut))


@pytest.mark.parametrize("settings", [{"zero_stage": 1}, {"zero_stage": 3}, {"tensor": 2}], ids=str)
def test_they_are_called_in_a_mesh_with_the_part_of_a_rank(tmp_path, settings):
    folder = tmp_path / "calls"
    folder.mkdir()
    spec = ModelSpec(build=build_mlp, hooks=lambda: Counter(str(folder)))
    given = small_config(2, train={"epochs": 1}, parallel=parallel("mesh", **settings))
    saved = train(make_run(tmp_path, dataclasses.replace(given, checkpoint=Checkpoint(every_steps=2)), spec=spec))
    assert {(folder / str(rank)).read_text() for rank in range(2)} == {str(saved.step)}


@dataclasses.dataclass
class Counter(Hooks):
    folder: str

    def after_step(self, step):
        Path(self.folder, str(step.rank)).write_text(str(step.position.global_step))


def test_B27_hooks_of_another_class_are_an_error(tmp_path):
    run = make_run(tmp_path, config(), spec=ModelSpec(build=build_mlp, hooks=dict))
    with pytest.raises(RankFailed, match="spec.hooks: expected an object of a class derived from spark_dl.Hooks, fou"):
        on_ranks(train_rank, run)
