"""Every file of the newest checkpoint, damaged in every way: resume goes on from the last valid one, and says so."""

import json
import logging
import shutil
import uuid
from pathlib import Path

import pytest
import torch

from spark_dl import Checkpoint, Config, ModelSpec, Train, storage
from spark_dl.evaluate import load_model
from spark_dl.parallel.pieces import Layout, Piece, whole
from spark_dl.rundir import checkpoint, checkpoint_files, generations, run_folder
from tests.builders.models import build_mlp
from tests.unit.rundir.test_checkpoint import group as group
from tests.unit.rundir.test_checkpoint import save, steps

FILES = ("MANIFEST.json", "model.pt", "rank-00000.pt", "training.pt")
"""All files of a checkpoint of one rank, which `test_the_grid_has_every_file` checks."""


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def link(path):
    """To a copy of the very same content."""
    path.rename(path.parent.parent.parent / "moved")
    path.symlink_to(path.parent.parent.parent / "moved")


def folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "bit": flip,
    "list": lambda path: path.write_text("[]"),
    "gone": Path.unlink,
    "link": link,
    "folder": folder,
}
GRID = [pytest.param(name, how, id=f"{name}-{how}") for name in FILES for how in DAMAGES]
STRICT = Config(checkpoint=Checkpoint(strict=True))
WEIGHTS = {"0": build_mlp().state_dict()}


def begin(run_dir, config=None):
    return run_folder.begin_attempt(str(run_dir), config or Config(), resume=True, overwrite=False)


@pytest.fixture
def run_dir(tmp_path, group):
    """A run with the checkpoints of steps 1 and 2."""
    generation = checkpoint.start_generation(str(tmp_path / "run"))
    for step in (1, 2):
        save(tmp_path / "run", step=step, generation=generation, model=WEIGHTS)
    return tmp_path / "run"


def path_of(run_dir, step, name):
    return run_dir / "checkpoints" / f"step-{step:08d}.gen-0001" / name


def test_the_grid_has_every_file(run_dir):
    assert sorted(path.name for path in path_of(run_dir, 2, "").iterdir()) == sorted(FILES)


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("name", "how"), GRID)
def test_F13_resume_goes_on_from_the_last_valid_one_and_names_both(run_dir, name, how, caplog):
    bad, used = path_of(run_dir, 2, name), path_of(run_dir, 1, "")
    DAMAGES[how](bad)
    with caplog.at_level(logging.WARNING, "spark_dl"):
        generation, saved = begin(run_dir)
    assert (generation, saved.step, saved.url) == (2, 1, str(used).rstrip("/"))
    (warning,) = caplog.records
    assert f"{bad} is damaged: " in warning.getMessage()
    assert f"using the checkpoint {saved.url}" in warning.getMessage()


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("name", "how"), GRID)
def test_F13_strict_stops_and_names_file_and_cause(run_dir, name, how):
    bad = path_of(run_dir, 2, name)
    DAMAGES[how](bad)
    with pytest.raises(ValueError, match=r"checkpoint\.strict: ") as caught:
        begin(run_dir, STRICT)
    assert f"{bad} is damaged: " in str(caught.value)
    assert generations.read_generation(str(run_dir)) == 1, "an attempt that runs is left alone"


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("name", "how"), GRID)
def test_a_bad_old_one_blocks_nothing(run_dir, name, how, group, caplog):
    DAMAGES[how](path_of(run_dir, 1, name))
    assert begin(run_dir, STRICT)[1].step == 2
    for step in (3, 4):
        save(run_dir, step=step, generation=2)
    assert steps(run_dir) == [3, 4]
    assert "cannot delete" not in caplog.text or how == "folder"


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("name", "how"), GRID)
def test_a_checkpoint_that_is_named_is_an_error_with_file_and_cause(run_dir, name, how):
    url, bad = str(path_of(run_dir, 2, "")), path_of(run_dir, 2, name)
    DAMAGES[how](bad)
    with pytest.raises(ValueError, match="is damaged: ") as caught:
        checkpoint.find(url)
    assert str(bad) in str(caught.value)
    assert checkpoint.find(str(run_dir)).step == 1


