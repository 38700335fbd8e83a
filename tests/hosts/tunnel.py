"""An encrypted network interface between two hosts of a testbed: `python -m tests.hosts.tunnel`. A small WireGuard.

Packets of the interface `tun0` travel in UDP, with AES-GCM. Arguments: the host's address, that of the other one, the
address of `tun0`, and the key.
"""

import fcntl
import os
import selectors
import socket
import struct
import subprocess
import sys

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PORT, MTU = 51820, 1300
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def main(own, other, address, key):
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", b"tun0", _IFF_TUN | _IFF_NO_PI))
    for command in (f"address add {address}/24 dev tun0", f"link set dev tun0 mtu {MTU} up"):
        subprocess.run(["ip", *command.split()], check=True)
    cipher, link = AESGCM(bytes.fromhex(key)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    link.bind((own, PORT))
    print("up", flush=True)
    with selectors.DefaultSelector() as ready:
        ready.register(tun, selectors.EVENT_READ)
        ready.register(link, selectors.EVENT_READ)
        while True:
            for found, _ in ready.select():
                if found.fileobj is link:
                    packet = link.recv(65536)
                    try:
                        os.write(tun, cipher.decrypt(packet[:12], packet[12:], None))
                    except (InvalidTag, ValueError):  # not of the other host
                        continue
                else:
                    nonce = os.urandom(12)
                    link.sendto(nonce + cipher.encrypt(nonce, os.read(tun, 65536), None), (other, PORT))


if __name__ == "__main__":
    main(*sys.argv[1:])
