"""Saved models: written, read in another process without Spark, and refused when they are damaged."""

import functools
import json
import os
import pickle
import shutil
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from spark_dl import Config, Data, Loader, ModelSpec, storage
from spark_dl.data.columns.ragged import from_lengths
from spark_dl.data.columns.schema import Column
from spark_dl.scoring.saved_model import load_model, read_saved_model, write_saved_model
from spark_dl.scoring.scorer import Scorer, saved_scorer
from spark_dl.scoring.tables import trial
from tests.builders.models import build_dropout_mlp, build_mlp

COLUMNS = (Column("features", "float32", (4,), "list"),)
CONFIG = Config(data=Data(features=("features",), label="label", cast={"label": "int64"}, weight="w"))
FORMATS = ("weights", "export")


def halved(batch):
    return {**batch, "features": batch["features"] / 2}


def two_columns(output):
    return {"best": output.argmax(1), "scores": output}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, features):
        return self.b(self.a(features)), features.sum(1)


SPECS = {
    "plain": ModelSpec(build=build_mlp),
    "functions": ModelSpec(build=build_dropout_mlp, transform=halved, predict=two_columns),
    "tied": ModelSpec(build=Tied),
}


def trained(spec):
    model = spec.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def saved(folder, name, kind="weights"):
    spec = SPECS[name]
    model = trained(spec)
    write_saved_model(folder, model, spec, CONFIG, COLUMNS, format=kind)
    return Scorer(spec=spec, config=CONFIG, columns=COLUMNS, url="", sha256=""), model


def scorer_at(folder):
    return saved_scorer(read_saved_model(folder))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", SPECS)
def test_a_saved_model_predicts_what_the_trained_one_does(tmp_path, name, kind):
    scorer, model = saved(tmp_path / "m", name, kind)
    cells = [np.random.default_rng(0).normal(size=(37, 4)).astype(np.float32)]
    expected = scorer.outputs(model, cells, "cpu")
    found = scorer_at(tmp_path / "m")
    outputs = found.outputs(found.load(), cells, "cpu")
    assert outputs.keys() == expected.keys()
    for column, value in expected.items():
        torch.testing.assert_close(outputs[column], value)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_model_that_was_replaced_is_not_loaded_for_its_predecessor(tmp_path, kind):
    """Vocabulary, settings and weights are of one model, and a Python worker keeps no model for another one."""
    saved(tmp_path / "m", "plain", kind)
    before = scorer_at(tmp_path / "m")
    assert pickle.dumps(scorer_at(tmp_path / "m").sha256) == pickle.dumps(before.sha256)
    before.load()
    shutil.rmtree(tmp_path / "m")
    saved(tmp_path / "m", "plain", kind)
    for load in (before.load, *([before.spec.build] if kind == "export" else [])):
        with pytest.raises(ValueError, match="/m was replaced after it was read; call predict"):
            load()
    assert scorer_at(tmp_path / "m").sha256 != before.sha256
    scorer_at(tmp_path / "m").load()


@pytest.mark.parametrize("kinds", [(a, b) for a in FORMATS for b in FORMATS], ids="-".join)
def test_a_model_is_replaced_whole(tmp_path, kinds):
    """Readers see the model of before or the new one, at each moment of the writes."""
    models = [trained(SPECS["plain"]) for _ in range(3)]
    cells = torch.ones(2, 4)
    at = tmp_path / "m"

    def outputs(model):
        found = model(cells)
        return (found["prediction"] if isinstance(found, dict) else found).detach().numpy()

    for number, model in enumerate(models):
        seen = []

        def write(url, content, number=number, seen=seen, own=storage.write_bytes):
            own(url, content)
            seen.append(outputs(load_model(at)) if number or url.endswith("model.json") else None)

        with mock.patch.object(storage, "write_bytes", write):
            write_saved_model(at, model, SPECS["plain"], CONFIG, COLUMNS, format=kinds[number % 2], overwrite=True)
        if number:
            np.testing.assert_allclose(seen[0], outputs(models[number - 1]), rtol=1e-5)
        np.testing.assert_allclose(seen[1], outputs(model), rtol=1e-5)
        assert len(os.listdir(at)) == 2
    with pytest.raises(ValueError, match="the folder is not empty; choose another one, delete it, or replace"):
        saved(at, "plain")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not a saved model"):
        write_saved_model(tmp_path / "other", model, SPECS["plain"], CONFIG, COLUMNS, overwrite=True)
    assert os.listdir(tmp_path / "other") == ["mine.txt"]


