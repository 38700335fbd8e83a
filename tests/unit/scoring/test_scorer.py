"""What a scorer holds: the weights that a task loads, their checkpoint, and the rows that the model gets at once."""

import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from spark_dl import Config, Data, Launch, Loader, ModelSpec, Sequences, save_model
from spark_dl.data.columns.ragged import from_lengths
from spark_dl.data.columns.schema import Column
from spark_dl.launch.rank.rendezvous import join
from spark_dl.rundir import saving
from spark_dl.scoring import scorer as scorers
from spark_dl.scoring.saved_model import write_saved_model
from spark_dl.scoring.scorer import MOST_ROWS_AT_ONCE, Scorer, find_scorer, loaded_model, scorer_of
from tests.builders.datasets import write_dataset
from tests.builders.models import build_mlp, same_bits

COLUMN = Column("features", "float32", (4,), "list")
CONFIG = Config(data=Data(features=("features",), label="label", cast={"label": "int64"}))
SPEC = ModelSpec(build=build_mlp)


@pytest.fixture
def save(no_launcher, tmp_path):
    """Saves a checkpoint whose weights have one value."""

    def save(step, value, run_dir=tmp_path / "run"):
        weights = {name: torch.full_like(tensor, value) for name, tensor in build_mlp().state_dict().items()}
        about = saving.About(world_size=1, generation=0, step=step, config=CONFIG, columns=(COLUMN,))
        contents = saving.contents(0, model={"0": weights}, training={"step": step})
        return Path(saving.save(str(run_dir), contents, about).url)

    with join(Launch(device="cpu")):
        yield save


def value_of(model):
    return next(model.parameters()).flatten()[0].item()


def test_a_task_loads_the_weights_that_the_driver_has_read_or_none(save, tmp_path):
    url = save(1, 1.0)
    scorer = scorer_of(SPEC, tmp_path / "run")
    assert value_of(scorer.load()) == 1
    other = save(1, 2.0, run_dir=tmp_path / "other")
    shutil.rmtree(url)
    shutil.copytree(other, url)  # as whole as the first one
    assert value_of(scorer_of(SPEC, tmp_path / "run").load()) == 2
    with pytest.raises(RuntimeError, match="has changed since"):
        scorer.load()


@pytest.mark.parametrize(("dtype", "stored"), [
    ("bfloat16", "float32"), ("float16", "float32"), ("uint8", "int16"), ("uint16", "int32"), ("uint32", "int64"),
    *((name, name) for name in ("bool", "int8", "int16", "int32", "int64", "float32", "float64")),
])  # fmt: skip
def test_a_prediction_has_the_smallest_type_of_spark_that_holds_it(dtype, stored):
    value = torch.tensor([0, 1], dtype=getattr(torch, dtype))
    found = scorers._storable("y", value)
    assert found.dtype == getattr(torch, stored)
    assert found.tolist() == value.tolist()


@pytest.mark.parametrize(("value", "found"), [
    (torch.ones(2, dtype=torch.complex64), "complex64"), (torch.ones(2, 2).to_sparse(), "a sparse tensor"),
    (torch.ones(2, dtype=torch.uint64), "uint64"),
])  # fmt: skip
def test_a_prediction_that_spark_cannot_have_is_an_error(value, found):
    with pytest.raises(
        ValueError, match=f"spec.predict: the column 'y' is {found}, which Spark does not have; convert"
    ):
        scorers._storable("y", value)


def test_a_task_loads_the_saved_model_that_the_driver_has_read_or_none(tmp_path):
    write_saved_model(tmp_path / "m", build_mlp(), SPEC, CONFIG, (COLUMN,))
    scorer = find_scorer(tmp_path / "m")
    assert same_bits(scorer.load().state_dict(), find_scorer(str(tmp_path / "m")).load().state_dict())
    shutil.rmtree(tmp_path / "m")
    other = build_mlp()
    torch.nn.init.ones_(next(other.parameters()))
    write_saved_model(tmp_path / "m", other, SPEC, CONFIG, (COLUMN,))
    with pytest.raises(ValueError, match="was replaced after it was read"):
        scorer.load()


def test_the_weights_alone_must_be_whole_for_a_prediction(save, tmp_path):
    save(1, 1.0)
    newest = save(2, 2.0)
    training = (newest / "training.pt").read_bytes()
    (newest / "training.pt").write_bytes(training[:-1] + bytes([training[-1] ^ 1]))
    scorer = scorer_of(SPEC, tmp_path / "run")
    assert Path(scorer.url) == newest
    assert value_of(scorer.load()) == 2


