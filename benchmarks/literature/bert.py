"""Scaling of BERT-Large (330 M parameters) on K80 GPUs: minutes of the same training, as lecture notes give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

PUBLISHED_MIN = {1: 399, 2: 214, 4: 118, 8: 61}
PARAMETERS = 330e6


def fit(minutes: Mapping[int, float]) -> tuple[float, float]:
    """Returns computation and exchange, in minutes: T(n) = computation / n + exchange (n - 1) / n^2.

    n ranks take a 1/n of the steps. In each, a ring sends 2 (n - 1) / n of the gradient, and nothing is hidden behind
    the computation. The two parameters have the least sum of squared relative errors.
    """
    ranks, expected = np.array(list(minutes), dtype=float), np.array(list(minutes.values()), dtype=float)
    parts = np.stack([1 / ranks, (ranks - 1) / ranks**2], axis=1)
    found, *_ = np.linalg.lstsq(parts / expected[:, None], np.ones(len(ranks)), rcond=None)
    return float(found[0]), float(found[1])


def predict(computation: float, exchange: float, ranks: int) -> float:
    """Returns the minutes on this number of ranks."""
    return computation / ranks + exchange * (ranks - 1) / ranks**2


def rows() -> dict[str, Any]:
    """Returns the parameters of all four figures, and the rows; the second prediction knows only 1 and 8 GPUs."""
    both = fit(PUBLISHED_MIN)
    ends = fit({ranks: PUBLISHED_MIN[ranks] for ranks in (1, 8)})
    found = []
    for ranks, published in PUBLISHED_MIN.items():
        model, from_ends = predict(*both, ranks), predict(*ends, ranks)
        found.append({"gpus": ranks, "published_min": published, "model_min": model, "error": model / published - 1,
                      "from_1_and_8_min": from_ends, "from_1_and_8_error": from_ends / published - 1,
                      "held_out": ranks not in (1, 8)})  # fmt: skip
    return {"computation_min": both[0], "exchange_min": both[1], "rows": found}
