"""What listens on a host, as the kernel says it: /proc/PID/net of a process there, and whose sockets these are."""

import contextlib
import ipaddress
import os
import pathlib

_LISTEN = "0A"


def is_python(pid):
    with contextlib.suppress(OSError):
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    return False


def listening(pids):
    """The processes that listen, each with address and port: {(pid, address, port)}. All are in one namespace."""
    owners = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    owners.setdefault(os.readlink(descriptor.path), []).append(pid)
    found = set()
    for name in ("tcp", "tcp6"):
        for pid in pids:
            with contextlib.suppress(OSError):
                lines = pathlib.Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
                break
        else:
            continue
        for line in lines:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = line.split()
            if state == _LISTEN:
                for owner in owners.get(f"socket:[{line.split()[9]}]", ()):
                    found.add((owner, *_address_of(local)))
    return found


def _address_of(local):
    """The address and port of `0100007F:1F90`: words of four bytes, each in the order of the machine."""
    address, port = local.split(":")
    words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)
