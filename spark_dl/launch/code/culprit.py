"""Finds the part of a call that cannot be pickled, and names it as in the user's code."""

from __future__ import annotations

import collections
import functools
import inspect
import io
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_MAX_VISITED = 200
_OPAQUE = {"pyspark", "py4j", "threading", "queue", "concurrent", "multiprocessing", "asyncio", "socket", "_io"}
"""Packages whose objects are named as a whole. Their internal attributes would not help the user."""
_SUSPENDED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
"""Objects that are named as a whole, too: their frames contain objects that cannot be pickled."""
_NOT_PICKLED = {"__dict__", "__weakref__", "_abc_impl", "__builtins__"}
"""Attributes of classes and modules that pickling leaves out."""
_ON_DRIVER = (
    ", which exists on the driver only; pass the values that the ranks need as arguments (numbers, strings, arrays), "
    "and a DataFrame as the data of spark_dl.train or spark_dl.run_on_dataframe"
)
_BUILD_INSIDE = "; build it inside the function (or in spec.build), which runs on the ranks"

_CACHED = type(functools.cache(len))


@dataclass(frozen=True)
class _Place:
    """The place of an object: an expression, and the function whose variable the expression begins with."""

    root: str
    """The argument that contains the object."""
    expression: str
    of: str = ""

    def __str__(self) -> str:
        return f"the variable `{self.expression}` of {self.of}" if self.of else f"`{self.expression}`"

    def item(self, suffix: str) -> _Place:
        return _Place(self.root, self.expression + suffix, self.of)

    def variable(self, name: str) -> _Place:
        return _Place(self.root, name, str(self))

    def of_class(self, name: str) -> _Place:
        return _Place(self.root, name)


def dumps(value: Any) -> bytes:
    """Pickles an object with Spark's cloudpickle. Raises the errors of parts that cannot be pickled."""
    out = io.BytesIO()
    _pickler()(out).dump(value)
    return out.getvalue()


def _cached(function: Any, maxsize: int | None, typed: bool) -> Any:
    """Returns a function with a cache of its own, which is empty (`functools.lru_cache`). Called on a rank."""
    return functools.lru_cache(maxsize, typed)(function)


@functools.cache
def _pickler() -> Any:
    from pyspark import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, _CACHED) and getattr(value, "__module__", None) == "__main__":
                # By name, it would be looked for in the main module of a rank, which is another one.
                options = value.cache_parameters()
                return _cached, (value.__wrapped__, options["maxsize"], options["typed"])
            # Spark Connect pickles a session as its id, which is not valid on an executor.
            if type(value).__module__ == "pyspark.sql.connect.session" and type(value).__name__ == "SparkSession":
                raise TypeError("a SparkSession cannot be pickled")
            return super().reducer_override(value)

    return Pickler


def describe_culprit(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Returns a sentence with the innermost part of a call that cannot be pickled, its type, and what to change.

    Called on the driver, after `dumps` has failed. Searches breadth first: variables and default values of functions,
    attributes, items, and members of classes that are pickled with their code.
    """
    roots = [("function", fn), *_named_arguments(fn, args), *kwargs.items()]
    queue = collections.deque((_Place(name, name), value) for name, value in roots if _error_of(value) is not None)
    seen = {id(value) for _, value in queue}
    for _ in range(_MAX_VISITED):
        if not queue:
            break
        place, value = queue.popleft()
        failing = [(where, part) for where, part in _parts(place, value) if _error_of(part) is not None]
        if not failing:
            return _sentence(place, value)
        queue.extend((where, part) for where, part in failing if id(part) not in seen)
        seen.update(id(part) for _, part in failing)
    return f"the function or its arguments cannot be sent to the ranks{_BUILD_INSIDE}"


def _sentence(place: _Place, value: Any) -> str:
    kind = type(value)
    subject = "it" if str(place) == f"`{place.root}`" else str(place)
    if kind.__module__.split(".")[0] in ("pyspark", "py4j"):
        return f"{place.root} cannot be sent to the ranks: {subject} is a {kind.__name__}{_ON_DRIVER}"
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{place.root} cannot be sent to the ranks: {subject} is a {name} ({_error_of(value)}){_BUILD_INSIDE}"


def _named_arguments(fn: Any, args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Returns the positional arguments with the names of their parameters."""
    try:
        return list(inspect.signature(fn).bind_partial(*args).arguments.items())
    except (TypeError, ValueError):  # not a Python function, or one that does not take them
        return [(f"args[{i}]", value) for i, value in enumerate(args)]


def _error_of(value: Any) -> Exception | None:
    """Returns the error of pickling an object; None if it can be pickled."""
    try:
        dumps(value)
    except Exception as error:
        return error
    return None


def _parts(place: _Place, value: Any) -> Iterator[tuple[_Place, Any]]:
    """Yields the parts that are pickled with an object. Skips dynamic attributes: py4j objects have any."""
    if isinstance(value, dict):
        yield from ((place.item(f"[{key!r}]"), part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        yield from ((place.item(f"[{i}]"), part) for i, part in enumerate(value))
    elif isinstance(value, types.FunctionType):
        yield from ((place.variable(name), part) for name, part in _variables(value))
        yield from _attributes(place, vars(value))
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        yield place.item(".__self__"), value.__self__
        if isinstance(value, types.MethodType):
            yield place, value.__func__
    elif isinstance(value, functools.partial):
        yield place.item(".func"), value.func
        yield from ((place.item(f".args[{i}]"), part) for i, part in enumerate(value.args))
        yield from ((place.item(f".keywords[{name!r}]"), part) for name, part in value.keywords.items())
    elif isinstance(value, (staticmethod, classmethod)):
        yield place, value.__func__
    elif isinstance(value, property):
        yield from ((place, part) for part in (value.fget, value.fset, value.fdel))
    elif isinstance(value, type):
        yield from _attributes(place.of_class(value.__qualname__.rpartition(".")[2]), vars(value))
        yield from ((place.of_class(base.__name__), base) for base in value.__bases__)
    elif not isinstance(value, _SUSPENDED) and type(value).__module__.split(".")[0] not in _OPAQUE:
        yield from _attributes(place, getattr(value, "__dict__", {}))
        slots = [
            n for c in type(value).__mro__ for n, s in vars(c).items() if isinstance(s, types.MemberDescriptorType)
        ]
        yield from _attributes(place, {name: getattr(value, name) for name in slots if hasattr(value, name)})
        if not isinstance(value, types.ModuleType):
            yield place.of_class(type(value).__name__), type(value)


def _attributes(place: _Place, values: Mapping[str, Any]) -> Iterator[tuple[_Place, Any]]:
    yield from ((place.item(f".{name}"), part) for name, part in values.items() if name not in _NOT_PICKLED)


def _variables(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yields closure cells, defaults and globals of a function that is pickled with its code."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # an empty cell
            yield name, cell.cell_contents
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    names = sorted({name for inner in _codes(code) for name in inner.co_names})
    yield from ((name, function.__globals__[name]) for name in names if name in function.__globals__)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields the code of a function and of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
