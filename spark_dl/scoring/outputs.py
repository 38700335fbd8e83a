"""From a model's output to the columns of Spark ML: `rawPrediction`, `probability` and `prediction`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spark_dl.config.data import Assembled
from spark_dl.spec import Batch, ModelSpec, Output


@dataclass(frozen=True)
class Squeezed:
    """A `forward` whose output has no second axis of length 1, as labels do not have it. # [rows, 1] to [rows]"""

    spec: ModelSpec
    inputs: tuple[str, ...] | Assembled

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        output = self.spec.output(model, batch, self.inputs)
        return output.squeeze(1) if isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] == 1 else output


@dataclass(frozen=True)
class ClassColumns:
    """A `predict` with the columns of a classifier, from logits. # [rows, classes], [rows, 1] or [rows]

    The prediction of a row with NaN among its logits is NaN. One logit per row is that of the second of two classes.

    Args:
        names: the columns, by `rawPrediction` and `probability`, [rows, classes], and `prediction`, [rows]; all
            float64.
    """

    names: Mapping[str, str]

    def __call__(self, output: Any) -> dict[str, Tensor]:
        logits = single_output(output).double()
        if logits.ndim == 1 or logits.shape[1] == 1:
            positive = logits.reshape(-1)
            raw = torch.stack([-positive, positive], 1)
            probability = torch.stack([torch.sigmoid(-positive), torch.sigmoid(positive)], 1)
        else:
            raw, probability = logits, logits.softmax(1)
        prediction = raw.argmax(1).double().masked_fill(raw.isnan().any(1), torch.nan)  # NaN is no class
        columns = {"rawPrediction": raw, "probability": probability, "prediction": prediction}
        return {name: columns[kind] for kind, name in self.names.items()}


@dataclass(frozen=True)
class ValueColumn:
    """A `predict` with the column of a regressor, float64. # [rows, 1] or [rows] to [rows]"""

    name: str

    def __call__(self, output: Any) -> dict[str, Tensor]:
        values = single_output(output)
        if values.ndim == 2 and values.shape[1] != 1:
            raise ValueError(
                f"expected one output per row, found shape {tuple(values.shape)}; use TorchEstimator for several"
            )
        return {self.name: values.reshape(-1).double()}


def single_output(output: Any) -> Tensor:
    """Returns the only output, [rows] or [rows, n]. Raises ValueError for several outputs or more axes."""
    if isinstance(output, Mapping) and len(output) == 1:  # of an exported program
        (output,) = output.values()
    if not isinstance(output, Tensor) or output.ndim not in (1, 2):
        found = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"expected one output, [rows] or [rows, n], found {found}; use TorchEstimator")
    return output