def test_a_model_that_has_settings_of_its_own_takes_no_others(save, tmp_path):
    write_saved_model(tmp_path / "m", build_mlp(), SPEC, CONFIG, (COLUMN,))
    known = find_scorer(tmp_path / "m")
    for model in (tmp_path / "m", dataclasses.make_dataclass("Model", ["scorer"])(known)):
        for options in ({"config": CONFIG}, {"checkpoint_url": save(1, 1.0)}):
            with pytest.raises(ValueError, match="checkpoint_url, config: expected only with a ModelSpec"):
                find_scorer(model, **options)
    assert find_scorer(dataclasses.make_dataclass("Model", ["scorer"])(known)) is known


@pytest.mark.parametrize("model", [None, 3, object(), dataclasses.make_dataclass("Model", ["scorer"])(3)])
def test_other_models_are_refused(model):
    with pytest.raises(ValueError, match="model: expected a ModelSpec, a model of spark_dl.ml, or the URL"):
        find_scorer(model)


def a_row_less(output):
    return output[:-1]


def two_of_three(output):
    return {"whole": output, "short": output[:1]}


@pytest.mark.parametrize("predict", [a_row_less, two_of_three])
def test_each_row_must_have_a_prediction(predict):
    spec = ModelSpec(build=build_mlp, predict=predict)
    scorer = Scorer(spec=spec, config=CONFIG, columns=(COLUMN,), url="", sha256="")
    with pytest.raises(ValueError, match=r"spec.predict.*one entry per row"):
        scorer.outputs(scorer.load(), [np.zeros((3, 4), np.float32)], "cpu")


def test_a_model_that_was_not_trained_here_has_the_same_weights_in_each_task():
    scorer = Scorer(spec=SPEC, config=CONFIG, columns=(COLUMN,), url="", sha256="")
    torch.manual_seed(1)
    first, drawn = scorer.load(), torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn)  # the numbers of the process are left alone
    torch.manual_seed(2)
    assert same_bits(first.state_dict(), scorer.load().state_dict())
    assert not first.training


@pytest.mark.parametrize(("columns", "cells", "rows"), [
    ((COLUMN,), [(3000, 4)], 1024),
    ((COLUMN,), [(7, 4)], 7),
    ((Column("image", "float32", (1024, 1024), "list"),), [(9, 1024, 1024)], 8),
    ((Column("image", "float32", (4096, 4096), "list"),), [(2, 4096, 4096)], 1),
    ((COLUMN, Column("image", "uint8", (1024, 1024), "list")), [(40, 4), (40, 1024, 1024)], 32),
])  # fmt: skip
def test_the_model_gets_no_more_than_32_mib_of_rows_at_once(columns, cells, rows):
    config = dataclasses.replace(CONFIG, data=Data(features=tuple(c.name for c in columns)))
    scorer = Scorer(spec=SPEC, config=config, columns=columns, url="", sha256="")
    some = [np.broadcast_to(np.float32(0), shape)[:MOST_ROWS_AT_ONCE] for shape in cells]
    assert scorer._rows_at_once(some, "cpu") == rows
    few = dataclasses.replace(scorer, config=dataclasses.replace(config, loader=Loader(rows_at_once=5)))
    assert few._rows_at_once(some, "cpu") == 5


@pytest.mark.parametrize(("lengths", "inner", "rows"), [
    ([1] * 1024, (), 1024), ([64] * 1024, (), 512), ([1] * 1023 + [1 << 10], (), 32), ([64] * 1024, (4,), 128),
    ([0], (), 1),
])  # fmt: skip
def test_a_value_of_a_ragged_column_counts_as_a_vector_of_the_model(lengths, inner, rows):
    column = Column("words", "int64", (None, *inner), "list")
    scorer = Scorer(spec=SPEC, config=CONFIG, columns=(column,), url="", sha256="")
    cells = from_lengths(np.zeros((sum(lengths), *inner), np.int64), np.array(lengths))
    assert scorer._rows_at_once([cells], "cuda") == rows
    on_cpu = 2048 // (max(1, *lengths, 0) * math.prod(inner))
    assert scorer._rows_at_once([cells], "cpu") == max(1, min(len(lengths), on_cpu))
    of_bytes = dataclasses.replace(scorer, columns=(dataclasses.replace(column, dtype="uint8"),))
    assert of_bytes._rows_at_once([cells], "cpu") == rows


