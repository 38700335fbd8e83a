"""The process of a rank: torchrun's environment in it, its place among the ranks, and its state after a call.

Spark reuses its Python workers, so a rank must leave the process as it found it: what is left would reach the next
call, such as an autocast that is still on, a patched function of torch, a default timeout of sockets. All of it is
looked at after a call and restored. A process in which something was left is not used again, as more may have been left
than anybody looks at (`task.py`).
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import logging
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spark_dl.launch.rank.store import RankStore
from spark_dl.world import World

_NAMESPACES = (
    "torch", "torch.nn.functional", "torch.nn.init", "torch.autograd", "torch.distributed", "torch.optim",
    "torch.utils.data", "numpy", "random", "socket", "time", "os", "builtins", "json", "pickle", "threading",
)  # fmt: skip
"""Modules whose functions are not replaced for good."""
_CLASSES: tuple[type, ...] = (
    torch.Tensor,
    nn.Module,
    nn.Linear,
    torch.optim.Optimizer,
    torch.optim.SGD,
    threading.Thread,
)
_NOT_OF_THE_USER = {"__builtins__", "__warningregistry__", "__file__", "__cached__"}
_HOOKS = (
    "_global_backward_hooks", "_global_backward_pre_hooks", "_global_forward_hooks", "_global_forward_pre_hooks",
    "_global_module_registration_hooks", "_global_buffer_registration_hooks", "_global_parameter_registration_hooks",
)  # fmt: skip
_missing = object()

_HARMLESS = ("sys.excepthook",)  # torch.distributed.init_process_group sets it, too

_log = logging.getLogger("spark_dl")

RANK_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Variables that each rank has its own value of, or that the ranks meet by."""

_READ_AT_START = (
    "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS",
    "TORCHDYNAMO_", "TORCHINDUCTOR_",
)  # fmt: skip
_READ_AGAIN = ("OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR")

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable with the number of failed attempts before this one, as torchrun has it."""

_RUN = ("SPARK_DL_RUN_DIR", "SPARK_DL_GENERATION", "SPARK_DL_CHECKPOINT")
"""Variables of a rank of `launch` with a run folder: the folder, the attempt, and its checkpoint to resume from."""

_PLACES = (
    ("RANK", "WORLD_SIZE"),  # torchrun, and spark_dl
    ("HOROVOD_RANK", "HOROVOD_SIZE"),  # horovodrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # mpirun of Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH and Intel MPI
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH2
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun; SLURM_NTASKS is also that of a batch script, which is alone
)
"""Variables of launchers: the rank, and the number of ranks."""

_left: list[str] = []
"""What functions have left in this process."""

_TORCH_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)
_TORCH_FLAGS: tuple[tuple[Any, str], ...] = (
    (torch.backends.cudnn, "enabled"),
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn, "allow_tf32"),
)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Lets torch use only operations that give the same bits each time, in the block (`train.deterministic`)."""
    cudnn = torch.backends.cudnn
    before = torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it at each call of cuBLAS
    try:
        torch.set_deterministic_debug_mode("error")
        cudnn.deterministic, cudnn.benchmark = True, False
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        cudnn.deterministic, cudnn.benchmark = before[1:]


class ProcessState:
    """The state of this process at one moment."""

    def __init__(self) -> None:
        modules = [sys.modules[name] for name in _NAMESPACES if name in sys.modules]
        self._namespaces: list[tuple[str, Any, dict[str, Any]]] = [
            *((module.__name__, module, dict(vars(module))) for module in modules),
            *((cls.__qualname__, cls, dict(vars(cls))) for cls in _CLASSES),
        ]
        self._hooks = [(name, hooks, dict(hooks)) for name, hooks in _global_hooks()]
        self._values = {name: get() for name, (get, _) in _VALUES.items()}
        self._stacks = _stacks()

    def restore(self) -> list[str]:
        """Restores all that can be restored. Returns what had changed, in words."""
        changed = []
        for name, get_set in _VALUES.items():
            get, put = get_set
            before = self._values[name]
            if get() is not before and get() != before:
                changed += [] if name in _HARMLESS else [name]
                if put is not None:
                    with contextlib.suppress(Exception):  # a name is reported all the same
                        put(before)
        for name, owner, before_of in self._namespaces:
            changed += [f"{name}.{key}" for key in _put_back(owner, before_of)]
        for name, hooks, before_of in self._hooks:
            if dict(hooks) != before_of:
                changed.append(f"hooks for all modules or optimizers ({name.strip('_')})")
                hooks.clear()
                hooks.update(before_of)
        if _stacks() != self._stacks:
            changed.append("a mode of torch (torch.overrides, torch.utils._python_dispatch) that was not left")
        if changed:
            torch.clear_autocast_cache()
        return changed


