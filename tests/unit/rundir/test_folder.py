"""What overwrite may delete of a run's folder: what our code wrote, by its names, and nothing through a link."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from spark_dl import Config, Data, Launch, storage
from spark_dl.cli.progress import with_log_dir
from spark_dl.data.store import store
from spark_dl.data.write.arrays import write_arrays
from spark_dl.rundir import checkpoint, generations, metrics, run_folder
from spark_dl.rundir.run_folder import check_folder, delete_run, trial_dir
from spark_dl.track.plots import plot_loss
from tests.unit.rundir.test_checkpoint import handmade

OURS = ("checkpoints/step-00000001.gen-0001", "shards/train", "shards/train-a b", "shards/validation",
        "shards/evaluate-0123abcd")  # fmt: skip
THEIRS = ("checkpoints/best.ckpt", "checkpoints/step-00000001.gen-0001/notes.txt", "checkpoints/step-7/model.pt",
          "shards/mine/x", "shards/train/notes.txt", "shards/evaluate-mine/part-0123abcd-0000.parquet",
          "notes.txt", "predictions/part-0.parquet", "metrics.jsonl.bak", "logs/rank-0.log.bak",
          "logs/mine", "environment/1.json", "environment/000001-driver.json.bak", "report.html", "mlflow.db",
          "tensorboard/events.out.tfevents.1.host.1.0", "profile/rank-0.json")  # fmt: skip


def a_run(run_dir):
    """A run's folder as our code leaves it, with its half-written files."""
    run_dir = Path(run_dir)
    generations.start_generation(str(run_dir))
    for name in OURS[1:]:
        write_arrays({"x": np.arange(5)}, str(run_dir / name), Data())
    saved = handmade(run_dir, 1, files={"model.pt": b"weights", "rank-00000.pt": b"state", "training.pt": b"adam"})
    half = handmade(run_dir, 2)
    (half / "MANIFEST.json").unlink()
    for path in (half / "model.pt.tmp-0123456789ab", saved / "rank-00001.pt", run_dir / "metrics.jsonl",
                 run_dir / "config.yaml", run_dir / "shards/validation/_manifest.json.tmp-0123456789ab"):  # fmt: skip
        path.write_bytes(b"ours")
    (run_dir / "environment").mkdir()
    for name in ("000001-driver.json", "000001-ranks.json", "000001-ranks.json.tmp-0123456789ab"):
        (run_dir / "environment" / name).write_bytes(b"ours")
    (run_dir / "logs").mkdir()
    for rank in (0, 12):
        (run_dir / "logs" / f"rank-{rank}.log").write_text("stdout: ours")
    for name in (
        "tensorboard/events.out.tfevents.1.host.1.0.spark_dl",
        "profile/rank-1.pt.trace.json.gz",
        "profile/rank-1.summary.json",
        "mlflow.json",
    ):
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).write_text("ours")
    return run_dir


def files(folder):
    """Every file below a folder, links followed, with its content."""
    found = {}
    for base, _, names in os.walk(folder, followlinks=True):
        for name in names:
            path = Path(base) / name
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def begin(run_dir, config=None, **how):
    return run_folder.begin_attempt(str(run_dir), config or Config(), **{"resume": False, "overwrite": True, **how})


