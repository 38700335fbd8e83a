"""Checkpoints: there once the manifest is, and only as they were written."""

import configparser
import errno
import hashlib
import io
import pickle
import random
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from spark_dl import Checkpoint, Config, Data, Launch, Loader, Train, storage
from spark_dl.config.load import build_config
from spark_dl.data.columns.schema import Column
from spark_dl.launch.failures.errors import is_retryable
from spark_dl.launch.rank.rendezvous import join
from spark_dl.rundir import checkpoint, checkpoint_files, run_folder, saving
from spark_dl.rundir.checkpoint_files import NotLoadedError
from spark_dl.rundir.generations import read_generation

COLUMNS = (Column("features", "float32", (2, 3), "ndarray"), Column("label", "int64"))


@pytest.fixture
def group(no_launcher):
    """A process group of this process alone: saving is collective."""
    with join(Launch(device="cpu")):
        yield


ABOUT, OPTIONS = ("rows", "score", "branch", "shapes"), ("problem", "key", "read_back", "in_use")


def save(run_dir, step=1, generation=0, config=None, **parts):
    about, options = ({name: parts.pop(name) for name in names if name in parts} for names in (ABOUT, OPTIONS))
    content = {"model": {"w": torch.arange(3.0)}, "training": {"progress": {"epoch": 1}}, **parts}
    about = saving.About(
        world_size=1, generation=generation, step=step, config=config or Config(), columns=COLUMNS, **about
    )
    return saving.save(str(run_dir), saving.contents(0, **content), about, **options).url