@pytest.mark.parametrize("how", [how for how in DAMAGES if how != "link"])  # the driver looks for links
def test_the_model_of_a_damaged_checkpoint_is_not_loaded(run_dir, how):
    url, bad = str(path_of(run_dir, 2, "")), path_of(run_dir, 2, "model.pt")
    assert load_model(ModelSpec(build=build_mlp), url) is not None
    DAMAGES[how](bad)
    with pytest.raises((ValueError, OSError), match=r"model\.pt"):
        load_model(ModelSpec(build=build_mlp), url)


def test_only_what_is_read_must_have_its_checksum(run_dir):
    flip(path_of(run_dir, 2, "training.pt"))
    assert checkpoint.find(str(run_dir), only_weights=True).step == 2
    assert checkpoint.find(str(run_dir)).step == 1


def test_none_valid_is_an_error_that_lists_each_with_its_cause(run_dir):
    flip(path_of(run_dir, 1, "model.pt"))
    path_of(run_dir, 2, "MANIFEST.json").write_text("")
    for use in (begin, lambda url: checkpoint.find(str(url))):
        with pytest.raises(ValueError, match="no valid checkpoint") as caught:
            use(run_dir)
        for bad in (path_of(run_dir, 1, "model.pt"), path_of(run_dir, 2, "MANIFEST.json")):
            assert f"{bad} is damaged: " in str(caught.value)
    with pytest.raises(ValueError, match=r"already has checkpoints \(the last one of step 2\)"):
        run_folder.begin_attempt(str(run_dir), Config(), resume=False, overwrite=False)
    assert generations.read_generation(str(run_dir)) == 1


def test_after_a_failure_the_advice_tells_damaged_checkpoints_from_none(run_dir):
    path_of(run_dir, 2, "MANIFEST.json").write_text("")
    assert "(step 1). resume=True" in checkpoint.how_to_resume(str(run_dir))
    path_of(run_dir, 1, "model.pt").unlink()
    assert checkpoint.how_to_resume(str(run_dir)) == (
        f"All checkpoints of {run_dir} are damaged, or of another version (the last one is of step 2). "
        "A resume says what is wrong with each; overwrite would delete them."
    )
    for step in (1, 2):
        shutil.rmtree(path_of(run_dir, step, ""))
    assert checkpoint.how_to_resume(str(run_dir)).startswith("No checkpoint has been saved yet")


def test_B33_what_was_never_committed_is_no_damage(run_dir, caplog):
    """As of a rank that was killed while it saved."""
    shutil.copytree(path_of(run_dir, 2, ""), path_of(run_dir, 3, ""))
    for name in ("MANIFEST.json", "training.pt"):
        path_of(run_dir, 3, name).unlink()
    assert begin(run_dir, STRICT)[1].step == 2
    assert not caplog.records


def test_what_a_rank_leaves_that_is_killed_before_the_manifest_is_no_damage(run_dir, monkeypatch, caplog):
    """All its files are there, as if the manifest had been lost."""

    def end(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_files, "write_manifest", end)
    with pytest.raises(KeyboardInterrupt):
        save(run_dir, 3, generation=1)
    assert {path.name for path in path_of(run_dir, 3, "").iterdir()} == {*FILES, "UNFINISHED"} - {"MANIFEST.json"}
    assert begin(run_dir, STRICT)[1].step == 2
    for step in (1, 2):
        shutil.rmtree(path_of(run_dir, step, ""))
    assert begin(run_dir, STRICT)[1] is None
    assert not caplog.records


GENERATION = {name: DAMAGES[name] for name in DAMAGES if name not in ("folder", "longer")}


