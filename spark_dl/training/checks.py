"""What ranks check while they train, and what they say of memory.

- The loss of a batch is a mean over its rows, so that weights do not depend on the number of ranks.
- Sparse gradients, of `nn.Embedding(sparse=True)` and `nn.EmbeddingBag(sparse=True)`, fit the optimizer.
- Experts have their balance and load.
- Ranks that must have the same weights have the same bits, before each checkpoint and by
  `train.check_replicas_every`. Each rank sends 8 bytes per tensor. In data parallelism all ranks have the same
  weights; in a mesh, the ranks that have the same elements of a parameter.
- An error about a device without free memory says what to change, and an error keeps no memory alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spark_dl.config import Config
from spark_dl.gather import gather_json, gather_tensors, gathered, sum_over_ranks
from spark_dl.generators import generators_kept
from spark_dl.launch.failures.errors import OtherRankError
from spark_dl.nn.moe import moe_layers
from spark_dl.optimization import parts_of, trained_by
from spark_dl.parallel.loss import Call, loss_and_count, select_rows
from spark_dl.parallel.modules import is_out_of_memory, module_state_kept
from spark_dl.parallel.trainable import Trainable
from spark_dl.spec import Batch, ModelSpec
from spark_dl.training.finite import StepCheck, stored_elements
from spark_dl.world import World

_TOLERANCE, _TOLERANCE_ON_GPU, _TOLERANCE_IN_BF16 = 1e-5, 1e-3, 2e-2
"""Relative differences that are rounding. On a GPU, batches of other sizes have other kernels, in TF32 as well."""

_TAKE_SPARSE = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)

_CHUNK = 1 << 18
"""Elements that are hashed at a time, so that a hash needs a few MiB."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 divided by the golden ratio, an odd number whose multiples have well mixed bits; as a signed number."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Key = tuple[str, str]
"""Name of a tensor, and what a rank has of it. Ranks with the same key must have the same elements."""


def check_batch_loss(
    spec: ModelSpec, model: nn.Module, batch: Batch, config: Config, *, call: Call | None = None
) -> None:
    """Raises ValueError if `spec.batch_loss` of a batch is not the mean of those of its halves. Collective.

    Called before the first step, on a rank, in evaluation mode, without dropout. The means of the halves are weighted
    by their rows, or by `spec.count`. A loss that draws random numbers is not checked, nor one that fails: the step
    then shows its error. The model is left as it was. batch: on the device of the model.
    """
    rows = torch.nonzero(batch["weight"] > 0)[:, 0]
    half = (len(rows) + 1) // 2
    # In float32, as rounding in 16 bits would hide a difference.
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, precision="float32"))
    # All ranks call it as often, as the forward pass can be collective.
    parts = [rows, rows, rows[:half], rows[half:]] if len(rows) > 1 else [torch.arange(len(batch["weight"]))] * 4
    with module_state_kept(model), generators_kept(_gpus(model)), torch.no_grad():
        model.eval()
        losses = []
        for i, part in enumerate(parts):
            torch.manual_seed(i)
            losses.append(_loss_and_count(spec, model, select_rows(batch, part.to(rows.device)), config, call))
    if len(rows) < 2 or not all(losses) or gathered():  # the loss of a global batch is meant to be of no smaller one
        return
    (whole, count), (again, _), (first, first_count), (second, second_count) = (each for each in losses if each)
    tolerance = _TOLERANCE_ON_GPU if batch["weight"].is_cuda else _TOLERANCE
    if any(p.dtype == torch.bfloat16 for p in model.parameters()):
        tolerance = _TOLERANCE_IN_BF16
    if not math.isclose(whole, again, rel_tol=tolerance, abs_tol=tolerance):
        return  # it draws random numbers
    halves = (first + second) / (first_count + second_count) if first_count + second_count else 0.0
    whole = whole / count if count else 0.0
    if math.isclose(whole, halves, rel_tol=tolerance, abs_tol=tolerance) or not math.isfinite(whole):
        return
    of = "rows" if spec.count is None else "count"
    raise ValueError(
        f"spec.batch_loss (a LightningModule: training_step): the loss of {len(rows)} rows is {whole:.6g}, and the "
        f"mean of its halves {halves:.6g}, so it is not a mean over the {of}, and the weights would depend on the "
        "number of ranks and micro-batches; say what it is a mean over, such as ModelSpec(count=lambda batch: "
        "(batch['labels'] != -100).sum()); gather the rows that it compares, spark_dl.gather_rows(rows); or accept it "
        "with train.check_batch_loss: false"
    )


