"""What a run begins with: weights of another run or program (`train.init_from`), checksums of the user's code.

By the checksums a resumed run notices that the code of a `ModelSpec` has changed.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spark_dl import storage
from spark_dl.config import Config
from spark_dl.data.columns.schema import Column, check_reference_columns
from spark_dl.rundir import checkpoint, signing
from spark_dl.rundir.checkpoint import Saved, load_into, load_weights
from spark_dl.rundir.checkpoint_files import MANIFEST
from spark_dl.spec import FUNCTIONS, ModelSpec, Run

if TYPE_CHECKING:
    from spark_dl.rundir.foreign import ForeignWeights  # which most runs need not load

_log = logging.getLogger("spark_dl")
_PYTHON = "python"
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))


@dataclass(frozen=True)
class InitialWeights:
    """A `ModelSpec.build` that loads weights and buffers from files into the model. Called on every rank."""

    build: Callable[[], nn.Module]
    source: Saved | ForeignWeights
    """The checkpoint, which was checked before, or the files of another program."""

    @property
    def index_url(self) -> str:
        """The file that says where the weights are."""
        source = self.source
        return storage.join(source.url, MANIFEST) if isinstance(source, Saved) else source.files[0]

    def __call__(self) -> nn.Module:
        """Builds the model with the weights. Raises as `load_into` does, and for a damaged checkpoint."""
        return self.load_into(self.build())

    def load_into(self, model: nn.Module) -> nn.Module:
        """Returns the model with the weights."""
        if isinstance(model, nn.Module):  # another type is reported by the caller
            try:
                weights, frozen = self._read(model)
                load_into(model, weights, f"the weights of {self.source.url}", same_dtypes=True, frozen=frozen)
            except ValueError as error:
                raise ValueError(
                    f"train.init_from: {error}; build the same model, or leave out train.init_from and load the parts "
                    "that fit in spec.build"
                ) from None
        return model

    def _read(self, model: nn.Module) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        if isinstance(self.source, Saved):
            saved = checkpoint.open_checkpoint(self.source.url, sha256=self.source.sha256)
            return load_weights(saved), saved.frozen
        from spark_dl.rundir.foreign import fill_tied

        return fill_tied(model, self.source.read()), {}


def begin(
    spec: ModelSpec | None, config: Config, saved: checkpoint.Saved | None, run_dir: str, *, overwrite: bool
) -> tuple[ModelSpec | None, Sequence[Column]]:
    """Returns the spec with the weights of `train.init_from`, and the columns that the model was trained on before.

    Called on the driver. spec: None for trials, each of which has its own; their ranks load the weights (`for_rank`).

    Args:
        saved: the checkpoint that the run resumes from, which replaces these weights, or None.

    Raises:
        ValueError: If the checkpoint is missing or damaged, if its weights are those of another model, or if
            `overwrite` would delete it.
    """
    if saved is not None:
        return spec, saved.columns
    if config.train.init_from is None:
        return spec, ()
    source = _find(config.train.init_from, config)
    columns: Sequence[Column] = ()
    if isinstance(source, Saved):
        columns = source.columns
        signing.warn_if_ignored(source.url, source.manifest, config.checkpoint.signing_key_file)
        if overwrite and checkpoint.run_dir_of(source) == run_dir:
            raise ValueError(
                f"train.init_from: {source.url} is a checkpoint of the run_dir, which overwrite deletes; use another "
                "run_dir"
            )
    if spec is None:
        return None, columns
    weights = InitialWeights(spec.build, source)
    _check_fits(weights)
    return dataclasses.replace(spec, build=weights), columns


def for_rank(run: Run) -> Run:
    """Returns the run with what the settings do to the model of `spec.build`: `train.activation_checkpointing`,
    `train.precision: bf16`, and the weights of `train.init_from`, if no driver has prepared it, as under torchrun."""
    url, build = run.config.train.init_from, run.spec.build
    if url is not None and run.checkpoint is None and not isinstance(build, InitialWeights):
        source = _find(url, run.config)
        if run.train.columns and isinstance(source, Saved):
            check_reference_columns(run.train.select(run.config.data.columns), source.columns)
        build = InitialWeights(build, source)
    if run.config.train.precision == "bf16" and run.config.parallel.has_master_weights:
        from spark_dl.parallel.low_precision import InBfloat16  # which most runs need not load

        build = InBfloat16(build)
    if run.config.train.activation_checkpointing:
        from spark_dl.parallel.recompute import Recomputed

        build = Recomputed(build, run.config.train.activation_checkpointing)
    return run if build is run.spec.build else dataclasses.replace(run, spec=dataclasses.replace(run.spec, build=build))


def _find(url: str, config: Config) -> Saved | ForeignWeights:
    key_file = config.checkpoint.signing_key_file
    try:
        try:
            return checkpoint.find(url, only_weights=True, key_file=key_file)
        except checkpoint.NoCheckpointError as error:
            from spark_dl.rundir import foreign

            found = foreign.find(url)
            if found is None:
                raise ValueError(f"{error}, safetensors, a folder of Hugging Face or of torch's DCP") from None
        if key_file is not None:
            raise ValueError(
                f"{found.url} has no signature, which checkpoint.signing_key_file asks for; begin with a checkpoint, "
                "or load these weights in spec.build"
            )
        return found
    except ValueError as error:
        raise ValueError(f"train.init_from: {error}") from error


def _check_fits(weights: InitialWeights) -> None:
    """Raises ValueError if the weights are those of another model, before ranks start.

    Other errors of `build` are left to the ranks, which may have packages and devices that the driver lacks.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            model = weights.build()
        except Exception:
            return
        weights.load_into(model)


