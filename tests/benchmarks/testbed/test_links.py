"""What has passed a network interface, by the kernel's counters."""

import pytest

from benchmarks.testbed import links

PROC_NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier comp
    lo: 1104     12    0    0    0     0          0         0     2208      12    0    0    0     0       0          0
  eth0:123456789    9    0    0    0     0          0         0 987654321    8    0    0    0     0       0          0
"""


def test_the_kernel_s_counters():
    found = links.parse_counters(PROC_NET_DEV)
    assert found == {"lo": links.LinkBytes(1104, 2208), "eth0": links.LinkBytes(123456789, 987654321)}
    assert found["eth0"] - found["lo"] == links.LinkBytes(123456789 - 1104, 987654321 - 2208)


def test_the_counters_of_this_host_go_up():
    before = links.read_link("127.0.0.1")
    assert (links.read_link("127.0.0.1") - before).received >= 0
    with pytest.raises(RuntimeError, match=r"no network interface .* 192\.0\.2\.1"):
        links.read_link("192.0.2.1")


def test_the_interface_of_gloo_counts_where_it_is_another_one(monkeypatch):
    content = {"bytes": PROC_NET_DEV}
    monkeypatch.setattr(links.Path, "read_text", lambda path: content["bytes"])
    assert links.read_link("127.0.0.1") == links.LinkBytes(1104, 2208)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert links.read_link("127.0.0.1") == links.LinkBytes(1104, 2208)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert links.read_link("127.0.0.1") == links.LinkBytes(1104 + 123456789, 2208 + 987654321)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(RuntimeError, match="has no network interface eth7"):
        links.read_link("127.0.0.1")
