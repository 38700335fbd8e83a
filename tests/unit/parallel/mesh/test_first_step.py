"""Whether a rank has the memory that the check of the first step needs."""

import subprocess
import sys

import torch

from spark_dl.parallel.mesh.mesh import has_memory

LIMITED = """
import resource, torch
from spark_dl.parallel.mesh.mesh import has_memory
(now,) = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData:")]
resource.setrlimit(resource.RLIMIT_DATA, (now + (256 << 20), resource.RLIM_INFINITY))
print(has_memory(64 << 20, torch.device("cpu")), has_memory(512 << 20, torch.device("cpu")))
"""


def test_a_limit_of_the_process_counts():
    assert has_memory(512 << 20, torch.device("cpu"))
    found = subprocess.check_output([sys.executable, "-c", LIMITED], text=True, timeout=60)
    assert found.split() == ["True", "False"]