def _put_back(owner: Any, before: dict[str, Any]) -> list[str]:
    """Restores the functions and classes of a module or class. Returns the names of those that were replaced."""
    restored, now = [], dict(vars(owner))
    for key, value in before.items():
        if key in _NOT_OF_THE_USER or now.get(key, _missing) is value:
            continue
        if not (callable(value) or isinstance(value, (property, staticmethod, classmethod))):
            continue  # plain values, which modules keep for themselves
        if _is_by_itself(now.get(key), owner):
            continue
        restored.append(key)
        setattr(owner, key, value)
    return restored


def _is_by_itself(value: Any, owner: Any) -> bool:
    """Whether the package of a module or class has replaced a function, as torch does when it imports its compiler.

    What counts is the file of the code: a wrapper has the module of what it wraps.
    """
    package = sys.modules.get(getattr(owner, "__module__", owner.__name__).partition(".")[0])
    code = getattr(value, "__code__", None)
    return code is not None and any(
        code.co_filename.startswith(f"{folder}/") for folder in getattr(package, "__path__", ())
    )


def _global_hooks() -> list[tuple[str, Any]]:
    modules, optimizers = nn.modules.module, importlib.import_module("torch.optim.optimizer")
    hooks = [(name, getattr(modules, name)) for name in _HOOKS if hasattr(modules, name)]
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    return [*hooks, *((name, getattr(optimizers, name)) for name in names if hasattr(optimizers, name))]


def _stacks() -> tuple[Any, ...]:
    overrides, dispatch = torch.overrides, importlib.import_module("torch.utils._python_dispatch")
    lengths = (
        getattr(overrides, "_len_torch_function_stack", None),
        getattr(dispatch, "_len_torch_dispatch_stack", None),
    )
    saved = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", None)
    return tuple(length() for length in lengths if length is not None), saved() if saved else None


def _start_method() -> str | None:
    return multiprocessing.get_start_method(allow_none=True)


def _set_start_method(method: str | None) -> None:
    multiprocessing.set_start_method(method, force=True)


def _set_stream(name: str) -> Callable[[Any], None]:
    return lambda stream: setattr(sys, name, stream)


