"""The average of the weights (`train.ema_decay`, `train.swa_start`), which is validated and saved beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from spark_dl.optimization import HALF
from spark_dl.parallel.modules import plain_name


class WeightAverage:
    """The average of parameters after each step: `decay * average + (1 - decay) * weights`.

    It begins with the weights that the run begins with. As these are random, the first steps have a lower decay,
    `(1 + step) / (10 + step)`, as in `tf.train.ExponentialMovingAverage`. Without a decay, it is the mean of the
    weights after each step from `start` on, and the weights before. Not collective: a rank averages what it has, the
    same weights as all ranks, or in a mesh its parts. Buffers, such as the statistics of BatchNorm, are not averaged.

    Args:
        parameters: the parameters of the model; in a mesh what this rank has of those of the optimizer.
        decay: per step; None for the mean.
        start: the step from which on the mean is taken.
        share: makes the model have parameters that were written, if it has not already. Collective.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        decay: float | None,
        *,
        start: int = 0,
        share: Callable[[], None] = lambda: None,
    ):
        self._decay, self._start, self._share = decay, start, share
        self._parameters = list(parameters)
        self.values = [_copy_of(p) for p in self._parameters]
        """The average of each parameter, in their order. Averages of weights in half precision are in float32."""

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes the weights of a step into the average. step: number of steps before it."""
        if self._decay is None:
            decay = 1 - 1 / (step - self._start + 1) if step >= self._start else 0.0
        else:
            decay = min(self._decay, (1 + step) / (10 + step))
        for average, parameter in zip(self.values, self._parameters, strict=True):
            if parameter.is_floating_point():
                average.lerp_(parameter.to(average.dtype), 1 - decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the average of its weights in this block. Takes the memory of one more copy. Collective."""
        kept = [parameter.detach().clone() for parameter in self._parameters]
        try:
            self._write(self.values)
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)
        self._share()

    def state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns the average by the names of a module's parameters. Tied parameters have several names."""
        named, of = module.named_parameters(remove_duplicate=False), self._by_parameter()
        return {plain_name(name): of[id(parameter)] for name, parameter in named}

    @torch.no_grad()
    def load_state_dict(self, module: nn.Module, state: Mapping[str, Tensor] | None) -> None:
        """Restores the average. None, of a run without one: it begins with the weights of now."""
        of = self._by_parameter()
        for name, parameter in module.named_parameters():
            of[id(parameter)].copy_((state or {}).get(plain_name(name), parameter))

    def _by_parameter(self) -> dict[int, Tensor]:
        return {id(parameter): value for parameter, value in zip(self._parameters, self.values, strict=True)}


def _copy_of(parameter: Tensor) -> Tensor:
    copy = parameter.detach().clone(memory_format=torch.contiguous_format)
    return copy.float() if copy.dtype in HALF else copy
