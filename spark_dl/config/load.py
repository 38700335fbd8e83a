"""Reads settings from YAML files and dotted command-line overrides (`--train.lr=0.1`), with jsonargparse.

Parsing has two passes: the first finds `parallel.strategy`, which defines the fields of `parallel` in the second.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import docstring_parser
import jsonargparse
import yaml

from spark_dl.config import Config, strategies
from spark_dl.config.checks import check, suggestion
from spark_dl.config.fields import fields_of_caller
from spark_dl.config.kinds import SECTION, explain_value, hints_of
from spark_dl.config.parallel import Parallel

_MOST_VALUES = 1_000_000
"""Values of a settings file: more than a vocabulary in it has."""

_MODE = "spark_dl"


def sections(strategy: str = strategies.DEFAULT) -> dict[str, type]:
    """Returns the dataclass of each section by its name in `Config`. Raises ValueError for an unknown strategy."""
    found: dict[str, type] = {}
    for name, hint in typing.get_type_hints(Config).items():
        options = [t for t in typing.get_args(hint) if t is not types.NoneType]
        found[name] = options[0] if options else hint
    return {**found, "parallel": strategies.find(strategy).settings}


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
            raise ValueError(f"unknown config key {name!r}{suggestion(str(name), list(known))}")
        if name == "sequences" and values is None:
            continue
        check(isinstance(values, Mapping), name, SECTION, values)
        own = {key: value for key, value in values.items() if (name, key) != ("parallel", "strategy")}
        fields = {f.name: f for f in dataclasses.fields(known[name])}
        for key in own:
            if key not in fields:
                raise ValueError(_unknown_key(f"{name}.{key}", strategy, config_keys(strategy)))
        for key, field in fields.items():
            check(key in own or not _is_required(field), f"{name}.{key}", "a value, as there is no default", None)
        built[name] = known[name](**own)
    return Config(**built)


def as_read(plain: Mapping[str, Any]) -> Config:
    """Builds the `Config` of a checkpoint, which need not be the caller's: how rows are read and what is computed.

    Where rows and files are written, and what is connected to, the caller says: fields of `of_caller` have defaults.
    Raises ValueError as `build_config` does.
    """
    found = build_config(plain)
    kept: dict[str, Any] = {}
    for field in dataclasses.fields(found):
        section = getattr(found, field.name)
        if section is not None:
            own = set(fields_of_caller(type(section)))
            values = {f.name: getattr(section, f.name) for f in dataclasses.fields(section) if f.name not in own}
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

    Raises ValueError for an unknown key, with the closest known key, and for an invalid value.
    """
    pairs = overrides.items() if isinstance(overrides, Mapping) else [o.partition("=")[::2] for o in overrides]
    args = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in pairs]
    args = args if path is None else [f"--config={path}", *args]
    parser = SettingsParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config")
    # On a command line, null is no value; in a mapping, "null" is a text.
    texts = {key: value for key, value in pairs if isinstance(overrides, Mapping) and isinstance(value, str)}
    return parse_config(parser, args, texts=texts)[0]


def parse_config(
    parser: jsonargparse.ArgumentParser,
    args: Sequence[str],
    more_hints: Mapping[str, Any] | None = None,
    *,
    texts: Mapping[str, str] | None = None,
) -> tuple[Config, dict[str, Any]]:
    """Adds all settings to a parser that has `--config`, and parses. Returns the settings and all parsed values.

    more_hints: types of the other arguments of the parser, for messages. texts: values of settings that can be any
    text, which are not read as YAML. Raises ValueError as `load_config` does.
    """
    parser.parser_mode = _MODE
    for path in _config_files(args):
        check_keys_once(path)
    strategy = strategy_of(args)
    known = sections(strategy)
    parser.add_argument("--parallel.strategy", default=strategy, help=f"one of {', '.join(strategies.names())}")
    for name, section in known.items():
        if name == "sequences":
            parser.add_argument("--sequences", type=section | None, default=None, help="null if each row is a sample")
        else:
            parser.add_class_arguments(section, name)
    try:
        parsed = _plain(parser.parse_args(list(args)).as_dict())
    except jsonargparse.ArgumentError as error:
        raise ValueError(_explain(str(error), strategy, {**hints_of(known), **(more_hints or {})})) from None
    for key in _keys_of_text(strategy) & (texts or {}).keys():
        of_section, _, of_setting = key.partition(".")
        parsed[of_section][of_setting] = (texts or {})[key]
    return build_config({name: values for name, values in parsed.items() if name in known}), parsed


class _Text(str):
    """A string of YAML that stays what it is."""


class SettingsParser(jsonargparse.ArgumentParser):
    """A parser whose `--print_config` writes strings of Python's own type."""

    def dump(self, namespace: jsonargparse.Namespace, *args: Any, **kwargs: Any) -> str:
        plain = namespace.clone()
        for key, value in namespace.items():
            plain[key] = _plain(value)
        return str(super().dump(plain, *args, **kwargs))


def _read_yaml(text: str) -> Any:
    """Reads YAML as jsonargparse does, which would read strings in it once more: `"0123"` would be a number.

    It looks at the exact type of a value, so that a string of another type stays as it is. Values of settings that are
    numbers, such as `lr`, stay of Python's own type, which its checks of numbers expect.
    """
    value = jsonargparse.get_loader("yaml")(text)
    if not isinstance(value, dict) or not {*value} & {*Config.__dataclass_fields__}:
        is_word = value is None and text.strip()[:1] in ("#", "&")  # of a command line: no comment, and no anchor
        return _Text(text) if is_word else _marked(value, depth=0)
    parallel = value.get("parallel")
    strategy = parallel.get("strategy") if isinstance(parallel, dict) else None
    of_text = _keys_of_text(strategy if strategy in strategies.names() else strategies.DEFAULT)
    return {section: _marked_section(section, settings, of_text) for section, settings in value.items()}