@pytest.mark.parametrize("how", GENERATION)
def test_a_damaged_generation_is_named_and_loses_no_number(run_dir, how, caplog):
    bad = run_dir / "generations" / "000001"
    GENERATION[how](bad)
    with pytest.raises(ValueError, match=rf"checkpoint\.strict: .*{bad}"):
        begin(run_dir, STRICT)
    with caplog.at_level(logging.WARNING, "spark_dl"):
        generation, saved = begin(run_dir)
    assert (generation, saved.step) == (2, 2)
    (warning,) = caplog.records
    assert str(bad) in warning.getMessage()
    assert saved.url in warning.getMessage()
    assert begin(run_dir, STRICT)[0] == 3


def test_a_file_that_is_missing_or_not_listed_is_damage_that_names_it(run_dir):
    saved = checkpoint.open_checkpoint(str(path_of(run_dir, 2, "")))
    with pytest.raises(checkpoint_files.DamagedError, match=r"other\.pt is damaged: it is not in the manifest"):
        checkpoint_files.read(saved.url, saved.manifest, "other.pt")
    path_of(run_dir, 2, "model.pt").unlink()
    checkpoint_files.check_contents(saved.url, {"files": {}})
    with pytest.raises(checkpoint_files.DamagedError, match=r"model\.pt is damaged: it is missing, expected \d+ bytes"):
        checkpoint_files.check_contents(saved.url, saved.manifest, only_weights=True)


def test_on_a_store_the_manifest_of_another_job_is_not_replaced():
    """On a disk the folder has been made exclusively; a store has no folders."""
    url = f"memory://host/{uuid.uuid4().hex}"
    checkpoint_files.write_manifest(url, {"step": 1})
    written = storage.read_bytes(storage.join(url, "MANIFEST.json"))
    with pytest.raises(FileExistsError, match=r"MANIFEST\.json exists; another job writes to this folder"):
        checkpoint_files.write_manifest(url, {"step": 2})
    assert storage.read_bytes(storage.join(url, "MANIFEST.json")) == written


def files_of(run_dir, **change):
    """The tensors of a file `x.pt`, which has the first two of the three elements of `w`."""
    tmp = str(run_dir)
    entry = checkpoint_files.write(tmp, "x.pt", {"w": torch.tensor([1.0, 2.0])})
    about = {"dtype": "float32", "shape": [3], "files": {"x.pt": [PIECE]}, **change}
    manifest = {"files": {"x.pt": entry}, "tensors": {"tied": {}, "model": {"w": about}}}
    return checkpoint_files.TensorFiles(tmp, manifest, "model")


PIECE = Piece((0,), (2,), 0, 2).to_plain()


def test_tensors_that_the_files_do_not_have_are_an_error_that_names_them(tmp_path):
    files = files_of(tmp_path)
    first = Layout((3,), (Piece((0,), (2,), 0, 2),))
    assert files.read([("w", first)])[0].tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"has no tensor 'v'; it was saved by another model or optimizer"):
        files.read([("v", whole((3,)))])
    with pytest.raises(ValueError, match=r"'w' has the shape \[3\] there, and \[4\] in the model"):
        files.read([("w", whole((4,)))])
    with pytest.raises(checkpoint_files.DamagedError, match=r"its files lack 1 elements of 'w'"):
        files.read([("w", whole((3,)))])
    with pytest.raises(checkpoint_files.DamagedError, match=r"MANIFEST\.json is damaged: 'w': "):
        files_of(tmp_path, files={"x.pt": ["all"]}).read([("w", whole((3,)))])


