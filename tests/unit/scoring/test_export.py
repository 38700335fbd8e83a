"""The formats of `export`. What reads the weights again is in tests/unit/rundir/test_foreign.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import torch
from torch import nn

from spark_dl import Checkpoint, Config, Data, Launch, Loader, ModelSpec, export, save_model
from spark_dl.data.columns.schema import Column
from spark_dl.launch.rank.rendezvous import join
from spark_dl.rundir import checkpoint, foreign, saving
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


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=7, n_embd=4, n_layer=1, n_head=2, n_positions=8, bos_token_id=1))


_READS = """
import sys, torch
from transformers import AutoModel, AutoModelForCausalLM
import safetensors.torch
folder, expected = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
expected = safetensors.torch.load_file(expected)
assert model.state_dict().keys() == expected.keys()
assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
assert AutoModel.from_pretrained(folder).h[0].attn.c_attn.weight.equal(expected["transformer.h.0.attn.c_attn.weight"])
assert not [name for name in sys.modules if name.startswith(("spark_dl", "pyspark"))]
"""


def test_transformers_reads_a_model_of_its_own_without_spark_dl(tmp_path, no_launcher):
    """The run begins with it again: tied weights, which Hugging Face stores once, are filled in."""
    pytest.importorskip("transformers")
    model = gpt2()
    with join(Launch(device="cpu")):
        about = saving.About(world_size=1, generation=0, step=1, config=Config(), columns=())
        saving.save(str(tmp_path / "run"), saving.contents(0, model={"0": model.state_dict()}, training={}), about)
    folder = export(tmp_path / "run", tmp_path / "hf", format="hf", spec=ModelSpec(build=gpt2), max_shard_bytes=500)
    plain = export(tmp_path / "run", tmp_path / "plain.safetensors")
    assert len(list(Path(folder).glob("model-*-of-*.safetensors"))) > 1
    ran = subprocess.run(
        [sys.executable, "-c", _READS, folder, plain], cwd=tmp_path, timeout=120, capture_output=True, text=True,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = foreign.find(folder).read()
    assert "lm_head.weight" not in found
    assert same_bits(foreign.fill_tied(gpt2(), found), model.state_dict())


class Rows(nn.Module):
    """A mean over the values of each row, padded or not, and a network."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    def forward(self, values, mask):
        return self.body((values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1))


@pytest.mark.parametrize("is_ragged", [False, True])
def test_onnxruntime_computes_what_the_model_does(tmp_path, no_launcher, is_ragged):
    runtime = pytest.importorskip("onnxruntime")
    build = Rows if is_ragged else build_mlp
    names = ["v", "v_mask"] if is_ragged else ["v"]
    spec = ModelSpec(
        build=build,
        forward=lambda model, batch: model(*(batch[name] for name in names)),
        predict=lambda output: {"score": output, "best": output.argmax(1)},
    )
    config = Config(data=Data(features=("v",)), loader=Loader(ragged="pad"))
    column = Column("v", "float32", (None,) if is_ragged else (4,), "list")
    model = build()
    with join(Launch(device="cpu")):
        about = saving.About(world_size=1, generation=0, step=1, config=config, columns=(column,))
        saving.save(str(tmp_path / "run"), saving.contents(0, model={"0": model.state_dict()}, training={}), about)
    path = export(tmp_path / "run", tmp_path / "model.onnx", format="onnx", spec=spec)
    session = runtime.InferenceSession(path)
    assert [i.name for i in session.get_inputs()] == names
    assert [o.name for o in session.get_outputs()] == ["score", "best"]
    for rows in (1, 5):
        values = torch.randn(rows, 4)
        inputs = [values, torch.tensor([True, True, True, False]).repeat(rows, 1)] if is_ragged else [values]
        found = session.run(None, {name: value.numpy() for name, value in zip(names, inputs, strict=True)})
        with torch.no_grad():
            expected = model.eval()(*inputs)
        torch.testing.assert_close(torch.from_numpy(found[0]), expected, rtol=1e-5, atol=1e-6)
        assert found[1].tolist() == expected.argmax(1).tolist()


def test_a_program_is_one_file_of_torch(run_dir, tmp_path):
    config, column = Config(data=Data(features=("v",))), Column("v", "float32", (4,), "list")
    with join(Launch(device="cpu")):
        about = saving.About(world_size=1, generation=0, step=2, config=config, columns=(column,))
        saving.save(run_dir, saving.contents(0, model={"0": build_mlp().state_dict()}, training={}), about)
    program = torch.export.load(export(run_dir, tmp_path / "m.pt2", format="export", spec=MLP)).module()
    assert program(torch.zeros(3, 4))["prediction"].shape[0] == 3


@pytest.mark.parametrize(("options", "problem"), [
    ({"format": "pickle"}, "format: expected one of 'safetensors', 'hf', 'dcp', 'export', 'onnx', found 'pickle'"),
    ({"format": "onnx"}, "format='onnx' needs spec=, whose functions are parts of the program"),
    ({"format": "export"}, "format='export' needs spec=, whose functions are parts of the program"),
    ({"format": "export", "spec": MLP, "module": "0"}, "module='0' is for weights, and format='export' is a program"),
    ({"format": "hf", "spec": MLP, "module": "9"}, "the model of spec.build has no module '9'"),
])  # fmt: skip
def test_what_a_format_cannot_do_is_an_error_before_anything_is_written(run_dir, tmp_path, options, problem):
    with pytest.raises(ValueError, match=f"export: {problem}"):
        export(run_dir, tmp_path / "out", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_folder_is_written_whole_or_not_at_all(run_dir, tmp_path, monkeypatch):
    def full(url, content):
        if url.endswith("model.safetensors.index.json"):
            raise OSError(28, "No space left on device")
        return create_exclusively(url, content)

    monkeypatch.setattr("spark_dl.scoring.export.create_exclusively", full)
    with pytest.raises(OSError, match="No space left"):
        export(run_dir, tmp_path / "hf", format="hf", max_shard_bytes=50)
    assert not (tmp_path / "hf").exists()