def test_a_reader_between_two_models_gets_the_new_one(tmp_path):
    models = [trained(SPECS["plain"]) for _ in range(2)]
    write_saved_model(tmp_path / "m", models[0], SPECS["plain"], CONFIG, COLUMNS)

    def read(url, own=storage.read_bytes):
        if url.endswith("model.safetensors"):
            write_saved_model(tmp_path / "m", models[1], SPECS["plain"], CONFIG, COLUMNS, overwrite=True)
        return own(url)

    with mock.patch.object(storage, "read_bytes", read):
        found = load_model(tmp_path / "m")
    torch.testing.assert_close(found(torch.ones(2, 4)), models[1](torch.ones(2, 4)))


def test_only_the_settings_of_features_are_saved(tmp_path):
    saved(tmp_path / "m", "plain")
    found = read_saved_model(tmp_path / "m")
    assert found.config == Config(data=Data(features=("features",), label=None))
    assert found.columns == COLUMNS


LOAD = """
import sys, torch
from spark_dl.scoring.saved_model import load_model
from spark_dl.scoring.tables import trial
output = load_model(sys.argv[1])(torch.ones(2, 4))
print((output["prediction"] if isinstance(output, dict) else output).tolist())
assert not {name.split(".")[0] for name in sys.modules} & {"pyspark", "py4j", "tests"} - set(sys.argv[2:])
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", FORMATS)
def test_another_process_loads_a_model_without_spark(tmp_path, kind):
    _, model = saved(tmp_path / "m", "plain", kind)
    needed = ["tests"] if kind == "weights" else []
    found = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "m"), *needed], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    np.testing.assert_allclose(json.loads(found.stdout), model(torch.ones(2, 4)).detach(), rtol=1e-5)


def test_S03_weights_are_no_pickle(tmp_path):
    saved(tmp_path / "m", "plain")
    assert sorted(os.listdir(tmp_path / "m")) == ["model.json", "model.safetensors"]
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads((tmp_path / "m" / "model.safetensors").read_bytes())


def test_a_folder_that_is_in_use_and_functions_without_a_name_are_refused(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="the folder is not empty"):
        saved(tmp_path / "used", "plain")
    with pytest.raises(ValueError, match="expected 'weights' or 'export', found 'pickle'"):
        saved(tmp_path / "m", "plain", "pickle")
    spec = ModelSpec(build=build_mlp, predict=lambda output: {"y": output})
    with pytest.raises(ValueError, match=r"spec.predict: .*format='export'"):
        write_saved_model(tmp_path / "m", build_mlp(), spec, CONFIG, COLUMNS)
    assert not (tmp_path / "m").exists()
    write_saved_model(tmp_path / "m", build_mlp().eval(), spec, CONFIG, COLUMNS, format="export")
    assert trial(scorer_at(tmp_path / "m")).keys() == {"y"}


def test_what_torch_export_does_not_take_is_refused(tmp_path):
    class Odd(nn.Linear):
        def forward(self, features):
            return super().forward(features if float(features.sum()) > 0 else -features)

    spec = ModelSpec(build=lambda: Odd(4, 2))
    with pytest.raises(ValueError, match="torch.export cannot export the model: .*save its weights instead"):
        write_saved_model(tmp_path / "m", spec.build(), spec, CONFIG, COLUMNS, format="export")
    ragged = (Column("features", "float32", (None,), "list"),)
    config = Config(data=CONFIG.data, loader=Loader(ragged="offsets"))
    with pytest.raises(ValueError, match="supports ragged columns with loader.ragged: pad, found 'offsets'"):
        write_saved_model(tmp_path / "m", build_mlp(), SPECS["plain"], config, ragged, format="export")

    class OfOneLength(nn.Module):
        def forward(self, features):
            return features[:, :1] * len(features[0])

    spec = ModelSpec(build=OfOneLength, forward=by_first)
    config = Config(data=CONFIG.data)
    with pytest.raises(ValueError, match=r"torch.export cannot export the model|made for rows of one length"):
        write_saved_model(tmp_path / "m", spec.build(), spec, config, ragged, format="export")


def by_first(model, batch):
    return model(batch["features"])


class OfTokens(nn.Module):
    """Scores of a row, and of each of its tokens, of two ragged features and a fixed one."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, tokens, mask, values, values_mask, number):
        encoded = self.embed(tokens) * mask[..., None]
        mean = encoded.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        total = (values * values_mask).sum(1, keepdim=True)
        return {"row": self.out(mean) + total + number, "tags": self.out(encoded)}


def of_tokens(model, batch):
    return model(*(batch[n] for n in ("tokens", "tokens_mask", "values", "values_mask")), batch["number"])


