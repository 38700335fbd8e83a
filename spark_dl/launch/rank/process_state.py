"""What a user's function can leave in the process of a rank, beside the settings that are always restored.

Spark uses a Python worker again, so that what is left would reach the next call: an autocast that is still on, a
patched function of torch, a default timeout of sockets. All of it is looked at after a call and restored. A process in
which something was left is not used again, as more may have been left than anybody looks at (`task.py`).
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

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
    found, now = [], dict(vars(owner))
    for key, value in before.items():
        if key in _NOT_OF_THE_USER or now.get(key, _missing) is value:
            continue
        if not (callable(value) or isinstance(value, (property, staticmethod, classmethod))):
            continue  # plain values, which modules keep for themselves
        if _is_by_itself(now.get(key), owner):
            continue
        found.append(key)
        setattr(owner, key, value)
    return found


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
    found = [(name, getattr(modules, name)) for name in _HOOKS if hasattr(modules, name)]
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    return [*found, *((name, getattr(optimizers, name)) for name in names if hasattr(optimizers, name))]


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
_HARMLESS = ("sys.excepthook",)  # torch.distributed.init_process_group sets it, too
