"""PipeDream's plans, from the profiles that its authors published, beside those of their own program."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.literature.pipedream_cuts import plan
from benchmarks.literature.profile_text import read_graph, states


@dataclass(frozen=True)
class Published:
    """A plan for a network on workers that are linked at one rate.

    `period_s` and `times_data_parallel` are what the program of the authors prints for the profile, and `cut` is the
    last state before its first cut.
    """

    profile: str
    workers: int
    bytes_per_s: float
    replication: str
    cut: int | None = None
    period_s: float | None = None
    times_data_parallel: float | None = None
    transfers: bool = False


PUBLISHED = (
    Published("vgg16", 4, 1.25e9, "3-1", 15, 0.174498, 2.866),
    Published("vgg16", 4, 10e9, "3-1", None, None, 1.232),
    Published("resnet50", 4, 1.25e9, "straight", None, None, 1.544),
    Published("vgg16", 4, 3.125e9, "3-1", transfers=True),
    Published("vgg16", 8, 3.125e9, "7-1", transfers=True),
    Published("vgg16", 16, 3.125e9, "15-1", transfers=True),
)
"""The last three are the plans in the authors' repository (runtime/image_classification/models/vgg16). It does not say
for which rate they are: with transfers between stages, 25 Gbit/s gives all three."""


def rows(folder: str | Path) -> list[dict[str, Any]]:
    """Returns a row for each published plan.

    folder: has vgg16.txt and resnet50.txt, or vgg16/graph.txt and resnet50/graph.txt, as the authors' repository.
    Raises FileNotFoundError as `find_profile` does.
    """
    names = dict.fromkeys(each.profile for each in PUBLISHED)
    profiles = {name: states(read_graph(find_profile(folder, name))) for name in names}
    return [_row(each, profiles[each.profile]) for each in PUBLISHED]


def find_profile(folder: str | Path, name: str) -> Path:
    """Returns the file of a network, such as vgg16. Variables of the environment in `folder` are filled in.

    Raises FileNotFoundError, with what to do, if there is none.
    """
    folder = Path(os.path.expandvars(folder))
    for path in (folder / f"{name}.txt", folder / name / "graph.txt"):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"there is no {folder / name}.txt and no {folder / name}/graph.txt; set --profiles to the folder "
        "profiler/image_classification/profiles of a clone of github.com/msr-fiddle/pipedream"
        + ("; the variable SPARK_DL_TEST_DATA is not set" if "$" in str(folder) else "")
    )


def _row(published: Published, found_states: list[Any]) -> dict[str, Any]:
    found = plan(found_states, published.workers, published.bytes_per_s, transfers=published.transfers)
    cut = found.stages[0].end if len(found.stages) > 1 else None
    is_equal = (
        found.replication == published.replication
        and published.cut in (None, cut)
        and _is_near(found.period_s, published.period_s, 1e-6)
        and _is_near(found.times_data_parallel, published.times_data_parallel, 1e-3)
    )
    return {
        "profile": published.profile, "workers": published.workers, "bytes_per_s": published.bytes_per_s,
        "transfers": published.transfers, "replication": found.replication, "cut": cut, "period_s": found.period_s,
        "times_data_parallel": found.times_data_parallel, "published_replication": published.replication,
        "published_cut": published.cut, "published_period_s": published.period_s,
        "published_times_data_parallel": published.times_data_parallel, "equal": is_equal,
    }  # fmt: skip


def _is_near(value: float, published: float | None, within: float) -> bool:
    return published is None or abs(value - published) <= within
