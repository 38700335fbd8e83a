"""Which LightningModules are taken, and what their steps see. (That they train exactly: tests/ranks.)"""

import copy

import cloudpickle
import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from torch import nn
from torch.optim import lr_scheduler

from spark_dl import Config, Data, ModelSpec
from spark_dl.parallel.loss import noting_counts, weighted_loss_sum
from spark_dl.spec import Position
from tests.builders.lightning_modules import Classifier

BATCH = {"features": torch.randn(6, 4), "label": torch.arange(6) % 3, "weight": torch.ones(6)}
CONFIG = Config(data=Data(features=("features",)))


def loss_of(build, **options):
    spec = ModelSpec.from_lightning(build, **options)
    return weighted_loss_sum(spec, spec.build_to_train(), BATCH, CONFIG)[1]


def test_a_class_a_function_and_a_module_are_built():
    module = Classifier(lr=0.3)
    for given in (Classifier, lambda: Classifier(0.3), module):
        model = ModelSpec.from_lightning(given).build_to_train()
        assert isinstance(model, Classifier)
        assert model is not module
    copies = [ModelSpec.from_lightning(module).build() for _ in range(2)]
    assert copies[0] is not copies[1]
    torch.testing.assert_close(copies[0].state_dict(), module.state_dict())
    assert copies[0].hparams.lr == 0.3


def test_the_check_leaves_the_generators_and_the_module_as_they_were():
    module = Classifier()
    weights, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    ModelSpec.from_lightning(Classifier)
    ModelSpec.from_lightning(module)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(module.state_dict(), weights)
    assert module._trainer is None


