"""A run in MLflow, on a database without a server, and in TensorBoard. The runs train, as one rank without Spark."""

import dataclasses
import json
import logging
import math
import os
import sys
import time
import urllib.parse
from pathlib import Path

import mlflow
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from spark_dl import ModelSpec, Track, storage, worker
from spark_dl.data.columns.schema import Column
from spark_dl.data.load.resume_check import dataset_digest
from spark_dl.evaluate import load_model
from spark_dl.rundir import checkpoint
from spark_dl.storage.credentials import without_secrets
from spark_dl.track import mlflow_model, mlflow_run, tracking
from tests.builders.datasets import write_dataset
from tests.builders.models import MLP, small_config
from tests.ranks.runs import cut_at, make_run

STEPS_PER_EPOCH = 6
METRICS = {"recall": {"class": "MulticlassRecall", "num_classes": 3, "average": "none"}}


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def uri(database, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    return database


@pytest.fixture(autouse=True)
def in_its_folder(tmp_path, monkeypatch):
    """MLflow stores artifacts in the working folder if there is no server."""
    monkeypatch.chdir(tmp_path)


def config_with(uri="", train=None, **track):
    if uri:
        track = {"mlflow": True, **track}
    return small_config(
        1, train={"epochs": 2, "validation_fraction": 0.2, "metrics": METRICS, **(train or {})}, **track
    )


def train(run, *, resume=False):
    """What the driver does with a run."""
    os.makedirs(run.run_dir, exist_ok=True)
    with tracking.tracking(run, resume=resume) as tracker:
        result = worker.main(run, report=tracker.put).result
        tracker.finish(result, lambda text: None)
    return result


def resumed(run, config=None, **settings):
    saved = checkpoint.find(run.run_dir)
    generation = checkpoint.start_generation(run.run_dir)
    run = dataclasses.replace(run, config=config or run.config, checkpoint=saved.url, generation=generation)
    return train(run, resume=True)


def found_run(run, uri):
    """The MLflow run of a run, and a client."""
    client = mlflow.MlflowClient(uri)
    return client.get_run(json.loads(Path(run.run_dir, "mlflow.json").read_text())["run_id"]), client


def history(client, run_id, key):
    return [(m.step, m.value) for m in client.get_metric_history(run_id, key)]


@pytest.mark.slow
def test_a_run_has_its_datasets_as_inputs_once(tmp_path, uri):
    config = config_with(uri, train={"epochs": 1, "validation_fraction": 0.0})
    validation = make_run(tmp_path, config, rows=96).train
    run = make_run(tmp_path, config, validation=validation)
    train(run)
    resumed(run, dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=2)))
    inputs = found_run(run, uri)[0].inputs.dataset_inputs
    found = {each.tags[0].value: each.dataset for each in inputs}
    assert len(inputs) == len(found) == 2
    for context, shards in (("training", run.train), ("validation", validation)):
        dataset = found[context]
        assert (dataset.name, dataset.source_type) == (f"data-{shards.rows}", "local")
        assert json.loads(dataset.source) == {"uri": shards.url}
        assert json.loads(dataset.profile) == {"num_rows": shards.rows, "num_shards": shards.num_shards}
        assert dataset_digest(shards)["sha256"].startswith(dataset.digest)
        specs = json.loads(dataset.schema)["mlflow_tensorspec"]
        (features,), (label,) = (json.loads(specs[name]) for name in ("features", "targets"))
        assert (features["name"], features["tensor-spec"]) == ("features", {"dtype": "float32", "shape": [-1, 4]})
        assert (label["name"], label["tensor-spec"]) == ("label", {"dtype": "int64", "shape": [-1]})