def handmade(run_dir, step, generation=1, files=None, **manifest):
    """A checkpoint of files with any content, with a manifest that fits them."""
    folder = Path(run_dir) / "checkpoints" / f"step-{step:08d}.gen-{generation:04d}"
    folder.mkdir(parents=True)
    entries = {}
    for name, content in (files or {}).items():
        (folder / name).write_bytes(content)
        entries[name] = {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    plain = {"step": step, "generation": generation, "world_size": 1, "files": entries, "columns": [],
             "config": Config().to_dict(), **manifest}  # fmt: skip
    checkpoint_files.write_manifest(str(folder), plain)
    return folder


def steps(run_dir):
    return [saved.step for saved in checkpoint.list_checkpoints(str(run_dir))]


def test_a_run_that_has_failed_says_how_to_go_on(tmp_path, group, monkeypatch):
    run_dir = str(tmp_path / "run")
    assert checkpoint.how_to_resume(run_dir) == (
        "No checkpoint has been saved yet, so the next call begins from the start."
    )
    url = save(tmp_path / "run", step=12)
    resume = f"resume=True / --resume with the run_dir {run_dir} goes on from it."
    assert checkpoint.how_to_resume(run_dir) == f"The last checkpoint is {url} (step 12). {resume}"

    def fail(url):
        raise OSError("no route to host")

    monkeypatch.setattr(storage, "list_names", fail)
    assert checkpoint.how_to_resume(run_dir) == f"The last checkpoint cannot be read (no route to host); {resume}"


def test_what_is_saved_comes_back(tmp_path, group):
    config = Config(data=Data(features=("features",)), train=Train(lr=0.25))
    model = {"0": {"w": torch.randn(3, 4), "n": torch.tensor(7), "h": torch.ones(2, dtype=torch.bfloat16)}}
    url = save(tmp_path / "run", step=12, generation=3, config=config, model=model, training={"a": [1, (2.5, None)]})
    saved = checkpoint.latest(str(tmp_path / "run"))
    assert (saved.url, saved.step, saved.generation) == (url, 12, 3)
    assert saved.columns == COLUMNS
    assert build_config(saved.manifest["config"]) == config
    assert checkpoint.run_dir_of(saved) == str(tmp_path / "run")
    found = checkpoint.load(saved, "model.pt")["0"]
    assert all(torch.equal(found[k], v) and found[k].dtype == v.dtype for k, v in model["0"].items())
    assert checkpoint.load(saved, "training.pt") == {"a": [1, (2.5, None)]}


def test_the_manifest_has_the_shapes_of_weights_that_rank_0_has(tmp_path, group):
    save(tmp_path, model={"w": torch.ones(2, 3)}, shapes={"w": [2, 3]})
    saved = checkpoint.last_valid(str(tmp_path))
    assert saved.manifest["shapes"] == {"w": [2, 3]}
    assert checkpoint.shapes_of(saved) == {"w": [2, 3]}


def test_the_manifest_is_written_last(tmp_path, group, monkeypatch):
    written = []
    real = storage.writing
    monkeypatch.setattr(storage, "writing", lambda url: (written.append(Path(url).name), real(url))[1])
    save(tmp_path)
    assert written[0] == "UNFINISHED"
    assert sorted(written[1:-1]) == ["model.pt", "rank-00000.pt", "training.pt"]
    assert written[-1] == "MANIFEST.json"


@pytest.mark.parametrize("broken", ["rank-00000.pt", "model.pt", "training.pt", "MANIFEST.json"])
def test_a_part_that_cannot_be_written_is_an_error_and_no_checkpoint(tmp_path, group, broken):
    save(tmp_path, step=1)
    (tmp_path / "checkpoints" / "step-00000002.gen-0000" / broken).mkdir(parents=True)
    with pytest.raises(saving.NotWrittenError, match=rf"checkpoint at step 2 not saved: .*{broken}") as error:
        save(tmp_path, step=2)
    assert error.value.url == str(tmp_path / "checkpoints" / "step-00000002.gen-0000")
    assert is_retryable(error.value)
    assert steps(tmp_path) == [1]
    with pytest.raises(
        saving.BadStateError, match="step 2 not saved: w is not finite"
    ) as error:  # nor would a later one be
        save(tmp_path, step=2, problem="w is not finite")
    assert not is_retryable(error.value)


def test_the_newest_are_kept_and_the_others_deleted(tmp_path, group):
    config = Config(checkpoint=Checkpoint(keep=2))
    for step in (1, 2, 9, 10, 100):
        save(tmp_path, step=step, config=config)
    assert steps(tmp_path) == [10, 100]
    assert len(storage.list_names(checkpoint.folder(str(tmp_path)))) == 2


@pytest.mark.parametrize(("mode", "best"), [("min", [2, 4]), ("max", [1, 3])])
def test_the_best_are_kept_beside_the_newest(tmp_path, group, mode, best):
    config = Config(checkpoint=Checkpoint(keep=1, keep_best=2), train=Train(early_stop_mode=mode))
    for step, score in enumerate([0.9, 0.1, 0.8, 0.2, 0.5, None, float("nan"), 0.5, None], 1):
        save(tmp_path, step=step, config=config, score=None if score is None else checkpoint.Score(score, "loss", mode))
    assert steps(tmp_path) == [*best, 9]
    found = checkpoint.by_score(checkpoint.list_checkpoints(str(tmp_path)), mode)
    assert found[0].step == {"min": 2, "max": 1}[mode]


def test_R6_scores_of_other_metrics_modes_and_rows_are_not_compared(tmp_path, group):
    config = Config(checkpoint=Checkpoint(keep=9), train=Train(early_stop_mode="max", early_stop_metric="acc"))
    scores = [(9.0, "loss", "min", "a"), (0.1, "acc", "max", "a"), (0.9, "acc", "max", "b"), (0.8, "acc", "max", "a")]
    for step, score in enumerate([*scores, (0.7, "acc", "max", "a")], 1):
        save(tmp_path, step=step, config=config, score=checkpoint.Score(*score))
    found = checkpoint.list_checkpoints(str(tmp_path))
    assert [saved.step for saved in checkpoint.by_score(found, "max", "acc")] == [4, 5, 2]
    assert [saved.step for saved in checkpoint.by_score(found, "min", "loss")] == [1]


def test_R20_a_branch_that_was_left_has_no_best_checkpoint(tmp_path, group):
    config = Config(checkpoint=Checkpoint(keep=9))
    score = {step: checkpoint.Score(1 / step, "loss", "min") for step in (1, 2, 3)}
    for step in (1, 2, 3):
        save(tmp_path, step=step, generation=1, config=config, score=score[step])
    save(tmp_path, step=2, generation=2, config=config, score=checkpoint.Score(0.9, "loss", "min"), branch=[(1, 1)])
    found = checkpoint.list_checkpoints(str(tmp_path))
    assert [(s.generation, s.step) for s in checkpoint.by_score(found, "min")] == [(2, 2), (1, 1)]


def test_R17_what_a_lower_keep_does_not_need_is_deleted_before_the_next_checkpoint_is_written(
    tmp_path, group, monkeypatch
):
    urls = [save(tmp_path, step=step, config=Config(checkpoint=Checkpoint(keep=3))) for step in (1, 2, 3)]
    there = []
    real = checkpoint_files.begin
    monkeypatch.setattr(checkpoint_files, "begin", lambda *args: (there.append(steps(tmp_path)), real(*args)))
    save(tmp_path, step=4, config=Config(checkpoint=Checkpoint(keep=1)), read_back=True, in_use=urls[0])
    assert there == [[1, 3]], "the newest, and the one that the run goes on from"
    assert steps(tmp_path) == [1, 4]


def test_R1_what_cannot_be_loaded_again_is_not_committed(tmp_path, group, monkeypatch):
    def fail(url, entry):
        raise checkpoint_files.NotLoadedError(entry["name"], "found the object x.Y")

    monkeypatch.setattr(checkpoint_files, "read_back", fail)
    with pytest.raises(saving.BadStateError, match=r"rank 0 cannot load what it has written: .*found the object x\.Y"):
        save(tmp_path, step=1, read_back=True)
    assert steps(tmp_path) == []
    save(tmp_path, step=2)
    assert steps(tmp_path) == [2]


def test_deleting_begins_with_the_manifest(tmp_path, group, monkeypatch):
    save(tmp_path, step=1)
    deleted, delete_file = [], storage.delete_file
    monkeypatch.setattr(storage, "delete_file", lambda url: (deleted.append(Path(url).name), delete_file(url)))
    save(tmp_path, step=2, config=Config(checkpoint=Checkpoint(keep=1)))
    assert deleted[:2] == ["UNFINISHED", "MANIFEST.json"]  # of step 2, which is committed now, and of step 1
    assert {*deleted[2:]} == {"model.pt", "training.pt", "rank-00000.pt"}


def test_what_cannot_be_deleted_is_a_warning_and_the_new_checkpoint_is_there(tmp_path, group, caplog):
    config = Config(checkpoint=Checkpoint(keep=1))
    moved, target = Path(save(tmp_path, step=1)), tmp_path / "elsewhere"
    moved.rename(target)
    moved.symlink_to(target)
    save(tmp_path, step=2, config=config, generation=2)
    assert "cannot delete the checkpoints before the last 1" in caplog.text
    assert f"{moved} is a symbolic link to {target}" in caplog.text
    assert (target / "model.pt").exists()
    assert steps(tmp_path) == [2]  # what a link leads to is not the run's
    moved.unlink()
    target.rename(moved)
    save(tmp_path, step=3, config=config, generation=2)
    assert steps(tmp_path) == [3]


def test_what_older_attempts_have_not_committed_is_deleted(tmp_path, group):
    folders = [Path(checkpoint.folder(str(tmp_path)), f"step-0000000{step}.gen-000{step}") for step in (1, 2, 3)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "model.pt").write_bytes(b"half")
    for _ in range(2):
        checkpoint.start_generation(str(tmp_path))
    save(tmp_path, step=4, generation=2)
    assert [folder.exists() for folder in folders] == [False, True, True]
    assert steps(tmp_path) == [4]


def test_an_attempt_that_cannot_be_read_is_an_error_and_no_checkpoint(tmp_path, group):
    (tmp_path / "generations").write_text("no folder")
    with pytest.raises(RuntimeError, match=r"step 1 not saved: cannot commit it: .*generations"):
        save(tmp_path)
    assert steps(tmp_path) == []


# What counts as a checkpoint


def test_a_checkpoint_that_is_deleted_while_the_run_is_listed_does_not_count(tmp_path, monkeypatch):
    for step in (1, 2):
        handmade(tmp_path, step)
    read = storage.read_bytes

    def delete_then_read(url):
        if "step-00000001" in url:
            storage.delete(url)
        return read(url)

    monkeypatch.setattr(storage, "read_bytes", delete_then_read)
    assert [saved.step for saved in checkpoint.list_checkpoints(str(tmp_path))] == [2]


def test_a_folder_without_a_manifest_does_not_exist(tmp_path):
    folder = handmade(tmp_path, step=5, files={"model.pt": b"weights"})
    (folder / "MANIFEST.json").unlink()
    assert checkpoint.latest(str(tmp_path)) is None
    for url in (str(tmp_path), str(folder)):
        with pytest.raises(ValueError, match="no checkpoint at"):
            checkpoint.find(url)
    with pytest.raises(FileNotFoundError, match=r"MANIFEST\.json"):
        checkpoint.open_checkpoint(str(folder))


def test_other_names_are_passed_by(tmp_path):
    handmade(tmp_path, step=5)
    for name in ("notes", "step-7", "step-00000009.gen-0001.tmp"):
        other = tmp_path / "checkpoints" / name
        other.mkdir()
        (other / "MANIFEST.json").write_text("{}")
    assert steps(tmp_path) == [5]


def test_the_newest_is_that_of_the_highest_step_in_whole_numbers(tmp_path):
    for step in (9, 100_000_000, 10, 99_999_999):
        handmade(tmp_path, step)
    assert steps(tmp_path) == [9, 10, 99_999_999, 100_000_000]
    assert checkpoint.latest(str(tmp_path)).step == 100_000_000


def test_a_later_attempt_that_began_at_an_earlier_step_is_newer(tmp_path):
    for step, generation in [(500, 1), (400, 2)]:
        handmade(tmp_path, step, generation)
    assert checkpoint.latest(str(tmp_path)).step == 400


def test_of_the_same_step_the_later_attempt_is_newer(tmp_path):
    for generation in (2, 10, 1):
        handmade(tmp_path, 5, generation)
    assert checkpoint.latest(str(tmp_path)).generation == 10


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert checkpoint.list_checkpoints(str(tmp_path / "nowhere")) == []
    assert checkpoint.latest(str(tmp_path)) is None


def test_a_checkpoint_that_was_copied_out_of_its_run_is_its_own_folder(tmp_path):
    saved = handmade(tmp_path / "run", 1)
    shutil.copytree(saved, tmp_path / "best")
    assert checkpoint.run_dir_of(checkpoint.find(str(saved))) == str(tmp_path / "run")
    assert checkpoint.run_dir_of(checkpoint.find(str(tmp_path / "best"))) == str(tmp_path / "best")


def test_find_takes_a_run_or_one_of_its_checkpoints(tmp_path):
    first, second = handmade(tmp_path, 1), handmade(tmp_path, 2)
    assert checkpoint.find(str(tmp_path)).url == str(second)
    assert checkpoint.find(str(first)).step == 1
    assert checkpoint.find(first.as_uri()).step == 1


class Touch:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def saved(content, **options):
    torch.save(content, out := io.BytesIO(), **options)
    return out.getvalue()


def legacy_tar(bad):
    """The format of torch before 0.2: `torch.load` reads it with `tarfile` and `pickle`."""
    with tarfile.open(fileobj=(out := io.BytesIO()), mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            member = tarfile.TarInfo(name)
            member.size = len(content := pickle.dumps(bad))
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def renamed(content, rename, bad):
    """The archive of `torch.save`, with other names, and a pickle in the place of its own."""
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out := io.BytesIO(), "w") as new:
        for name in old.namelist():
            new.writestr(rename(name), pickle.dumps(bad) if name.endswith("data.pkl") else old.read(name))
    return out.getvalue()


WEIGHTS = {"0": {"w": torch.arange(3.0)}}
HOSTILE = {
    "torch.save": lambda bad, out: saved({"w": bad}),
    "torch.save of old": lambda bad, out: saved({"w": bad}, _use_new_zipfile_serialization=False),
    "pickle": lambda bad, out: pickle.dumps(bad),
    "legacy tar": lambda bad, out: legacy_tar(bad),
    "zip with a pickle": lambda bad, out: renamed(saved(WEIGHTS), lambda name: name, bad),
    "zip with absolute names": lambda bad, out: renamed(saved(WEIGHTS), lambda name: f"{out}/{name}", bad),
    "zip with names above": lambda bad, out: renamed(saved(WEIGHTS), lambda name: f"../../out/{name}", bad),
    "TorchScript": lambda bad, out: scripted(),
    "eval": lambda bad, out: saved({"w": Call(eval, f"open({str(out)!r} + '/x', 'w')")}),
    "getattr": lambda bad, out: saved({"w": Call(getattr, "", "format")}),
}


class Call:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def scripted():
    torch.jit.save(torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1, 1)), out := io.BytesIO())
    return out.getvalue()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol", "ignore:'?torch", "ignore:`torch")
