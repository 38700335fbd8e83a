"""Files of datasets, runs and models that lead out of their folder, name Python objects, or nest for ever."""

import hashlib
import io
import json
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import spark_dl
from spark_dl import Config, load_config
from spark_dl.config.checks import suggestion
from spark_dl.data.columns.schema import Column
from spark_dl.rundir import checkpoint, generations
from spark_dl.rundir.checkpoint_files import KINDS, DamagedError, NotLoadedError, TensorFiles, digest
from spark_dl.rundir.metrics import read_metrics
from spark_dl.scoring.saved_model import load_model, read_saved_model, write_saved_model
from spark_dl.spec import ModelSpec
from spark_dl.track.run_log import read_run
from tests.builders.datasets import write_dataset
from tests.unit.rundir.test_checkpoint import handmade, saved

DEEP = b"[" * 200_000
TAGS = [
    "!!python/object/apply:os.system ['touch {canary}']",
    "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{canary}']]",
    "!!python/object/new:os.system ['touch {canary}']",
    "!!python/name:os.system",
    "!!python/module:antigravity",
    "!!python/object:tests.unit.rundir.test_checkpoint.Touch {{path: '{canary}'}}",
    "!!python/tuple [1, 2]",
]


def build():
    return torch.nn.Linear(1, 1)


def a_model(folder):
    spec = ModelSpec(build=build, loss="MSELoss")
    config = Config(data=spark_dl.Data(features=("x",), label=None))
    write_saved_model(folder, build(), spec, config, (Column("x", "float32", (1,), "ndarray"),), format="weights")
    return folder


OUTSIDE = ["../secret", "../../secret", "{outside}", "a/../../secret", "..", "", "secret\0", "..\\secret",
           "%2e%2e%2fsecret", "file://{outside}"]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_S14_a_checkpoint_names_files_of_its_own_folder_alone(tmp_path, name):
    content = saved({"0": {"w": torch.ones(1)}})
    (tmp_path / "secret").write_bytes(content)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    name = name.format(outside=tmp_path / "secret")
    folder = handmade(tmp_path / "run", 1, files={"model.pt": content})
    assert checkpoint.find(str(folder)).step == 1
    named = json.loads((folder / "MANIFEST.json").read_text())
    handmade(tmp_path / "other", 1, files={"model.pt": content})
    folder = tmp_path / "other" / "checkpoints" / "step-00000001.gen-0001"
    named["files"][name] = entry
    del named["sha256"]
    (folder / "MANIFEST.json").write_text(json.dumps({**named, "sha256": digest(named)}))
    with pytest.raises(DamagedError, match="found the file"):
        checkpoint.find(str(folder))


@pytest.mark.parametrize("name", OUTSIDE)
def test_S14_a_saved_model_names_files_of_its_own_folder_alone(tmp_path, name):
    folder = a_model(tmp_path / "m")
    assert isinstance(load_model(folder), torch.nn.Linear)
    (tmp_path / "secret").write_bytes((folder / "model.safetensors").read_bytes())
    path = folder / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"file": name.format(outside=tmp_path / "secret")}))
    for read in (load_model, read_saved_model):
        with pytest.raises(
            ValueError, match=r"model\.json: found the file .*, expected model\.safetensors or model\.pt2"
        ):
            read(folder)


PLACES = ["{tag}", "train: {tag}", "train:\n  lr: {tag}", "data:\n  features: [{tag}]"]
KEYS = ["train.lr", "train.optimizer_args", "data.encode", "parallel.strategy"]


@pytest.mark.parametrize(("tag", "place"), [(tag, PLACES[i % 4]) for i, tag in enumerate(TAGS)])
def test_S15_a_tag_of_python_in_settings_is_an_error_and_makes_nothing(tmp_path, tag, place):
    canary, path = tmp_path / "canary", tmp_path / "run.yaml"
    path.write_text(place.format(tag=tag.format(canary=canary)) + "\n")
    with pytest.raises((ValueError, SystemExit)):
        load_config(path)
    assert not canary.exists()
    path.write_text(yaml.safe_dump({"train": {"lr": 0.5}}))
    assert load_config(path).train.lr == 0.5


@pytest.mark.parametrize(("tag", "key"), [(TAGS[i], key) for i, key in enumerate(KEYS)])
def test_S15_a_tag_of_python_on_the_command_line_is_an_error_and_makes_nothing(tmp_path, tag, key):
    canary = tmp_path / "canary"
    with pytest.raises(ValueError, match=re.escape(key.split(".")[0])):
        load_config(overrides=[f"{key}={tag.format(canary=canary)}"])
    assert not canary.exists()
    assert load_config(overrides=["train.optimizer_args={momentum: 0.9}"]).train.optimizer_args == {"momentum": 0.9}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tag", TAGS)
