"""The network of a testbed: hosts are network namespaces around a switch, each on a link of a set rate. Linux, root.

The switch is a namespace of its own, with a bridge in it. So nothing is added to the network of the machine itself,
there is no address or route that could collide, and several beds can be at once, all with the same addresses.
A link is a veth pair with a token bucket (tc-tbf(8)) at both ends: what a host sends waits in the host, and what it
receives in the switch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_dl.bench.testbed.reap import FILES, bed_folder, run_tool

INTERFACE = "eth0"
"""Name of the one interface that each host has, besides loopback."""
_SWITCH = "switch"
_PORTS_WAIT_S = 10.0

_NETWORK = "10.0.0.0/24"
RENO = "reno"
"""NOTE: TCP's congestion control, the one that every Linux lets all namespaces have, so that figures do not depend on
the machine's. With BBR each connection sends next to nothing for 200 ms every ten seconds (Cardwell et al. 2016,
PROBE_RTT): an all-reduce of 64 MiB over 8 hosts then took 4.80 to 5.20 s, and 4.76 to 4.77 s with Reno, where the links
allow 4.75."""
_BURST_S = 0.0004
_MIN_BURST_FRAMES = 2
_QUEUE_S = 0.05
_MIN_QUEUE_BYTES = 1 << 19
"""NOTE: a bucket's burst passes at full speed, so it must be short against what is measured, and not so short that a
late timer costs rate. The queue must take what several hosts send to one at once: of 7 senders at 200 Mbit/s, 256 KiB
lost a fifth of all packets, and the transfer took 1.4 times as long as with 1 MB. The cost is that a full queue
delays packets by 50 ms, longer below 84 Mbit/s."""


@dataclass(frozen=True)
class Host:
    """One host of a bed."""

    name: str
    """Its host name, which all hosts of the bed resolve; the switch's port to it has this name too."""
    address: str
    """IPv4 address of its interface."""
    namespace: str
    """For `ip netns exec`."""
    interface: str = INTERFACE

    @property
    def bed(self) -> str:
        return self.namespace.rpartition(".")[0]

    @property
    def switch(self) -> str:
        """The namespace with the other end of its link."""
        return f"{self.bed}.{_SWITCH}"


@dataclass(frozen=True)
class Counters:
    """What passed a host's link, in Ethernet frames with all their headers, as the host sees it.

    NOTE: above 1 Gbit/s the kernel hands several frames on as one, which then count the headers of one.
    """

    tx_bytes: int
    rx_bytes: int
    tx_packets: int
    rx_packets: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            self.tx_bytes - earlier.tx_bytes, self.rx_bytes - earlier.rx_bytes,
            self.tx_packets - earlier.tx_packets, self.rx_packets - earlier.rx_packets,
        )  # fmt: skip


def create(
    bed: str, names: Sequence[str], *, rate_mbit: float | None, mtu: int, congestion_control: str = RENO
) -> tuple[Host, ...]:
    """Makes the hosts of these names, all reachable from each other, and the bed's folder.

    Raises RuntimeError where a tool fails; what was made until then is left for `remove`.
    """
    hosts = tuple(Host(name, f"10.0.0.{i}", f"{bed}.{name}") for i, name in enumerate(names, start=1))
    switch = hosts[0].switch
    bed_folder(bed).mkdir(mode=0o700)
    for host in hosts:
        files = FILES / host.namespace
        files.mkdir(parents=True)
        lines = ["127.0.0.1 localhost", *(f"{h.address} {h.name}" for h in hosts)]
        (files / "hosts").write_text("\n".join(lines) + "\n")
    run_tool(["ip", "-batch", "-"], [f"netns add {name}" for name in (switch, *(h.namespace for h in hosts))])
    run_tool(["ip", "-n", switch, "-batch", "-"], [
        f"link add name {_SWITCH} type bridge mcast_snooping 0",
        f"link set dev {_SWITCH} addrgenmode none",
        f"link set dev {_SWITCH} up",
    ])  # fmt: skip
    for host in hosts:
        _link(host, hosts, mtu, congestion_control)
        if rate_mbit is not None:
            set_rate(host, rate_mbit, mtu=mtu)
    _wait_for_ports(hosts)
    return hosts


