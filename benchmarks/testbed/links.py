"""Bytes through a host's network interfaces, from the kernel's counters."""

from __future__ import annotations

import functools
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_dl.config import Launch
from spark_dl.launch.barrier import run_barrier
from spark_dl.launch.rank.rendezvous import interfaces_of_host
from spark_dl.launch.rank.task import RankResult


@dataclass(frozen=True)
class LinkBytes:
    """Bytes since the interface came up, headers included."""

    received: int
    sent: int

    def __sub__(self, before: LinkBytes) -> LinkBytes:
        return LinkBytes(self.received - before.received, self.sent - before.sent)


def read_link(host: str) -> LinkBytes:
    """Returns the counters of the interface with the host's address, and of the interfaces in GLOO_SOCKET_IFNAME.

    Linux only. Raises RuntimeError if no interface has the host's address, or an interface does not exist.
    """
    names = interfaces_of_host(host)
    counters = parse_counters(Path("/proc/self/net/dev").read_text())
    if unknown := names - counters.keys():
        raise RuntimeError(f"{socket.gethostname()} has no network interface {', '.join(sorted(unknown))}")
    return LinkBytes(*(sum(getattr(counters[n], way) for n in names) for way in ("received", "sent")))


def parse_counters(text: str) -> dict[str, LinkBytes]:
    """Returns the counters of `/proc/net/dev` by interface."""
    found = {}
    for line in text.splitlines()[2:]:
        name, _, values = line.partition(":")
        numbers = [int(v) for v in values.split()]
        found[name.strip()] = LinkBytes(received=numbers[0], sent=numbers[8])
    return found


def read_links(spark: Any, num_hosts: int) -> dict[str, LinkBytes]:
    """Returns the counters of all executors' hosts, by name, and of the driver's host. Called on the driver.

    One rank runs on each host, which must have one task slot. Raises as `run_barrier` does.
    """
    found = run_barrier(spark, functools.partial(_read_own_link), launch=Launch(num_ranks=num_hosts, device="cpu"))
    by_host = {host: LinkBytes(**counted) for host, counted in found}
    driver = str(spark.conf.get("spark.driver.host"))
    return {**by_host, f"driver {driver}": read_link(driver)}


def _read_own_link(report: Any = None) -> RankResult:
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    assert isinstance(context, BarrierTaskContext)
    task = context.partitionId()
    context.barrier()  # so that each host has one task
    host = context.getTaskInfos()[task].address.rsplit(":", 1)[0].strip("[]")
    link = read_link(host)
    return RankResult(task, (host, {"received": link.received, "sent": link.sent}))
