"""A LightningModule that is defined where it is used, from a DataFrame to predictions."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

import spark_dl
from spark_dl import DDP, TreeReduce
from spark_dl.rundir import checkpoint
from tests.builders.models import blobs, small_config


def define():
    """A class that executors cannot import: it is sent by value."""

    class Classifier(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
            self.accuracy = MeanMetric()

        def forward(self, x):
            return self.model(x)

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self(x), y) * (1 + self.global_step / 10 + batch_idx)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            x, y = batch
            scores = self(x)
            self.accuracy.update(scores.argmax(1) == y)
            self.log("val_acc", self.accuracy)
            return F.cross_entropy(scores, y)

        def predict_step(self, batch, batch_idx):
            (x,) = batch
            return {"class_id": self(x).argmax(1)}

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Classifier


@pytest.fixture(scope="module")
def points(spark):
    columns = blobs(245)
    rows = [(x.tolist(), int(y)) for x, y in zip(*columns.values(), strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label bigint").repartition(3).cache()


@pytest.mark.modes("local")
@pytest.mark.slow
@pytest.mark.long
def test_a_module_of_a_notebook_trains_is_evaluated_and_predicts(spark, points, tmp_path):
    spec = spark_dl.ModelSpec.from_lightning(define())
    train = {"lr": 0.01, "epochs": 3, "early_stop_metric": "val_acc", "early_stop_mode": "max"}
    config = small_config(2, train=train, data={"validation_fraction": 0.2})
    result = spark_dl.train(points, spec, config, run_dir=str(tmp_path / "run"))
    assert set(result.metrics) == {"loss", "val_acc"}
    found = spark_dl.evaluate(points, spec, result.checkpoint)
    predicted = spark_dl.predict(points, spec, result.checkpoint).collect()
    right = sum(row["class_id"] == row["label"] for row in predicted)
    assert (found["rows"], found["val_acc"]) == (245, pytest.approx(right / 245))
    assert right > 150
    model = result.load_model(spec)
    assert isinstance(model, L.LightningModule)
    x = torch.tensor([row["features"] for row in predicted])
    assert model(x).argmax(1).tolist() == [row["class_id"] for row in predicted]


@pytest.mark.slow
@pytest.mark.modes("local")
@pytest.mark.long
def test_tree_reduce_trains_it_as_ddp_does(spark, points, tmp_path):
    spec = spark_dl.ModelSpec.from_lightning(define())
    results = []
    for parallel in (DDP(), TreeReduce()):
        settings = {"train": {"lr": 0.01}, "data": {"validation_fraction": 0.2}, "parallel": parallel}
        run_dir = str(tmp_path / parallel.strategy)
        results.append(spark_dl.train(points, spec, small_config(2, **settings), run_dir=run_dir))
    result, again = results
    assert again.metrics == pytest.approx(result.metrics, rel=1e-4)
    weights, weights_again = (checkpoint.load(checkpoint.find(r.run_dir), "model.pt")["0"] for r in results)
    for name, value in weights.items():
        torch.testing.assert_close(weights_again[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.modes("local")
def test_settings_that_the_module_makes_useless_are_refused_before_any_job(spark, points, tmp_path):
    spec = spark_dl.ModelSpec.from_lightning(define())
    with pytest.raises(ValueError, match=r"train\.optimizer: has no effect with spec\.optimizer"):
        spark_dl.train(points, spec, small_config(1, train={"lr": 0.01, "optimizer": "Adam"}), run_dir=str(tmp_path))