@pytest.mark.parametrize("how", HOSTILE)
def test_S03_a_checkpoint_that_would_run_code_is_one_error_and_runs_nothing(tmp_path, how):
    (tmp_path / "out").mkdir()
    content = HOSTILE[how](Touch(tmp_path / "out" / "was here"), tmp_path / "out")
    handmade(tmp_path / "run", 1, files={"model.pt": content})
    with pytest.raises(NotLoadedError, match=r"/model\.pt was not loaded: expected tensors and plain data") as error:
        checkpoint.load(checkpoint.latest(str(tmp_path / "run")), "model.pt")
    assert "weights_only" not in str(error.value)
    assert list((tmp_path / "out").iterdir()) == []
    handmade(tmp_path / "run", 2, files={"model.pt": saved(WEIGHTS)})
    assert torch.equal(
        checkpoint.load(checkpoint.latest(str(tmp_path / "run")), "model.pt")["0"]["w"], WEIGHTS["0"]["w"]
    )


def test_S03_torch_is_of_a_version_whose_weights_only_holds():
    """CVE-2025-32434 is mended in 2.6, CVE-2026-24747 in 2.10."""
    settings = configparser.ConfigParser()
    settings.read(Path(__file__).parents[3] / "setup.cfg")
    (floor,) = re.findall(r"^torch>=([\d.]+)$", settings["options"]["install_requires"], re.MULTILINE)
    assert tuple(map(int, floor.split("."))) >= (2, 10)
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)


