"""From the addresses of Spark, and from local ranks, to torch's devices."""

import os
import re
import stat
from types import SimpleNamespace

import pytest
import torch

from spark_dl.launch.rank import gpus
from spark_dl.launch.rank.gpus import (
    Seen,
    device_indices,
    first,
    gpus_of_local_rank,
    gpus_of_task,
    listed_uuids,
    see_gpus,
)

GPU_3 = {"gpu": SimpleNamespace(addresses=["3"])}


def devices(*indices):
    return tuple(torch.device("cuda", index) for index in indices)


@pytest.fixture
def host(monkeypatch):
    """Makes this a host with these GPUs, as torch and CUDA_VISIBLE_DEVICES show them."""

    def pretend(uuids, visible=None, *, names=None):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = [
            SimpleNamespace(name=name, **({"uuid": uuid} if uuid else {}))
            for uuid, name in zip(uuids, names or ["NVIDIA A100"] * len(uuids), strict=True)
        ]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)

    yield pretend
    os.environ.pop("CUDA_DEVICE_ORDER", None)


@pytest.mark.parametrize(("wanted", "resources"), [("cpu", {}), ("auto", {}), ("cpu", GPU_3)])
def test_a_task_without_a_gpu_or_that_wants_none_uses_the_cpu(wanted, resources):
    assert gpus_of_task(wanted, resources) == ()
    assert first(()) == torch.device("cpu")


def test_B23_a_gpu_that_spark_did_not_give_is_an_error():
    with pytest.raises(RuntimeError, match="Spark gave this task no GPU"):
        gpus_of_task("cuda", {})


@pytest.mark.parametrize(("visible", "cuda", "why"), [
    (None, None, "it is built for CPUs; install torch for CUDA"),
    ("", "12.9", "CUDA_VISIBLE_DEVICES='' may hide it"),
    ("-1", "12.9", "CUDA_VISIBLE_DEVICES='-1' may hide it"),
    (None, "12.9", "look at the output of nvidia-smi"),
])  # fmt: skip
def test_a_gpu_that_torch_does_not_see_is_an_error_that_says_why(host, monkeypatch, visible, cuda, why):
    host([], visible)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(RuntimeError, match=rf"GPU 3, but torch .* finds no CUDA here: {re.escape(why)}"):
        gpus_of_task("auto", GPU_3)


def test_the_gpus_are_those_that_spark_gave_and_are_numbered_as_nvidia_smi_does(host):
    host(["a", "b", "c", "d"], "3,2,1,0")
    found = gpus_of_task("auto", {"gpu": SimpleNamespace(addresses=["3", "1"])})
    assert found == devices(0, 2)
    assert first(found) == found[0]
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_an_order_of_the_user_s_is_kept(host, monkeypatch):
    host(["a", "b"])
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert gpus_of_task("cuda", {"gpu": SimpleNamespace(addresses=["1"])}) == devices(1)
    assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_torch_s_uuids_have_the_prefix_of_nvidia_smi(host):
    host(["aaaa-1", "GPU-bbbb-2", None], "0,1,2")
    assert see_gpus() == Seen("0,1,2", ("GPU-aaaa-1", "GPU-bbbb-2", ""), False)
    host(["aaaa-1"], names=["NVIDIA A100-SXM4-40GB MIG 1g.5gb"])
    assert see_gpus() == Seen(None, ("GPU-aaaa-1",), True)


A, B, C, MIG = "GPU-aaaa-1", "GPU-bbbb-2", "GPU-cccc-3", "MIG-GPU-cc/1/0"


@pytest.mark.parametrize(("addresses", "visible", "count", "expected"), [
    (["0"], None, 1, [0]), (["3"], None, 8, [3]), (["2", "5"], None, 8, [2, 5]),  # all GPUs of the host are seen
    (["2"], "2,3", 2, [0]), (["3"], "2,3", 2, [1]), (["3", "2"], "2,3", 2, [1, 0]), (["0"], "1,0", 2, [1]),
    (["1"], " 3, 1 ,0", 3, [1]), (["3"], "2,3,99,1", 2, [1]),  # CUDA stops at a GPU that is not there
    (["3"], "2,3,-1,1", 2, [1]),
    (["3"], "3", 1, [0]), (["0"], "3", 1, [0]), (["3"], None, 1, [0]), (["2", "5"], None, 2, [0, 1]),  # only its own
    ([A], f"{B},{A}", 2, [1]), ([A], "GPU-bb,GPU-aa", 2, [1]), ([MIG], MIG, 1, [0]), ([MIG], None, 1, [0]),
    (["1"], f"{A},{B}", 2, [1]), ([A, B], None, 2, [0, 1]), ([A], "0", 1, [0]),
    (["3"], "", 8, [3]), (["3"], "0", 8, [3]), (["3"], "-1", 8, [3]),  # set when CUDA had started: it sees all of them
])  # fmt: skip
def test_an_address_becomes_the_index_that_torch_has_for_it_where_torch_knows_no_uuids(
    addresses, visible, count, expected
):
    assert device_indices(addresses, Seen(visible, ("",) * count)) == expected


@pytest.mark.parametrize("addresses", [[A], [B], [C], [C, A], [A.upper().replace("GPU", "GPU")]], ids=str)
@pytest.mark.parametrize("order", [(A, B, C), (C, A, B), (B, C, A)], ids=str)
@pytest.mark.parametrize(
    "visible", [None, "", "-1", "0", "0,1,2", "2,1,0", "5,7,1", f"{A},{B},{C}", "GPU-a,GPU-b,GPU-c"]
)
def test_a_uuid_is_found_whatever_cuda_visible_devices_says(addresses, order, visible):
    found = device_indices(addresses, Seen(visible, order))
    assert [order[index] for index in found] == [f"GPU-{a.lower().removeprefix('gpu-')}" for a in addresses]