def test_all_rows_are_predicted_in_their_order_whatever_the_model_gets_at_once():
    scorer = Scorer(spec=SPEC, config=CONFIG, columns=(COLUMN,), url="", sha256="")
    rows = np.random.default_rng(0).normal(size=(MOST_ROWS_AT_ONCE * 2 + 3, 4)).astype(np.float32)
    model, sizes = scorer.load(), []
    model.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    whole = scorer.outputs(model, [rows], "cpu")
    assert sizes == [1024, 1024, 3]
    one = dataclasses.replace(scorer, config=dataclasses.replace(CONFIG, loader=Loader(rows_at_once=1)))
    for name, values in one.outputs(model, [rows[1000:1040]], "cpu").items():
        torch.testing.assert_close(values, whole[name][1000:1040])
    assert {name: len(values) for name, values in scorer.outputs(model, [rows[:0]], "cpu").items()} == {"prediction": 0}


WORDS = Column("words", "int64", (None,), "list")
OF_WORDS = dataclasses.replace(CONFIG, data=Data(features=("words",), label=None))


class PerWord(torch.nn.Module):
    """Returns a value for each word, one for each row, and three for each row."""

    def forward(self, words, mask):
        value = words.float() * 2
        return {"word": value, "row": (value * mask).sum(1), "three": value.sum(1, keepdim=True).repeat(1, 3)}


def of_words(build=PerWord, **loader):
    spec = ModelSpec(
        build=build,
        forward=lambda model, batch: model(batch["words"], batch["words_mask"]),
        predict=lambda found: found,
    )
    config = dataclasses.replace(OF_WORDS, loader=Loader(**loader))
    return Scorer(spec=spec, config=config, columns=(WORDS,), url="", sha256="")


@pytest.mark.parametrize(("loader", "shapes"), [
    ({}, [(6, 9)]), ({"rows_at_once": 2}, [(2, 9), (2, 4), (2, 1)]), ({"max_tokens": 9}, [(1, 9), (2, 4), (3, 2)]),
    ({"max_tokens": 9, "pad_to": (4, 8)}, [(1, 16), (2, 4), (2, 4), (1, 4)]), ({"pad_to": (4, 8)}, [(6, 16)]),
], ids=str)  # fmt: skip
def test_rows_are_computed_with_those_of_similar_lengths_and_come_back_in_their_order(loader, shapes):
    scorer = of_words(**loader).with_varying()
    lengths = np.array([1, 4, 2, 9, 1, 4])
    cells, model, found = from_lengths(np.arange(1, 22), lengths), scorer.load(), []
    model.register_forward_pre_hook(lambda _, given: found.append(tuple(given[0].shape)))
    outputs = scorer.outputs(model, [cells], "cpu")
    assert found == shapes
    sums = np.add.reduceat(np.arange(1, 22), cells.offsets[:-1]) * 2
    assert outputs["row"].tolist() == sums.tolist()
    assert (outputs["word"].values / 2).tolist() == list(range(1, 22))
    assert outputs["word"].lengths.tolist() == lengths.tolist()


@pytest.mark.parametrize("rows_at_once", [None, 1, 2, 3])
def test_values_for_each_word_come_without_padding_whatever_the_model_gets_at_once(rows_at_once):
    scorer = of_words(rows_at_once=rows_at_once).with_varying()
    assert scorer.varying == (("word", "words"),)
    assert scorer.with_varying() is scorer
    cells = from_lengths(np.arange(1, 7), np.array([1, 0, 3, 2]))
    found = scorer.outputs(scorer.load(), [cells], "cpu")
    assert found["word"].lengths.tolist() == [1, 0, 3, 2]
    assert found["word"].own_values.tolist() == [2, 4, 6, 8, 10, 12]
    assert found["row"].tolist() == [2, 0, 2 * (2 + 3 + 4), 2 * (5 + 6)]
    assert found["three"].shape == (4, 3)
    zeros = scorer.outputs_of_zeros(scorer.load())
    assert (zeros["word"].lengths.tolist(), zeros["row"].tolist()) == ([1, 1], [0, 0])


class TwoForEach(torch.nn.Module):
    def forward(self, words, mask):
        return {"pairs": words.float().repeat_interleave(2, 1)}


class Stubborn(torch.nn.Module):
    """Does not take rows of zeros, so that what varies is not known."""

    def forward(self, words, mask):
        if not words.any():
            raise RuntimeError("no words")
        return {"word": words.float()}


