"""The average of the weights (`train.ema_decay`, `train.swa_start`), which is validated and saved beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from spark_dl.parallel.modules import plain_name


class WeightAverage:
    """The average of a model's parameters after each step: `decay * average + (1 - decay) * weights`.

    It begins with the weights that the run begins with. As these are random, the first steps have a lower decay,
    `(1 + step) / (10 + step)`, as in `tf.train.ExponentialMovingAverage`. Without a decay, it is the mean of the
    weights after each step from `start` on, and the weights before. Not collective: the weights are the same on all
    ranks, and so is the average. Buffers, such as the statistics of BatchNorm, are not averaged.
    """

    def __init__(self, module: nn.Module, decay: float | None, *, start: int = 0):
        self._module, self._decay, self._start = module, decay, start
        self._parameters = list(module.parameters())
        self._average = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes the weights of a step into the average. step: number of steps before it."""
        if self._decay is None:
            decay = 1 - 1 / (step - self._start + 1) if step >= self._start else 0.0
        else:
            decay = min(self._decay, (1 + step) / (10 + step))
        for average, parameter in zip(self._average, self._parameters, strict=True):
            if parameter.is_floating_point():
                average.lerp_(parameter, 1 - decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the average of its weights in this block. Takes the memory of one more copy."""
        kept = [parameter.detach().clone() for parameter in self._parameters]
        try:
            self._write(self._average)
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the average by the names of the parameters. Tied parameters have several names."""
        places = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        named = self._module.named_parameters(remove_duplicate=False)
        return {plain_name(name): self._average[places[id(parameter)]] for name, parameter in named}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor] | None) -> None:
        """Restores the average. None, of a run without one: it begins with the weights of now."""
        named = {plain_name(name): parameter for name, parameter in self._module.named_parameters()}
        for average, (name, parameter) in zip(self._average, named.items(), strict=True):
            average.copy_(parameter if state is None or name not in state else state[name])
