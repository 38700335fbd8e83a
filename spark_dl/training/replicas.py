"""Compares, to the bit, the weights of ranks that must have the same ones, before each checkpoint and by
`train.check_replicas_every`.

Each rank sends 8 bytes per tensor. In data parallelism all ranks have the same weights; in a mesh, those that have the
same elements of a parameter. No difference is tolerated: ranks that apply the same gradients have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spark_dl.gather import gather_json, gather_tensors
from spark_dl.launch.failures.errors import OtherRankError
from spark_dl.parallel.trainable import Trainable
from spark_dl.training.finite import StepCheck, stored_elements
from spark_dl.world import World

if TYPE_CHECKING:
    from spark_dl.config import Config

_CHUNK = 1 << 18
"""Elements that are hashed at a time, so that a hash needs a few MiB."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 divided by the golden ratio, an odd number whose multiples have well mixed bits; as a signed number."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Key = tuple[str, str]
"""Name of a tensor, and what a rank has of it. Ranks with the same key must have the same elements."""


class ReplicaDriftError(RuntimeError):
    """The weights of ranks that must have the same ones differ. Another attempt starts from the last checkpoint."""


@dataclass(frozen=True)
class Drift:
    """The first tensor that differs between ranks that have the same key of it."""

    name: str
    ranks: list[int]
    """Ranks that differ from most others; all ranks that have it, if there is no majority."""
    others: list[int]
    """The majority; empty if there is none."""
    count: int
    """Number of keys whose tensors differ."""


class TrainedParameters:
    """The parameters that are trained as the model was built, which must stay those that are."""

    def __init__(self, trainable: Trainable):
        self._named = [(n, p) for module in trainable.modules for n, p in module.named_parameters()]
        self._built = [p.requires_grad for _, p in self._named]

    def check(self, global_step: int) -> None:
        """Raises ValueError if a parameter has become trainable, or is frozen, since the model was built.

        Called on every rank. What exchanges gradients, and the optimizer of `train.optimizer`, have the parameters
        that were trainable then.
        """
        now = [p.requires_grad for _, p in self._named]
        if now == self._built:
            return
        changed = [(name, is_) for (name, _), was, is_ in zip(self._named, self._built, now, strict=True) if was != is_]
        names = ", ".join(f"{name!r} ({'trainable' if is_ else 'frozen'})" for name, is_ in changed[:8])
        more = f" and {len(changed) - 8} more" if len(changed) > 8 else ""
        raise ValueError(
            f"requires_grad has changed before step {global_step}: {names}{more}. The ranks exchange the gradients of "
            "the parameters that are trainable in spec.build; leave requires_grad as it sets it, and "
            "freeze a part for some time by a learning rate of 0 for its parameter group (spec.optimizer)"
        )