# Attempts


def test_what_an_older_attempt_saves_while_another_begins_is_gone_on_from(tmp_path, monkeypatch):
    handmade(tmp_path, 1)
    start = checkpoint.start_generation

    def save_and_start(run_dir, **options):
        handmade(tmp_path, 2)
        return start(run_dir, **options)

    monkeypatch.setattr(checkpoint, "start_generation", save_and_start)
    generation, saved = run_folder.begin_attempt(str(tmp_path), Config(), resume=True, overwrite=False)
    assert (generation, saved.step) == (2, 2)


def test_what_may_not_begin_leaves_an_attempt_that_runs_alone(tmp_path):
    handmade(tmp_path, 1)
    for how, message in (({"resume": False}, "already has checkpoints"), ({"resume": True}, "other settings")):
        with pytest.raises(ValueError, match=message):
            run_folder.begin_attempt(str(tmp_path), Config(train=Train(lr=9.0)), **how, overwrite=False)
    assert read_generation(str(tmp_path)) == 0


@pytest.mark.parametrize("wrong", ["step-00000001.gen-0001", "last", "{run_dir}/checkpoints/step-00000099.gen-0001"])
def test_a_checkpoint_to_resume_from_that_is_not_there_is_an_error_that_lists_those_of_the_run(tmp_path, wrong):
    run_dir = str(tmp_path / "run")

    def resume():
        with pytest.raises(ValueError, match=r"^resume: no checkpoint at /.*; expected the path or URL of a") as found:
            run_folder.begin_attempt(run_dir, Config(), resume=wrong.format(run_dir=run_dir), overwrite=False)
        return str(found.value).partition("; ")[2]

    assert resume() == f"expected the path or URL of a checkpoint, and {run_dir} has none"
    made = [str(handmade(run_dir, step)) for step in range(1, 13)]
    Path(made[10], "MANIFEST.json").unlink()  # it was not committed
    listed = ", ".join([made[11], *made[1:10][::-1]])
    assert resume() == f"expected the path or URL of a checkpoint, and {run_dir} has {listed} and 1 more"


