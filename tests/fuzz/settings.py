"""Random valid settings: the same from YAML, from overrides, and from what a run stores."""

import dataclasses
import json
import typing
from dataclasses import dataclass

import yaml
from hypothesis import strategies as st

from spark_dl.config import strategies as strategies_of_runs
from spark_dl.config.load import build_config, load_config, sections
from tests.fuzz.errors import note, without_digits

WORDS = (
    "a", "yes", "no", "on", "null", "~", "1", "1.0", "1_000", "0x1f", "0o17", "2024-01-01", "12:30:00", "#x", "{a}",
    "[a]", "a.b", "a=b", "é", "日本", "'", '"', "!x", "&x", "*x", "%x", "@x", "`x", "|", ">", "true", "True", "NaN",
    ".nan", ".inf", "inf", "=", "<<", "\\", "s3://b/k", "a,b", "a: b", "- a", " a", "a ", "a\nb", "\t",
)  # fmt: skip
"""Strings that YAML can take for something else."""
_NUMBERS = (0, 1, 2, 3, 7, 16, 64, 1000, -1, 0.1, 0.5, 1.0, 1e-8, 1e3, 2.5)
_WORD = st.sampled_from(WORDS)
_CONDITION = st.tuples(_WORD, st.sampled_from(["==", "<", "!="]), st.sampled_from([*WORDS, 1, 2.5, True]))
_ENCODINGS = (
    {"as": "hash", "buckets": 7},
    {"as": "vocabulary", "values": ["no", "1", ""]},
    {"as": "timestamp", "unit": "ms"},
    {"ragged": True},
)
_CHOSEN = {
    "data.filters": st.lists(_CONDITION.map(list), min_size=1, max_size=2),
    "data.fill": st.dictionaries(_WORD, st.sampled_from([*WORDS, 0, 1.5, True]), max_size=2),
    "data.encode": st.dictionaries(_WORD, st.sampled_from(_ENCODINGS), max_size=2),
    "data.cast": st.dictionaries(st.sampled_from(["a", "features", "label"]), st.sampled_from(["float32", "int64"])),
    "sequences.length": st.integers(1, 5),
}


@dataclass(frozen=True)
class Case:
    """Settings by their dotted keys."""

    settings: dict
    strategy: str = "ddp"


def values_of(key, hint):
    """A strategy for the values of a setting, by its type. Some are invalid for the setting."""
    if key in _CHOSEN:
        return _CHOSEN[key]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if hint is bool:
        return st.booleans()
    if hint in (int, float):
        return st.sampled_from([n for n in _NUMBERS if hint is float or isinstance(n, int)])
    if hint is str:
        return st.sampled_from(WORDS)
    if origin is tuple or origin in (list, typing.get_origin(typing.Sequence[str])):
        return st.lists(values_of(key, args[0] if args and args[0] is not typing.Any else str), max_size=3)
    if origin is dict or origin is typing.get_origin(typing.Mapping[str, str]):
        return st.dictionaries(
            st.sampled_from(WORDS), values_of(key, args[1] if args[1] is not typing.Any else str), max_size=2
        )
    if args:  # a union
        return st.one_of([st.none() if a is type(None) else values_of(key, a) for a in args])
    return st.none()


@st.composite
def cases(draw):
    """Up to six settings of any sections."""
    strategy = draw(st.sampled_from(["ddp", "ddp", *strategies_of_runs.names()]))
    known = {
        f"{name}.{field.name}": typing.get_type_hints(section)[field.name]
        for name, section in sections(strategy).items()
        for field in dataclasses.fields(section)
    }
    keys = draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=6, unique=True))
    if any(key.startswith("sequences.") for key in keys) and "sequences.length" not in keys:
        keys.append("sequences.length")
    return Case({key: draw(values_of(key, known[key])) for key in keys}, strategy)


def nested(case):
    found = {"parallel": {"strategy": case.strategy}}
    for key, value in case.settings.items():
        section, _, name = key.partition(".")
        found.setdefault(section, {})[name] = value
    return found


def comparable(value):
    """Plain settings in which 1 and 1.0 are the same, and 1 and true are not."""
    if isinstance(value, dict):
        return {key: comparable(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [comparable(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def attempt(call):
    """The settings as JSON, or None if they are refused."""
    try:
        return json.dumps(comparable(call().to_dict()), sort_keys=True), ""
    except ValueError as error:
        return None, str(error)


def check(spark, folder, case):
    folder.mkdir()
    plain = nested(case)
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(plain, allow_unicode=True), encoding="utf-8")
    ways = {
        "python": attempt(lambda: build_config(plain)),
        "yaml": attempt(lambda: load_config(path)),
        "overrides": attempt(lambda: load_config(overrides={"parallel.strategy": case.strategy, **case.settings})),
    }
    (folder / "json.yaml").write_text(json.dumps(plain), encoding="utf-8")
    ways["json"] = attempt(lambda: load_config(folder / "json.yaml"))
    found = {name: config for name, (config, _) in ways.items()}
    if len(set(found.values())) > 1:
        shown = "\n".join(f"{name}: {config or error}" for name, (config, error) in ways.items())
        raise AssertionError(f"the ways differ:\n{shown}")
    if found["python"] is None:
        note(f"settings: {without_digits(ways['python'][1])}")
        return
    stored = json.loads(found["python"])
    (folder / "stored.yaml").write_text(yaml.safe_dump(stored, allow_unicode=True), encoding="utf-8")
    again = {
        "stored": attempt(lambda: build_config(stored)),
        "stored yaml": attempt(lambda: load_config(folder / "stored.yaml")),
    }
    for name, (config, error) in again.items():
        assert config == found["python"], f"{name}: {config or error}\nand was {found['python']}"
