"""The device of these tests: a GPU, or the CPU in its place with `make test-gpu DEVICE=cpu`."""

import os

import pytest

# A process that is forked from one that has started CUDA cannot use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch


@pytest.fixture(scope="session")
def device():
    """`cuda` or `cpu`, as in `launch.device`. Skips if there is no GPU and nobody asked for the CPU."""
    wanted = os.environ.get("SPARK_DL_TEST_DEVICE", "")
    assert wanted in ("", "cpu", "cuda"), f"DEVICE: expected cpu or cuda, found {wanted!r}"
    if wanted == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        if wanted:
            pytest.fail("DEVICE=cuda, and torch finds no GPU")
        pytest.skip("torch finds no GPU; `make test-gpu DEVICE=cpu` runs these tests on the CPU")
    return "cuda"


@pytest.fixture
def gpu(device):
    """Skips tests for which a CPU cannot stand in."""
    if device == "cpu":
        pytest.skip("there is nothing to see on a CPU")
