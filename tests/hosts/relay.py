"""Passes frames between two interfaces, and treats them as a bad network does: loses, delays and reorders some of them.

`python -m tests.hosts.relay A B LOSS DELAY_S`: LOSS is the probability that a frame is lost. The delay of each frame is
drawn from 0 to DELAY_S, so that frames overtake each other. Prints "ready", and at the end of its input how many frames
were passed, lost and overtaken. For kernels without `tc netem`.
"""

import heapq
import itertools
import json
import random
import select
import socket
import sys
import time

_ALL_PROTOCOLS = 3
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_OUTGOING = 263, 15, 4
_LARGEST = 1 << 17


def open_interface(name):
    """With a header for each frame, of which the checksum, or the cuts of a large frame, is left to the next sender."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    sock.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    sock.bind((name, 0))
    sock.setblocking(False)
    return sock


def main(a, b, loss, delay_s):
    ends = [open_interface(a), open_interface(b)]
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    draw, number, waiting = random.Random(0), itertools.count(), []
    counts = {"passed": 0, "lost": 0, "overtaken": 0}
    last_sent, by_id = dict.fromkeys(ends, -1), {id(sock): sock for sock in ends}
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([*ends, sys.stdin], [], [], wait_s)
        if sys.stdin in ready:
            break
        for sock in ready:
            frame, about = sock.recvfrom(_LARGEST)
            if about[2] == _PACKET_OUTGOING:  # sent by this program
                continue
            if draw.random() < loss:
                counts["lost"] += 1
            else:
                due = time.monotonic() + draw.random() * delay_s
                heapq.heappush(waiting, (due, next(number), id(other[sock]), frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, sequence, at, frame = heapq.heappop(waiting)
            sock = by_id[at]
            try:
                sock.send(frame)
            except OSError:  # the queue of the interface is full, or it is down
                counts["lost"] += 1
                continue
            counts["passed"] += 1
            counts["overtaken"] += sequence < last_sent[sock]
            last_sent[sock] = max(last_sent[sock], sequence)
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
