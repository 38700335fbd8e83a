"""A rank that sends a known tensor to the others, in the way of a training: `python -m tests.hosts.send_job`."""

import torch
import torch.distributed as dist

from spark_dl import Launch
from spark_dl.launch.rank.rendezvous import join

MARKER = bytes(range(64, 80)) * 4
"""64 bytes of the tensor."""

if __name__ == "__main__":
    with join(Launch(num_ranks=2, device="cpu", start_timeout_s=60, collective_timeout_s=60)) as world:
        tensor = torch.frombuffer(bytearray(MARKER * 64), dtype=torch.uint8).clone()
        if world.rank:
            tensor.zero_()
        for _ in range(20):
            dist.broadcast(tensor, 0)
        print(world.interface, tensor.numpy().tobytes().count(MARKER))