def test_a_rank_of_an_older_attempt_cannot_commit(tmp_path, group):
    old = checkpoint.start_generation(str(tmp_path))
    save(tmp_path, step=1, generation=old)
    new = checkpoint.start_generation(str(tmp_path))
    with pytest.raises(RuntimeError, match=r"step 2 not saved: this is attempt 1 .*attempt 2 has started") as error:
        save(tmp_path, step=2, generation=old)
    assert not isinstance(error.value, saving.NotWrittenError)
    assert steps(tmp_path) == [1]
    save(tmp_path, step=2, generation=new)
    assert steps(tmp_path) == [1, 2]


# Resuming


def of_ranks(run_dir, *states):
    """A checkpoint in which each rank has a state of its own."""
    files = {}
    for rank, state in enumerate(states):
        buffer = io.BytesIO()
        torch.save({"state": state}, buffer)
        files[f"rank-{rank:05d}.pt"] = buffer.getvalue()
    handmade(run_dir, 1, files=files, world_size=len(states))
    return checkpoint.latest(str(run_dir))


def test_what_only_some_ranks_have_is_the_mean_of_theirs(tmp_path):
    """As the state of Adam where a rank never used an expert."""
    used = [{0: {"step": torch.tensor(8.0)}, 1: {"step": torch.tensor(float(n)), "seen": n}} for n in (4, 6)]
    saved = of_ranks(tmp_path, {"state": used[0]}, {"state": used[1]}, {"state": {0: {"step": torch.tensor(2.0)}}})
    assert saving.load_rank_state(saved, 1, 2) == {
        "state": {0: {"step": torch.tensor(6.0)}, 1: {"step": torch.tensor(5.0), "seen": 4}}
    }
    assert saving.load_rank_state(saved, 2, 3) == {"state": {0: {"step": torch.tensor(2.0)}}}


