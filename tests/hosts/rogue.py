"""A program on a host of no rank, which tries what it can at ports of others: `python -m tests.hosts.rogue JSON`.

The JSON is {"ports": [[address, port], ...], "anywhere": [address, port]}; so is the output, on one line.
"""

import json
import pickle
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

CANARY = pickle.dumps(print)
SENT = {
    "silence": b"",
    "http": b"PUT /runfunc/func HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(CANARY) + CANARY,
    "2 GiB": struct.pack("!I", 0x7FFFFFFF) + bytes(4096),
    "zeros": bytes(64),
    "a pair of Gloo": struct.pack("<q", 1) + bytes(64),
    "a query of TCPStore": b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x02" + struct.pack("<Q", 7) + b"weights",
}


def attempt(address, port, name):
    """How a try ended: dropped (no answer to the first packet), refused, closed, or still open; and what was said."""
    try:
        client = socket.create_connection((address, port), 3)
    except TimeoutError:
        return ["dropped", ""]
    except OSError as error:
        return ["refused", str(error)]
    try:
        with client:
            client.settimeout(8)
            client.sendall(SENT[name])
            said = b""
            while part := client.recv(1 << 16):
                said += part
            return ["closed", said.decode("latin1")]
    except TimeoutError:
        return ["open", ""]
    except OSError as error:
        return ["closed", str(error)]


def outside(address, port):
    """Why nothing outside the bed is reached."""
    try:
        socket.create_connection((address, port), 3).close()
    except OSError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    tries = [(address, port, name) for address, port in asked["ports"] for name in SENT]
    with ThreadPoolExecutor(len(tries) or 1) as pool:
        ends = list(pool.map(lambda each: attempt(*each), tries))
    print(json.dumps({"tries": [[*each, *end] for each, end in zip(tries, ends, strict=True)],
                      "outside": outside(*asked["anywhere"])}))  # fmt: skip
