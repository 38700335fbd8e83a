"""The weights of a model as one vector, cut into a block for each server."""

from __future__ import annotations

import bisect
import itertools

import torch
import torch.distributed as dist
from torch import Tensor

from spark_dl.spec import ModelSpec


class FlatModel:
    """A model whose trainable parameters and their gradients are views of two flat float32 vectors on its device.

    A server's block is a range of elements, and may cut through parameters. A parameter that a mini-batch does not use
    has gradient 0. Raises ValueError for a model without trainable parameters, or with fewer elements than servers, and
    for parameters that are not float32.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, num_servers: int):
        self.model = spec.build_to_train().to(device)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError("spec.build: no parameter of the model requires a gradient; there is nothing to train")
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.dtype != torch.float32:
                raise ValueError(
                    f"spec.build: parameter servers hold float32, found the parameter {name} of {parameter.dtype}"
                )
        self.weights = torch.cat([p.detach().reshape(-1) for p in parameters])  # (elements,)
        self.gradients = torch.zeros_like(self.weights)  # (elements,)
        self._names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self._ends = list(itertools.accumulate(p.numel() for p in parameters))
        for parameter, end in zip(parameters, self._ends, strict=True):
            part = slice(end - parameter.numel(), end)
            parameter.data = self.weights[part].view_as(parameter)
            parameter.grad = self.gradients[part].view_as(parameter)
        size = len(self.weights)
        if size < num_servers:
            raise ValueError(f"parallel.num_servers: expected at most {size}, the model's weights, found {num_servers}")
        self.blocks = [slice(s * size // num_servers, (s + 1) * size // num_servers) for s in range(num_servers)]
        """Range of elements of each server."""

    def name_of(self, element: int) -> str:
        """Returns the name of the parameter that contains an element of the weights."""
        return self._names[bisect.bisect_right(self._ends, element)]

    def broadcast_from_rank0(self) -> None:
        """Copies rank 0's model to every rank, as `spec.build` may use a generator that is not seeded. Collective."""
        frozen = (p.detach() for p in self.model.parameters() if not p.requires_grad)
        for tensor in (self.weights, *frozen, *self.model.buffers()):
            _broadcast(tensor, 0)

    def bring_together(self, first_server: int) -> None:
        """Copies each server's block, and rank 0's buffers, such as BatchNorm's, to every rank. Collective."""
        for server, block in enumerate(self.blocks):
            _broadcast(self.weights[block], first_server + server)
        for buffer in self.model.buffers():
            _broadcast(buffer, 0)


def _broadcast(tensor: Tensor, rank: int) -> None:
    dist.broadcast(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor, rank)
