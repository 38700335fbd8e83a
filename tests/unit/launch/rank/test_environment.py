"""The process of a rank: torchrun's variables, what a call leaves behind, and a rank that would train alone."""

import dataclasses
import io
import json
import multiprocessing
import multiprocessing.context
import os
import random
import socket
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spark_dl.launch.rank import environment
from spark_dl.launch.rank.environment import (
    check_own_gpus,
    find_place,
    first_step_checked,
    restored_process,
    torchrun_env,
)
from spark_dl.world import World

HOSTS = ("a", "a", "b")
"""Two ranks on one host and one on another."""


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def world_of(rank, store=None, hosts=HOSTS, device="cpu"):
    same = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    return World(
        rank=rank, world_size=len(hosts), local_rank=same.index(rank), local_world_size=len(same), host=hosts[rank],
        device=torch.device(device), store=store,
    )  # fmt: skip


def env_of(rank, store, **options):
    names = list(dict.fromkeys(HOSTS))
    return torchrun_env(
        world_of(rank, store, **options), group_rank=names.index(HOSTS[rank]), num_groups=len(names), run_id="id"
    )


def test_the_environment_has_every_variable_that_torchrun_sets(tmp_path, store):
    program = tmp_path / "print_env.py"
    program.write_text("import json, os; print(json.dumps(dict(os.environ)))")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(program)]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "OMP"))}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=plain, timeout=100)
    added = json.loads(done.stdout).keys() - plain.keys()
    not_needed = {"OMP_NUM_THREADS", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "LC_CTYPE"}
    assert added - not_needed <= env_of(0, store).keys()


def test_ranks_and_groups_are_right_for_unequal_hosts(store):
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE")
    found = [[env_of(rank, store)[name] for name in names] for rank in range(3)]
    assert found == [list("0020023"), list("1120023"), list("2011123")]
    assert {env_of(rank, store)["TORCHELASTIC_RUN_ID"] for rank in range(3)} == {"id"}


def test_accelerate_is_told_of_a_cpu_unless_the_user_has_said_something(store, monkeypatch):
    assert env_of(0, store)["ACCELERATE_USE_CPU"] == "true"
    assert "ACCELERATE_USE_CPU" not in env_of(0, store, device="cuda:0")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    assert env_of(0, store)["ACCELERATE_USE_CPU"] == "false"