def code_of(spec: ModelSpec) -> dict[str, str]:
    """Returns a checksum of each function of a spec, by its name, and the version of Python. Called on the driver.

    A checksum is of the function itself, its plain default arguments and variables, and the methods of its class. The
    functions that it calls, and the modules of other files, are not looked at. Comments and positions do not count.
    """
    parts = {name: getattr(spec, name) for name in (*FUNCTIONS, "loss")}
    parts |= {f"metrics.{name}": metric for name, metric in spec.metrics.items()}
    code = {f"spec.{name}": _checksum(part) for name, part in parts.items() if part is not None}
    return {**code, _PYTHON: ".".join(map(str, sys.version_info[:2]))}


def warn_of_changes(before: Mapping[str, str] | None, now: Mapping[str, str], url: str) -> None:
    """Logs a warning with the functions that have changed since a checkpoint was saved. Called on the driver.

    Args:
        before: None for a checkpoint that has none. Another version of Python compiles to other code.
    """
    if before is None or before.get(_PYTHON) != now[_PYTHON]:
        return
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed:
        _log.warning(
            "the code or the variables of %s have changed since the checkpoint %s was saved; the run goes on with the "
            "new ones, so its weights are not those of one run with either", ", ".join(changed), url,
        )  # fmt: skip


def _checksum(part: Any) -> str:
    return hashlib.sha256("\n".join(_lines(part, 0, set())).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _lines(value: Any, depth: int, seen: set[int]) -> Iterator[str]:
    """Yields texts that are the same in each process for the same code and plain data. # seen: objects so far"""
    if not isinstance(value, _PLAIN):
        if id(value) in seen:
            return
        seen.add(id(value))
    if depth > 8 or isinstance(value, _PLAIN):
        yield repr(value) if isinstance(value, _PLAIN) else type(value).__name__
    elif isinstance(value, functools.partial):
        parts: tuple[Any, ...] = (value.func, value.args, value.keywords)
        for part in parts:
            yield from _lines(part, depth + 1, seen)
    elif isinstance(value, types.MethodType):
        yield from _lines(value.__func__, depth + 1, seen)
        yield from _lines(vars(value.__self__) if hasattr(value.__self__, "__dict__") else None, depth + 1, seen)
    elif isinstance(value, types.FunctionType):
        yield from _lines_of_code(value.__code__, depth)
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell is not None and _is_set(cell)]
        parts = (value.__defaults__, value.__kwdefaults__, cells)
        for part in parts:
            yield from _lines(part, depth + 1, seen)
    elif isinstance(value, (list, tuple)):
        yield type(value).__name__
        for part in value:
            yield from _lines(part, depth + 1, seen)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield repr(key) if isinstance(key, _PLAIN) else type(key).__name__
            yield from _lines(value[key], depth + 1, seen)
    elif isinstance(value, nn.Module):
        yield from _lines_of_class(type(value), depth)
        yield repr(value)  # the settings of its layers, without weights
    elif isinstance(value, type):
        yield from _lines_of_class(value, depth)
    else:
        yield from _lines_of_class(type(value), depth)
        yield from _lines(getattr(value, "__dict__", None), depth + 1, seen)


def _lines_of_class(cls: type, depth: int) -> Iterator[str]:
    yield f"{cls.__module__}.{cls.__qualname__}"
    for name, member in sorted(vars(cls).items()):
        function = getattr(member, "__func__", member)
        if isinstance(function, types.FunctionType):
            yield name
            yield from _lines_of_code(function.__code__, depth + 1)


def _lines_of_code(code: types.CodeType, depth: int) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, code.co_kwonlyargcount))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _lines_of_code(constant, depth + 1)
        elif isinstance(constant, frozenset):  # its order differs between processes
            yield repr(sorted(map(repr, constant)))
        else:
            yield repr(constant)


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that has no value yet
        return False
