"""Table 2 of GPipe (Huang et al. 2019, arXiv:1811.06965): throughput of a Transformer on K accelerators."""

from __future__ import annotations

from typing import Any

PUBLISHED = {4: {2: 1.7, 4: 3.2, 8: 4.8}, 32: {2: 1.8, 4: 3.4, 8: 6.3}}
"""By micro-batches M, then by stages K, relative to K = 2 and M = 1."""
FITS = 0.10


def speedup(stages: int, micro_batches: int) -> float:
    """Returns the throughput of K equal stages relative to one stage: K M / (M + K - 1). It is 1 for K = 2, M = 1."""
    return stages * micro_batches / (micro_batches + stages - 1)


def rows() -> list[dict[str, Any]]:
    """Returns a row for each published figure. It fits if the formula is within 10 %."""
    found = []
    for micro_batches, by_stages in PUBLISHED.items():
        for stages, published in by_stages.items():
            formula = speedup(stages, micro_batches)
            error = formula / published - 1
            found.append({"micro_batches": micro_batches, "stages": stages, "published": published,
                          "formula": formula, "error": error, "fits": abs(error) <= FITS})  # fmt: skip
    return found
