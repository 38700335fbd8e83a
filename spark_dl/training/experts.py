"""The balance and the load of experts during a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from spark_dl.gather import gather_json, sum_over_ranks
from spark_dl.nn.moe import moe_layers
from spark_dl.parallel.trainable import Trainable
from spark_dl.world import World

if TYPE_CHECKING:
    from spark_dl.config import Config


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