BASE = {"global_batch_size": 64, "lr": 0.1}


def resume_with(tmp_path, **sections):
    handmade(tmp_path, 1, config=Config(train=Train(**BASE)).to_dict())
    checkpoint.check_same_settings(checkpoint.latest(str(tmp_path)), Config(**{"train": Train(**BASE), **sections}))


@pytest.mark.parametrize("sections", [
    {},
    {"train": Train(**BASE, epochs=9, max_steps=7, log_every=3)},
    {"train": Train(**BASE, metrics={"m": {"class": "MeanMetric"}})},
    {"train": Train(**BASE, early_stop_metric="loss", early_stop_mode="max", early_stop_patience=1)},
    {"launch": Launch(num_ranks=4, device="cpu", start_timeout_s=1, threads=2)},
    {"checkpoint": Checkpoint(every_steps=3, keep=9)},
    {"loader": Loader(prefetch_batches=9)},
], ids=str)  # fmt: skip
def test_B32_a_run_may_go_on_with_these_settings_changed(tmp_path, sections):
    resume_with(tmp_path, **sections)


@pytest.mark.parametrize(("sections", "differences"), [
    ({"train": Train(**{**BASE, "lr": 0.2})}, [r"train\.lr: was 0\.1, now 0\.2"]),
    ({"train": Train(**BASE, seed=1)}, [r"train\.seed: was 0, now 1"]),
    ({"train": Train(**BASE, optimizer="Adam")}, [r"train\.optimizer: was 'SGD', now 'Adam'"]),
    ({"loader": Loader(num_streams=8, shuffle=False)}, [r"loader\.num_streams: was 16", r"loader\.shuffle: was"]),
    ({"data": Data(features=("a", "b"))}, [r"data\.features"]),
    ({"train": Train(**{**BASE, "global_batch_size": 32}, epochs=5)}, [r"global_batch_size: was 64, now 32"]),
], ids=str)  # fmt: skip
def test_B32_a_run_does_not_go_on_with_other_settings_and_all_are_listed(tmp_path, sections, differences):
    with pytest.raises(ValueError, match=r"cannot resume from") as caught:
        resume_with(tmp_path, **sections)
    assert str(caught.value).count(": was ") == len(differences)
    for difference in differences:
        assert caught.match(difference)