def test_a_rank_on_the_cpu_sees_no_gpu(store):
    """A host may have some, which libraries would take."""
    assert env_of(0, store)["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in env_of(0, store, device="cuda:0")


def test_the_place_comes_from_the_environment_or_is_that_of_one_process(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert find_place() == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert find_place() == (2, 3)


LAUNCHERS = {
    "torchrun": {"RANK": "1", "WORLD_SIZE": "3"}, "horovodrun": {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "3"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, "MPICH": {"PMI_RANK": "1", "PMI_SIZE": "3"},
    "MVAPICH2": {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "3"},
    "srun": {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "6"},
    "srun without its step": {"SLURM_PROCID": "1", "SLURM_NTASKS": "3"},
}  # fmt: skip


@pytest.fixture
def alone(monkeypatch):
    for name in os.environ:
        if name in ("RANK", "WORLD_SIZE") or name.startswith(("HOROVOD_", "OMPI_", "PMI_", "MV2_", "SLURM_")):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_place_is_that_of_the_launcher(alone, launcher):
    for name, value in LAUNCHERS[launcher].items():
        alone.setenv(name, value)
    assert find_place() == (1, 3)


@pytest.mark.parametrize("env", [{}, {"WORLD_SIZE": "1"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}])
def test_a_process_without_a_rank_is_alone(alone, env):
    """A batch script of SLURM has the variables of its job, and no other task."""
    for name, value in env.items():
        alone.setenv(name, value)
    assert find_place() == (0, 1)


@pytest.mark.parametrize("found", [
    ("0", None), (None, "5"), ("3", "3"), ("-1", "3"), ("a", "3"), ("0", "0"), ("", "2"), ("0", ""), ("1.0", "2"),
])  # fmt: skip
@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")])
def test_variables_that_are_no_rank_are_an_error_that_names_them(alone, names, found):
    for name, value in zip(names, found, strict=True):
        if value is not None:
            alone.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{names[0]}={found[0]}, {names[1]}={found[1]}: expected the rank"):
        find_place()


def state():
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.zeros(1).device,
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": torch.backends.cudnn.benchmark,
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "path": list(sys.path),
        "argv": list(sys.argv),
        "filters": list(warnings.filters),
        "random": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
    }


def change_everything(folder):
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.autograd.set_detect_anomaly(True)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    os.environ["OF_A_RANK"] = "1"
    os.chdir(folder)
    sys.path.append("/of/a/rank")
    sys.argv.append("--of-a-rank")
    warnings.simplefilter("error")
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def test_nothing_that_a_call_changes_is_left_to_the_next_one(tmp_path):
    def fail_after_changes():
        with restored_process():
            change_everything(tmp_path)
            raise KeyError

    before = state()
    with pytest.raises(KeyError):
        fail_after_changes()
    assert state() == before


def test_the_next_call_gets_an_accelerate_that_has_found_no_ranks_yet():
    accelerate = pytest.importorskip("accelerate")
    with restored_process():
        accelerate.Accelerator(cpu=True)
    assert accelerate.state.PartialState._shared_state == {}


def step():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model.weight)


def test_a_step_without_a_process_group_is_an_error_before_it_changes_weights():
    alone = pytest.raises(RuntimeError, match=r"rank 1 of 3 takes an optimizer step without a process group")
    with first_step_checked(world_of(1)), alone:
        step()
    step()  # nothing is left


def test_a_single_rank_and_ranks_with_a_group_may_step(tmp_path):
    with first_step_checked(world_of(0, hosts=("a",))):
        step()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with first_step_checked(world_of(1)):
            step()
    finally:
        dist.destroy_process_group()


def test_both_checks_of_a_first_step_are_active_on_ranks_with_gpus_and_a_step_is_checked_once(tmp_path, monkeypatch):
    """Torch iterates over the hooks of an optimizer, which therefore must not remove themselves."""
    looked = []
    monkeypatch.setattr(environment, "check_own_gpus", lambda world, used: looked.append({d.type for d in used}))
    world = dataclasses.replace(world_of(1, device="cuda:0"), gpus=(torch.device("cuda", 0),))
    with pytest.raises(RuntimeError, match="would train alone"), first_step_checked(world):
        step()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    handle = register_optimizer_step_pre_hook(lambda *_: None)  # another one of the user's
    try:
        with first_step_checked(world):
            step()
            step()
        with first_step_checked(world, may_be_alone=True):
            step()
    finally:
        handle.remove()
        dist.destroy_process_group()
    assert looked == [{"cpu"}, {"cpu"}]


def test_the_compile_workers_of_inductor_end_with_the_call():
    from torch._inductor import async_compile, config

    with restored_process(), config.patch(compile_threads=2):
        pool = async_compile.AsyncCompile.process_pool()
        assert pool.submit(os.getpid).result(timeout=60) != os.getpid()
    pool.process.wait(timeout=10)


def test_a_step_on_the_gpu_of_another_rank_is_an_error_that_says_which_is_its_own():
    own = dataclasses.replace(world_of(1, device="cuda:3"), gpus=(torch.device("cuda", 3), torch.device("cuda", 2)))
    check_own_gpus(own, [torch.device("cuda", 3), torch.device("cuda", 2), torch.device("cpu")])
    with pytest.raises(RuntimeError, match=r"rank 1 trains on cuda:1, and its GPU is cuda:3, cuda:2; use torch.cuda"):
        check_own_gpus(own, [torch.device("cuda", 3), torch.device("cuda", 1)])


def test_the_device_of_a_step_is_looked_at_once_on_ranks_with_a_gpu_alone(monkeypatch):
    looked = []
    monkeypatch.setattr(environment, "check_own_gpus", lambda world, used: looked.append({d.type for d in used}))
    with_gpu = dataclasses.replace(world_of(0, device="cuda:0", hosts=("a",)), gpus=(torch.device("cuda", 0),))
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    for world in (world_of(0, hosts=("a",)), with_gpu):
        with first_step_checked(world):
            optimizer.step()
            optimizer.step()
    optimizer.step()
    assert looked == [{"cpu"}]


def leave_autocast():
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()


def leave_hook():
    nn.modules.module.register_module_forward_hook(lambda *_: None)


def leave_optimizer_hook():
    register_optimizer_step_pre_hook(lambda *_: None)


def leave_patch():
    original = torch.nn.functional.linear
    torch.nn.functional.linear = lambda *args: original(*args) * 2


def leave_method():
    nn.Module.train = lambda self, mode=True: self


def leave_timeout():
    socket.setdefaulttimeout(5)


def leave_start_method():
    multiprocessing.set_start_method("spawn")


def leave_stdout():
    sys.stdout = io.StringIO()
    sys.stdout.close()


def outcome():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(0.3)
        model.bias.fill_(0.1)
    model.train()
    return (
        model(torch.ones(1, 2)).tolist(), model.training, socket.getdefaulttimeout(), sys.stdout,
        multiprocessing.get_start_method(allow_none=True), len(nn.modules.module._global_forward_hooks),
    )  # fmt: skip


LEFT = [leave_autocast, leave_hook, leave_optimizer_hook, leave_patch, leave_method, leave_timeout, leave_start_method,
        leave_stdout]  # fmt: skip


@pytest.mark.parametrize("leave", LEFT, ids=lambda leave: leave.__name__)
def test_what_a_function_leaves_reaches_no_other_call_and_the_process_is_not_used_again(leave, monkeypatch):
    monkeypatch.setattr(environment, "_left", [])
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
    before = outcome()
    for _ in range(2):  # as a second call that does the same
        with restored_process():
            leave()
        assert outcome() == before
    assert not environment.is_clean()
    assert len(environment._left) == 2


def test_a_training_leaves_nothing(monkeypatch):
    monkeypatch.setattr(environment, "_left", [])
    with restored_process():
        step()
        torch.manual_seed(3)
        torch.set_num_threads(2)
    assert environment.is_clean(), environment._left


PLAIN_STATE = """
import sys
from spark_dl.launch.rank.environment import ProcessState
import torch

before = ProcessState()
assert "torch._dynamo" not in sys.modules
seed = torch.manual_seed
import torch._dynamo  # as an optimizer does, or a collective operation
assert torch.manual_seed is not seed
print(before.restore())

def patched(*args, wrapped=torch.manual_seed):
    return wrapped(*args)

patched.__module__ = torch.manual_seed.__module__
torch.manual_seed = patched
print(before.restore())
"""


def test_what_torch_replaces_in_itself_is_not_left_by_a_function():
    """Else no worker of a plain session would be used again, as its first call imports torch's compiler."""
    done = subprocess.run([sys.executable, "-c", PLAIN_STATE], capture_output=True, text=True, timeout=100)
    assert done.stdout.split("\n")[:2] == ["[]", "['torch.manual_seed']"], done.stderr