@pytest.mark.slow
def test_a_run_has_its_settings_metrics_and_checkpoint(tmp_path, uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "points")
    monkeypatch.setenv("MLFLOW_RUN_CONTEXT", '{"team": "blue"}')
    config = config_with(uri, mlflow_log_checkpoint=True)
    run = make_run(tmp_path, config)
    result = train(run)
    found, client = found_run(run, uri)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
    assert client.get_experiment_by_name("points").experiment_id == found.info.experiment_id
    params = found.data.params
    assert (params["train.lr"], params["train.max_steps"], params["parallel.strategy"]) == ("0.1", "null", "ddp")
    assert (params["model"], params["loss"], params["train_rows"]) == ("build_mlp", "CrossEntropyLoss", "245")
    assert params["version.torch"] == torch.__version__
    logged = [json.loads(line) for line in Path(run.run_dir, "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in logged if line["kind"] == "step"]
    assert history(client, found.info.run_id, "train/loss") == [(s["step"], s["loss"]) for s in steps]
    first = client.get_metric_history(found.info.run_id, "train/lr")[0]
    assert abs(first.timestamp / 1000 - steps[0]["time"]) < 1
    epochs = [line for line in logged if line["kind"] == "epoch"]
    assert history(client, found.info.run_id, "train/epoch_loss") == [(e["step"], e["train_loss"]) for e in epochs]
    for i in range(3):
        values = [(e["step"], e["metrics"]["recall"][i]) for e in epochs]
        assert history(client, found.info.run_id, f"validation/recall/{i}") == values
    tags = found.data.tags
    assert (tags["team"], tags["spark_dl.run_dir"]) == ("blue", run.run_dir)
    assert tags["spark_dl.checkpoint"] == result["checkpoint"]
    assert "mlflow.user" in tags
    folder = client.download_artifacts(found.info.run_id, "")
    assert sorted(os.listdir(f"{folder}/checkpoint")) == sorted(os.listdir(result["checkpoint"]))
    assert Path(folder, "config.yaml").read_text().startswith("data:")
    assert checkpoint.find(f"{folder}/checkpoint").step == result["steps"], "the upload is a whole checkpoint"


@pytest.mark.slow
def test_without_being_asked_only_the_manifest_is_uploaded_and_no_model(tmp_path, uri):
    run = make_run(tmp_path, config_with(uri))
    train(run)
    found, client = found_run(run, uri)
    assert [a.path for a in client.list_artifacts(found.info.run_id, "checkpoint")] == ["checkpoint/MANIFEST.json"]
    assert found.outputs is None or not found.outputs.model_outputs


def test_S03_the_model_is_loaded_with_its_signature_and_nothing_of_it_is_pickled(tmp_path, uri, monkeypatch):
    run = make_run(tmp_path, config_with(uri, mlflow_log_model=True, mlflow_registered_model_name="points"))
    result = train(run)
    found, client = found_run(run, uri)
    ((model_id, step),) = [(m.model_id, m.step) for m in found.outputs.model_outputs]
    assert step == result["steps"]
    assert client.get_logged_model(model_id).status.value == "READY"
    version = client.get_model_version("points", "1")
    assert version.run_id == found.info.run_id

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    folder = mlflow.artifacts.download_artifacts("models:/points/1")
    assert sorted(os.listdir(f"{folder}/data")) == ["model.pt2"]
    x = torch.randn(7, 4)
    expected = load_model(MLP, result["checkpoint"])(x).detach()
    assert torch.allclose(mlflow.pytorch.load_model(f"models:/{model_id}")(x), expected, atol=1e-6)
    loaded = mlflow.pyfunc.load_model("models:/points/1", model_config={"device": "cpu"})
    assert torch.allclose(torch.from_numpy(loaded.predict(x.numpy())), expected, atol=1e-6)
    assert str(loaded.metadata.signature.inputs) == "[Tensor('float32', (-1, 4))]"
    assert str(loaded.metadata.signature.outputs) == "[Tensor('float32', (-1, 3))]"
    assert loaded.input_example.shape == (2, 4)
    with pytest.raises(mlflow.exceptions.MlflowException):
        loaded.predict(x.numpy()[:, :3])


def test_a_resumed_run_goes_on_in_the_same_runs_and_no_step_is_doubled(tmp_path, uri, caplog):
    config = config_with(uri, tensorboard=True, train={"epochs": 3})
    run = make_run(tmp_path, config)
    with pytest.raises(KeyboardInterrupt):
        interrupted_at(run, 9)
    before, client = found_run(run, uri)
    assert before.info.status == "KILLED"
    assert history(client, before.info.run_id, "train/loss")[-1][0] == 9
    saved = checkpoint.find(run.run_dir)
    assert saved.step == STEPS_PER_EPOCH - 1

    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=4))
    with caplog.at_level(logging.WARNING, "spark_dl"):
        result = resumed(run, longer)
    found, client = found_run(run, uri)
    assert found.info.run_id == before.info.run_id
    assert found.info.status == "FINISHED"
    for key in ("train/loss", "train/lr"):
        assert [step for step, _ in history(client, found.info.run_id, key)] == list(range(1, result["steps"] + 1))
    assert found.data.params["train.epochs"] == "3"
    assert "parameters of a run cannot change, so it keeps its values of train.epochs" in caplog.text
    assert "epochs: 4" in Path(client.download_artifacts(found.info.run_id, "config.yaml")).read_text()
    losses = scalars(run, "train/loss")
    logged = history(client, found.info.run_id, "train/loss")
    assert [(s.step, s.value) for s in losses] == [(step, pytest.approx(value)) for step, value in logged]