def test_columns_that_grow_with_the_padding_of_a_batch_are_an_error():
    with pytest.raises(
        ValueError, match="the column 'pairs' has 2 values for a row with 1 value of the feature 'words'"
    ):
        of_words(TwoForEach).with_varying()
    scorer = of_words(Stubborn, rows_at_once=1).with_varying()
    assert scorer.varying == ()
    cells = from_lengths(np.arange(1, 4), np.array([1, 2]))
    with pytest.raises(
        ValueError, match=r"the column 'word' has entries of the shapes \(2,\), \(1,\), expected one shape"
    ):
        scorer.outputs(scorer.load(), [cells], "cpu")


def test_a_column_that_varies_has_a_value_for_each_word():
    scorer = dataclasses.replace(of_words(), varying=(("row", "words"),))
    cells = from_lengths(np.arange(1, 4), np.array([1, 2]))
    with pytest.raises(
        ValueError, match=r"one value in the column 'row' for each value of 'words', shape \(2, 2, ...\), found"
    ):
        scorer.outputs(scorer.load(), [cells], "cpu")


def test_a_checkpoint_must_have_the_features_and_no_sequences(save, tmp_path):
    save(1, 1.0)
    other = dataclasses.replace(CONFIG, data=Data(features=("feature",)))
    with pytest.raises(ValueError, match=r"the checkpoint .* has no column 'feature', its columns are "):
        scorer_of(SPEC, tmp_path / "run", other)
    with pytest.raises(ValueError, match=r"the model reads sequences \(sequences.length=3\)"):
        scorer_of(SPEC, tmp_path / "run", dataclasses.replace(CONFIG, sequences=Sequences(length=3)))


def test_without_a_checkpoint_settings_and_rows_are_needed_and_no_vocabulary_of_a_training(tmp_path):
    url = str(tmp_path / "data")
    write_dataset(url, {"features": np.ones((3, 4), np.float32)}, label=None, features=("features",))
    config = Config(data=Data(features=("features",), label="label"))
    found = find_scorer(SPEC, config=config, data=url)
    assert (found.url, [column.name for column in found.columns]) == ("", ["features"])
    for options in ({"config": config}, {"data": url}, {}):
        with pytest.raises(ValueError, match="checkpoint_url: expected a checkpoint or a run_dir, found None"):
            find_scorer(SPEC, **options)
    words = Config(data=Data(features=("features",), encode={"features": {"as": "vocabulary"}}))
    with pytest.raises(ValueError, match=r"data.encode.features: no dataset of a training has its vocabulary"):
        find_scorer(SPEC, config=words, data=url)


def test_a_worker_keeps_the_last_two_models(monkeypatch):
    monkeypatch.setattr(scorers, "_loaded", type(scorers._loaded)())
    known = Scorer(spec=SPEC, config=CONFIG, columns=(COLUMN,), url="", sha256="")
    first = loaded_model(known, b"1", torch.device("cpu"))
    assert loaded_model(known, b"1", torch.device("cpu")) is first
    second = loaded_model(known, b"2", torch.device("cpu"))
    assert loaded_model(known, b"1", torch.device("cpu")) is first
    loaded_model(known, b"3", torch.device("cpu"))  # in the place of the second, which was used least
    assert loaded_model(known, b"1", torch.device("cpu")) is first
    assert loaded_model(known, b"2", torch.device("cpu")) is not second
    assert len(scorers._loaded) == 2


def test_a_model_is_saved_with_a_checkpoint_or_with_settings_and_rows(save, tmp_path):
    url = save(1, 1.0)
    for options in ({"config": CONFIG}, {"data": "/data"}):
        with pytest.raises(ValueError, match="config, data: expected only without a checkpoint, which has its own"):
            save_model(tmp_path / "m", SPEC, url, **options)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed", "fp16-mixed"])
def test_predictions_are_float32_of_a_model_that_computes_in_another_precision(precision):
    seen = []

    def forward(model, batch):
        output = model(batch["features"])
        seen.append(output.dtype)
        return output

    config = dataclasses.replace(CONFIG, loader=Loader(predict_precision=precision))
    spec = ModelSpec(build=build_mlp, forward=forward)
    scorer = Scorer(spec=spec, config=config, columns=(COLUMN,), url="", sha256="")
    rows = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    found = scorer.outputs(scorer.load(), [rows], "cpu")["prediction"]
    assert {*seen} == {{"float32": torch.float32, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}[precision]}
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, scorer.load()(torch.from_numpy(rows)).detach(), rtol=0.02, atol=0.02)