def _link(host: Host, hosts: Sequence[Host], mtu: int, congestion_control: str) -> None:
    """Links a host to the switch. With all neighbours known and no IPv6, nothing is sent that no process has sent."""
    interface = f"{host.interface} mtu {mtu} address {_mac(host)} netns {host.namespace}"
    run_tool(["ip", "-n", host.switch, "-batch", "-"], [
        f"link add name {host.name} mtu {mtu} type veth peer name {interface}",
        f"link set dev {host.name} master {_SWITCH} addrgenmode none",
        f"link set dev {host.name} up",
    ])  # fmt: skip
    run_tool(["ip", "-n", host.namespace, "-batch", "-"], [
        "link set dev lo up",
        f"link set dev {host.interface} addrgenmode none",
        f"link set dev {host.interface} up",
        f"address add {host.address}/24 dev {host.interface} noprefixroute",
        f"route add {_NETWORK} dev {host.interface} src {host.address} congctl {congestion_control}",
        *(f"neighbour add {h.address} lladdr {_mac(h)} dev {host.interface}" for h in hosts if h != host),
    ])  # fmt: skip


def _mac(host: Host) -> str:
    return f"02:00:00:00:00:{int(host.address.rpartition('.')[2]):02x}"


def _wait_for_ports(hosts: Sequence[Host]) -> None:
    """The switch passes frames on to a new port only some time after it is up."""
    end = time.monotonic() + _PORTS_WAIT_S
    while True:
        links = json.loads(run_tool(["ip", "-n", hosts[0].switch, "-d", "-j", "link"]))
        states = {link["ifname"]: link.get("linkinfo", {}).get("info_slave_data", {}).get("state") for link in links}
        waiting = [host.name for host in hosts if states[host.name] != "forwarding"]
        if not waiting:
            return
        if time.monotonic() > end:
            raise RuntimeError(f"the switch does not pass frames on to {waiting} {_PORTS_WAIT_S:g} s after they are up")
        time.sleep(0.02)


def set_rate(host: Host, rate_mbit: float, *, mtu: int) -> None:
    """Limits a host's link in both directions, from now on."""
    bytes_per_s = rate_mbit * 1e6 / 8
    burst = max(int(bytes_per_s * _BURST_S), _MIN_BURST_FRAMES * (mtu + 14))
    queue = max(int(bytes_per_s * _QUEUE_S), _MIN_QUEUE_BYTES)
    bucket = ["tbf", "rate", f"{round(rate_mbit * 1e6)}bit", "burst", str(burst), "limit", str(queue)]
    for namespace, device in ((host.namespace, host.interface), (host.switch, host.name)):
        run_tool(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket])


def connect(host: Host) -> None:
    """Ends `disconnect`."""
    run_tool(["ip", "-n", host.switch, "link", "set", "dev", host.name, "master", _SWITCH])


def disconnect(host: Host) -> None:
    """Takes a host's port out of the switch: frames are lost from now on, and nothing tells either end."""
    run_tool(["ip", "-n", host.switch, "link", "set", "dev", host.name, "nomaster"])


def read_counters(hosts: Iterable[Host]) -> dict[str, Counters]:
    """What has passed each host's link so far, by its name; `hosts` are of one bed."""
    hosts = list(hosts)
    links = json.loads(run_tool(["ip", "-n", hosts[0].switch, "-s", "-j", "link"]))
    ports = {link["ifname"]: link["stats64"] for link in links}
    found = {}
    for host in hosts:
        sent, received = ports[host.name]["rx"], ports[host.name]["tx"]  # as the switch's port has them
        found[host.name] = Counters(sent["bytes"], received["bytes"], sent["packets"], received["packets"])
    return found
