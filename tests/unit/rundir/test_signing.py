"""Signed checkpoints: what somebody else has changed is never loaded."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from spark_dl import Checkpoint, Config, Data, ModelSpec, Train
from spark_dl.prepare import next_attempt, prepare_run
from spark_dl.rundir import checkpoint, checkpoint_files, generations, run_folder, signing
from spark_dl.training import initial
from tests.builders.datasets import write_dataset
from tests.unit.rundir.test_checkpoint import group as group
from tests.unit.rundir.test_checkpoint import save, steps


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o644, 0o604, 0o660, 0o606, 0o666])
def test_S04_a_key_that_others_can_write_is_an_error_and_one_that_all_can_read_a_warning(key_file, caplog, mode):
    Path(key_file).chmod(mode)
    if mode & 0o022:
        with pytest.raises(ValueError, match=rf"signing_key_file: other users can change {key_file} \(mode -rw.*0600"):
            signing.read_key(key_file)
        return
    for _ in range(2):
        signing.read_key(key_file)
    said = [r.message for r in caplog.records if f"every user of this host can read {key_file}" in r.message]
    assert len(said) == bool(mode & 0o004)


def test_S04_the_key_of_another_user_is_an_error(key_file):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    for user_id in (65534, 1):
        os.chown(key_file, user_id, user_id)
        with pytest.raises(ValueError, match=f"other users can change .* user id {user_id}"):
            signing.read_key(key_file)


def test_S04_the_key_of_root_is_that_of_all_users(key_file, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only root has a file of root")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert len(signing.read_key(key_file)) == 32


def signed(run_dir, key_file, step, generation=0, config=None):
    return save(run_dir, step=step, generation=generation, key=signing.read_key(key_file), config=config)


def forge(url, change):
    """Changes a manifest, and computes its checksum again, as everybody can."""
    path = Path(url, "MANIFEST.json")
    manifest = json.loads(path.read_text())
    change(manifest)
    manifest["sha256"] = checkpoint_files.digest(manifest)
    path.write_text(json.dumps(manifest))


def flip_in_weights(url):
    """Changes a bit of the weights, and the checksums of the file and of the manifest with it."""
    import hashlib

    file = Path(url, "model.pt")
    data = bytearray(file.read_bytes())
    data[-200] ^= 1
    file.write_bytes(data)
    forge(url, lambda manifest: manifest["files"]["model.pt"].update(sha256=hashlib.sha256(data).hexdigest()))


def test_S04_a_signed_checkpoint_is_loaded(tmp_path, group, key_file):
    url = signed(tmp_path, key_file, 1)
    assert checkpoint.find(url, key_file=key_file).step == 1
    assert checkpoint.last_valid(str(tmp_path), key_file=key_file).step == 1
    assert checkpoint.find(url).step == 1  # who has no key can read it
    assert json.loads(Path(url, "MANIFEST.json").read_text())["hmac_sha256"] != signing.read_key(key_file).hex()


@pytest.mark.parametrize(
    "attack",
    [
        flip_in_weights,
        lambda url: forge(url, lambda manifest: manifest.update(score=0.0)),
        lambda url: forge(url, lambda manifest: manifest.pop("hmac_sha256")),
        lambda url: forge(url, lambda manifest: manifest.update(hmac_sha256="0" * 64)),
        lambda url: forge(url, lambda manifest: manifest.update(hmac_sha256=7)),
    ],
    ids=["weights", "manifest", "no signature", "another signature", "no text"],
)
def test_S04_what_was_changed_with_its_checksums_is_refused(tmp_path, group, key_file, caplog, attack):
    signed(tmp_path, key_file, 1)
    url = signed(tmp_path, key_file, 2)
    attack(url)
    with pytest.raises(ValueError, match=r"MANIFEST\.json: .*sign"):
        checkpoint.find(url, key_file=key_file)
    assert checkpoint.last_valid(str(tmp_path), key_file=key_file).step == 1
    assert "using the checkpoint" in caplog.text
    with pytest.raises(ValueError, match=r"checkpoint\.strict: .*sign"):
        checkpoint.last_valid(str(tmp_path), key_file=key_file, strict=True)


def test_S04_a_resume_goes_on_from_the_last_checkpoint_whose_signature_is_right(tmp_path, group, key_file):
    generation = checkpoint.start_generation(str(tmp_path))
    signed(tmp_path, key_file, 1, generation)
    forge(signed(tmp_path, key_file, 2, generation), lambda manifest: manifest.update(score=0.0))
    config = Config(checkpoint=Checkpoint(signing_key_file=key_file))
    assert run_folder.begin_attempt(str(tmp_path), config, resume=True, overwrite=False)[1].step == 1


def test_S04_the_checkpoint_of_another_key_is_refused_on_resume(tmp_path, group, key_file):
    signed(tmp_path, key_file, 1)
    other = tmp_path / "other"
    other.write_bytes(b"another key, of 32 bytes or more than that")
    config = Config(checkpoint=Checkpoint(signing_key_file=str(other)))
    with pytest.raises(ValueError, match=r"no valid checkpoint: .*its signature is not of the key in .*other") as found:
        run_folder.begin_attempt(str(tmp_path), config, resume=True, overwrite=False)
    assert "set checkpoint.signing_key_file to the key that signed it" in str(found.value)
    assert not {"damaged", "overwrite", "restore"} & set(re.findall(r"\w+", str(found.value)))
    assert steps(tmp_path) == [1]  # it is still there
    assert generations.read_generation(str(tmp_path)) == 0  # and an attempt that runs goes on


@pytest.fixture
def swapped(tmp_path, group, key_file):
    """Runs A and B of one key. The signed checkpoint of step 2 in A is that of B, by somebody who has no key."""
    urls = []
    for name in ("A", "B"):
        generation = checkpoint.start_generation(str(tmp_path / name))
        urls += [signed(tmp_path / name, key_file, step, generation) for step in (1, 2)]
    shutil.rmtree(urls[1])
    shutil.copytree(urls[3], urls[1])
    return urls


def test_S04_a_signed_checkpoint_of_another_run_is_refused_in_place_of_this_run_s(tmp_path, swapped, key_file, caplog):
    bad = swapped[1]
    with pytest.raises(
        ValueError, match=rf"^{bad}/MANIFEST\.json: it was signed for the run \w+, and this is the folder"
    ):
        checkpoint.find(bad, key_file=key_file)
    config = Config(checkpoint=Checkpoint(signing_key_file=key_file))
    for resume in (True, swapped[0]):
        assert (
            run_folder.begin_attempt(str(tmp_path / "A"), config, resume=resume, overwrite=False)[1].url == swapped[0]
        )
    assert f"newer ones cannot be used: {bad}/MANIFEST.json: it was signed for the run" in caplog.text
    with pytest.raises(ValueError, match="it was signed for the run"):
        run_folder.begin_attempt(str(tmp_path / "A"), config, resume=bad, overwrite=False)
    strict = Config(checkpoint=Checkpoint(signing_key_file=key_file, strict=True))
    with pytest.raises(ValueError, match=r"checkpoint\.strict: .*it was signed for the run"):
        run_folder.begin_attempt(str(tmp_path / "A"), strict, resume=True, overwrite=False)
    assert checkpoint.find(bad).step == 2  # without a key, it is a checkpoint


def test_a_run_keeps_its_id_in_each_attempt_and_where_it_is_copied_or_moved(tmp_path, group, key_file):
    config = Config(checkpoint=Checkpoint(signing_key_file=key_file))
    generation = checkpoint.start_generation(str(tmp_path / "A"))
    signed(tmp_path / "A", key_file, 1, generation)
    generation, _ = run_folder.begin_attempt(str(tmp_path / "A"), config, resume=True, overwrite=False)
    url = signed(tmp_path / "A", key_file, 2, generation)
    (tmp_path / "A/generations/000001").write_text("damaged")
    assert checkpoint.find(url, key_file=key_file).step == 2
    shutil.copytree(tmp_path / "A", tmp_path / "moved")
    shutil.copytree(tmp_path / "A/checkpoints", tmp_path / "only/checkpoints")
    shutil.copytree(url, tmp_path / "best")
    for copied in ("moved", "only"):
        for _ in range(2):
            begun = run_folder.begin_attempt(str(tmp_path / copied), config, resume=True, overwrite=False)
            assert begun[1].step == 2
    assert checkpoint.find(tmp_path / "best", key_file=key_file).step == 2


def test_an_unsigned_run_is_resumed_without_the_key_and_says_so_with_it(tmp_path, group, key_file):
    url = save(tmp_path, step=1)
    config = Config(checkpoint=Checkpoint(signing_key_file=key_file))
    for resume in (True, url):
        with pytest.raises(ValueError, match=r"MANIFEST\.json: it has no signature, .*begun without a key is") as found:
            run_folder.begin_attempt(str(tmp_path), config, resume=resume, overwrite=False)
        assert not {"damaged", "overwrite", "restore"} & set(re.findall(r"\w+", str(found.value)))
        assert run_folder.begin_attempt(str(tmp_path), Config(), resume=resume, overwrite=False)[1].step == 1


SPEC = ModelSpec(build=lambda: torch.nn.Linear(2, 1))


def warned(caplog):
    return [
        record.message for record in caplog.records if "is signed, and its signature is not checked" in record.message
    ]


@pytest.mark.parametrize("has_key", [False, True])
def test_a_signed_run_that_goes_on_without_its_key_warns_once(tmp_path, group, key_file, caplog, has_key):
    rows = {"x": np.zeros((64, 2), np.float32), "y": np.zeros((64, 1), np.float32)}
    data, settings = str(tmp_path / "data"), {"features": ("x",), "label": "y"}
    write_dataset(data, rows, **settings)
    config = Config(data=Data(**settings), checkpoint=Checkpoint(signing_key_file=key_file if has_key else None))
    run_dir = str(tmp_path / "run")
    url = signed(run_dir, key_file, 1, checkpoint.start_generation(run_dir), config=config)
    with prepare_run(data, SPEC, config, run_dir=run_dir, resume=True) as run:
        assert next_attempt(run, run.generation).checkpoint == run.checkpoint == url  # a restart has the same settings
    assert len(warned(caplog)) == (not has_key)
    assert all(url in text and "set checkpoint.signing_key_file to the key" in text for text in warned(caplog))


@pytest.mark.parametrize("has_key", [False, True])
def test_a_run_that_begins_with_the_weights_of_a_signed_one_without_its_key_warns(
    tmp_path, group, key_file, caplog, has_key
):
    url = save(tmp_path, model={"0": SPEC.build().state_dict()}, key=signing.read_key(key_file))
    checkpoints = Checkpoint(signing_key_file=key_file if has_key else None)
    initial.begin(SPEC, Config(train=Train(init_from=url), checkpoint=checkpoints), None, "/other", overwrite=False)
    assert [url in text for text in warned(caplog)] == [True] * (not has_key)


def test_to_start_again_is_advised_only_against_damage(tmp_path, group, key_file):
    for step in (1, 2):
        save(tmp_path, step=step)
    url = save(tmp_path, step=3, config=Config(checkpoint=Checkpoint(keep=3)), key=signing.read_key(key_file))
    Path(url, "model.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.pt is damaged: .*000002.*000001.*no signature") as found:
        checkpoint.last_valid(str(tmp_path), key_file=key_file)
    assert str(found.value).count("begun without a key") == 1
    assert str(found.value).endswith("; restore the damaged files")


def test_a_key_that_cannot_be_used_is_an_error_that_says_how_to_make_one(tmp_path):
    (tmp_path / "short").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"signing_key_file: expected at least 32 bytes .*found 5; .*urandom"):
        signing.read_key(str(tmp_path / "short"))
    with pytest.raises(ValueError, match=r"signing_key_file: cannot read .*none.* rank 0 need it"):
        signing.read_key(str(tmp_path / "none"))
