"""The benchmark of a GPU, small: that it runs on the device and counts what it says."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.peers import gpt, gpu
from tests.spark.conftest import REPOSITORY

LOOPS = {"loader": ("spark_dl", "on_device"), "worker": ("worker", "bare"), "gpt": ("worker", "bare"),
         "mlp": ("worker", "bare"), "mesh": ("zero3", "ddp"), "predict": ("spark_dl", "bare"),
         "nccl": ("ddp", "single"), "layout": ("fast", "float32")}  # fmt: skip


def run(device, *arguments):
    small = (
        "--batch-size", "16", "--steps", "3", "--image-size", "32", "--repeats", "1", "--gpt-rows", "2",
        "--gpt-blocks", "1", "--gpt-width", "64", "--mlp-rows", "64", "--mlp-steps", "20", "--device", device,
    )  # fmt: skip
    command = [sys.executable, "jobs/bench.py", "gpu", *small, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
def test_each_part_measures_two_loops_in_turn(device):
    compiled = () if device == "cuda" else ("--no-compile",)  # a compiled ResNet-50 takes minutes on a few cores
    result = run(device, *compiled)
    assert result.pop("device") == (torch.cuda.get_device_name() if device == "cuda" else "cpu")
    assert result.pop("torch") == torch.__version__
    assert result.keys() == LOOPS.keys()
    for part, (ours, other) in LOOPS.items():
        measured = result[part]
        if part in ("gpt", "mesh"):
            rates, mfu = measured.pop("tokens_per_s"), measured.pop("mfu")
            assert rates == {name: pytest.approx(512 * measured[name]) for name in (ours, other)}
            assert mfu.keys() == rates.keys()
        assert measured.keys() == {ours, other, "ratio", "ratios"}
        assert min(measured[ours], measured[other]) > 0
        assert measured["ratios"] == [pytest.approx(measured[ours] / measured[other])] == [measured["ratio"]]


@pytest.mark.parametrize(("options", "message"), [
    ({"parts": ("loader", "disk")}, "--parts: expected some of loader, worker, gpt, .*, found disk"),
    ({"steps": 1}, "--steps: expected at least 2"),
])  # fmt: skip
def test_what_cannot_be_measured_is_an_error_that_names_the_argument(options, message):
    with pytest.raises(ValueError, match=message):
        gpu.measure(gpu.Options(device="cpu", **options))


def test_without_a_gpu_the_error_says_how_to_try_the_command(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"--device: found no GPU that torch can use; `--device cpu` tries"):
        gpu.measure(gpu.Options())


def test_the_gpt_has_124_million_parameters_and_its_flops_are_those_of_the_formula():
    assert sum(p.numel() for p in gpt.build_gpt(12, 768).parameters()) == 124_046_592
    weights = 12 * (12 * 768**2 + 13 * 768) + 2 * 768 + gpt.VOCABULARY * 768  # of blocks, the last norm, the head
    assert gpt.flops_per_token(12, 768) == 6 * weights + 12 * 12 * 768 * 512
