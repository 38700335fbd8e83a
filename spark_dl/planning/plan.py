"""Plans how a model is laid out on ranks: pipeline, data and tensor ranks, ZeRO stage, micro-batches, stages.

Reads the profile of a model's layers: JSON, which docs/planner.md describes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_dl import storage
from spark_dl.config.checks import suggestion
from spark_dl.parallel.cost.cost import Network
from spark_dl.parallel.mesh.planner.records import (
    GPIPE,
    KINDS,
    ONE_F_ONE_B,
    STATES,
    ZERO_STAGES,
    Cluster,
    LayerProfile,
    Seconds,
)
from spark_dl.parallel.mesh.planner.search import MeshPlan, Problem, search
from spark_dl.planning import page
from spark_dl.planning import page as pages

_LAYER = ("name", "forward_s", "backward_s", "parameter_bytes", "output_bytes", "kept_bytes", "tensor", "repeat")
_NEEDED = ("name", "forward_s", "backward_s", "parameter_bytes", "output_bytes", "kept_bytes")


def read_profile(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, tuple[LayerProfile, ...]]:
    """Returns the name of a profile and its layers.

    Args:
        source: path or URL of a JSON file, or its content. Raises ValueError, with the key, for what is no profile.
    """
    if isinstance(source, Mapping):
        return _profile(source, "profile", "model")
    url = storage.absolute(source)
    if not storage.exists(url):
        raise ValueError(f"profile: there is no {url}; expected a JSON file with the layers of a model")
    try:
        content = json.loads(storage.read_bytes(url))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"profile: {url} is not JSON: {error}") from error
    return _profile(content, url, storage.name(url).removesuffix(".json"))


def _profile(content: Any, where: str, name: str) -> tuple[str, tuple[LayerProfile, ...]]:
    _check_mapping(content, ("name", "layers"), where)
    layers = content.get("layers")
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise ValueError(f"{where}: layers: expected a list with at least one layer, found {layers!r}")
    profile = tuple(layer for i, each in enumerate(layers) for layer in _layers(each, f"{where}: layers[{i}]"))
    name = content.get("name", name)
    if not isinstance(name, str):
        raise ValueError(f"{where}: name: expected a string, found {name!r}")
    return name, profile


def _layers(content: Any, where: str) -> Iterator[LayerProfile]:
    """One entry of the list: a layer, or equal layers in a row."""
    _check_mapping(content, _LAYER, where)
    if missing := [key for key in _NEEDED if key not in content]:
        raise ValueError(f"{where}: expected the keys {', '.join(_NEEDED)}; missing: {', '.join(missing)}")
    name, repeat = content["name"], content.get("repeat", 1)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}.name: expected a string, found {name!r}")
    if isinstance(repeat, bool) or not isinstance(repeat, int) or repeat < 1:
        raise ValueError(f"{where}.repeat: expected a whole number >= 1, found {repeat!r}")
    layer = LayerProfile(
        name,
        _seconds(content["forward_s"], f"{where}.forward_s"),
        _seconds(content["backward_s"], f"{where}.backward_s"),
        int(_number(content["parameter_bytes"], f"{where}.parameter_bytes")),
        _number(content["output_bytes"], f"{where}.output_bytes"),
        _number(content["kept_bytes"], f"{where}.kept_bytes"),
        _tensor(content.get("tensor", ()), f"{where}.tensor"),
    )
    if repeat == 1:
        yield layer
        return
    for i in range(repeat):
        yield LayerProfile(f"{name}.{i}", *list(vars(layer).values())[1:])


def _seconds(content: Any, where: str) -> Seconds:
    _check_mapping(content, ("fixed", "per_row"), where)
    return Seconds(*(_number(content.get(key, 0.0), f"{where}.{key}") for key in ("fixed", "per_row")))


def _tensor(content: Any, where: str) -> tuple[str, ...]:
    if not isinstance(content, Sequence) or isinstance(content, str):
        raise ValueError(f"{where}: expected a list of {', '.join(KINDS)}, found {content!r}")
    for each in content:
        if each not in KINDS:
            raise ValueError(f"{where}: expected a list of {', '.join(KINDS)}, found {each!r}")
    return tuple(content)


def _number(content: Any, where: str) -> float:
    if isinstance(content, bool) or not isinstance(content, int | float) or not 0 <= content < math.inf:
        raise ValueError(f"{where}: expected a number >= 0, found {content!r}")
    return content


def _check_mapping(content: Any, known: Sequence[str], where: str) -> None:
    if not isinstance(content, Mapping):
        raise ValueError(f"{where}: expected an object with {', '.join(known)}, found {content!r:.80}")
    for key in content:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}{suggestion(str(key), known)}")


@dataclass(frozen=True)
class MeshPlans:
    """What `plan_mesh` returns: the best plan of each mesh that fits, the shortest step first."""

    name: str
    """Of the profile."""
    problem: Problem
    plans: tuple[MeshPlan, ...]
    page: str | None
    """Path or URL of the page, if one was written."""

    @property
    def best(self) -> MeshPlan:
        return self.plans[0]

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The settings of a run with the best plan, by section of the configuration."""
        return page.settings(self.best)

    @property
    def text(self) -> str:
        """The stages of the best plan and the other plans, as tables for a terminal."""
        return "\n".join(page.text(self.problem, self.plans))

    def to_dict(self) -> dict[str, Any]:
        """Returns the plans as plain data, for JSON."""
        return {
            "settings": self.settings,
            "plans": [page.as_dict(self.problem, plan) for plan in self.plans],
            **({"page": self.page} if self.page else {}),
        }


