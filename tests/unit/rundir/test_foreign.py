"""Weights in formats of other programs: those that `export` writes, those that others write, and what is refused."""

import enum
import json
import os
import pickle
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from spark_dl import Checkpoint, Config, ModelSpec, Train, export
from spark_dl.rundir import foreign
from spark_dl.training import initial
from tests.builders.models import same_bits
from tests.unit.rundir.test_checkpoint import group as group
from tests.unit.rundir.test_checkpoint import save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Tied(nn.Module):
    """A model with two names for one weight, a buffer, a scalar and bfloat16."""

    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(5, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 5, bias=False, dtype=torch.float32)
        self.head.weight = self.embed.weight
        self.low = nn.Parameter(torch.randn(4).bfloat16())


@pytest.fixture
def trained(tmp_path, group):
    model = Tied()
    model.body(torch.randn(8, 3))
    save(tmp_path / "run", model={"0": model.state_dict()})
    return str(tmp_path / "run"), model.state_dict()


def begun(url, build=Tied, **checkpoint):
    """The model with which a run begins."""
    config = Config(train=Train(init_from=str(url)), checkpoint=Checkpoint(**checkpoint))
    spec, columns = initial.begin(ModelSpec(build=build), config, None, "/other", overwrite=False)
    assert columns == ()
    return spec.build_to_train()


@pytest.mark.parametrize(("options", "files"), [
    ({"format": "safetensors"}, None),
    ({"format": "hf"}, ["model.safetensors"]),
    ({"format": "hf", "max_shard_bytes": 70}, [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]),
    ({"format": "dcp"}, [".metadata"]),
])  # fmt: skip
def test_what_is_exported_is_read_again_to_the_bit(trained, tmp_path, options, files):
    url, state = trained
    path = export(url, tmp_path / "x.safetensors", **options)
    assert same_bits(begun(path).state_dict(), state)
    if files is not None:
        assert {*files} <= {*os.listdir(path)}


@pytest.mark.parametrize("options", [{"format": "safetensors"}, {"format": "hf"}, {"format": "dcp"}])
def test_a_module_is_exported_with_its_own_names(trained, tmp_path, options):
    url, state = trained
    path = export(url, tmp_path / "x.safetensors", module="body", **options)
    found = begun(path, lambda: Tied().body).state_dict()
    assert same_bits(found, {name.removeprefix("body."): v for name, v in state.items() if name.startswith("body.")})
    with pytest.raises(ValueError, match=r"has no weights of a module 'bod'; it has body, embed, head, low"):
        export(url, tmp_path / "y.safetensors", module="bod", **options)
    assert not (tmp_path / "y.safetensors").exists()


def test_the_libraries_read_what_is_exported(trained, tmp_path):
    url, state = trained
    found = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load({"model": found}, checkpoint_id=export(url, tmp_path / "dcp", format="dcp"))
    assert same_bits(found, state)
    folder = export(url, tmp_path / "hf", format="hf", max_shard_bytes=70)
    found = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(folder))
    assert same_bits(found, state)
    with open(f"{folder}/{foreign.HF_INDEX}") as file:
        index = json.load(file)
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in state.values())
    assert index["weight_map"].keys() == state.keys()