def test_a_module_by_the_other_name_of_the_package_is_taken():
    class Own(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def training_step(self, batch):
            self.log("loss", 1.0)
            return nn.functional.cross_entropy(self.linear(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    spec = cloudpickle.loads(cloudpickle.dumps(ModelSpec.from_lightning(Own)))
    model = spec.build_to_train()
    with torch.no_grad():
        model.linear.weight.zero_()
        model.linear.bias.zero_()
    assert weighted_loss_sum(spec, model, BATCH, CONFIG)[1].item() == pytest.approx(6 * torch.tensor(3.0).log().item())


def test_what_is_no_lightning_module_is_an_error():
    for given in (nn.Identity, lambda: None):
        with pytest.raises(ValueError, match="expected a LightningModule of lightning or pytorch_lightning, found"):
            ModelSpec.from_lightning(given)
    with pytest.raises(ValueError, match="or a function or class that builds it, found 3"):
        ModelSpec.from_lightning(3)


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class WithoutOptimizer(pl.LightningModule):
    def training_step(self, batch):
        return None


class WithoutStep(pl.LightningModule):
    def configure_optimizers(self):
        return None


class ByIterator(Classifier):
    def training_step(self, dataloader_iter):
        return None


class AsksForSteps(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.estimated_stepping_batches)


@pytest.mark.parametrize(("build", "error", "fact"), [
    (Manual, ValueError, "Manual sets automatic_optimization=False.*spark_dl.launch"),
    (WithoutOptimizer, ValueError, "WithoutOptimizer needs configure_optimizers"),
    (WithoutStep, ValueError, "WithoutStep needs training_step"),
    (ByIterator, ValueError, "takes dataloader_iter"),
    (AsksForSteps, AttributeError, "estimated_stepping_batches: spark_dl trains without.*when it is built"),
])  # fmt: skip
def test_a_module_that_cannot_be_trained_is_an_error_that_says_why(build, error, fact):
    with pytest.raises(error, match=fact):
        ModelSpec.from_lightning(build)


class OfLightning1(Classifier):
    def validation_epoch_end(self, outputs):
        self.log("accuracy", 1.0)


def test_hooks_that_lightning_has_removed_are_an_error_as_in_its_trainer():
    with pytest.raises(ValueError, match=r"OfLightning1 overrides validation_epoch_end, which spark_dl does not call"):
        ModelSpec.from_lightning(OfLightning1)
    assert ModelSpec.from_lightning(OfLightning1, ignore_hooks=["validation_epoch_end"]).build is OfLightning1


class WithHooks(Classifier):
    def on_train_epoch_end(self):
        pass

    def on_before_optimizer_step(self, optimizer):
        pass

    def configure_callbacks(self):
        return []

    def test_step(self, batch, batch_idx):
        pass

    def on_test_epoch_end(self):
        pass


def test_overridden_hooks_that_are_not_called_are_named_and_can_be_left_out():
    hooks = ["on_before_optimizer_step", "on_train_epoch_end", "configure_callbacks"]
    with pytest.raises(ValueError, match=rf"WithHooks overrides {', '.join(hooks)}, which.*ignore_hooks=\['on_before"):
        ModelSpec.from_lightning(WithHooks)
    with pytest.raises(ValueError, match="WithHooks overrides configure_callbacks, which"):
        ModelSpec.from_lightning(WithHooks, ignore_hooks=hooks[:2])
    assert ModelSpec.from_lightning(WithHooks, ignore_hooks=hooks).build is WithHooks
    with pytest.raises(ValueError, match="no method 'on_train_epoch_ends'.*on_train_epoch_end"):
        ModelSpec.from_lightning(WithHooks, ignore_hooks=["on_train_epoch_ends"])


def returning(make):
    class Own(Classifier):
        def configure_optimizers(self):
            return make(torch.optim.SGD(self.parameters(), lr=0.1))

    return Own


def step_lr(optimizer):
    return lr_scheduler.StepLR(optimizer, 1)


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize(("make", "expected"), [
    (lambda o: o, (None, "epoch", 1, None)),
    (lambda o: [o], (None, "epoch", 1, None)),
    (lambda o: (o,), (None, "epoch", 1, None)),
    (lambda o: ([o], [step_lr(o)]), ("StepLR", "epoch", 1, None)),
    (lambda o: ([o], [{"scheduler": step_lr(o), "interval": "step", "name": "lr"}]), ("StepLR", "step", 1, None)),
    (lambda o: {"optimizer": o, "lr_scheduler": step_lr(o)}, ("StepLR", "epoch", 1, None)),
    (lambda o: [{"optimizer": o, "lr_scheduler": {"scheduler": step_lr(o), "frequency": 3}}],
     ("StepLR", "epoch", 3, None)),
    (lambda o: {"optimizer": o, "lr_scheduler": plateau(o), "monitor": "val_loss"},
     ("ReduceLROnPlateau", "epoch", 1, "val_loss")),
    (lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": plateau(o), "monitor": "val_acc", "strict": True}},
     ("ReduceLROnPlateau", "epoch", 1, "val_acc")),
])  # fmt: skip
def test_every_form_of_configure_optimizers_is_read(make, expected):
    spec = ModelSpec.from_lightning(returning(make))
    found = spec.optimizer(spec.build())
    name = None if found.scheduler is None else type(found.scheduler).__name__
    assert (name, found.interval, found.frequency, found.monitor) == expected
    assert isinstance(found.optimizer, torch.optim.SGD)


@pytest.mark.parametrize(("make", "fact"), [
    (lambda o: None, "expected one optimizer, found None"),
    (lambda o: [o, o], "expected one optimizer, found 2"),
    (lambda o: ([o, o], []), "expected one optimizer, found 2"),
    (lambda o: ([o], [step_lr(o), step_lr(o)]), "expected at most one scheduler, found 2"),
    (lambda o: {"optimizer": o, "lr_schedulers": step_lr(o)}, r"expected keys out of .*found \['lr_schedulers'\]"),
    (lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": step_lr(o), "every": 2}}, r"found \['every'\]"),
    (lambda o: {"optimizer": o, "lr_scheduler": plateau(o)}, "needs `monitor`"),
    (lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": plateau(o), "monitor": "a", "strict": False}},
     "strict=False"),
    (lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": step_lr(o), "reduce_on_plateau": True}},
     "only supported with ReduceLROnPlateau"),
    (lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": step_lr(o), "interval": "batch"}}, "found 'batch'"),
    (lambda o: torch.optim.SGD(nn.Linear(1, 1).parameters()), "parameters that are not parameters of the model"),
])  # fmt: skip
def test_an_optimization_that_is_not_supported_is_an_error_on_the_driver(make, fact):
    with pytest.raises(ValueError, match=fact):
        ModelSpec.from_lightning(returning(make))


class PredictsLabels(Classifier):
    def predict_step(self, batch):
        return {"label": self(batch[0]).argmax(1)}


def test_predictions_are_those_of_forward_or_of_predict_step():
    features = {"features": BATCH["features"]}
    for build, names in ((Classifier, ["prediction"]), (PredictsLabels, ["label"])):
        spec = ModelSpec.from_lightning(build)
        model = spec.build().eval()
        found = spec.predictions(spec.output(model, features, ("features",)))
        assert list(found) == names
        assert len(found[names[0]]) == 6


def test_the_batch_can_have_another_form():
    class Named(Classifier):
        def training_step(self, batch):
            return self.model(batch["points"]["xyz"]).square().mean()

    assert loss_of(Named, batch=lambda columns: {"points": {"xyz": columns["features"]}}) > 0


class Logs(Classifier):
    def training_step(self, batch, batch_idx):
        self.accuracy(self(batch[0]), batch[1])
        self.log("acc", self.accuracy, on_step=True)
        return torch.tensor(float(self.current_epoch * 100 + self.global_step * 10 + batch_idx))


def test_steps_see_the_position_and_what_they_log_does_not_grow():
    spec = ModelSpec.from_lightning(Logs)
    model = spec.build_to_train()
    assert weighted_loss_sum(spec, model, BATCH, CONFIG)[1] == 0
    spec.set_position(model, Position(epoch=2, step=1, global_step=7))
    assert weighted_loss_sum(spec, model, BATCH, CONFIG)[1] == 6 * 271
    assert model.accuracy._update_count == 0
    assert "log" not in vars(model)


class Skips(Classifier):
    def training_step(self, batch, batch_idx):
        return None


class PerRow(Classifier):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")


class AsksTheTrainer(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / self.trainer.max_epochs


@pytest.mark.parametrize(("build", "error", "fact"), [
    (Skips, ValueError, "training_step: expected the mean loss of the batch.*found NoneType; a step cannot be skipped"),
    (PerRow, ValueError, r"expected the mean loss of the rows, a tensor with one value, found shape \(6,\)"),
    (AsksTheTrainer, AttributeError, r"self\.trainer\.max_epochs: spark_dl trains without Lightning's Trainer"),
])  # fmt: skip
def test_what_a_step_must_not_do_is_an_error(build, error, fact):
    with pytest.raises(error, match=fact):
        loss_of(build)


class Counting(Classifier):
    """Its loss is a mean over the labels of class 1 and above."""

    def training_step(self, batch, batch_idx):
        losses = nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")
        return {"loss": ((losses * (batch[1] > 0)).sum(), (batch[1] > 0).sum())}

    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)


def test_a_step_may_return_the_sum_of_losses_and_what_their_mean_is_over():
    spec = ModelSpec.from_lightning(Counting)
    model = spec.build_to_train()
    losses = nn.functional.cross_entropy(model(BATCH["features"]), BATCH["label"], reduction="none").detach()
    counted = losses[BATCH["label"] > 0]
    with noting_counts() as noted:
        _, total = weighted_loss_sum(spec, model, BATCH, CONFIG)
    assert total.item() == pytest.approx(counted.sum().item())
    assert noted.total().item() == len(counted) < len(losses)
    evaluation = spec.evaluation(model)
    for rows in (slice(0, 1), slice(1, None)):
        evaluation.update({name: tensor[rows] for name, tensor in BATCH.items()})
    assert evaluation.compute()["loss"] == pytest.approx(counted.mean().item())