@pytest.mark.parametrize("how", [{"overwrite": True}, {"overwrite": False}, {"overwrite": False, "resume": True}])
@pytest.mark.parametrize("name", ["checkpoints/best.ckpt", "shards/mine/x", "metrics.jsonl", "config.yaml"])
def test_B33_a_folder_without_the_mark_is_refused_and_named(tmp_path, how, name):
    for path in (name, "notes.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("theirs")
    before = files(tmp_path)
    with pytest.raises(ValueError, match=rf"contains {name.split('/')[0]} without the mark of a run"):
        begin(tmp_path, **how)
    assert files(tmp_path) == before


@pytest.mark.parametrize("how", [{"overwrite": False}, {"resume": True, "overwrite": False}, {"overwrite": True}])
@pytest.mark.parametrize("place", ["", "run", "checkpoints"])
def test_B33_a_loop_of_links_is_an_error_that_names_the_folder(tmp_path, how, place):
    loop = tmp_path / ("run/checkpoints" if place == "checkpoints" else "loop")
    loop.parent.mkdir(exist_ok=True)
    loop.symlink_to(loop)
    run_dir = tmp_path / "run" if place == "checkpoints" else loop / place
    found = rf"cannot read the run_dir {run_dir}: .*symbolic links.*; check the path"
    if place == "checkpoints":
        found = f"{loop} is a symbolic link to {loop}, expected"
    with pytest.raises(ValueError, match=f"^{found}"):
        begin(run_dir, **how)


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"format": "other"}'])
def test_B33_a_mark_that_somebody_else_wrote_is_none(tmp_path, damage):
    for name in ("generations/000001", "checkpoints/best.ckpt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(damage)
    with pytest.raises(ValueError, match="contains checkpoints without the mark of a run"):
        begin(tmp_path)


def test_a_folder_of_other_names_and_empty_folders_may_become_a_run(tmp_path):
    (tmp_path / "notes.txt").write_text("theirs")
    for name in ("checkpoints", "shards"):
        (tmp_path / name).mkdir()
    assert begin(tmp_path) == (1, None)
    assert begin(tmp_path, overwrite=False) == (2, None)


def test_exactly_what_our_code_writes_is_deleted(tmp_path):
    run_dir = a_run(tmp_path / "run")
    generation = files(run_dir / "generations")
    for name in THEIRS:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text("theirs")
    check_folder(str(run_dir), overwrite=True)
    delete_run(str(run_dir), keep=())
    assert {*files(run_dir)} == {*THEIRS, *(f"generations/{name}" for name in generation), "config.yaml"}
    assert not (run_dir / "checkpoints/step-00000002.gen-0001").exists()
    assert not (run_dir / "shards/validation").exists()


def test_the_trials_of_a_run_are_deleted_like_runs_and_nothing_else_in_their_folder(tmp_path):
    run_dir = a_run(tmp_path / "run")
    (run_dir / "study.log").write_text("ours")
    for name in ("0003", "0003-fold-1"):
        a_run(run_dir / "trials" / name)
    theirs = ("trials/notes.txt", "trials/0004/model.pt", "trials/mine/config.yaml", "trials/0003/notes.txt")
    for name in theirs:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text("theirs")
    delete_run(str(run_dir), keep=())
    left = {name for name in files(run_dir) if not name.startswith("generations/") and "/generations/" not in name}
    assert left == {*theirs, "config.yaml"}
    assert begin(run_dir, overwrite=False) == (2, None)
    (run_dir / "trials/0003/config.yaml").write_text("ours")
    with pytest.raises(ValueError, match=r"already has trials of spark_dl.tune; set resume .* overwrite"):
        begin(run_dir, overwrite=False)


@pytest.mark.parametrize("name", ["study.log", "trials/0003", "trials/0003/checkpoints", "trials"])
def test_a_link_among_trials_is_refused(tmp_path, name):
    run_dir = a_run(tmp_path / "run")
    (run_dir / "study.log").write_text("ours")
    a_run(run_dir / "trials/0003")
    (run_dir / name).rename(tmp_path / "target")
    (run_dir / name).symlink_to(tmp_path / "target")
    before = files(tmp_path)
    with pytest.raises(ValueError, match=rf"/{name} is a symbolic link to .*/target"):
        delete_run(str(run_dir), keep=())
    assert files(tmp_path) == before


@pytest.mark.parametrize("by", ["path", "link", "url"])
def test_a_dataset_that_is_used_stays_by_whatever_url(tmp_path, by):
    run_dir = a_run(tmp_path / "run")
    (tmp_path / "link").symlink_to(run_dir)
    used = {"path": run_dir, "link": tmp_path / "link", "url": run_dir}[by] / "shards/train"
    before = files(run_dir / "shards/train")
    delete_run(str(run_dir), keep=[used.as_uri() if by == "url" else str(used)])
    assert files(run_dir / "shards/train") == before
    assert os.listdir(run_dir / "shards") == ["train"]


LINKS = ("checkpoints", "shards", "generations", "metrics.jsonl", "config.yaml", "environment",
         "environment/000001-driver.json", OURS[0], f"{OURS[0]}/model.pt", f"{OURS[0]}/MANIFEST.json", "shards/train",
         "shards/train/_manifest.json")  # fmt: skip


@pytest.mark.parametrize("name", LINKS)
def test_B33_a_link_is_refused_and_what_it_points_to_stays(tmp_path, name):
    run_dir = a_run(tmp_path / "run")
    (run_dir / name).rename(tmp_path / "target")
    (run_dir / name).symlink_to(tmp_path / "target")
    before = files(tmp_path)
    for use in (begin, lambda folder: delete_run(str(folder), keep=())):
        with pytest.raises(ValueError, match=rf"/{name} is a symbolic link to .*/target"):
            use(run_dir)
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", ["checkpoints", "shards", "generations", "metrics.jsonl", "tensorboard", "profile"])
def test_S13_a_run_that_begins_follows_no_planted_link(tmp_path, name):
    target = a_run(tmp_path / "victim") / name
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(target)
    before = files(tmp_path / "victim")
    with pytest.raises(ValueError, match=f"{name}.*(nothing was changed|use another run_dir)"):
        run_folder.begin_attempt(str(tmp_path / "run"), Config(), resume=False, overwrite=False)
    assert files(tmp_path / "victim") == before
    (tmp_path / "run" / name).unlink()
    assert run_folder.begin_attempt(str(tmp_path / "run"), Config(), resume=False, overwrite=False) == (1, None)


PLANTED = ("checkpoints", OURS[0], "shards", "shards/train", "environment", "logs", "tensorboard", "profile",
           "loss.png", "mlflow.json", "metrics.jsonl", "config.yaml", "study.log", "trials", "trials/0000")  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_S13_a_resume_follows_no_link_below_the_run_folder(tmp_path, name):
    """`checkpoints` as a link to another run's: a resume deleted both checkpoints of that run."""
    a_run(tmp_path / "victim")
    (tmp_path / "victim/loss.png").write_text("theirs")
    a_run(tmp_path / "victim/trials/0000")
    run_dir = a_run(tmp_path / "run")
    if (run_dir / name).exists():
        (run_dir / name).rename(tmp_path / "aside")
    (run_dir / name).parent.mkdir(exist_ok=True)
    (run_dir / name).symlink_to(tmp_path / "victim" / name)
    before = files(tmp_path / "victim")
    with pytest.raises(ValueError, match=rf"^{run_dir}/{name} is a symbolic link to {tmp_path}/victim/{name}, exp"):
        run_folder.begin_attempt(str(run_dir), Config(), resume=True, overwrite=False)
    assert files(tmp_path / "victim") == before
    assert not (run_dir / "generations/000002").exists()


def test_S13_each_way_to_a_part_of_a_run_refuses_a_link(tmp_path):
    """Also where no attempt begins: plots, logs, metrics, settings, trials, and checkpoints that are looked up."""
    run_dir = a_run(tmp_path / "run")
    uses = {
        "loss.png": plot_loss, "checkpoints": checkpoint.list_checkpoints, "metrics.jsonl": metrics.read_metrics,
        "logs": lambda run: with_log_dir(Launch(), run), "trials": lambda run: trial_dir(run, 3),
        "generations": generations.read_generation,
    }  # fmt: skip
    (run_dir / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "time": 0.0, "loss": 1.0}\n')
    for name, use in uses.items():
        if (run_dir / name).exists():
            (run_dir / name).rename(tmp_path / name)
        (run_dir / name).symlink_to(tmp_path / name)
        with pytest.raises(ValueError, match=f"{run_dir}/{name} is a symbolic link to {tmp_path}/{name}, expected"):
            use(str(run_dir))


@pytest.mark.parametrize(("mode", "warns"), [(0o777, True), (0o1777, True), (0o770, False), (0o755, False)])
def test_S13_a_run_dir_that_every_user_can_write_to_is_said(tmp_path, caplog, mode, warns):
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    check_folder(str(tmp_path / "run"), overwrite=False)
    assert ("every user of this host can write to the run_dir" in caplog.text) == warns


def test_the_run_dir_itself_may_be_a_link(tmp_path):
    run_dir = a_run(tmp_path / "run")
    (tmp_path / "latest").symlink_to(run_dir)
    begin(tmp_path / "latest")
    delete_run(str(tmp_path / "latest"), keep=())
    assert os.listdir(run_dir / "shards") == os.listdir(run_dir / "checkpoints") == []


def test_settings_are_not_replaced_before_the_run_starts(tmp_path):
    begin(tmp_path)
    assert os.listdir(tmp_path) == ["generations"]


@pytest.mark.parametrize("name", ["d", "d/inner", "f"])
def test_delete_follows_no_link(tmp_path, name):
    target = tmp_path / "target"
    for path in (target / "deep/file", tmp_path / "d/own"):
        path.parent.mkdir(parents=True)
        path.write_text("theirs")
    link = tmp_path / name
    if name == "d":
        (tmp_path / "d/own").unlink()
        (tmp_path / "d").rmdir()
    link.symlink_to(target / "deep/file" if name == "f" else target)
    storage.delete(str(tmp_path / name.split("/")[0]))
    assert (target / "deep/file").read_text() == "theirs"
    assert not os.path.lexists(tmp_path / name)


@pytest.mark.parametrize("linked", ["dataset", "key"])
def test_cleaning_a_store_deletes_nothing_through_a_link(tmp_path, linked):
    target = tmp_path / "target"
    inner = target if linked == "dataset" else target / "0123456789ab"
    write_arrays({"x": np.arange(5)}, str(inner), Data())
    key = tmp_path / "store" / ("a" * 64)
    link = key / "0123456789ab" if linked == "dataset" else key
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    before = files(target)
    assert store.clean_store(str(tmp_path / "store"), ttl_days=0)["denied"] == 1
    assert files(target) == before


def test_cleaning_a_store_leaves_files_that_are_not_ours(tmp_path):
    folder = tmp_path / "store" / ("a" * 64) / "0123456789ab"
    write_arrays({"x": np.arange(5)}, str(folder), Data())
    (folder / "notes.txt").write_text("theirs")
    assert store.clean_store(str(tmp_path / "store"), ttl_days=0)["deleted"] == 1
    assert os.listdir(folder) == ["notes.txt"]


def test_resume_and_overwrite_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="resume and overwrite exclude each other"):
        run_folder.begin_attempt(str(tmp_path), Config(), resume=True, overwrite=True)