def rewrite(run_dir, change):
    path = path_of(run_dir, 2, "MANIFEST.json")
    manifest = json.loads(path.read_text())
    change(manifest)
    manifest["sha256"] = checkpoint_files.digest(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(("change", "cause"), [
    (lambda m: m.pop("step"), "step"),
    (lambda m: m.update(step="2"), "step"),
    (lambda m: m.update(step=7), "its folder"),
    (lambda m: m.update(generation=7), "its folder"),
    (lambda m: m.update(world_size=True), "world_size"),
    (lambda m: m.update(files=[]), "files"),
    (lambda m: m["files"].update({"../../x": {"bytes": 1, "sha256": ""}}), r"\.\./x"),
    (lambda m: m["files"]["model.pt"].pop("sha256"), "model.pt"),
    (lambda m: m.update(format="other"), "format"),
], ids=range(9))  # fmt: skip
def test_a_manifest_that_says_something_else_is_damaged(run_dir, change, cause, caplog):
    rewrite(run_dir, change)
    with pytest.raises(checkpoint_files.DamagedError, match=rf"MANIFEST\.json is damaged: .*{cause}"):
        checkpoint.open_checkpoint(str(path_of(run_dir, 2, "")))
    assert begin(run_dir)[1].step == 1


@pytest.mark.parametrize(("change", "match"), [
    (lambda m: m.update(version=checkpoint_files.VERSION + 1), "version 3; this spark_dl reads version 2"),
    (lambda m: m.update(version=1), "version 1; this spark_dl reads version 2"),
])  # fmt: skip
def test_B33_another_version_is_an_error_and_no_damage(run_dir, change, match):
    rewrite(run_dir, change)
    with pytest.raises(ValueError, match=match):
        begin(run_dir)


def test_a_checkpoint_of_before_the_checksums_says_so(run_dir):
    path = path_of(run_dir, 2, "MANIFEST.json")
    manifest = {**json.loads(path.read_text()), "version": 1}
    del manifest["sha256"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"written by an earlier spark_dl \(version 1, without its own checksum"):
        checkpoint.find(str(run_dir))


def test_ranks_load_only_what_the_driver_has_checked(run_dir, group):
    saved = checkpoint.find(str(run_dir))
    assert checkpoint.open_checkpoint(saved.url, sha256=saved.sha256) == saved
    save(run_dir, step=2, generation=1, model={"0": {"w": torch.ones(3)}}, config=Config(train=Train(lr=0.5)))
    with pytest.raises(RuntimeError, match=r"MANIFEST\.json has changed since this run checked or saved it"):
        checkpoint.open_checkpoint(saved.url, sha256=saved.sha256)


def test_the_checkpoint_that_was_just_saved_is_kept_whatever_older_attempts_left(run_dir, group):
    save(run_dir, step=9, generation=1)
    flip(path_of(run_dir, 9, "model.pt"))
    generation, saved = begin(run_dir)
    assert saved.step == 2
    url = save(run_dir, step=3, generation=generation, config=Config(checkpoint=Checkpoint(keep=1)))
    assert [found.url for found in checkpoint.list_checkpoints(str(run_dir))] == [url]


def test_a_refused_commit_leaves_nothing(run_dir, group):
    checkpoint.start_generation(str(run_dir))
    with pytest.raises(RuntimeError, match="attempt 2 has started"):
        save(run_dir, step=3, generation=1)
    assert not path_of(run_dir, 3, "").exists()


METRICS = {
    "garbage": lambda path: path.write_bytes(b"\xff\xfe\n"),
    "list": lambda path: path.write_text("[]\n"),
    "no step": lambda path: path.write_text('{"kind": "step", "time": 1.0}\n'),
    "link": lambda path: path.symlink_to(path.parent / "config.yaml"),
}  # fmt: skip


@pytest.mark.parametrize("how", METRICS)
def test_B33_metrics_that_cannot_be_read_are_an_error_that_names_the_file(run_dir, how):
    METRICS[how](run_dir / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"/metrics\.jsonl is (damaged|a symbolic link)"):
        begin(run_dir)
    assert generations.read_generation(str(run_dir)) == 1
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "time": 1.0}\n{"kind": "st')
    assert begin(run_dir)[1].step == 2


def test_a_model_is_saved_without_a_copy_of_it(tmp_path, group):
    """A process that has no room for a copy saves it."""
    import resource

    model = {"0": {"w": torch.ones(50_000_000)}}  # 200 MB
    save(tmp_path, step=1, model={"0": {"w": torch.ones(3)}})
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 100_000_000, limits[1]))
    try:
        url = save(tmp_path, step=2, model=model)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert torch.equal(checkpoint.load(checkpoint.open_checkpoint(url), "model.pt")["0"]["w"], model["0"]["w"])
