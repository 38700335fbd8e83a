"""LightningModules that tests train, with spark_dl and with Lightning's own Trainer."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy


class Classifier(pl.LightningModule):
    """As in Lightning's documentation."""

    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        self.accuracy(scores, y)
        self.log("val_loss", F.cross_entropy(scores, y))
        self.log_dict({"val_acc": self.accuracy, "val_largest": scores.max()}, reduce_fx="max")
        self.log("val_share", (scores.argmax(1) == y).float().mean(), on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


class ByEpoch(Classifier):
    """With a scheduler by epochs, in a tuple of lists."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class ByStep(Classifier):
    """With Adam and a warm-up that becomes a decay, every third step."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        schedulers = [
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6),
        ]
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[2])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 3}}


class OnPlateau(Classifier):
    """With a scheduler that reads a value that `validation_step` logs."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


class WithState(ByStep):
    """With BatchNorm, dropout, and a weight of the loss that grows with the epochs and the steps."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        factor = 1 + self.current_epoch + self.global_step / 10 + batch_idx / 100
        return {"loss": super().training_step(batch, batch_idx) * factor}


class SeesPosition(Classifier):
    """Its loss is about the numbers that it sees."""

    def training_step(self, batch, batch_idx):
        _, y = batch
        seen = self.current_epoch * 100 + self.global_step * 10 + batch_idx
        return sum(0 * p.sum() for p in self.parameters()) + seen + 0 * y.sum()