def test_a_mig_instance_is_found_by_its_name_as_torch_can_report_the_uuid_of_the_whole_gpu():
    assert device_indices(["MIG-x"], Seen("MIG-x", (A,), True)) == [0]
    assert device_indices(["MIG-x"], Seen(None, ("MIG-x",), True)) == [0]
    assert device_indices(["MIG-x"], Seen(None, (A,), True)) == [0]  # CUDA shows a process one instance at most


@pytest.mark.parametrize(("addresses", "visible", "count"), [
    (["0"], "2,3", 2), (["2", "1"], "2,3,4", 3), (["5"], None, 2), ([A], None, 8), ([MIG], f"{A},{B}", 2),
    (["2"], f"{A},{B}", 2), ([A], "0,1", 2), (["0", "1"], "3", 1),
])  # fmt: skip
def test_B23_an_address_that_cannot_be_found_is_an_error_that_names_what_is_seen(addresses, visible, count):
    named = re.escape(f"{addresses}, and torch finds {count} with CUDA_VISIBLE_DEVICES={visible or '(not set)'};")
    with pytest.raises(RuntimeError, match=named):
        device_indices(addresses, Seen(visible, ("",) * count))


@pytest.mark.parametrize("address", [C, "GPU-aa"])
def test_one_gpu_that_is_seen_is_not_taken_for_one_with_another_uuid(address):
    with pytest.raises(RuntimeError, match=f"torch finds 1 .*: {A}; make"):
        device_indices([address], Seen(None, (A,)))


def test_a_uuid_that_is_not_seen_is_an_error_with_those_that_are():
    with pytest.raises(
        RuntimeError, match=rf"the GPUs \['{C}'\], and torch finds 2 with .*\(not set\): {A}, {B}; make"
    ):
        device_indices([C], Seen(None, (A, B)))


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A program that prints what nvidia-smi prints."""
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def write(body):
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(program.stat().st_mode | stat.S_IEXEC)

    return write


def test_numbers_beside_uuids_in_cuda_visible_devices_are_looked_up_with_nvidia_smi(host, nvidia_smi):
    nvidia_smi(f'[ "$1" = --query-gpu=index,uuid ] && printf "0, {A}\\n1, {B}\\n2, {C}\\n"')
    assert listed_uuids() == {"0": A, "1": B, "2": C}
    host([C.removeprefix("GPU-"), A.removeprefix("GPU-")], f"{C},{A}")
    assert gpus_of_task("auto", {"gpu": SimpleNamespace(addresses=["2"])}) == devices(0)
    assert gpus_of_task("auto", {"gpu": SimpleNamespace(addresses=["0"])}) == devices(1)
    with pytest.raises(RuntimeError, match=rf"\['{B}'\], and torch finds 2"):
        gpus_of_task("auto", {"gpu": SimpleNamespace(addresses=["1"])})


@pytest.mark.parametrize("body", ["exit 9", "echo 'no devices'"])
def test_an_nvidia_smi_that_fails_says_nothing(nvidia_smi, body):
    nvidia_smi(body)
    assert listed_uuids() == {}


def test_without_nvidia_smi_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert listed_uuids() == {}


@pytest.mark.parametrize(("local_rank", "ranks", "amount", "expected"), [
    (0, 1, "auto", [0, 1, 2, 3]), (0, 2, "auto", [0]), (2, 3, "auto", [2]),  # alone on its host: all of them
    (0, 1, 1, [0]), (1, 2, 2, [2, 3]), (0, 2, 2, [0, 1]), (3, 4, 1, [3]),
    (0, 8, 0.5, [0]), (1, 8, 0.5, [0]), (2, 8, 0.5, [1]), (7, 8, 0.5, [3]), (5, 6, 0.34, [2]), (1, 2, 0.75, [1]),
    (11, 12, 0.33, [3]), (0, 1, 0, []),
])  # fmt: skip
def test_without_spark_s_addresses_gpus_are_dealt_by_local_rank(host, local_rank, ranks, amount, expected):
    host(["a", "b", "c", "d"])
    assert gpus_of_local_rank("auto", local_rank, ranks, amount) == devices(*expected)
    assert gpus_of_local_rank("cpu", local_rank, ranks, amount) == ()


@pytest.mark.parametrize(("local_rank", "amount"), [(4, "auto"), (4, 1), (2, 2), (8, 0.5), (0, 8)])
def test_B23_too_few_gpus_for_the_ranks_of_a_host_is_an_error_that_says_how_to_share(host, local_rank, amount):
    host(["a", "b", "c", "d"])
    with pytest.raises(RuntimeError, match=rf"local rank {local_rank} has no GPU: this host has 4 .*gpus_per_rank="):
        gpus_of_local_rank("cuda", local_rank, 9, amount)


def test_B23_without_a_gpu_auto_is_the_cpu_and_cuda_is_an_error(host):
    host([])
    assert gpus_of_local_rank("auto", 0, 1) == ()
    with pytest.raises(RuntimeError, match="launch.device: found 'cuda', but torch .* finds no CUDA here"):
        gpus_of_local_rank("cuda", 0, 1)


def test_nothing_asks_for_gpus_that_a_rank_does_not_use(monkeypatch):
    monkeypatch.setattr(gpus, "see_gpus", lambda: pytest.fail("CUDA would start"))
    assert gpus_of_task("cpu", GPU_3) == ()