@pytest.mark.parametrize(("more", "missing", "sections"), [
    ({"lab": {"a": 1}}, None, "lab"), ({}, "data", "data"), ({"lab": {}}, "train", "lab, train"),
])  # fmt: skip
def test_B32_a_run_of_a_version_with_other_sections_does_not_go_on(tmp_path, more, missing, sections):
    before = {name: value for name, value in {**Config().to_dict(), **more}.items() if name != missing}
    handmade(tmp_path, 1, config=before)
    match = f"another version of spark_dl has written .sections of its settings that differ: {sections}[)]"
    with pytest.raises(ValueError, match=match):
        checkpoint.check_same_settings(checkpoint.latest(str(tmp_path)), Config())


@pytest.mark.parametrize("missing", ["faults", "launch", "track", "checkpoint"])
def test_a_run_of_a_version_without_a_section_that_may_change_goes_on(tmp_path, missing):
    handmade(tmp_path, 1, config={name: value for name, value in Config().to_dict().items() if name != missing})
    checkpoint.check_same_settings(checkpoint.latest(str(tmp_path)), Config())


@pytest.mark.parametrize(("names", "is_committed"), [
    (["MANIFEST.json"], True), (["MANIFEST.json", "UNFINISHED"], True), (["UNFINISHED"], False), ([], False),
    (["training.pt", "rank-00000.pt", "model.pt"], True),  # its manifest was lost
    (["training.pt", "rank-00000.pt", "model-00003.pt"], True),
    (["training.pt", "rank-00000.pt", "model.pt", "UNFINISHED"], False),
    (["training.pt", "rank-00000.pt"], False), (["rank-00000.pt", "model.pt"], False),
    (["training.pt", "model.pt"], False), (["training.pt", "rank-00001.pt", "model.pt"], False),
    (["training.pt", "rank-00000.pt", "optimizer-00000.pt"], False),
], ids=str)  # fmt: skip
def test_a_checkpoint_was_committed_if_it_has_a_manifest_or_all_that_comes_before_it(tmp_path, names, is_committed):
    folder = tmp_path / "checkpoints" / "step-00000007.gen-0002"
    folder.mkdir(parents=True)
    for name in names:
        (folder / {"UNFINISHED": checkpoint_files.UNFINISHED}.get(name, name)).touch()
    assert checkpoint.last_step(str(tmp_path)) == (7 if is_committed else None)
    assert checkpoint.newest_committed_attempt(str(tmp_path)) == (2 if is_committed else 0)
    assert checkpoint.newest_attempt(str(tmp_path)) == 2


def draw():
    return random.random(), np.random.random(), torch.rand(1).item(), random.gauss(0, 1), np.random.normal()


def test_random_numbers_go_on_where_they_were(tmp_path, group):
    random.seed(5), np.random.seed(6), torch.manual_seed(7)
    draw()
    saved = checkpoint.open_checkpoint(save(tmp_path))
    expected = draw()
    draw()
    assert saving.restore_random_state(saved, 0, 1, Config())
    assert draw() == expected


def test_random_numbers_of_another_number_of_ranks_are_left_alone(tmp_path, group):
    saved = checkpoint.open_checkpoint(save(tmp_path))
    before = torch.get_rng_state()
    torch.rand(1)
    now = torch.get_rng_state()
    assert not saving.restore_random_state(saved, 0, 2, Config())
    assert torch.equal(torch.get_rng_state(), now)
    assert not torch.equal(before, now)


def test_a_full_disk_says_how_much_is_missing_and_other_errors_stay_as_they_are(tmp_path):
    file = str(tmp_path / "not there" / "model.pt")
    needs = (
        r"No space left on device: it needs about 8,\d\d\d bytes, and [\d,]+ bytes are free; free space, or lower che"
    )
    content = {"w": torch.zeros(2000)}
    with pytest.raises(OSError, match=needs) as full, checkpoint_files._space_told(file, content):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, file)
    for url, number in ((file, errno.EIO), ("s3://bucket/model.pt", errno.ENOSPC)):
        error = OSError(number, "as it is")
        with pytest.raises(OSError, match="as it is") as other, checkpoint_files._space_told(url, content):
            raise error
        assert other.value is error
