"""The network of a testbed: network namespaces as hosts, a switch, and links with a set rate. Needs Linux and root.

The switch is a namespace with a bridge. Nothing is added to the network of the machine itself, so addresses and routes
cannot collide, and several beds can exist at once with the same addresses. A link is a veth pair with a token bucket
(tc-tbf(8)) at both ends: sent frames queue in the host, and received frames in the switch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.testbed.reap import FILES, bed_folder, run_tool

INTERFACE = "eth0"
"""Name of each host's interface, besides loopback."""
_SWITCH = "switch"
_PORTS_WAIT_S = 10.0

_NETWORK = "10.0.0.0/24"
RENO = "reno"
"""NOTE: every Linux supports this congestion control in all namespaces, so figures do not depend on the machine's. With
BBR, each connection sends almost nothing for 200 ms every ten seconds (Cardwell et al. 2016, PROBE_RTT). An all-reduce
of 64 MiB over 8 hosts took 4.80 to 5.20 s with BBR, and 4.76 to 4.77 s with Reno. The limit of the links is 4.75 s."""
_BURST_S = 0.0004
_MIN_BURST_FRAMES = 2
_QUEUE_S = 0.05
_MIN_QUEUE_BYTES = 1 << 19
"""NOTE: a burst of the token bucket passes at full speed, so it must be small relative to a measurement, but large
enough that late timers do not lower the rate. The queue must hold packets that several hosts send to one host at once.
With 7 senders at 200 Mbit/s and 256 KiB, a fifth of all packets was lost, and the transfer took 1.4 times as long as
with 1 MB. In return, a full queue delays packets by 50 ms, and longer below 84 Mbit/s."""


@dataclass(frozen=True)
class Host:
    """Host of a bed."""

    name: str
    """Host name, which all hosts of the bed resolve. The switch's port has the same name."""
    address: str
    """IPv4 address of the interface."""
    namespace: str
    """Namespace for `ip netns exec`."""
    interface: str = INTERFACE

    @property
    def bed(self) -> str:
        return self.namespace.rpartition(".")[0]

    @property
    def switch(self) -> str:
        """Namespace with the other end of the link."""
        return f"{self.bed}.{_SWITCH}"


@dataclass(frozen=True)
class Counters:
    """Bytes over a host's link, in Ethernet frames with headers, from the host's side.

    NOTE: above 1 Gbit/s, the kernel may merge frames, which then have the headers of one frame.
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
    """Creates connected hosts with these names, and the bed's folder.

    Raises RuntimeError if a tool fails. `remove` then deletes what was created.
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
    """Links a host to the switch. Without ARP and IPv6, only the processes' own traffic is sent."""
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
    """Waits until the switch forwards frames to new ports."""
    end = time.monotonic() + _PORTS_WAIT_S
    while True:
        links = json.loads(run_tool(["ip", "-n", hosts[0].switch, "-d", "-j", "link"]))
        states = {link["ifname"]: link.get("linkinfo", {}).get("info_slave_data", {}).get("state") for link in links}
        waiting = [host.name for host in hosts if states[host.name] != "forwarding"]
        if not waiting:
            return
        if time.monotonic() > end:
            raise RuntimeError(f"the switch does not forward frames to {waiting} {_PORTS_WAIT_S:g} s after they are up")
        time.sleep(0.02)


def set_rate(host: Host, rate_mbit: float, *, mtu: int, queue_frames: int | None = None) -> None:
    """Limits a host's link in both directions.

    queue_frames: length of the queues. Frames that find a full queue are lost.
    """
    bytes_per_s = rate_mbit * 1e6 / 8
    burst = max(int(bytes_per_s * _BURST_S), _MIN_BURST_FRAMES * (mtu + 14))
    queue = max(int(bytes_per_s * _QUEUE_S), _MIN_QUEUE_BYTES) if queue_frames is None else queue_frames * (mtu + 14)
    bucket = ["tbf", "rate", f"{round(rate_mbit * 1e6)}bit", "burst", str(burst), "limit", str(queue)]
    for namespace, device in ((host.namespace, host.interface), (host.switch, host.name)):
        run_tool(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket])


def connect(host: Host) -> None:
    """Ends `disconnect`."""
    run_tool(["ip", "-n", host.switch, "link", "set", "dev", host.name, "master", _SWITCH])


def disconnect(host: Host) -> None:
    """Removes a host's port from the switch: frames are lost, and neither end is notified."""
    run_tool(["ip", "-n", host.switch, "link", "set", "dev", host.name, "nomaster"])


def unplug(host: Host) -> None:
    """Takes the switch's end of a host's link down: the host's interface loses its carrier."""
    run_tool(["ip", "-n", host.switch, "link", "set", "dev", host.name, "down"])


def plug(host: Host) -> None:
    """Ends `unplug`."""
    run_tool(["ip", "-n", host.switch, "link", "set", "dev", host.name, "up"])
    _wait_for_ports([host])


def read_counters(hosts: Iterable[Host]) -> dict[str, Counters]:
    """Returns the bytes over each host's link so far, by host name. # hosts: of one bed"""
    hosts = list(hosts)
    links = json.loads(run_tool(["ip", "-n", hosts[0].switch, "-s", "-j", "link"]))
    ports = {link["ifname"]: link["stats64"] for link in links}
    found = {}
    for host in hosts:
        sent, received = ports[host.name]["rx"], ports[host.name]["tx"]  # from the switch's side
        found[host.name] = Counters(sent["bytes"], received["bytes"], sent["packets"], received["packets"])
    return found
