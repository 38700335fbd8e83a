"""Models that are cut into stages, and the steps that they are trained on."""

import contextlib
import dataclasses
import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spark_dl import ModelSpec
from spark_dl.parallel.loss import autocast
from spark_dl.parallel.trainable import add_gradients
from tests.builders.models import blobs
from tests.builders.settings import make_config

CPU = torch.device("cpu")


def data_ranks(group):
    """Of four ranks: the pipeline of two ranks that this one is in, the group of its stage, and its data rank."""
    rank = dist.get_rank(group)
    pipelines, stages = ([dist.new_group(ranks) for ranks in of_all] for of_all in ([[0, 2], [1, 3]], [[0, 1], [2, 3]]))
    return pipelines[rank % 2], stages[rank // 2], rank % 2


def part_of(micro_batches, data_rank):
    """Every second row of each micro-batch."""
    return [{name: values[data_rank::2] for name, values in batch.items()} for batch in micro_batches]


def sum_gradients(module, group):
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad, group=group)


@contextlib.contextmanager
def joined():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def build_normed():
    """Eight layers: BatchNorm, a layer that works in place, and one whose output is a view."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Unflatten(1, (4, 4)),
        Transposed(), nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3),
    )  # fmt: skip


class Transposed(nn.Module):
    """Its output, and the gradient of its input, are not contiguous."""

    def forward(self, value):
        return value.transpose(1, 2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model that is trained, as one process and as a pipeline."""

    spec: ModelSpec = dataclasses.field(default_factory=lambda: ModelSpec(build=build_normed))
    layers: tuple[str, ...] | None = None
    micro_batches: int = 4
    rows: int = 245
    global_batch_size: int = 48
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def config(self):
        return make_config(**{"features": ("features",), "label": "label", "accumulation_steps": self.micro_batches,
                              "global_batch_size": self.global_batch_size, "num_streams": 8, **self.more})  # fmt: skip

    def steps(self):
        """(micro-batches, true rows) of each step. The last batch is short: rows of weight 0 fill it."""
        columns = {name: torch.from_numpy(values) for name, values in blobs(self.rows).items()}
        for start in range(0, self.rows, self.global_batch_size):
            true_rows = min(self.global_batch_size, self.rows - start)
            index = torch.arange(start, start + self.global_batch_size).clamp(max=self.rows - 1)
            batch = {name: values[index] for name, values in columns.items()}
            batch["weight"] = (torch.arange(self.global_batch_size) < true_rows).float()
            parts = [dict(zip(batch, of_each, strict=True)) for of_each in zip(
                *(values.chunk(self.micro_batches) for values in batch.values()), strict=True
            )]  # fmt: skip
            yield parts, true_rows

    def train_alone(self):
        """The losses of each step, the state, and the output for a batch of another size, of one process."""
        model = self.spec.build_to_train()
        optimizer = self.optimizer(model.parameters())
        losses = []
        for micro_batches, rows in self.steps():
            losses.append(float(add_gradients(
                self.spec, model, micro_batches, self.config, device=CPU, scale=lambda loss, rows=rows: loss / rows,
            )))  # fmt: skip
            optimizer.step()
            optimizer.zero_grad()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

        def forward(batch):
            with autocast(batch, self.config):
                return self.spec.output(model, batch, self.config.data.features)

        return losses, state, self.output(model, forward)

    def output(self, model, forward):
        """What `forward` returns for a batch with fewer rows, in evaluation mode."""
        [micro_batch, *_], _ = next(self.steps())
        model.eval()
        with torch.inference_mode():
            return forward({name: values[:7] for name, values in micro_batch.items()})
