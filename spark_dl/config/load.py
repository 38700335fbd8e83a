"""Reads settings from YAML files and dotted overrides (`--train.lr=0.1`).

Files and overrides are layers: each sets values of keys, and the last one of a key counts. All of them together say
`parallel.strategy`, which defines the settings of `parallel`.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import docstring_parser
import yaml

from spark_dl.config import Config, strategies
from spark_dl.config.checks import SettingError, check, suggestion
from spark_dl.config.fields import fields_of_caller
from spark_dl.config.kinds import SECTION, describe, fitted, hints_of, options_of
from spark_dl.config.parallel import Parallel

_MOST_VALUES = 1_000_000
"""Values of a settings file: more than a vocabulary in it has."""

Layer = Mapping[str, Any]
"""Values by key: those of a section (`train: {lr: 1}`), or of one setting (`train.lr: 1`). A `Text` is not read yet."""


class Text(str):
    """A value as it was written on a command line. YAML reads it, unless its setting can be any text."""


class _Loader(yaml.SafeLoader):
    """YAML that takes `1e-3` for a number, as JSON and Python do."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.[\d_]+)([eE][-+]?\d+)$"),
    list("-+0123456789."),
)


def sections(strategy: str = strategies.DEFAULT) -> dict[str, type]:
    """Returns the dataclass of each section by its name in `Config`. Raises ValueError for an unknown strategy."""
    by_name: dict[str, type] = {}
    for name, hint in typing.get_type_hints(Config).items():
        (by_name[name],) = (option for option in options_of(hint) if option is not types.NoneType)
    return {**by_name, "parallel": strategies.find(strategy).settings}


def config_keys(strategy: str = strategies.DEFAULT) -> list[str]:
    """Returns all dotted keys, such as `train.lr`."""
    keys = [f"{name}.{f.name}" for name, section in sections(strategy).items() for f in dataclasses.fields(section)]
    return [*keys, "parallel.strategy"]


def build_config(plain: Mapping[str, Any]) -> Config:
    """Builds a `Config` from nested dicts, such as those of a YAML file. Missing keys have their defaults.

    Raises ValueError for an unknown key, with the closest known key, and for an invalid value.
    """
    parallel = plain.get("parallel", {})
    strategy = parallel.get("strategy", strategies.DEFAULT) if isinstance(parallel, Mapping) else strategies.DEFAULT
    known = sections(strategy)
    built: dict[str, Any] = {}
    for name, values in plain.items():
        if name not in known:
            raise SettingError(str(name), f"unknown config key {name!r}{suggestion(str(name), list(known))}")
        if name == "sequences" and values is None:
            continue
        check(isinstance(values, Mapping), name, SECTION, values)
        own = {key: value for key, value in values.items() if (name, key) != ("parallel", "strategy")}
        fields = {f.name: f for f in dataclasses.fields(known[name])}
        for key in own:
            if key not in fields:
                raise _unknown_key(f"{name}.{key}", strategy, config_keys(strategy))
        for key, field in fields.items():
            if key not in own and _is_required(field):
                kind = describe(hints_of(known)[f"{name}.{key}"])
                raise SettingError(f"{name}.{key}", f"expected {kind}, found nothing")
        built[name] = known[name](**own)
    return Config(**built)


def as_read(plain: Mapping[str, Any]) -> Config:
    """Builds the `Config` of a checkpoint, which need not be the caller's: how rows are read and what is computed.

    Where rows and files are written, and what is connected to, the caller says: fields of `of_caller` have defaults.
    Raises ValueError as `build_config` does.
    """
    config = build_config(plain)
    kept: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        section = getattr(config, field.name)
        if section is not None:
            callers_fields = set(fields_of_caller(type(section)))
            values = {
                f.name: getattr(section, f.name) for f in dataclasses.fields(section) if f.name not in callers_fields
            }
            kept[field.name] = type(section)(**values)
    return Config(**kept)