def _marked_section(section: str, settings: Any, of_text: Collection[str]) -> Any:
    if not isinstance(settings, dict):
        return _marked(settings, depth=-1)
    return {name: _marked(v, depth=1 if f"{section}.{name}" in of_text else 0) for name, v in settings.items()}


def _keys_of_text(strategy: str) -> set[str]:
    """Returns the settings whose values can be any text."""
    return {key for key, hint in hints_of(sections(strategy)).items() if str in (hint, *_options(hint))}


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else ()


def _marked(value: Any, *, depth: int) -> Any:
    if isinstance(value, dict):
        return {key: _marked(inner, depth=depth + 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [_marked(inner, depth=depth + 1) for inner in value]
    return _Text(value) if depth > 0 and isinstance(value, str) else value


def _plain(value: Any) -> Any:
    """Returns parsed values with strings of Python's own type."""
    if isinstance(value, dict):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return str(value) if isinstance(value, _Text) else value


jsonargparse.set_loader(_MODE, _read_yaml, (yaml.YAMLError,))


def check_keys_once(path: str | Path) -> None:
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

    try:
        root = yaml.compose(Path(path).read_text(), yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return  # the parser says what is wrong
    if root is not None:
        walk(root, "")


def _pairs(args: Sequence[str]) -> list[tuple[str, str]]:
    """Returns options of a command line with their values: `--name=value`, or `--name value`."""
    return [
        (a.partition("=")[0], a.partition("=")[2] if "=" in a else b)
        for a, b in zip(args, [*args, ""][1:], strict=True)
    ]


def _config_files(args: Sequence[str]) -> list[str]:
    return [value for name, value in _pairs(args) if name == "--config" and Path(value).is_file()]


def strategy_of(args: Sequence[str]) -> str:
    """Returns `parallel.strategy` from the command line and its `--config` files. The last occurrence wins."""
    found = strategies.DEFAULT
    for name, value in _pairs(args):
        if name == "--parallel.strategy":
            found = value
        elif name in ("--config", "--parallel"):
            found = _strategy_in(name, value) or found
    return found


def _strategy_in(name: str, value: str) -> str | None:
    """Returns the strategy in a YAML file or in the value of `--parallel`; None if it cannot be read."""
    try:
        read = yaml.safe_load(value if name == "--parallel" or not Path(value).is_file() else Path(value).read_text())
    except (OSError, yaml.YAMLError):
        return None
    parallel = read if name == "--parallel" else read.get("parallel") if isinstance(read, Mapping) else None
    strategy = parallel.get("strategy") if isinstance(parallel, Mapping) else None
    return None if strategy is None else str(strategy)


def _explain(message: str, strategy: str, hints: Mapping[str, Any]) -> str:
    """Returns an error of jsonargparse as one of a setting. For an unknown key it has the closest known key."""
    message = _as_of_group(message)
    group = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message)
    other = re.search(r"(?:[Uu]nrecognized arguments: --|Option ')([\w.]+)", message)
    key = ".".join(group.groups()) if group else other.group(1) if other else None
    if key is not None:
        return _unknown_key(key, strategy, [*(k for k in hints if k not in sections()), "parallel.strategy"])
    if explained := explain_value(message, hints):
        return explained
    if unexpected := re.match(r"Unexpected config: (.*)", message, re.DOTALL):
        return f"config: expected sections with settings, found {unexpected[1]!r:.200}"
    return re.sub(r"\s+", " ", re.sub(r'Parser key "([\w.]+)":', r"\1:", message)).strip()


def _as_of_group(message: str) -> str:
    """Rewrites a message about `sequences`, an optional section, in the form of messages about other sections."""
    section = re.match(r'Parser key "(\w+)":\s+Does not validate against any of the Union subtypes', message)
    problem = re.search(r"Problem with given class_path '[\w.]+':\s+(.*)\s+- Expected a ", message, re.DOTALL)
    if not (section and problem):
        return message
    name = section.group(1)
    found = re.sub(r"^Option '([\w.]+)' is", rf"Group '{name}' does not accept option '\1', which is", problem.group(1))
    return re.sub(r'^(Parser key "|the following arguments are required: )', rf"\1{name}.", found)


def _unknown_key(key: str, strategy: str, known: Sequence[str]) -> str:
    section, _, name = key.partition(".")
    if section == "parallel" and (having := _strategies_with(name)):
        return (
            f"{key}: not a setting of parallel.strategy={strategy!r}, but of {' and '.join(having)}; remove it, or "
            "choose another strategy"
        )
    nearest = suggestion(key, known)
    if key.count(".") == 0 and "mean" not in nearest:
        nearest = suggestion(key, sorted({k.split(".")[0] for k in known}))
    return f"unknown config key {key!r}{nearest}"


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


def _lines_of(name: str, section: type) -> list[str]:
    documented = docstring_parser.parse_from_object(section)
    meanings = {p.arg_name: _first_sentence(p.description) for p in documented.params}
    lines = []
    for field in dataclasses.fields(section):
        default = "required" if _is_required(field) else f"default: {_default(field)!r}"
        lines.append(f"    --{name}.{field.name} ({default})  {meanings.get(field.name, '')}".rstrip())
    return lines


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _first_sentence(text: str | None) -> str:
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join((text or "").split()))[0]