class ReplicaCheck:
    """Compares the weights of ranks before each checkpoint, and every few steps if that is set."""

    def __init__(self, trainable: Trainable, world: World, config: Config, step_check: StepCheck | None):
        self._trainable, self._world, self._step_check = trainable, world, step_check
        # Servers and Spark's drivers give the ranks their weights anew in each step.
        self._compares = world.world_size > 1 and not (config.parallel.servers or config.parallel.by_spark)
        self._every = config.train.check_replicas_every
        self._known: dict[bool, list[list[Key]]] = {}
        """Keys of each rank, with and without buffers. They do not change in a run."""
        self._hosts: list[str] = []
        self._same_in: int | None = None
        """Step of the last comparison that found no difference."""

    def end_step(self, global_step: int, checkpoint: str | None) -> None:
        """Compares the parameters if that is due after this step. Collective. Raises as `check` does."""
        if self._every and global_step % self._every == 0:
            self.check(global_step, checkpoint)

    def check(self, global_step: int, checkpoint: str | None, *, with_buffers: bool = False) -> None:
        """Compares parameters, and with buffers the floating-point ones. Collective. Does nothing if
        there are no replicas.

        checkpoint: the last one. Nothing is compared after NaN or Inf, about which another error says more.
        Raises ReplicaDriftError on the ranks that differ, and OtherRankError on the others.
        """
        if not self._compares:
            return
        is_finite = self._step_check is None or not self._step_check.has_findings
        tensors = dict(self._tensors(with_buffers))
        if with_buffers not in self._known:
            about = gather_json({"keys": list(tensors), "host": self._world.host})
            self._known[with_buffers] = [[(name, of) for name, of in each["keys"]] for each in about]
            self._hosts = [each["host"] for each in about]
        device = self._world.device
        flag = torch.tensor([is_finite], dtype=torch.int64, device=device)
        own = torch.cat([flag, *(fingerprint(t).reshape(1).to(device) for t in tensors.values())])
        found = [each.tolist() for each in gather_tensors(own)]
        if not all(each[0] for each in found):
            return
        keys = self._known[with_buffers]
        drift = find_drift([dict(zip(k, each[1:], strict=True)) for k, each in zip(keys, found, strict=True)])
        if drift is None:
            self._same_in = global_step
            return
        is_own = self._world.rank in drift.ranks
        raise (ReplicaDriftError if is_own else OtherRankError)(self._explain(drift, global_step, checkpoint))

    def _tensors(self, with_buffers: bool) -> Iterator[tuple[Key, Tensor]]:
        for name, of, tensor, is_parameter in self._copies():
            # Buffers of integers, such as counters, can be those of the rank.
            if is_parameter or (with_buffers and tensor.is_floating_point()):
                yield (name, of), tensor

    def _copies(self) -> Iterator[tuple[str, str, Tensor, bool]]:
        if self._trainable.state is not None:
            yield from self._trainable.state.copies()
            return
        for i, module in enumerate(self._trainable.modules):
            parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
            for name, tensor in module.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor):  # not what `get_extra_state` returns
                    yield name, str(i), tensor, name in parameters

    def _explain(self, drift: Drift, global_step: int, checkpoint: str | None) -> str:
        named = " and ".join(f"rank {rank} on {self._hosts[rank]}" for rank in drift.ranks)
        if drift.others:
            has = "has" if len(drift.ranks) == 1 else "have"
            others = ", ".join(map(str, drift.others))
            who = f"{named} {has} other bits of {drift.name!r} than rank{'s' * (len(drift.others) > 1)} {others}"
        else:
            who = f"{named} have different bits of {drift.name!r}, and which of them are right is not known"
        before = "" if self._same_in is None else f", which were the same in step {self._same_in}"
        saved = f"the last checkpoint is {checkpoint}" if checkpoint else "no checkpoint has been saved yet"
        return (
            f"the replicas of the model differ after step {global_step}: {who}. "
            f"{drift.count} tensor(s) differ{before}. Something has changed the weights of a rank alone: code that "
            f"depends on the rank, random numbers, or memory or a device that fails. Nothing has been saved since: "
            f"{saved}"
        )


def find_drift(found: Sequence[Mapping[Key, int]]) -> Drift | None:
    """Returns the first difference in the order of the model, or None. found: by rank, hashes by key."""
    by_key: dict[Key, dict[int, list[int]]] = {}
    for rank, own in enumerate(found):
        for key, value in own.items():
            by_key.setdefault(key, {}).setdefault(value, []).append(rank)
    differing = [(key, sorted(values.values(), key=len)) for key, values in by_key.items() if len(values) > 1]
    if not differing:
        return None
    (name, _), groups = differing[0]
    *few, most = groups
    if len(few[-1]) == len(most):
        return Drift(name, sorted(rank for ranks in groups for rank in ranks), [], len(differing))
    return Drift(name, sorted(rank for ranks in few for rank in ranks), most, len(differing))


def fingerprint(tensor: Tensor) -> Tensor:
    """Returns a hash of the bits of a tensor's elements, on its device. # returns: () int64

    A sum of the elements' bits, each times an odd number that depends on its place, modulo 2^64. So a change of one
    element always changes it, and changes of several cancel with the probability of a random number.
    """
    elements = stored_elements(tensor).contiguous().reshape(-1)
    bits = elements.view(_INTEGERS[elements.element_size()])
    factors = torch.arange(min(len(bits), _CHUNK), device=bits.device).mul_(2).add_(1).mul_(_ODD)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(_CHUNK):
        total = total * _ODD + (part.long() * factors[: len(part)]).sum()
    return total