def plan_mesh(
    profile: str | os.PathLike[str] | Mapping[str, Any],
    *,
    num_ranks: int,
    global_batch_size: int,
    hosts: int = 1,
    memory_gib: float | None = None,
    optimizer: str = "adam",
    rate_mbit: float = 10_000.0,
    latency_ms: float = 0.1,
    local_rate_mbit: float = 80_000.0,
    local_latency_ms: float = 0.02,
    zero_stages: Sequence[int] = ZERO_STAGES,
    schedules: Sequence[str] = (ONE_F_ONE_B, GPIPE),
    page: str | os.PathLike[str] | None = None,
) -> MeshPlans:
    """Finds the fastest ways to lay out a model on ranks, by a cost model. Needs no ranks and no Spark session.

    Args:
        profile: path or URL of a JSON file with the times and sizes of the model's layers, or its content.
        num_ranks, hosts: ranks with equal devices, equally many on each host.
        global_batch_size: rows of a step.
        memory_gib: memory of a rank's device. Without it, all plans fit.
        optimizer: `adam`, `momentum`, `sgd` in float32, or `mixed_adam`, Adam in mixed precision.
        rate_mbit, latency_ms: of the link of a host, in each direction, and of a message.
        local_rate_mbit, local_latency_ms: the same between two ranks of a host.
        zero_stages, schedules: those to choose from, of 0, 1, 2, 3 and `1f1b`, `gpipe`.
        page: path or URL of an HTML page to write, with a picture of the stages. An earlier plan is replaced.

    Raises:
        ValueError: For what is no profile, and, with the least memory that is needed, if no plan fits.
            ModuleNotFoundError for a page without the packages of the extra `spark_dl[plot]`.

    Example:
        >>> layer = {"forward_s": {"fixed": 0, "per_row": 1e-4}, "backward_s": {"fixed": 0, "per_row": 2e-4}}
        >>> layer |= {"parameter_bytes": 4e8, "output_bytes": 4096, "kept_bytes": 65536, "name": "block", "repeat": 8}
        >>> plans = spark_dl.plan_mesh({"layers": [layer]}, num_ranks=4, global_batch_size=64, memory_gib=16)
        >>> plans.settings
    """
    _check(num_ranks, hosts, global_batch_size, memory_gib, optimizer)
    url = None if page is None else storage.absolute(page)
    if url:
        pages.check(url)
    name, layers = read_profile(profile)
    cluster = Cluster(
        num_ranks,
        hosts,
        within=_network("local_", local_rate_mbit, local_latency_ms),
        between=_network("", rate_mbit, latency_ms),
        memory_bytes=math.inf if memory_gib is None else memory_gib * 2**30,
    )
    problem = Problem(layers, cluster, STATES[optimizer], global_batch_size, tuple(zero_stages), tuple(schedules))
    plans = tuple(search(problem))
    if url:
        about = {"optimizer": optimizer, "rate_mbit": rate_mbit, "latency_ms": latency_ms,
                 "local_rate_mbit": local_rate_mbit, "local_latency_ms": local_latency_ms}  # fmt: skip
        pages.write(url, name, problem, plans, about)
    return MeshPlans(name, problem, plans, url)


def _check(num_ranks: int, hosts: int, global_batch_size: int, memory_gib: float | None, optimizer: str) -> None:
    for key, number in (("num_ranks", num_ranks), ("hosts", hosts), ("global_batch_size", global_batch_size)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{key}: expected a whole number >= 1, found {number!r}")
    if memory_gib is not None and not 0 < memory_gib < math.inf:
        raise ValueError(f"memory_gib: expected a number above 0, found {memory_gib!r}")
    if optimizer not in STATES:
        raise ValueError(f"optimizer: unknown {optimizer!r}{suggestion(str(optimizer), list(STATES))}")


def _network(prefix: str, rate_mbit: float, latency_ms: float) -> Network:
    if not rate_mbit > 0:
        raise ValueError(f"{prefix}rate_mbit: expected a number above 0, found {rate_mbit!r}")
    if not 0 <= latency_ms < math.inf:
        raise ValueError(f"{prefix}latency_ms: expected a number >= 0, found {latency_ms!r}")
    return Network(alpha_s=latency_ms / 1e3, bytes_per_s=rate_mbit * 1e6 / 8)