def test_S15_the_report_of_a_run_makes_nothing_of_a_tag_in_its_settings(tmp_path, tag):
    run_dir = tmp_path / "run"
    generations.start_generation(str(run_dir))
    (run_dir / "config.yaml").write_text(yaml.safe_dump({"train": {"lr": 0.5}}))
    assert read_run(str(run_dir)).config == {"train": {"lr": 0.5}}
    for text in (tag.format(canary=tmp_path / "canary"), "[" * 2_000):
        (run_dir / "config.yaml").write_text(f"train: {text}\n")
        assert read_run(str(run_dir)).config == {}
    assert not (tmp_path / "canary").exists()


def dataset(tmp_path):
    return spark_dl.read_shards, Path(write_dataset(str(tmp_path / "d"), {"x": np.arange(5)}).url), "_manifest.json"


def run_of(tmp_path):
    return checkpoint.find, handmade(tmp_path / "run", 1, files={"model.pt": saved({})}), "MANIFEST.json"


def model(tmp_path):
    return read_saved_model, a_model(tmp_path / "m"), "model.json"


def generation(tmp_path):
    generations.start_generation(str(tmp_path))
    read = lambda folder: generations.read_record(os.path.join(folder, "000001"))  # noqa: E731
    return read, tmp_path / "generations", "000001"


def metrics(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "time": 1.0}\n')
    return read_metrics, tmp_path, "metrics.jsonl"


@pytest.mark.parametrize("content", [DEEP, b'{"a":' * 200_000, b"\xff\xfe", b"", b"null", b"NaN", b'"' + b"x" * 99],
                         ids=["lists", "dicts", "not UTF-8", "empty", "null", "NaN", "cut"])  # fmt: skip
@pytest.mark.parametrize("made", [dataset, run_of, model, generation, metrics])
def test_S15_json_of_any_depth_is_one_error_that_names_the_file(tmp_path, made, content):
    read, folder, name = made(tmp_path)
    read(str(folder))
    (folder / name).write_bytes(content + b"\n" if content else b"x\n")
    with pytest.raises(ValueError, match=re.escape(name)):
        read(str(folder))


def test_S23_a_compressed_checkpoint_is_refused_before_it_takes_the_memory(tmp_path):
    content, out = io.BytesIO(saved({"0": {"w": torch.zeros(1 << 20)}})), io.BytesIO()
    with zipfile.ZipFile(content) as plain, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert len(out.getvalue()) < 100_000  # of 4 MiB
    handmade(tmp_path / "run", 1, files={"model.pt": out.getvalue()})
    with pytest.raises(NotLoadedError, match=r"model.pt.*it is compressed, which torch's files are not"):
        checkpoint.load(checkpoint.find(str(tmp_path / "run")), "model.pt")


def test_S23_aliases_that_stand_for_more_values_than_fit_into_the_memory_are_refused(tmp_path):
    """600 bytes for 10^9 values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    (tmp_path / "run.yaml").write_text("\n".join([*lines, "train: {metrics: *a8}"]))
    with pytest.raises(ValueError, match=r"run.yaml: found more than 1,000,000 values with its aliases"):
        load_config(tmp_path / "run.yaml")


def test_aliases_that_people_use_are_read(tmp_path):
    (tmp_path / "run.yaml").write_text("data: {fill: {a: &one 1, b: *one}, nulls: fill}")
    assert load_config(tmp_path / "run.yaml").data.fill == {"a": 1, "b": 1}


def test_S23_names_with_control_characters_are_escaped_in_messages():
    text = suggestion("x", ["a\x1b]0;owned\x07\nERROR all is lost", "Größe"])
    assert text == "; expected one of Größe, a\\x1b]0;owned\\x07\\nERROR all is lost"


@pytest.mark.parametrize("dtype", ["load", "nn", "__name__", "float99", 7, None, ["float32"]])
def test_S23_a_manifest_with_a_dtype_that_is_none_of_torch_is_damaged(dtype):
    entry = {"dtype": dtype, "shape": [2], "files": {}}
    files = TensorFiles("/run/checkpoints/x", {"tensors": {"tied": {}, KINDS[0]: {"w": entry}}}, KINDS[0])
    with pytest.raises(DamagedError, match=r"/run/checkpoints/x/MANIFEST.json is damaged: 'w' has the dtype "):
        files.read_whole()
