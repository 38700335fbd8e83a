"""Table 1 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): gigabytes per device, by the planner's formulas."""

from __future__ import annotations

from typing import Any

from spark_dl.parallel.mesh.planner.records import STATES, held

MODELS = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
PUBLISHED = {
    1: ("120", "120", "120", "2048", "2048", "2048", "16000", "16000", "16000"),
    4: ("52.5", "41.3", "30", "896", "704", "512", "7000", "5500", "4000"),
    16: ("35.6", "21.6", "7.5", "608", "368", "128", "4750", "2875", "1000"),
    64: ("31.4", "16.6", "1.88", "536", "284", "32", "4187", "2218", "250"),
    256: ("30.4", "15.4", "0.47", "518", "263", "8", "4046", "2054", "62.5"),
    1024: ("30.1", "15.1", "0.12", "513", "257", "2", "4011", "2013", "15.6"),
}
"""By number of data ranks: for each model, ZeRO stages 1, 2 and 3, as printed."""


def cells() -> list[dict[str, Any]]:
    """Returns a row for each cell: what is published, the formula, and whether they are equal as printed.

    The paper rounds some cells and cuts others: 4187.5 is printed as 4187.
    """
    found = []
    for ranks, printed in PUBLISHED.items():
        keys = [(model, stage) for model in MODELS for stage in (1, 2, 3)]
        for (model, stage), published in zip(keys, printed, strict=True):
            gigabytes = held(MODELS[model], STATES["mixed_adam"], stage, ranks).total / 1e9
            unit = 10.0 ** -len(published.partition(".")[2])
            is_equal = -0.5 * unit <= gigabytes - float(published) < unit  # rounded or cut
            found.append({"ranks": ranks, "model": model, "zero_stage": stage, "published_gb": float(published),
                          "formula_gb": gigabytes, "equal": is_equal})  # fmt: skip
    return found
