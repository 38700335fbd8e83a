"""PipeDream: an asynchronous pipeline without a bubble (Narayanan et al. 2019, SOSP; Harlap et al. 2018,
arXiv:1806.03377).

Each stage alternates a forward pass of one mini-batch with the backward pass of an earlier one (1F1B), and applies its
gradients at once. With p stages, stage s computes mini-batch t with weights that lack the last p - 1 - s updates, and
computes its backward pass with the same weights, which it has kept (weight stashing). With vertical sync, all stages
compute a mini-batch with weights that lack the last p - 1 updates. The weights are those of SGD with delayed gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spark_dl.parallel.loss import Count
from spark_dl.parallel.mesh.layers import Layer
from spark_dl.parallel.mesh.pipeline import check_pipeline
from spark_dl.parallel.mesh.stage import Boundary, enter
from spark_dl.parallel.mesh.trial import RankStages, meta_like
from spark_dl.spec import Batch, ModelSpec, Output

if TYPE_CHECKING:
    from spark_dl.config import Config

_ACTIVATION_TAG, _GRADIENT_TAG = 21, 22
Version = list[dict[str, Tensor]]
"""Weights of the stage after some update: of each layer, by their names in the layer."""


@dataclass
class _MiniBatch:
    """A mini-batch whose forward pass this stage has computed, and its backward pass not yet."""

    version: int
    """Number of updates in the weights that it is computed with."""
    received: list[tuple[Tensor, ...]] = field(default_factory=list)
    """What the stage received, of each micro-batch."""
    computed: list[tuple[Tensor, ...]] = field(default_factory=list)
    """What it has passed on, or the loss, of each micro-batch."""
    sends: list[Any] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    """Learning rate and other settings of its step, of each parameter group."""


class PipeDream:
    """One rank, which is one stage, of an asynchronous pipeline.

    The arguments are those of `Pipeline`; the stages are as many as the ranks of `group`.

    One step of training is `forward_backward`, then the exchange of `.grad` with ranks that have the same stage, if
    there are any, then `step`. The gradients are those of an earlier mini-batch. In the first steps there are none, and
    `step` does nothing. `settle` computes what is left, so that all mini-batches are in the weights. It must be called
    before an evaluation and a checkpoint, whose state is that of the model and the optimizer alone.

    Args:
        vertical_sync: whether all stages compute a mini-batch with the weights after the same updates.
    """

    def __init__(
        self, spec: ModelSpec, model: nn.Module, chain: Sequence[Layer], cut: Sequence[int], config: Config, *,
        group: dist.ProcessGroup, device: torch.device, vertical_sync: bool = False,
    ):  # fmt: skip
        num_ranks = dist.get_world_size(group)
        check_pipeline(spec, num_ranks)
        assert len(cut) == num_ranks
        if dist.get_backend(group) != "gloo":
            raise ValueError(
                f"parallel.schedule: 'pipedream' needs the backend gloo, found {dist.get_backend(group)!r}, where "
                "messages in both directions wait for each other; use '1f1b', or launch.device cpu"
            )
        self._stages = RankStages(
            spec, model, chain, cut, config, group=group, device=device, rank_of=lambda stage: stage
        )
        if self._stages.tied:
            raise ValueError(
                f"parallel.schedule: 'pipedream' does not support parameters that several stages share, found "
                f"{' and '.join(self._stages.tied[0].names)}: their copies get different updates; use '1f1b'"
            )
        self._rank, self._stage = self._stages.rank, self._stages.stages[self._stages.rank]
        self._delay = num_ranks - 1 - self._rank
        self._version_delay = num_ranks - 1 if vertical_sync else self._delay
        self._flight: deque[_MiniBatch] = deque()
        self._due: _MiniBatch | None = None
        """The mini-batch whose gradients are in `.grad`."""
        self._started = self._updates = self._settled = 0
        self._versions: dict[int, Version] = {}
        self._grad_sends: deque[list[Any]] = deque()
        self._activations: _Inbox | None = None
        self._gradients: _Inbox | None = None
        self.most_versions = 0
        """Maximum number of versions of the weights that this rank has had at a time."""

    @property
    def module(self) -> nn.Module:
        """The model with only the layers of this rank. Parameters, buffers and state have their names in the model."""
        return self._stages.module

    @property
    def has_gradients(self) -> bool:
        """Whether `.grad` has the gradients of a mini-batch, which `step` applies."""
        return self._due is not None

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, and so the output and the loss."""
        return self._stage.is_last

    def forward_backward(self, micro_batches: Sequence[Batch], count: Count) -> Tensor:
        """Computes the forward pass of this mini-batch, and the backward pass of the one that is due.

        All ranks of the pipeline have the same micro-batches, on the CPU. count: as of `Trainable`.
        Sets `.grad` to the gradients of the due mini-batch: of the sum of its losses, divided by its `count`.
        Returns the sum of losses of this mini-batch, a float32 scalar, on the last stage, and 0 on the others.
        Raises ValueError if the shapes of micro-batches differ, in a step or between steps.
        """
        assert self._due is None
        batches = self._stages.take(micro_batches)
        self._open_inboxes()
        mini_batch = _MiniBatch(max(self._settled, self._started - self._version_delay))
        weights = self._weights(mini_batch.version)
        total = torch.zeros((), device=self._stages.device)
        for batch in batches:
            total += self._forward(mini_batch, batch, count, weights)
        self._flight.append(mini_batch)
        self._started += 1
        if len(self._flight) > self._delay:
            self._backward()
        return total

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Applies the gradients, with the settings that the optimizer had in the `step` of their mini-batch."""
        settings = [{k: _copied(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        (self._flight[-1] if self._flight else self._due_one()).settings = settings
        if self._due is not None:
            self._apply(optimizer)
        else:
            # NOTE: schedulers of torch warn if they are called before the optimizer, and look at this attribute.
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def settle(self, optimizer: torch.optim.Optimizer, reduce: Callable[[], None] = lambda: None) -> None:
        """Computes the backward passes that are left, and applies their gradients. Collective over the pipeline.

        Args:
            reduce: called after each backward pass, for the exchange of `.grad` with ranks that have the same stage.
        """
        while self._flight:
            self._backward()
            reduce()
            self._apply(optimizer)
            optimizer.zero_grad()
        while self._grad_sends:
            _wait(self._grad_sends.popleft())
        self._close_inboxes()
        assert self._updates == self._started
        self._settled = self._updates
        self._versions.clear()

    def forward(self, batch: Batch) -> Output | None:
        """Computes the model's output for a batch with any number of rows. Collective over the pipeline.

        Returns it on the rank of the last stage, and None on the others. For evaluations, after `settle`.
        """
        assert not self._flight, "call settle first"
        return self._stages.forward(batch)

    def _open_inboxes(self) -> None:
        boundaries = self._stages.boundaries
        if not self._stage.is_first and self._activations is None:
            boundary = boundaries[self._rank - 1]
            self._activations = _Inbox(self._stages, boundary, self._rank - 1, _ACTIVATION_TAG)
            self._activations.expect(1)
        if not self._stage.is_last and self._gradients is None:
            boundary = boundaries[self._rank]
            self._gradients = _Inbox(self._stages, boundary, self._rank + 1, _GRADIENT_TAG, gradients=True)

    def _close_inboxes(self) -> None:
        """Sends the next stage what it has posted a receive for: a message without meaning.

        NOTE: costs the transfer of one activation. A receive that stays posted would take the first message of another
        object that uses the group, and gloo cannot cancel it.
        """
        sends: list[Any] = []
        if self._gradients is not None:
            unused = list(meta_like(self._stages.boundaries[self._rank], self._stages.device))
            sends = self._send(unused, self._rank + 1, _ACTIVATION_TAG)
        if self._activations is not None:
            self._activations.take()
        _wait(sends)
        self._activations = self._gradients = None

    def _forward(self, mini_batch: _MiniBatch, batch: Batch, count: Count, weights: Version) -> Tensor:
        value: Any = None
        if self._activations is not None:
            self._activations.expect(1)  # one more than this: of the next step, or of settle
            leaves = self._activations.take()
            mini_batch.received.append(leaves)
            value = self._activations.boundary.wrap([enter(leaf) for leaf in leaves])
        if self._stage.is_last:
            losses = self._stage.loss_sum(batch, value, weights)
            mini_batch.computed.append((losses / count,))
            return losses.detach()
        tensors = self._stages.boundaries[self._rank].unwrap(self._stage.activation(batch, value, weights))
        mini_batch.computed.append(tensors)
        mini_batch.sends += self._send(tensors, self._rank + 1, _ACTIVATION_TAG)
        assert self._gradients is not None
        self._gradients.expect(1)
        return torch.zeros((), device=self._stages.device)

    def _backward(self) -> None:
        mini_batch = self._due = self._flight.popleft()
        for i, outputs in enumerate(mini_batch.computed):
            gradients: Sequence[Tensor | None] = [None] if self._gradients is None else self._gradients.take()
            if differentiable := [output for output in outputs if output.requires_grad]:
                torch.autograd.backward(differentiable, gradients)
            if self._activations is not None:
                leaves = [leaf for leaf in mini_batch.received[i] if leaf.requires_grad]
                sent = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
                self._grad_sends.append(self._send(sent, self._rank - 1, _GRADIENT_TAG))
        _wait(mini_batch.sends)  # they have arrived, as their gradients have
        while len(self._grad_sends) > 4 * len(mini_batch.computed):  # of earlier steps, which the receiver is past
            _wait(self._grad_sends.popleft())
        for parameter, leaf in self._pairs(mini_batch.version):
            parameter.grad, leaf.grad = leaf.grad, None
        mini_batch.received, mini_batch.computed = [], []

    def _send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> list[Any]:
        group = self._stages.group
        return [(t, dist.isend(t.detach().contiguous(), group=group, group_dst=rank, tag=tag)) for t in tensors]

    def _apply(self, optimizer: torch.optim.Optimizer) -> None:
        mini_batch = self._due_one()
        self._due = None
        self._drop_versions()
        if self._updates in self._versions:  # still needed: the step must not change it
            for parameter, _ in self._pairs(self._updates):
                parameter.data = parameter.data.clone()
        current = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for group, settings in zip(optimizer.param_groups, mini_batch.settings, strict=True):
            group.update(settings)
        try:
            optimizer.step()
        finally:
            for group, settings in zip(optimizer.param_groups, current, strict=True):
                group.update(settings)
        self._updates += 1
        if self._version_delay > self._delay:  # a later mini-batch will need it
            self._weights(self._updates)

    def _due_one(self) -> _MiniBatch:
        assert self._due is not None, "call forward_backward first"
        return self._due

    def _weights(self, version: int) -> Version:
        """Returns the weights after a number of updates, as leaves of autograd: the current ones, or kept ones.

        The current ones share the storage of the parameters. `.data` has a version counter of its own, so that the
        optimizer's change of the parameters, which then have another storage, is not seen as a change of these.
        """
        if version not in self._versions:
            assert version == self._updates
            made: dict[int, Tensor] = {}  # layers of a stage can share a parameter
            self._versions[version] = [
                {
                    name: made.setdefault(id(p), p.data.requires_grad_())
                    for name, p in layer.module.named_parameters()
                    if p.requires_grad
                }
                for layer in self._stage.layers
            ]
            self.most_versions = max(self.most_versions, len({*self._versions, self._updates}))
        return self._versions[version]

    def _pairs(self, version: int) -> list[tuple[nn.Parameter, Tensor]]:
        pairs: dict[int, tuple[nn.Parameter, Tensor]] = {}
        for layer, leaves in zip(self._stage.layers, self._versions[version], strict=True):
            named: Mapping[str, nn.Parameter] = dict(layer.module.named_parameters())
            pairs |= {id(named[name]): (named[name], leaf) for name, leaf in leaves.items()}
        return list(pairs.values())

    def _drop_versions(self) -> None:
        """Forgets the versions that no mini-batch needs."""
        needed = {mini_batch.version for mini_batch in self._flight}
        first = max(self._settled, self._started - self._version_delay)  # of the next mini-batch
        for version in [v for v in self._versions if v < first and v not in needed]:
            del self._versions[version]


class _Inbox:
    """Receives tensors from a neighbour. One receive is posted ahead, so that tensors arrive while others are computed.

    expected: number of messages that will surely come. Nothing is posted for others, as the neighbour may leave.
    """

    def __init__(self, stages: RankStages, boundary: Boundary, rank: int, tag: int, *, gradients: bool = False):
        self.boundary = boundary
        self._stages, self._rank, self._tag, self._gradients = stages, rank, tag, gradients
        self._expected = 0
        self._posted: list[tuple[Tensor, Any]] | None = None

    def expect(self, messages: int) -> None:
        self._expected += messages
        self._post()

    def _post(self) -> None:
        if self._posted is not None or not self._expected:
            return
        self._posted = []
        for expected, tensor in zip(self.boundary.tensors, meta_like(self.boundary, self._stages.device), strict=True):
            if expected.requires_grad or not self._gradients:
                work = dist.irecv(tensor, group=self._stages.group, group_src=self._rank, tag=self._tag)
                self._posted.append((tensor, work))

    def take(self) -> tuple[Tensor, ...]:
        """Waits for the next tensors. Activations that have gradients are leaves that require them."""
        assert self._posted is not None
        posted, self._posted = self._posted, None
        _wait(posted)
        self._expected -= 1
        self._post()
        tensors = [tensor for tensor, _ in posted]
        if self._gradients:
            return tuple(tensors)
        return tuple(t.requires_grad_(e.requires_grad) for t, e in zip(tensors, self.boundary.tensors, strict=True))


def _wait(messages: Sequence[tuple[Tensor, Any]]) -> None:
    for _, work in messages:
        work.wait()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
