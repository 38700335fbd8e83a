"""Backends of a user's own process groups: what is there passes, what is not is an error that lists the others."""

import pytest
import torch
import torch.distributed as dist

from spark_dl.launch import backends
from spark_dl.launch.backends import available, check_backend, checked_backends


@pytest.fixture
def has(monkeypatch):
    """Sets which of torch's backends this process has."""

    def choose(*names):
        monkeypatch.setattr(backends, "_OF_TORCH", {name: lambda n=name: n in names for name in backends._OF_TORCH})

    return choose


@pytest.mark.parametrize("backend", ["gloo", "GLOO", None, "cpu:gloo", "cpu:gloo,cuda:nccl", dist.Backend("gloo")])
def test_B24_backends_that_are_there_pass(has, backend):
    has("gloo", "nccl")
    check_backend(backend)


@pytest.mark.parametrize(("backend", "name"), [("mpi", "mpi"), ("cpu:gloo,cuda:nccl", "nccl"), ("glooo", "glooo")])
def test_B24_a_backend_that_is_not_there_names_those_that_are(has, backend, name):
    has("gloo", "ucc")
    with pytest.raises(
        ValueError, match=rf"^init_process_group: found the backend '{name}', expected one of gloo, ucc: "
    ):
        check_backend(backend)


def test_a_backend_of_another_package_is_there(has, monkeypatch):
    has("gloo")
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "theirs"])
    check_backend("theirs")
    assert available() == ["gloo", "theirs"]


def test_the_function_of_torch_is_as_before_after_the_block():
    before = dist.init_process_group
    with pytest.raises(ValueError, match="found the backend 'none'"), checked_backends():
        torch.distributed.init_process_group("none")
    assert dist.init_process_group is before is dist.distributed_c10d.init_process_group
