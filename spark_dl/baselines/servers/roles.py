"""Roles of the ranks, servers or trainers, and the connections between them."""

from __future__ import annotations

from dataclasses import dataclass

from spark_dl.baselines.servers.wire import Transport
from spark_dl.channel import Port, connect_to_rank
from spark_dl.config import Config
from spark_dl.world import World


@dataclass(frozen=True)
class Roles:
    """The roles of all ranks. Raises ValueError if no rank is left to train."""

    rank: int
    world_size: int
    num_servers: int

    def __post_init__(self) -> None:
        if self.num_servers >= self.world_size:
            raise ValueError(
                f"parallel.num_servers: found {self.num_servers}, expected fewer than the {self.world_size} ranks that "
                "were started; set it lower, or start more ranks"
            )

    @property
    def trainers(self) -> range:
        return range(self.world_size - self.num_servers)

    @property
    def servers(self) -> range:
        return range(self.world_size - self.num_servers, self.world_size)

    @property
    def first(self) -> int:
        """Rank of the first server, which decides for all servers."""
        return self.servers[0]

    @property
    def is_server(self) -> bool:
        return self.rank in self.servers

    @property
    def block(self) -> int:
        """Number of this server's block."""
        return self.rank - self.first


def connect_all(world: World, roles: Roles, config: Config, most_numbers: int) -> Transport:
    """Connects every trainer with every server, and every other server with the first one. Collective.

    `most_numbers` is the length of the longest block. Raises RuntimeError if a rank does not connect in time.
    """

    def name(rank: int) -> str:
        return f"parameter_server/{rank}"

    timeout_s = config.launch.start_timeout_s
    wire = Transport(most_numbers)
    try:
        if not roles.is_server:
            for server in roles.servers:
                wire.add(*connect_to_rank(world, name(server), server, timeout_s))
            return wire
        with Port(world, name(world.rank), "the parameter server") as port:
            if world.rank != roles.first:
                wire.add(*connect_to_rank(world, name(roles.first), roles.first, timeout_s))
            followers = roles.servers[1:] if world.rank == roles.first else ()
            for peer in port.accept([*roles.trainers, *followers], timeout_s):
                wire.add(*peer)
    except BaseException:
        wire.close()
        raise
    return wire