def with_settings(plain: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts for `build_config`: those of a `Config`, with other values by key, such as `train.lr`.

    Another `parallel.strategy` has its own settings, and none of the old strategy. Raises ValueError for a key without
    a section.
    """
    changed = dict(plain)
    strategy = settings.get("parallel.strategy", plain["parallel"]["strategy"])
    if strategy != plain["parallel"]["strategy"]:
        changed["parallel"] = {"strategy": strategy}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if section not in changed or not name:
            raise ValueError(f"settings: expected keys such as 'train.lr', found {key!r}")
        changed[section] = {**(changed[section] or {}), name: value}
    return changed


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def load_config(path: str | Path | None = None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """Reads a YAML file and applies dotted overrides, `["train.lr=0.1"]` or `{"train.lr": 0.1}`.

    The sections `input` and `model` of a file for `spark-dl` are left to that command.
    Raises ValueError for an unknown key, with the closest known key, and for an invalid value.

    Example:
        >>> spark_dl.load_config(overrides={"train.lr": 0.1}).train.lr
    """
    layers: list[Layer] = [] if path is None else [
        {key: value for key, value in read_file(path).items() if key not in ("input", "model")}
    ]  # fmt: skip
    if isinstance(overrides, Mapping):
        layers += [{key: _as_written(value)} for key, value in overrides.items()]
    else:
        layers += [layer_of(override) for override in overrides]
    return build_layers(layers)[0]


def _as_written(value: Any) -> Any:
    # In a mapping, "null" is a text where a text can be; "0.1" is a number where a number must be.
    return _Word(value) if isinstance(value, str) else value


class _Word(Text):
    """A string of Python, which is a value of a setting that can be any text, also "null"."""


def layer_of(override: str) -> Layer:
    """Returns the layer of `train.lr=0.1`. Raises ValueError without a value."""
    key, equals, value = override.partition("=")
    if not equals:
        raise SettingError(key, f"expected a value, as in {key}=..., found nothing")
    return {key: Text(value)}


def read_file(path: str | Path) -> Layer:
    """Returns the layer of a YAML file. Raises ValueError for a file that cannot be read, and for keys in it twice."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"config: cannot read {path}: {error}") from error
    try:
        check_keys_once(path, text)
        plain = _read_yaml(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"config: {path} is not YAML: {error}") from error
    check(plain is None or isinstance(plain, dict), "config", f"sections with settings in {path}", plain)
    return plain or {}


def _read_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader


def build_layers(layers: Iterable[Layer], more: Mapping[str, Any] | None = None) -> tuple[Config, dict[str, Any]]:
    """Returns the settings of layers, and the values of other keys that the layers have.

    Args:
        more: types of the other keys, and dataclasses of other sections. Raises ValueError as `load_config` does.
    """
    layers, more = list(layers), more or {}
    strategy = _strategy_of(layers)
    known: dict[str, Any] = {**sections(strategy), **more}
    of_sections: dict[str, Any] = {name: hint for name, hint in known.items() if dataclasses.is_dataclass(hint)}
    hints = {**known, **hints_of(of_sections)}
    hints["parallel.strategy"] = str
    found: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            _apply(found, str(key), value, hints, strategy)
    config_values = {name: found.pop(name) for name in [*found] if name not in more}
    config_values.setdefault("parallel", {})["strategy"] = strategy
    return build_config(config_values), found


def _apply(found: dict[str, Any], key: str, value: Any, hints: Mapping[str, Any], strategy: str) -> None:
    section, _, name = key.partition(".")
    if key not in hints:
        raise _unknown_key(key, strategy, [k for k, hint in hints.items() if "." in k or not _is(hint)])
    if name:
        if found.get(section) is None:
            found[section] = {}
        found[section][name] = _value_of(key, value, hints[key])
    elif _is(hints[key]):
        value = read_text(value) if isinstance(value, Text) else value
        if value is None and key == "sequences":
            found[key] = None
            return
        check(isinstance(value, Mapping), key, SECTION, value)
        found.setdefault(key, {})
        for inner, part in value.items():
            _apply(found, f"{key}.{inner}", part, hints, strategy)
    else:
        found[key] = _value_of(key, value, hints[key])


def _is(hint: Any) -> bool:
    """Whether a type is that of a section."""
    return dataclasses.is_dataclass(hint)


def _value_of(key: str, value: Any, hint: Any) -> Any:
    if isinstance(value, Text):
        options = options_of(hint)
        if str not in options:
            value = read_text(value)
        elif value in ("null", "~") and types.NoneType in options and not isinstance(value, _Word):
            value = None
        else:
            value = str(value)
    if key == "parallel.strategy":
        return value
    try:
        return fitted(hint, value)
    except (ValueError, OverflowError):
        raise SettingError(key, f"expected {describe(hint)}, found {value!r}") from None


def read_text(text: str) -> Any:
    """Returns the value of a text as YAML reads it, or the text itself if it is no YAML."""
    try:
        return _read_yaml(text)
    except (ValueError, yaml.YAMLError, RecursionError):
        return str(text)


def _strategy_of(layers: Iterable[Layer]) -> Any:
    """Returns `parallel.strategy`: the last one counts."""
    strategy: Any = strategies.DEFAULT
    for layer in layers:
        for key, value in layer.items():
            if key == "parallel.strategy":
                strategy = str(value) if isinstance(value, Text) else value
            elif key == "parallel":
                value = read_text(value) if isinstance(value, Text) else value
                strategy = value.get("strategy", strategy) if isinstance(value, Mapping) else strategy
    return strategy


def check_keys_once(path: str | Path, text: str) -> None:
    """Raises ValueError for a key or a section that a YAML file has twice, of which YAML would keep the last one.

    And for aliases of aliases, by which a small file stands for more values than fit into the memory.
    """
    values = 0

    def walk(node: yaml.Node, above: str) -> None:
        nonlocal values
        values += 1
        if values > _MOST_VALUES:
            raise ValueError(f"{path}: found more than {_MOST_VALUES:,} values with its aliases (*name); use fewer")
        lines: dict[str, int] = {}
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            name = f"{above}{key.value}"
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and name in lines:
                raise ValueError(
                    f"{path}: the key {name!r} is in line {lines[name]} and in line {line}; expected each key once, "
                    "so merge the two"
                )
            lines[name] = line
            walk(value, f"{name}.")
        for inner in node.value if isinstance(node, yaml.SequenceNode) else ():
            walk(inner, above)

    root = yaml.compose(text, yaml.SafeLoader)
    if root is not None:
        walk(root, "")


def _unknown_key(key: str, strategy: str, known: Sequence[str]) -> SettingError:
    section, _, name = key.partition(".")
    if section == "parallel" and (having := _strategies_with(name)):
        return SettingError(
            key, f"not a setting of parallel.strategy={strategy!r}, but of {' and '.join(having)}; remove it, or "
            "choose another strategy",
        )  # fmt: skip
    nearest = suggestion(key, known)
    if key.count(".") == 0 and "mean" not in nearest:
        nearest = suggestion(key, sorted({k.split(".")[0] for k in known}))
    return SettingError(key, f"unknown config key {key!r}{nearest}")


def _strategies_with(name: str) -> list[str]:
    """Returns the names of the strategies that have a setting, except strategies that cannot be loaded."""
    return [n for n, settings in _settings() if isinstance(settings, type) and name in _names(settings)]


def _names(section: type) -> set[str]:
    return {f.name for f in dataclasses.fields(section)}


def _settings() -> Iterator[tuple[str, type[Parallel] | ValueError]]:
    """Yields the name of each strategy, with its settings or with the error of loading it."""
    for name in strategies.names():
        try:
            yield name, strategies.find(name).settings
        except ValueError as error:
            yield name, error


def describe_settings() -> str:
    """Returns the settings of `sequences` and of all strategies, one per line, for `--help`."""
    lines = ["settings of sequences (optional):", "", *_lines_of("sequences", sections()["sequences"])]
    lines += ["", "settings of parallel, by strategy:"]
    for name, settings in _settings():
        if isinstance(settings, ValueError):
            lines += ["", f"  {name}: {settings}"]
        else:
            lines += ["", f"  {name}: {_first_sentence(settings.__doc__)}", *_lines_of("parallel", settings)]
    return "\n".join(lines)


def described(section: type) -> Iterator[tuple[str, str, str]]:
    """Yields the name of each setting, its default in words, and its meaning."""
    meanings = {
        p.arg_name: " ".join((p.description or "").split()) for p in docstring_parser.parse_from_object(section).params
    }
    for field in dataclasses.fields(section):
        default = "required" if _is_required(field) else f"default: {_default(field)!r}"
        yield field.name, default, meanings.get(field.name, "")


def _lines_of(name: str, section: type) -> list[str]:
    return [
        f"    --{name}.{field} ({default})  {_first_sentence(meaning)}".rstrip()
        for field, default, meaning in described(section)
    ]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _first_sentence(text: str | None) -> str:
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join((text or "").split()))[0]