def test_R9_a_run_that_goes_back_to_a_checkpoint_has_a_run_of_mlflow_with_the_steps_of_its_branch(tmp_path, uri):
    run = make_run(tmp_path, config_with(uri, train={"epochs": 3, "keep": 9}))
    train(run)
    left, client = found_run(run, uri)
    first, *_, last = checkpoint.list_checkpoints(run.run_dir)
    generation = checkpoint.start_generation(run.run_dir)
    train(dataclasses.replace(run, checkpoint=first.url, generation=generation), resume=True)
    found, client = found_run(run, uri)
    assert found.info.run_id != left.info.run_id
    assert found.data.tags["spark_dl.branch_of"] == left.info.run_id
    tags = client.get_run(left.info.run_id).data.tags
    assert (tags["spark_dl.left_at_step"], tags["spark_dl.continued_by"]) == (str(first.step), found.info.run_id)
    lines = [json.loads(line) for line in Path(run.run_dir, "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], pytest.approx(line["loss"])) for line in lines if line["kind"] == "step"]
    assert history(client, found.info.run_id, "train/loss") == losses
    assert [step for step, _ in losses] == list(range(1, last.step + 1))
    assert len(history(client, left.info.run_id, "train/loss")) == last.step


def interrupted_at(run, step):
    """Trains until a step, at which the user interrupts the driver."""
    os.makedirs(run.run_dir, exist_ok=True)
    with tracking.tracking(run, resume=False) as tracker:

        def put(event):
            tracker.put(event)
            if event["kind"] == "step" and event["step"] == step:
                raise KeyboardInterrupt

        worker.main(run, report=put)


def scalars(run, name):
    events = EventAccumulator(str(Path(run.run_dir, "tensorboard")))
    events.Reload()
    return events.Scalars(name)


def test_tensorboard_has_the_metrics_and_the_settings(tmp_path):
    run = make_run(tmp_path, config_with(tensorboard=True))
    result = train(run)
    lines = [json.loads(line) for line in Path(run.run_dir, "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    found = scalars(run, "train/loss")
    assert [(s.step, s.value) for s in found] == [(s["step"], pytest.approx(s["loss"])) for s in steps]
    assert [s.wall_time for s in found] == pytest.approx([s["time"] for s in steps], abs=0.01)
    assert [s.step for s in scalars(run, "validation/loss")] == [result["steps"] // 2, result["steps"]]
    events = EventAccumulator(str(Path(run.run_dir, "tensorboard")))
    events.Reload()
    (text,) = events.Tensors("settings/text_summary")
    assert b"\n    train:\n" in text.tensor_proto.string_val[0]


def test_event_files_of_a_remote_run_are_uploaded(tmp_path):
    run = make_run(tmp_path, config_with(tensorboard=True))
    run = dataclasses.replace(run, run_dir=f"memory://bucket/{time.time_ns()}")
    train_events(run, [step_event(1), {**step_event(1), "kind": "epoch", "train_loss": 0.5, "metrics": {}}])
    (name,) = storage.list_names(storage.join(run.run_dir, "tensorboard"))
    (tmp_path / name).write_bytes(storage.read_bytes(storage.join(run.run_dir, "tensorboard", name)))
    events = EventAccumulator(str(tmp_path / name))
    events.Reload()
    assert [s.value for s in events.Scalars("train/epoch_loss")] == [0.5]


def step_event(step):
    return {"kind": "step", "epoch": 0, "step": step, "steps": 9, "loss": 1.0, "lr": 0.1, "time": time.time()}


def train_events(run, events):
    with tracking.tracking(run, resume=False) as tracker:
        for event in events:
            tracker.put(event)


def test_the_user_s_own_run_is_used_and_left_open(tmp_path, uri):
    with mlflow.start_run(run_name="mine") as mine:
        run = make_run(tmp_path, config_with(uri))
        train(run)
        found, client = found_run(run, uri)
        assert (found.info.run_id, found.info.status) == (mine.info.run_id, "RUNNING")
        assert len(history(client, mine.info.run_id, "train/loss")) == 2 * (STEPS_PER_EPOCH - 1)
        mlflow.log_metric("after", 1.0)
    assert client.get_run(mine.info.run_id).info.status == "FINISHED"
    assert client.get_run(mine.info.run_id).data.metrics["after"] == 1.0


def test_a_run_that_fails_is_failed(tmp_path, uri):
    run = make_run(tmp_path, config_with(uri))
    with pytest.raises(ArithmeticError), tracking.tracking(run, resume=False):
        raise ArithmeticError("of a rank")
    assert found_run(run, uri)[0].info.status == "FAILED"


def test_artifacts_that_cannot_be_written_are_an_error_before_ranks_start(tmp_path, uri, monkeypatch):
    (tmp_path / "file").write_text("a file where MLflow stores artifacts")
    mlflow.MlflowClient(uri).create_experiment("no artifacts", artifact_location=f"{tmp_path}/file/artifacts")
    run = make_run(tmp_path, config_with(uri))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "no artifacts")
    refused = r"track.mlflow: cannot use MLflow at sqlite:.*/file/artifacts"
    with pytest.raises(RuntimeError, match=refused), tracking.tracking(run, resume=False):
        raise AssertionError("the ranks would have started")
    assert found_run(run, uri)[0].info.status == "FAILED"


def test_a_server_that_is_down_is_an_error_within_seconds(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"track.mlflow: the server http://127.0.0.1:9 does not answer; start it"):
        tracking.check(Track(mlflow=True))
    assert time.monotonic() - start < 20


def test_a_server_that_goes_is_an_error_of_each_call_for_which_mlflow_would_wait_for_minutes():
    run = mlflow_run.MlflowRun(None, "http://127.0.0.1:9", "run", "0", is_own=True)
    events = [{"kind": "checkpoint", "url": "c", "step": 1, "time": 0.0}]
    for call in (lambda: run.write(events), lambda: run.end("FINISHED"), lambda: run.upload("", [], "")):
        with pytest.raises(OSError, match="the server does not answer"):
            call()
    run.thread.close("FINISHED")


def test_a_database_that_cannot_be_opened_is_an_error_that_names_it(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    uri = f"sqlite:///{tmp_path}/file/m.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(RuntimeError, match=rf"track.mlflow: cannot use MLflow at {uri}: "):
        tracking.check(Track(mlflow=True))


def test_a_resumed_run_whose_mlflow_run_was_deleted_is_an_error(tmp_path, uri):
    run = make_run(tmp_path, config_with(uri))
    train_events(run, [])
    found, client = found_run(run, uri)
    client.delete_run(found.info.run_id)
    deleted = r"the MLflow run \w+ of earlier attempts has been deleted; .*run/mlflow.json"
    with pytest.raises(ValueError, match=deleted), tracking.tracking(run, resume=True):
        pass
    Path(run.run_dir, "mlflow.json").write_text("{}")
    with pytest.raises(ValueError, match=r"mlflow.json is damaged"), tracking.tracking(run, resume=True):
        pass


def test_a_resumed_run_with_another_server_has_a_new_run_there(tmp_path, uri):
    run = make_run(tmp_path, config_with(uri))
    before = json.dumps({"run_id": "1", "tracking_uri": "http://another", "experiment_id": "0"})
    storage.write_bytes(f"{run.run_dir}/mlflow.json", before.encode())
    with tracking.tracking(run, resume=True):
        pass
    assert found_run(run, uri)[0].info.status == "FINISHED"


class Branches(nn.Module):
    """What it computes depends on its input, so that torch.export cannot make a program of it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        out = self.linear(x)
        return out if float(out.sum()) > 0 else -out


def test_a_model_that_cannot_be_exported_is_an_error_before_ranks_start(tmp_path, uri):
    config = config_with(uri, mlflow_log_model=True)
    run = make_run(tmp_path, config, spec=ModelSpec(build=Branches))
    with pytest.raises(ValueError, match=r"track.mlflow_log_model: the model cannot be exported with torch.export"):
        train(run)
    assert not Path(run.run_dir, "mlflow.json").exists()


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.embedding = nn.Linear(2, 3), nn.Embedding(4, 3)

    def forward(self, numbers, word):
        return self.linear(numbers) + self.embedding(word)


def test_a_model_with_several_features_has_a_named_signature(tmp_path, uri, monkeypatch):
    columns = {
        "numbers": torch.randn(60, 2).numpy(), "word": torch.randint(0, 4, (60,)).numpy(),
        "label": torch.randint(0, 3, (60,)).numpy(),
    }  # fmt: skip
    config = config_with(uri, features=("numbers", "word"), mlflow_log_model=True)
    shards = write_dataset(str(tmp_path / "two"), columns, features=("numbers", "word"))
    run = dataclasses.replace(make_run(tmp_path, config), train=shards, spec=ModelSpec(build=TwoInputs))
    result = train(run)
    found, _ = found_run(run, uri)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    model_uri = f"models:/{found.outputs.model_outputs[0].model_id}"
    signature = mlflow.models.get_model_info(model_uri).signature
    assert str(signature.inputs) == "['numbers': Tensor('float32', (-1, 2)), 'word': Tensor('int64', (-1,))]"
    inputs = torch.randn(5, 2), torch.tensor([0, 1, 2, 3, 0])
    expected = load_model(run.spec, result["checkpoint"])(*inputs)
    assert torch.allclose(mlflow.pytorch.load_model(model_uri)(*inputs), expected, atol=1e-6)


def test_a_model_that_is_not_logged_at_the_end_costs_no_result(tmp_path, uri, caplog, monkeypatch):
    run = make_run(tmp_path, config_with(uri, mlflow_log_model=True))

    def fail(*args):
        raise OSError("no space for artifacts")

    monkeypatch.setattr(mlflow.MlflowClient, "log_model_artifacts", fail)
    assert train(run)["steps"] == 2 * (STEPS_PER_EPOCH - 1)
    assert "the model was not logged: no space for artifacts" in caplog.text
    assert found_run(run, uri)[0].info.status == "FINISHED"


def test_values_that_mlflow_does_not_accept_do_not_hold_up_the_others(tmp_path, uri, caplog):
    run = make_run(tmp_path, config_with(uri))
    train_events(run, [step_event(1), {**step_event(2), "time": -5.0}])
    assert found_run(run, uri)[0].info.status == "FINISHED"
    assert "does not accept these values" in caplog.text


class OfWords(nn.Module):
    """Scores of each word, or one that is made for rows of a length."""

    def __init__(self, *, fixed=False):
        super().__init__()
        self.embedding, self.fixed = nn.Embedding(4, 3), fixed

    def forward(self, words, mask):
        return self.embedding(words) * mask[..., None] * (len(words[0]) if self.fixed else 1)


def of_words(model, batch):
    return model(batch["words"], batch["words_mask"])


def test_a_model_with_a_ragged_feature_takes_rows_of_any_length(tmp_path, uri, monkeypatch):
    columns = [Column("words", "int64", (None,), "list")]
    config = config_with(uri, features=("words",), encode={"words": {"ragged": True}}, mlflow_log_model=True)
    run = dataclasses.replace(make_run(tmp_path, config), spec=ModelSpec(build=OfWords, forward=of_words))
    example = mlflow_model.Example.of_zeros(run, columns)
    model = OfWords()
    mlflow_model._save(model, run, example, str(tmp_path / "model"))
    signature = mlflow.models.get_model_info(str(tmp_path / "model")).signature
    assert str(signature.inputs) == "['words': Tensor('int64', (-1, -1)), 'words_mask': Tensor('bool', (-1, -1))]"
    assert str(signature.outputs) == "[Tensor('float32', (-1, -1, 3))]"
    for rows, length in ((1, 1), (4, 2), (3, 9)):
        inputs = torch.randint(0, 4, (rows, length)), torch.arange(length)[None] < torch.randint(1, 9, (rows, 1))
        torch.testing.assert_close(mlflow.pytorch.load_model(str(tmp_path / "model"))(*inputs), model(*inputs))
    with pytest.raises(ValueError, match="cannot be exported with .*its program is made for rows of one length"):
        mlflow_model._save(OfWords(fixed=True), run, example, str(tmp_path / "fixed"))


def test_ragged_features_without_padding_are_refused(tmp_path, uri):
    columns = [Column("words", "int64", (None,), "list")]
    config = config_with(uri, features=("words",), encode={"words": {"ragged": True}}, mlflow_log_model=True)
    config = dataclasses.replace(config, loader=dataclasses.replace(config.loader, ragged="offsets"))
    run = dataclasses.replace(make_run(tmp_path, config), spec=ModelSpec(build=OfWords, forward=of_words))
    with pytest.raises(ValueError, match="supports ragged features with loader.ragged: pad, found 'offsets' for 'wor"):
        mlflow_model.Example.of_zeros(run, columns)


def test_packages_that_are_missing_are_named_with_the_extra(monkeypatch):
    for name in ("mlflow", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ValueError, match=rf"track.{name}: needs the package {name} .* install spark_dl\[{name}\]"):
            tracking.check(Track(**{name: True}))


def test_a_profile_that_was_not_reached_is_a_warning(tmp_path, caplog):
    run = make_run(tmp_path, cut_at(config_with(profile_steps=(50, 60)), 2))
    train(run)
    assert "track.profile_steps: no profile was written, as this attempt did not take the steps 50 to 60" in caplog.text


@pytest.mark.parametrize(("uri", "shown"), [
    ("http://me:MARKER@host:5000/x", "http://host:5000/x"), ("https://MARKER@host/x", "https://host/x"),
    ("postgresql://u:MARKER@db/mlflow", "postgresql://db/mlflow"),
    ("postgresql://u:MA/RKER?@db/mlflow", "postgresql://db/mlflow"),
    ("mysql+pymysql://db/mlflow?user=u&password=MARKER&ssl=1", "mysql+pymysql://db/mlflow?user=u&password=***&ssl=1"),
    ("postgresql:///mlflow?host=db&passwd=MA%2FRKER", "postgresql:///mlflow?host=db&passwd=***"),
])  # fmt: skip
def test_S09_a_password_is_never_shown(uri, shown):
    assert without_secrets(uri) == shown
    with pytest.raises(RuntimeError, match="cannot use MLflow at") as e, mlflow_run.explained(uri):
        raise OSError(f"no route to {uri}, with {urllib.parse.unquote(uri)}")
    assert "MA" not in str(e.value)


@pytest.mark.parametrize("uri", ["sqlite:///a@b.db", "databricks", "databricks://profile", "http://host:5000/x",
                                 "postgresql://u@db/mlflow?sslmode=require"])  # fmt: skip
def test_uris_without_a_password_are_shown(uri):
    assert without_secrets(uri) == uri.replace("u@", "")


def test_S09_the_password_of_a_database_is_in_nothing_that_a_run_writes(tmp_path, monkeypatch, caplog):
    """SQLite ignores the password, as a server would not."""
    caplog.set_level(logging.DEBUG)
    uri = f"sqlite:///file:{tmp_path}/mlflow.db?uri=true&password=MARKER-of-the-database"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run = make_run(tmp_path, config_with(uri))
    train(run)
    found = found_run(run, uri)[0]
    assert found.info.status == "FINISHED"
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "mlflow.db"]
    assert not any(b"MARKER-of-the-database" in content for content in written)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("spark_dl")]
    assert ours
    assert "MARKER-of-the-database" not in f"{ours}{found.data.params}{found.data.tags}"


def test_R24_an_exported_model_fills_what_is_not_finite_as_predict_does():
    model = nn.Linear(2, 1)
    config = small_config(1, data={"features": ("x",), "label": None, "nonfinite": "fill", "fill": {"x": 2.0}})
    compute = mlflow_model._Compute(model, ModelSpec(build=lambda: model), config, config.data.features)
    found = compute(torch.tensor([[1.0, math.nan], [math.inf, 3.0]]))
    assert torch.equal(found, model(torch.tensor([[1.0, 2.0], [2.0, 3.0]])))
