"""Random chains of layers, clusters and problems for the planner."""

import random

from spark_dl.parallel.cost.cost import Network
from spark_dl.parallel.mesh.planner.records import KINDS, STATES, Cluster, LayerProfile, Seconds
from spark_dl.parallel.mesh.planner.search import Problem

WITHIN, BETWEEN = Network(1e-5, 5e9), Network(1e-4, 1e8)


def layers(rng: random.Random, count: int, *, kinds: tuple[str, ...] = KINDS) -> tuple[LayerProfile, ...]:
    return tuple(
        LayerProfile(
            f"layer{i}",
            Seconds(rng.uniform(0, 1e-3), rng.uniform(1e-4, 1e-2)),
            Seconds(rng.uniform(0, 1e-3), rng.uniform(1e-4, 2e-2)),
            parameter_bytes=rng.choice((0, rng.randrange(4, 4_000_000, 4))),
            output_bytes=rng.uniform(0, 1e5),
            kept_bytes=rng.uniform(0, 4e5),
            tensor=tuple(kind for kind in kinds if rng.random() < 0.4),
        )
        for i in range(count)
    )


def problem(rng: random.Random, *, most_layers: int = 10, most_ranks: int = 8) -> Problem:
    """A problem whose memory limit may rule out some plans, or all."""
    num_ranks = rng.randint(1, most_ranks)
    hosts = rng.choice([each for each in range(1, num_ranks + 1) if num_ranks % each == 0])
    chain = layers(rng, rng.randint(1, most_layers))
    whole = 4 * sum(layer.parameter_bytes for layer in chain)
    memory = rng.choice((float("inf"), whole * rng.uniform(0.3, 2) + 1e6))
    cluster = Cluster(num_ranks, hosts, WITHIN, Network(1e-4, rng.choice((1e7, 1e8, 1e9))), memory)
    return Problem(chain, cluster, STATES[rng.choice(list(STATES))], num_ranks * rng.choice((1, 2)))
