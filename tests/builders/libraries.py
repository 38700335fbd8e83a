"""Training functions that use Lightning, transformers and Accelerate as anyone would, for ranks of `launch`.

Each returns a dict with what the library took this rank for, the true rows that it has seen, and its weights.
"""

import os

import torch
from torch import nn

import spark_dl
from tests.builders.models import build_mlp

BATCH, EPOCHS, LR = 12, 2, 0.1
NUM_STREAMS = 12
"""A multiple of 1, 2 and 3 ranks, so that their global batches of 36 rows have the same rows."""
GLOBAL_BATCH = 36


def open_rows(url):
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    return spark_dl.open_dataset(
        url,
        spark_dl.Data(features=("features",), label="label"),
        batch_size=GLOBAL_BATCH // num_ranks,
        loader=spark_dl.Loader(num_streams=NUM_STREAMS),
    )


def mean_over_rows(losses, batch, rows):
    """This rank's part of the mean over the true rows of the global batch: DDP divides the sum by the ranks."""
    return (losses * batch["weight"]).sum() * int(os.environ.get("WORLD_SIZE", 1)) / rows.batch_rows


def weights_of(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def train_alone(url):
    """The same training in one process, without a library: what the ranks together must come to."""
    torch.manual_seed(0)
    model = build_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    rows = open_rows(url)
    for epoch in range(EPOCHS):
        rows.set_epoch(epoch)
        for batch in rows:
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(batch["features"]), batch["label"], reduction="none")
            mean_over_rows(losses, batch, rows).backward()
            optimizer.step()
    return weights_of(model)


def train_with_lightning(url, devices=None):
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self, rows):
            super().__init__()
            self.net, self.rows, self.seen = build_mlp(), rows, 0

        def training_step(self, batch, batch_idx):
            self.seen += int(batch["weight"].sum())
            losses = nn.functional.cross_entropy(self.net(batch["features"]), batch["label"], reduction="none")
            loss = mean_over_rows(losses, batch, self.rows)
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=LR)

    torch.manual_seed(0)
    rows = open_rows(url)
    module = Classifier(rows)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=devices or int(os.environ["WORLD_SIZE"]), max_epochs=EPOCHS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, rows)
    return {
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "rows": module.seen,
        "weights": weights_of(module),
    }


class BertOnRows(nn.Module):
    """A BERT from a config, without pretrained weights, for labels of rows."""

    def __init__(self, rows):
        from transformers import BertConfig, BertForSequenceClassification

        super().__init__()
        config = BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=8, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.bert = BertForSequenceClassification(config)
        self.rows, self.seen = rows, 0

    def forward(self, features, label, weight):
        self.seen += int(weight.sum())
        tokens = (features * 10).long().clamp(0, 49)
        output = self.bert(input_ids=tokens)
        losses = nn.functional.cross_entropy(output.logits, label, reduction="none")
        output["loss"] = mean_over_rows(losses, {"weight": weight}, self.rows)
        return output


def train_with_transformers(url, folder, overrides_loader=True):
    from transformers import Trainer, TrainingArguments

    class RowsTrainer(Trainer):
        def get_train_dataloader(self):
            return rows if overrides_loader else super().get_train_dataloader()

    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=folder, num_train_epochs=EPOCHS, learning_rate=LR, optim="sgd", lr_scheduler_type="constant",
        max_grad_norm=0, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    rows = open_rows(url)
    trainer = RowsTrainer(model=BertOnRows(rows), args=arguments, train_dataset=rows)
    trainer.train()
    return {
        "rank": arguments.process_index,
        "world_size": arguments.world_size,
        "rows": trainer.model.seen,
        "steps": trainer.state.global_step,
        "weights": weights_of(trainer.model),
    }


def train_with_accelerate(url):
    from accelerate import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = build_mlp()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
    rows, seen = open_rows(url), 0
    for epoch in range(EPOCHS):
        rows.set_epoch(epoch)
        for batch in rows:
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(batch["features"]), batch["label"], reduction="none")
            accelerator.backward(mean_over_rows(losses, batch, rows))
            optimizer.step()
            seen += int(batch["weight"].sum())
    return {
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "rows": seen,
        "weights": weights_of(model),
    }