@pytest.mark.parametrize("nested", [
    lambda state: state,
    lambda state: {"model": state},
    lambda state: {"state_dict": state, "epoch": 3, "optimizer": {"state": {"0": {"step": torch.zeros(())}}}},
    lambda state: {"app": {"model": state, "optim": {"lr": 0.1}}},
])  # fmt: skip
def test_the_state_dict_is_found_in_a_distributed_checkpoint_of_others(tmp_path, nested):
    state = Tied().state_dict()
    dcp.save(nested(state), checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same_bits(begun(tmp_path / "dcp").state_dict(), state)


@pytest.mark.parametrize(("content", "problem"), [
    ({"a": {"model": {"w": torch.ones(2)}}, "b": {"model": {"w": torch.ones(2)}}}, "several models .a/model, b/model."),
    ({"net": {"w": torch.ones(2)}}, "has the key net/w, and no state dict under a key 'model' or 'state_dict'"),
    ({"model": {"w": torch.ones(2), "x": {1, 2}}}, "'x' is no tensor, and not read, as it would have to be unpickled"),
    ({"model": {"w": torch.ones(2)}}, "do not fit the model of spec.build .not in the checkpoint: .*embed.weight"),
])  # fmt: skip
def test_a_distributed_checkpoint_without_one_state_dict_is_refused(tmp_path, content, problem):
    dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(ValueError, match=rf"train.init_from: .*{problem}"):
        begun(tmp_path / "dcp")


class _OldPickler(pickle.Pickler):
    """Names members of enumerations as Python 3.11.0 to 3.11.3 does."""

    def reducer_override(self, obj):
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def test_metadata_of_other_versions_of_python_is_read(tmp_path):
    state = Tied().state_dict()
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    with path.open("wb") as file:
        _OldPickler(file).dump(metadata)
    assert b"getattr" in path.read_bytes()
    assert same_bits(begun(tmp_path / "dcp").state_dict(), state)


class _Attribute:
    """Asks for an attribute of a class that may be named."""

    def __reduce__(self):
        return (getattr, (torch.Size, "__init__"))


class _Writes:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("content", [
    lambda path: pickle.dumps(_Writes(path)),
    lambda path: pickle.dumps(SimpleNamespace(storage_data={}, state_dict_metadata={})),
    lambda path: pickle.dumps({"a": torch.float32}), lambda path: pickle.dumps(_Attribute()),
    lambda path: b"\x80",
    lambda path: b"",
])  # fmt: skip
def test_S03_metadata_of_something_else_is_refused_and_not_run(tmp_path, content):
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(content(tmp_path / "written"))
    with pytest.raises(ValueError, match=r"train.init_from: .*\.metadata is no metadata of a distributed checkpoint: "):
        begun(tmp_path / "dcp")
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "", ".."])
def test_S03_an_index_leads_to_no_file_outside_its_folder(tmp_path, name):
    (tmp_path / "hf").mkdir()
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "outside.safetensors")
    (tmp_path / "hf" / foreign.HF_INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ValueError, match=r"train.init_from: .*index.json names the file '.*', expected the names of"):
        begun(tmp_path / "hf")


@pytest.mark.parametrize(("index", "problem"), [
    ("{", "is no index of safetensors: JSONDecodeError"),
    ("[]", "is no index of safetensors: TypeError"),
    ('{"weight_map": 3}', "is no index of safetensors: AttributeError"),
    ('{"weight_map": {"w": "model-1.safetensors"}}', "model-1.safetensors is missing, which .* names; copy the whole"),
])  # fmt: skip
def test_a_folder_that_is_not_whole_is_refused(tmp_path, index, problem):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / foreign.HF_INDEX).write_text(index)
    with pytest.raises(ValueError, match=rf"train.init_from: .*{problem}"):
        begun(tmp_path / "hf")


def test_a_part_of_a_file_is_refused(trained, tmp_path):
    for options in ({"format": "safetensors"}, {"format": "dcp"}):
        path = export(trained[0], tmp_path / f"{options['format']}.safetensors", **options)
        file = path if os.path.isfile(path) else os.path.join(path, "__0_0.distcp")
        os.truncate(file, os.path.getsize(file) // 2)
        with pytest.raises(ValueError, match=r"train.init_from: .*is damaged"):
            begun(path)


def test_S03_metadata_takes_no_more_memory_than_the_files_have(tmp_path):
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["model.w"].size = torch.Size([10**15])
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"is damaged: its tensors have 4,000,000,000,000,000 bytes, and its files "):
        begun(tmp_path / "dcp")


def test_files_that_change_after_the_driver_has_read_them_are_an_error(trained, tmp_path):
    path = export(trained[0], tmp_path / "hf", format="hf")
    found = foreign.find(path)
    other = Tied().state_dict()
    safetensors.torch.save_file({n: v.clone() for n, v in other.items()}, f"{path}/model.safetensors")
    with pytest.raises(ValueError, match=r"hf has changed since the driver read it \(found the SHA-256 "):
        found.read()
    os.unlink(f"{path}/model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors is missing; copy the whole folder"):
        found.read()


def test_S04_weights_without_a_signature_are_refused_where_one_is_asked_for(trained, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    path = export(trained[0], tmp_path / "hf", format="hf")
    with pytest.raises(ValueError, match=r"train.init_from: .*/hf has no signature, which checkpoint.signing_key_file"):
        begun(path, signing_key_file=str(key))


def test_a_place_without_weights_says_what_is_read(tmp_path):
    kinds = "a checkpoint, or a run folder with checkpoints, safetensors, a folder of Hugging Face or of torch's DCP"
    with pytest.raises(ValueError, match=rf"train.init_from: no checkpoint at .*/x.safetensors: expected {kinds}"):
        begun(tmp_path / "x.safetensors")


def test_another_dtype_is_refused(tmp_path):
    path = str(tmp_path / "w.safetensors")
    safetensors.torch.save_file({n: v.clone().half() for n, v in Tied().body.state_dict().items()}, path)
    with pytest.raises(
        ValueError, match=r"0.weight: \[3, 3\] float16 in the checkpoint, \[3, 3\] float32 in the model"
    ):
        begun(path, lambda: Tied().body)
