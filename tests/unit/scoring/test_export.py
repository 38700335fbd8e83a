"""One safetensors file of a checkpoint; that of a mesh is in tests/ranks/test_gpt.py."""

import pytest
import safetensors
import torch

from spark_dl import Checkpoint, Config, Launch, export, save_model
from spark_dl.launch.rank.rendezvous import join
from spark_dl.rundir import checkpoint, saving
from spark_dl.rundir.generations import create_exclusively
from spark_dl.scoring.scorer import scorer_of
from tests.builders.models import MLP, build_mlp, same_bits


@pytest.fixture
def run_dir(tmp_path, no_launcher):
    run_dir, model = str(tmp_path / "run"), {"0": build_mlp().state_dict()}
    with join(Launch(device="cpu")):
        about = saving.About(world_size=1, generation=0, step=1, config=Config(), columns=())
        saving.save(run_dir, saving.contents(0, model=model, training={}), about)
    return run_dir


def test_a_run_and_its_checkpoint_give_the_same_file(run_dir, tmp_path):
    saved = checkpoint.find(run_dir)
    paths = [export(url, tmp_path / name) for url, name in ((run_dir, "a"), (saved.url, "b"))]
    for path in paths:
        with safetensors.safe_open(path, "pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            assert file.metadata() == {
                "format": "pt", "spark_dl.checkpoint": saved.url.rpartition("/")[2], "spark_dl.step": str(saved.step),
            }  # fmt: skip
        assert same_bits(found, checkpoint.load(saved, "model.pt")["0"])


@pytest.mark.parametrize("is_folder", [False, True])
def test_nothing_is_overwritten(run_dir, tmp_path, is_folder):
    there = tmp_path / "there"
    there.mkdir() if is_folder else there.write_text("mine")
    with pytest.raises(ValueError, match=r"export: .*/there exists, and nothing is overwritten; choose another path"):
        export(run_dir, there)
    assert is_folder or there.read_text() == "mine"


def test_what_another_process_has_written_meanwhile_is_not_overwritten(run_dir, tmp_path, monkeypatch):
    target = tmp_path / "model.safetensors"
    find = checkpoint.find

    def found_late(*args, **options):
        target.write_bytes(b"of another process")
        return find(*args, **options)

    monkeypatch.setattr(checkpoint, "find", found_late)
    with pytest.raises(ValueError, match=r"export: .*model.safetensors exists, and nothing is overwritten"):
        export(run_dir, target)
    assert target.read_bytes() == b"of another process"


def test_without_a_checkpoint_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint at"):
        export(tmp_path / "none", tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_a_file_that_cannot_be_written_whole_is_not_there(tmp_path):
    with pytest.raises(TypeError):
        create_exclusively(str(tmp_path / "file"), torch.zeros(1))
    assert not (tmp_path / "file").exists()


def test_S04_a_checkpoint_without_the_signature_is_not_scored_saved_or_exported(run_dir, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    with pytest.raises(ValueError, match="it has no signature"):
        export(run_dir, tmp_path / "file", signing_key_file=str(key))
    with pytest.raises(ValueError, match="it has no signature"):
        save_model(tmp_path / "model", MLP, run_dir, signing_key_file=str(key))
    with pytest.raises(ValueError, match="it has no signature"):
        scorer_of(MLP, run_dir, Config(checkpoint=Checkpoint(signing_key_file=str(key))))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "run"]