@pytest.mark.parametrize("lengths", [([3, 1, 7], [2, 2, 5]), ([1, 1], [1, 1]), ([4], [9]), ([2, 0, 5], [0, 1, 3])])
def test_a_program_takes_ragged_features_of_any_lengths(tmp_path, lengths):
    data = Data(features=("tokens", "values", "number"), label=None,
                encode={"tokens": {"ragged": True}, "values": {"ragged": True}})  # fmt: skip
    columns = (Column("tokens", "int64", (None,), "list"), Column("values", "float32", (None,), "list"),
               Column("number", "float32", (1,), "ndarray"))  # fmt: skip
    spec, config = ModelSpec(build=OfTokens, forward=of_tokens), Config(data=data)
    model = OfTokens().eval()
    write_saved_model(tmp_path / "m", model, spec, config, columns, format="export")
    rng, (of_tokens_lengths, of_values) = np.random.default_rng(0), lengths
    cells = [
        from_lengths(rng.integers(0, 50, sum(of_tokens_lengths)), np.array(of_tokens_lengths)),
        from_lengths(rng.random(sum(of_values), dtype=np.float32), np.array(of_values)),
        rng.random((len(of_values), 1), dtype=np.float32),
    ]
    alone = Scorer(spec=spec, config=config, columns=columns, url="unused", sha256="").outputs(model, cells, "cpu")
    scorer = scorer_at(tmp_path / "m")
    found = scorer.outputs(scorer.load(), cells, "cpu")
    torch.testing.assert_close(found["row"], alone["row"])
    assert scorer.varying == (("tags", "tokens"),)
    assert found["tags"].lengths.tolist() == of_tokens_lengths
    loaded = load_model(tmp_path / "m")
    inputs = (torch.ones(2, 4).long(), torch.ones(2, 4).bool(), torch.ones(2, 6), torch.ones(2, 6).bool(),
              torch.ones(2, 1))  # fmt: skip
    torch.testing.assert_close(loaded(*inputs), model(*inputs))


def test_a_model_of_transformers_is_a_program_of_tokens(tmp_path):
    settings = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    spec = ModelSpec(build=functools.partial(transformers.BertForSequenceClassification, settings), forward=of_bert)
    data = Data(features=("input_ids",), label=None, encode={"input_ids": {"ragged": True}})
    columns = (Column("input_ids", "int32", (None,), "list"),)
    model = spec.build().eval()
    write_saved_model(tmp_path / "m", model, spec, Config(data=data), columns, format="export")
    cells = [from_lengths(np.arange(12, dtype=np.int32), np.array([3, 1, 8]))]
    alone = Scorer(spec=spec, config=Config(data=data), columns=columns, url="unused", sha256="")
    scorer = scorer_at(tmp_path / "m")
    found = scorer.outputs(scorer.load(), cells, "cpu")
    torch.testing.assert_close(found, alone.outputs(model, cells, "cpu"))


def of_bert(model, batch):
    return model(input_ids=batch["input_ids"], attention_mask=batch["input_ids_mask"]).logits


def _edit(folder, **changes):
    path = folder / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_damaged_and_foreign_files_are_refused(tmp_path):
    saved(tmp_path / "m", "plain")

    def copy():
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        shutil.copytree(tmp_path / "m", tmp_path / "c")
        return tmp_path / "c"

    def flip(folder):
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (folder / "model.safetensors").write_bytes(content)

    build = "tests.builders.models:build_dropout_mlp"
    for damage, match in (
        (flip, "checksum"), (lambda c: (c / "model.safetensors").unlink(), "is missing"),
        (lambda c: (c / "model.json").write_text("{"), "is damaged"),
        (lambda c: (c / "model.json").unlink(), "no model.json"),
        (lambda c: _edit(c, version=2), "version 1"), (lambda c: _edit(c, functions={"build": build}), "do not fit"),
        (lambda c: _edit(c, functions={"build": "os:getcwd"}), "returned str, expected a torch.nn.Module"),
        (lambda c: _edit(c, functions={"build": "gone_module:build"}), "install it here"),
    ):  # fmt: skip
        folder = copy()
        damage(folder)
        with pytest.raises(ValueError, match=match):
            load_model(folder)


def test_a_saved_model_has_no_loss(tmp_path):
    write_saved_model(tmp_path / "m", build_mlp(), ModelSpec(build=build_mlp), CONFIG, COLUMNS)
    with pytest.raises(RuntimeError, match="a saved model has no loss; evaluate the checkpoint"):
        read_saved_model(tmp_path / "m").spec.loss(torch.ones(1), torch.ones(1))