def _autocast(device: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: torch.is_autocast_enabled(device), lambda value: torch.set_autocast_enabled(device, value)


def _autocast_dtype(device: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: torch.get_autocast_dtype(device), lambda value: torch.set_autocast_dtype(device, value)


def _set_errors(found: Any) -> None:
    np.seterr(**found)


_VALUES: dict[str, tuple[Callable[[], Any], Callable[[Any], None] | None]] = {
    "autocast on CPUs (torch.autocast)": _autocast("cpu"),
    "autocast on GPUs (torch.autocast)": _autocast("cuda"),
    "the dtype of autocast on CPUs": _autocast_dtype("cpu"),
    "the dtype of autocast on GPUs": _autocast_dtype("cuda"),
    "the cache of autocast": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "inference mode": (torch.is_inference_mode_enabled, None),
    "the default timeout of sockets (socket.setdefaulttimeout)": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    "the start method of multiprocessing": (_start_method, _set_start_method),
    "torch.set_num_interop_threads": (torch.get_num_interop_threads, None),
    "sys.stdout": (lambda: sys.stdout, _set_stream("stdout")),
    "sys.stderr": (lambda: sys.stderr, _set_stream("stderr")),
    "sys.stdin": (lambda: sys.stdin, _set_stream("stdin")),
    "sys.excepthook": (lambda: sys.excepthook, _set_stream("excepthook")),
    "threading.excepthook": (lambda: threading.excepthook, lambda hook: setattr(threading, "excepthook", hook)),
    "the handler of SIGTERM": (lambda: signal.getsignal(signal.SIGTERM), None),
    "np.seterr": (np.geterr, _set_errors),
    "the print options of torch": (lambda: vars(torch._tensor_str.PRINT_OPTS).copy(), None),
}
"""What is compared after a call: how to read it, and how to set it; None where it cannot be set, or need not be."""


def check_env(env: Mapping[str, str]) -> None:
    """Raises ValueError for environment variables of the user that ranks cannot get. Called on the driver."""
    if not isinstance(env, Mapping):
        raise ValueError(f"env: expected a mapping of names to values, found {env!r:.200}")
    for name, value in env.items():
        if name in RANK_VARIABLES:
            raise ValueError(f"env: {name} is set by spark_dl on each rank; remove it")
        if not isinstance(name, str) or not isinstance(value, str):
            raise ValueError(f"env: expected names and values of type str, found {name!r}: {value!r}")


def warn_of_late(env: Mapping[str, str]) -> None:
    """Logs a warning for variables of a function that are read when Python, or torch, starts. Called on the driver."""
    if early := [name for name in env if name.startswith(_READ_AT_START) and name not in _READ_AGAIN]:
        _log.warning(
            "env: %s: read when Python or torch starts, which is before the call; set spark.executorEnv.%s, or run a "
            "program, launch('train.py', env=...)", ", ".join(early), early[0],
        )  # fmt: skip


def torchrun_env(world: World, *, group_rank: int, num_groups: int, run_id: str) -> dict[str, str]:
    """Returns the variables that torchrun would set. With them `init_process_group()` joins the existing store.

    A group is the ranks of one host, as torchrun's agent is. Hosts can have different numbers of ranks.
    """
    store = world.store
    assert isinstance(store, (dist.TCPStore, RankStore))
    env = {
        **place_env(world, group_rank=group_rank, num_groups=num_groups),
        "ROLE_NAME": "default",
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        RESTARTS: os.environ.get(RESTARTS, "0"),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if world.device.type == "cpu":
        # Without it, Accelerate and the Trainer of transformers take a rank on a CPU for a process of its own.
        env["ACCELERATE_USE_CPU"] = os.environ.get("ACCELERATE_USE_CPU", "true")
        env["CUDA_VISIBLE_DEVICES"] = ""  # GPUs of the host are not this rank's
    return env


def place_env(world: World, *, group_rank: int, num_groups: int) -> dict[str, str]:
    """Returns the variables of torchrun for the place of a rank among the others."""
    rank, world_size = str(world.rank), str(world.world_size)
    return {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_world_size),
        "GROUP_RANK": str(group_rank),
        "GROUP_WORLD_SIZE": str(num_groups),
        "NODE_RANK": str(group_rank),  # not torchrun's, but read by libraries for the same
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
    }


def run_env(run_dir: str, generation: int, checkpoint: str) -> dict[str, str]:
    """Returns the variables for `find_run`. checkpoint: URL; empty without one. Called on the driver."""
    return dict(zip(_RUN, (run_dir, str(generation), checkpoint), strict=True))


def find_run() -> tuple[str, int, str] | None:
    """Returns the run folder, the generation of this attempt, and the URL of its checkpoint or an empty string.

    None if the ranks have no run folder.
    """
    run_dir, generation, checkpoint = (os.environ.get(name, "") for name in _RUN)
    return (run_dir, int(generation), checkpoint) if run_dir else None


def find_place() -> tuple[int, int]:
    """Returns (rank, world size): of the process group, else of the environment of a launcher, else (0, 1).

    Raises ValueError for variables that are no rank and number of ranks.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    for names in _PLACES:
        values = [os.environ.get(name) for name in names]
        is_srun = names[0].startswith("SLURM")
        if values == [None, None] or (is_srun and values[1] is None and values[0] == "0"):
            continue
        if is_srun and values[1] is None:
            names = (names[0], "SLURM_NTASKS")
            values[1] = os.environ.get(names[1])
        if values == [None, "1"]:
            return 0, 1
        number = [int(text) if text and re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) else -1 for text in values]
        if not 0 <= number[0] < number[1]:
            raise ValueError(
                f"{names[0]}={values[0]}, {names[1]}={values[1]}: expected the rank of this process, from 0 on, and "
                "the number of ranks; a launcher such as torchrun, horovodrun, mpirun or srun sets both; remove them "
                "for a process that is alone"
            )
        return number[0], number[1]
    return 0, 1


@contextlib.contextmanager
def applied(env: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables in the block, and what torch has made of them when it was imported."""
    before, threads = dict(os.environ), torch.get_num_threads()
    os.environ.update(env)
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    dist.set_debug_level_from_env()  # TORCH_DISTRIBUTED_DEBUG
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.set_num_threads(threads)
        dist.set_debug_level_from_env()


@contextlib.contextmanager
def restored_process() -> Iterator[None]:
    """Restores the process after the block: environment, working folder, import path, torch's global settings.

    Random number generators continue where they were before the block. What else was changed is restored as far as that
    is possible (`ProcessState`), and `is_clean` then says that the process is not to be used again.
    """
    _let_torch_hear_of_data_workers()
    before = ProcessState()
    env, cwd, path, argv = dict(os.environ), os.getcwd(), list(sys.path), list(sys.argv)
    settings = [(setter, getter()) for getter, setter in _TORCH_SETTINGS]
    device = torch.get_default_device()
    flags = [(flags, name, getattr(flags, name)) for flags, name in _TORCH_FLAGS]
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.environ.clear()
        os.environ.update(env)
        sys.path[:], sys.argv[:] = path, argv
        with contextlib.suppress(OSError):  # the folder was deleted
            os.chdir(cwd)
        for setter, value in settings:
            setter(value)
        torch.set_default_device(None if device.type == "cpu" else device)
        for flags_of, name, value in flags:
            if getattr(flags_of, name) != value:
                setattr(flags_of, name, value)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.set_rng_state(generators[2])
        _reset_accelerate()
        _forget_meshes()
        _end_compile_workers()
        if left := before.restore():  # after the settings above, which it also sees
            _left.extend(left)
            _log.info("this process is not used again, as a function has changed %s in it", ", ".join(left[:8]))


def is_clean() -> bool:
    """Whether nothing was left in this process by a function, as far as is known."""
    return not _left


def _let_torch_hear_of_data_workers() -> None:
    """Lets PyTorch's DataLoader set its handler of SIGCHLD once more, if Spark has removed it.

    NOTE: Spark does so before each task, and PyTorch remembers only that it has set it. Without it, PyTorch notices
    after five seconds that a data worker has ended, and does not say by which signal.
    """
    module = sys.modules.get("torch.utils.data._utils.signal_handling")
    if module is not None and signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL:
        vars(module)["_SIGCHLD_handler_set"] = False


def _forget_meshes() -> None:
    """Forgets the meshes of torch's DTensor.

    NOTE: it keeps the results of operations with their mesh, and takes meshes of the same ranks for equal. In the next
    call this process can have another rank, and the mesh that was kept has the old one: parameters of `fully_shard`
    then have the wrong place (seen with torch 2.13, as `nn.Parameter` detaches its DTensor).
    """
    api = sys.modules.get("torch.distributed.tensor")
    if api is None:
        return
    debug = importlib.import_module("torch.distributed.tensor.debug")
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:  # of older versions
        propagate = api.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        clear = getattr(propagate, "cache_clear", None) or propagate.cache.cache_clear
    clear()


def _end_compile_workers() -> None:
    """Ends the processes in which inductor compiles, which otherwise live as long as this process does.

    They are there after a model was compiled. The next one starts new ones, and finds its kernels in the cache on disk.
    """
    module = sys.modules.get("torch._inductor.async_compile")
    if module is not None:
        module.shutdown_compile_workers()


def _reset_accelerate() -> None:
    """Forgets the process group that Accelerate has found; it is kept in a variable of the library."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@contextlib.contextmanager
def own_groups(world: World, timeout_s: float) -> Iterator[None]:
    """Gives each `init_process_group()` of the block its own keys in the store, and a time limit by default.

    Without keys of its own, a second process group reads the addresses of the first one and fails to connect: torch
    takes the store of an agent for a new one each time. All ranks must create their groups in the same order.

    Args:
        timeout_s: the limit of a collective operation, if the call does not set one; torch's default is 10 or 30
            minutes.
    """
    limits = ("default_pg_timeout", "default_pg_nccl_timeout")
    torch_limits = {name: getattr(distributed_c10d, name) for name in limits if hasattr(distributed_c10d, name)}
    for name in torch_limits:
        setattr(distributed_c10d, name, datetime.timedelta(seconds=timeout_s))
    # Not an import statement: torch.distributed has a function with the name of this module.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    original, count = handlers["env"], 0

    def open_store(url: str, timeout: datetime.timedelta, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
        nonlocal count
        env = os.environ
        if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # a store of the user's own
            yield from original(url, timeout, **kwargs)
            return
        count += 1
        client = world.store
        if isinstance(client, dist.TCPStore):  # one client serves one thread at a time
            client = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), None, False, timeout)
        yield dist.PrefixStore(f"group {count}", client), int(env["RANK"]), int(env["WORLD_SIZE"])

    handlers["env"] = open_store
    try:
        yield
    finally:
        handlers["env"] = original
        for name, limit in torch_limits.items():
            setattr(distributed_c10d, name, limit)


@contextlib.contextmanager
def first_step_checked(world: World, *, may_be_alone: bool = False) -> Iterator[None]:
    """Makes the first optimizer step in the block an error if it has no process group, or a GPU of another rank.

    Without a process group, a rank trains alone: no gradient of another rank reaches it, and nobody notices. Programs
    for torchrun use the GPU with the index `LOCAL_RANK`, which can be one of another application.

    Args:
        may_be_alone: whether a step without a process group is meant (`launch.independent_ranks`).
    """
    looks_alone = world.world_size > 1 and not may_be_alone
    if not (looks_alone or world.gpus):
        yield
        return
    is_checked = False

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # NOTE: the hook stays until the block ends. Torch iterates over the hooks while it calls them, so a hook that
        # removes itself is an error as soon as there is a second one, of whomever.
        nonlocal is_checked
        if is_checked:
            return
        is_checked = True
        if looks_alone and (reason := _why_alone()):
            raise RuntimeError(
                f"rank {world.rank} of {world.world_size} takes an optimizer step {reason}, so it would train alone; "
                "call torch.distributed.init_process_group() and wrap the model in DistributedDataParallel (Lightning: "
                "Trainer(devices=..., num_nodes=...) whose product is WORLD_SIZE; transformers and Accelerate: leave "
                "ACCELERATE_USE_CPU as it is); if each rank shall train a model of its own, set "
                "launch.independent_ranks to true"
            )
        if world.gpus:
            check_own_gpus(world, {p.device for group in optimizer.param_groups for p in group["params"]})

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def check_own_gpus(world: World, used: Iterable[torch.device]) -> None:
    """Raises RuntimeError if one of the devices is a GPU that is not this rank's."""
    for device in used:
        if device.type == "cuda" and device not in world.gpus:
            raise RuntimeError(
                f"rank {world.rank} trains on {device}, and its GPU is {', '.join(map(str, world.gpus))}; use "
                "torch.cuda.current_device() instead of LOCAL_RANK, or run the program as a script, in which the GPU "
                "of a rank has the index LOCAL_RANK"
            )


def _why_alone() -> str:
    """Returns why a rank trains alone; empty if it has a process group."""
    horovod, accelerate = sys.modules.get("horovod.torch"), sys.modules.get("accelerate.state")
    if accelerate is not None and accelerate.PartialState._shared_state.get("num_processes") == 1:
        return "with an Accelerate that has found one process"  # though it has created a process group
    if dist.is_initialized() or (horovod is not None and horovod.is_initialized()):
        return ""
    return "without a process group"
