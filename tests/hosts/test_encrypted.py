"""What somebody reads who hears all that hosts send: with plain links, and with an encrypted interface."""

import ctypes
import os
import pathlib
import secrets
import socket
import subprocess
import sys
import threading

import pytest

from tests.hosts.conftest import REPOSITORY
from tests.hosts.send_job import MARKER
from tests.hosts.tunnel import PORT

pytest.importorskip("cryptography", reason="no cryptography, which encrypts the tunnel of these tests")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
ALL_PROTOCOLS, CLONE_NEWNET = 3, 0x40000000
RANK = [sys.executable, "-m", "tests.hosts.send_job"]


class Ear:
    """Hears all frames at the switch of a bed. A thread keeps them while the block runs."""

    def __init__(self, bed):
        self._namespace = bed.driver.switch
        self.frames = []

    def __enter__(self):
        opened = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(opened,))
        self._thread.start()
        assert opened.wait(10)
        return self

    def __exit__(self, *error):
        self._is_over.set()
        self._thread.join(10)

    def _listen(self, opened):
        namespace = os.open(f"/var/run/netns/{self._namespace}", os.O_RDONLY)
        assert ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET) == 0  # of this thread alone
        os.close(namespace)
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) as ear:
            ear.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
            ear.settimeout(0.2)
            opened.set()
            while not self._is_over.is_set():
                try:
                    self.frames.append(ear.recv(65536))
                except TimeoutError:
                    continue

    def hears(self, text):
        return any(text in frame for frame in self.frames)

    def protocols(self):
        """The protocols of IP, and the ports of UDP, between the hosts."""
        packets = [frame[14:] for frame in self.frames if frame[12:14] == b"\x08\x00"]
        return {(packet[9], int.from_bytes(packet[22:24], "big") if packet[9] == socket.IPPROTO_UDP else 0)
                for packet in packets}  # fmt: skip


def send(bed, env=None):
    with Ear(bed) as ear:
        out = bed.run_ranks(RANK, num_ranks=2, timeout_s=100, env={"PYTHONPATH": str(REPOSITORY), **(env or {})})
    assert len(ear.frames) > 20
    return [line.split() for line in out], ear


@pytest.mark.long
def test_S10_who_hears_the_network_reads_what_ranks_send(hosts):
    with hosts(2) as bed:
        out, ear = send(bed)
        assert out == [["eth0", "64"]] * 2
        assert ear.hears(MARKER)
        assert {protocol for protocol, _ in ear.protocols()} == {socket.IPPROTO_TCP}


@pytest.mark.skipif(not pathlib.Path("/dev/net/tun").exists(), reason="no /dev/net/tun")
def test_S11_over_an_encrypted_interface_nobody_reads_what_ranks_send(hosts):
    key = secrets.token_hex(32)
    with hosts(2) as bed:
        ends = [host.address for host in bed.hosts]
        for number, host in enumerate(bed.hosts, 1):
            other = ends[2 - number]
            arguments = [host.address, other, f"10.9.0.{number}", key]
            tunnel = bed.popen(host, [sys.executable, "-m", "tests.hosts.tunnel", *arguments], cwd=REPOSITORY,
                               env={"PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE)  # fmt: skip
            assert tunnel.stdout.readline() == b"up\n"
        out, ear = send(bed, {"GLOO_SOCKET_IFNAME": "tun0", "MASTER_ADDR": "10.9.0.1"})
        assert out == [["tun0", "64"]] * 2
        assert not ear.hears(MARKER[:16])
        assert ear.protocols() == {(socket.IPPROTO_UDP, PORT)}