def _loss_and_count(
    spec: ModelSpec, model: nn.Module, rows: Batch, config: Config, call: Call | None
) -> tuple[float, float] | None:
    try:
        return loss_and_count(spec, model, rows, config, call=call)
    except Exception:
        return None


def _gpus(model: nn.Module) -> list[int]:
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})


def check_sparse(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Raises ValueError if sparse gradients would meet a setting that does not take them. Called on every rank.

    Before the first step, as the errors of torch in the step name neither the parameter nor the setting.
    """
    named = [(name, p) for module in modules for name, p in module.named_parameters()]
    sparse_ids = {
        id(layer.weight)
        for module in modules
        for layer in module.modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad
    }
    if not sparse_ids:
        if any(isinstance(part, torch.optim.SparseAdam) for part in parts_of(optimizer)):
            raise ValueError(
                "train.optimizer: SparseAdam takes sparse gradients alone, and the model has none; use Adam, or "
                "sparse=True in its nn.Embedding and nn.EmbeddingBag"
            )
        return
    names = [name for name, p in named if id(p) in sparse_ids]
    of = f"{names[0]!r}{f' and {len(names) - 1} more parameters' if len(names) > 1 else ''}"
    parallel = config.parallel
    for key, is_set in (
        ("train.clip_grad_norm", config.train.clip_grad_norm is not None),
        ("parallel.all_reduce", getattr(parallel, "all_reduce", "backend") != "backend"),
        ("parallel.compression", getattr(parallel, "compression", "none") in ("powersgd", "threshold", "topk")),
        ("parallel.zero_stage", getattr(parallel, "zero_stage", 0) == 3),
    ):
        if is_set:
            section, _, setting = key.partition(".")
            value = getattr(getattr(config, section), setting)
            raise ValueError(
                f"{key}: found {value!r}, which does not take the sparse gradients of {of}; change it, or build its "
                "layer without sparse=True"
            )
    for part in parts_of(optimizer):
        in_optimizer = {id(p) for p in trained_by(part)}
        if isinstance(part, torch.optim.SparseAdam):
            dense = [name for name, p in named if id(p) in in_optimizer and id(p) not in sparse_ids]
            if dense:
                raise ValueError(
                    f"train.optimizer: SparseAdam takes sparse gradients alone, and those of {dense[0]!r} are dense; "
                    "use SGD or Adagrad, or another optimizer for them (train.param_groups)"
                )
        elif (
            sparse_ids & in_optimizer
            and type(part).__module__.startswith("torch.optim")
            and not isinstance(part, _TAKE_SPARSE)
        ):
            raise ValueError(
                f"train.optimizer: {type(part).__name__} does not take the sparse gradients of {of}; use SGD, Adagrad "
                "or SparseAdam, also in train.param_groups, or build its layer without sparse=True"
            )


class ExpertBalance:
    """Keeps the experts of a model equally busy, and measures how busy they are. Does nothing without `MoE` layers."""

    def __init__(self, trainable: Trainable, world: World, config: Config):
        """Collective if a model takes several ranks.

        Raises ValueError if a layer is balanced by a bias, and the strategy computes gradients outside of its model.
        """
        self._layers = moe_layers(trainable.modules[0])
        self._device = world.device
        self._sum = trainable.sum_over_data or sum_over_ranks
        parallel = config.parallel
        for name, layer in self._layers.items():
            if layer.balance == "bias" and (parallel.by_spark or parallel.servers or parallel.all_gpus):
                raise ValueError(
                    f"parallel.strategy: {parallel.strategy!r} cannot balance the experts of {name!r} by a bias, as it "
                    "trains copies of the model; set balance='loss' in its MoE, or use another strategy, such as ddp"
                )
            layer.sum_over_data = self._sum if layer.balance == "loss" else None
        self._since_log = {name: layer.take_counts() for name, layer in self._layers.items()}
        self._everywhere = {name: layer.num_experts for name, layer in self._layers.items()}
        """Number of experts of each layer of the model, also of layers of other ranks."""
        if world.data_size < world.world_size:
            self._everywhere = {name: count for own in gather_json(self._everywhere) for name, count in own.items()}

    def end_step(self) -> None:
        """Updates the biases, after an optimizer step. Collective."""
        counts = {name: layer.take_counts() for name, layer in self._layers.items()}
        for name, own in counts.items():
            self._since_log[name] += own
        balanced = [name for name, layer in self._layers.items() if layer.balance == "bias"]
        if not balanced:
            return
        flat = torch.cat([counts[name] for name in balanced])
        self._sum(flat)
        for name, total in zip(balanced, flat.split([len(counts[name]) for name in balanced]), strict=True):
            self._layers[name].update_bias(total[:-1])

    def forget_step(self) -> None:
        """Forgets the choices of a step whose update is left out."""
        for layer in self._layers.values():
            layer.take_counts()

    def forget(self) -> None:
        """Forgets the choices since the last log line, whose steps are repeated."""
        self.forget_step()
        for own in self._since_log.values():
            own.zero_()

    def take_load(self) -> dict[str, Any]:
        """Returns the fields of a log line. Collective.

        For each layer these are the shares of its experts in the choices since the last call, the largest share over
        the mean, and the share of choices that were dropped.
        """
        if not self._everywhere:
            return {}
        parts = []
        for name, num_experts in self._everywhere.items():
            own = self._since_log.get(name)
            parts.append(torch.zeros(num_experts + 1, dtype=torch.float64, device=self._device) if own is None else own)
        # All ranks that have a layer count the same tokens equally often, so the shares are right.
        flat = torch.cat(parts)
        sum_over_ranks(flat)
        for own in self._since_log.values():
            own.zero_()
        load = {}
        for name, total in zip(self._everywhere, flat.split([len(part) for part in parts]), strict=True):
            *counts, dropped = total.tolist()
            if chosen := sum(counts):
                load[name or "model"] = {
                    "share": [round(count / chosen, 6) for count in counts],
                    "max_over_mean": round(max(counts) * len(counts) / chosen, 6),
                    "dropped": round(dropped / chosen, 6),
                }
        return {"expert_load": load} if load else {}


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

        Raises ReplicaDriftError on the ranks that differ, and OtherRankError on the others.

        Args:
            checkpoint: the last one. Nothing is compared after NaN or Inf, about which another error says more.
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
        checksums = [each.tolist() for each in gather_tensors(own)]
        if not all(each[0] for each in checksums):
            return
        keys = self._known[with_buffers]
        drift = find_drift([dict(zip(k, each[1:], strict=True)) for k, each in zip(keys, checksums, strict=True)])
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


@contextlib.contextmanager
def out_of_memory_explained(config: Config, world: World) -> Iterator[None]:
    """Makes an error of torch that a device, or the host, has no memory left one that says what to change."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        train = config.train
        rows = -(-train.global_batch_size // (config.data_size * train.accumulation_steps))
        shared = ", and other ranks use the same GPU (launch.gpus_per_rank)" if _is_shared(world) else ""
        smaller = "" if config.parallel.cuts_model else (
            ". For a model that is itself too large, set parallel.strategy to mesh, with zero_stage, tensor or pipeline"
        )  # fmt: skip
        raise RuntimeError(
            f"rank {world.rank} on {world.host}: {world.device} has no memory left, with about {rows} rows in a "
            f"micro-batch{shared}; raise train.accumulation_steps (now {train.accumulation_steps}), lower "
            f"train.global_batch_size (now {train.global_batch_size}), use more ranks, or set train.precision to "
            "bf16-mixed"
            f"{smaller}"
        ) from error


def _is_shared(world: World) -> bool:
    return world.device.type == "cuda" and world.world_size > 1 and world.backend == "gloo"


def clear_frames(error: BaseException) -> None:
    """Clears the local variables of the frames of an error and of its causes."""
    cause: BaseException | None = error
    cleared: set[int] = set()
    while cause is not None and id(cause) not in cleared:
        traceback.clear_frames(cause.__traceback__)
        cleared.add(id(cause))
        cause = cause.__cause__ or cause.__context__
