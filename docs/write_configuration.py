"""Writes `docs/configuration.md` from the fields of the settings and their docstrings; `--check` only compares.

python docs/write_configuration.py
"""

from __future__ import annotations

import dataclasses
import re
import sys
import textwrap
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_origin, get_type_hints

import docstring_parser

from spark_dl.config.conflicts import CONFLICTS, Conflict
from spark_dl.config.fields import fields_of_caller
from spark_dl.config.load import sections
from spark_dl.config.strategies import BUILT_IN, find

PAGE = Path(__file__).with_name("configuration.md")
HEAD = """# Configuration

<!-- Written by docs/write_configuration.py from the docstrings of the settings. Do not edit. -->

This page lists every setting of the package, by section. [The command spark-dl](commands.md) has two more,
`input` and `model`. A setting has the same name in YAML, on the command line and in Python:

```yaml
train: {epochs: 5, lr: 0.05}
parallel: {strategy: ddp, bucket_mib: 10}
```

```bash
spark-dl train --config conf/train/digits.yaml --train.epochs 5 --parallel.bucket_mib 10
```

```python
import spark_dl

config = spark_dl.Config(train=spark_dl.Train(epochs=5, lr=0.05), parallel=spark_dl.DDP(bucket_mib=10))
```

A value on the command line overrides a value in a file. An unknown key causes an error that suggests the
closest known key.
Settings that [cannot be used together](#settings-that-cannot-be-used-together) cause an error that names both.
A [resumed](choose-an-api.md) run must have the same settings as before; only those marked *may change* can differ.
`evaluate`, `predict` and `save_model` use the settings of the checkpoint, if they get no `config`. Settings marked
*of the caller* say where to write or to connect, or what may be sent. They are never taken from a checkpoint, which
somebody else may have written.
"""

CONFLICTS_HEAD = """## Settings that cannot be used together

The driver checks these combinations before it starts any Spark job. The error text is the setting, followed by the
message.

| Setting | Message |
|---|---|"""
NUMBERS = """
These settings must be consistent:

- `train.global_batch_size` is a multiple of `loader.num_streams`.
- `loader.num_streams` is at least `launch.num_ranks`. With `shards.storage: local`, it is a multiple of
  `launch.num_ranks`.
- `parallel.num_servers` is less than `launch.num_ranks`. `parallel.server_k` is at most the number of ranks that train.
- `faults.straggler_ranks` contains only ranks that train, `track.profile_ranks` only ranks below `launch.num_ranks`.
- `train.accumulation_steps` is at most the number of rows in each rank's part of a global batch. With
  `parallel.pipeline` above 1, it divides this number.
"""


def main() -> int:
    """Writes the page. With `--check` returns 1 if it is not up to date."""
    text = render()
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, section in sections().items():
        if name != "parallel":
            parts += [f"## {name}\n", _intro(section, name), _table(section, name)]
    parts += [
        "## parallel\n",
        "Each strategy has its own settings. See [strategies](strategies.md) for what each of them does.\n",
    ]
    for strategy in map(find, BUILT_IN):
        settings = strategy.settings
        parts += [
            f"### {settings.strategy}\n",
            _intro(settings, f"spark_dl.{settings.__name__}"),
            _table(settings, "parallel"),
        ]
    return "\n".join([*parts, CONFLICTS_HEAD, *map(_conflict, CONFLICTS), NUMBERS])


def _conflict(conflict: Conflict) -> str:
    """A row of the table: the message, with the names of the strategies that it is about."""
    message = re.sub(r", found {[^}]+}", "", conflict.message)
    having = [name for name in BUILT_IN if "{" in message and conflict.excluded(_worst(find(name).settings()))]
    message = message.replace("{c.parallel.strategy!r}", " or ".join(map(repr, having)))
    if "{" in message:
        raise ValueError(f"{conflict.key}: expected a message that no run has to fill in, found {message}")
    return f"| `{conflict.key}` | {message} |"


def _worst(parallel: Any) -> Any:
    """What a configuration with this strategy would be, had it all that a strategy may not support."""
    return SimpleNamespace(
        parallel=parallel,
        shards=SimpleNamespace(storage="local"),
        loader=SimpleNamespace(ragged="offsets"),
        launch=SimpleNamespace(num_ranks=0, min_ranks=1, gpus_per_rank=0.5),
        train=SimpleNamespace(
            precision="fp16-mixed",
            optimizers=["LBFGS", "Muon"],
            param_groups=({},),
            compile=True,
            channels_last=True,
            deterministic=True,
            activation_checkpointing=("full",),
            on_nonfinite="skip",
            check_replicas_every=1,
            validate_every_steps=1,
            ema_decay=0.9,
            swa_start=0.5,
            random_by="row",
        ),
        track=SimpleNamespace(profile_steps=(1, 2)),
        checkpoint=SimpleNamespace(weights="trainable"),
    )


def _intro(section: type, name: str) -> str:
    note = " The section may be `null`." if name == "sequences" else ""
    return (
        textwrap.fill(f"{_plain(section.__doc__.partition('Example:')[0])}{note}", 120, break_long_words=False) + "\n"
    )


def _table(section: type, prefix: str) -> str:
    meanings = {p.arg_name: p.description for p in docstring_parser.parse_from_object(section).params}
    hints = get_type_hints(section)
    fields = dataclasses.fields(section)
    if not fields:
        return "It has no settings.\n"
    lines = ["| Setting | Type | Default | Meaning |", "|---|---|---|---|"]
    for field in fields:
        meaning = _plain(meanings.get(field.name))
        if field.metadata.get("may_change") or getattr(section, "MAY_CHANGE", False):
            meaning = f"{meaning} *May change.*".strip()
        if field.name in fields_of_caller(section):
            meaning = f"{meaning} *Of the caller.*".strip()
        cells = [f"`{prefix}.{field.name}`", _type(hints[field.name]), _default(field), meaning]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _type(hint: Any) -> str:
    if get_origin(hint) is typing.Literal:
        return " or ".join(f"`{value}`" for value in get_args(hint))
    if type(None) in get_args(hint):
        inner = [_type(a) for a in get_args(hint) if a is not type(None)]
        return " or ".join([*inner, "null"])
    if get_origin(hint) in (typing.Union, type(int | str)):
        return " or ".join(_type(a) for a in get_args(hint))
    names = {
        "tuple": "list", "Mapping": "mapping", "dict": "mapping", "str": "string", "int": "integer", "float": "number",
        "bool": "true or false", "Sequence": "list",
    }  # fmt: skip
    name = getattr(get_origin(hint) or hint, "__name__", str(hint))
    return names.get(name, name)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower()}`" if value is not None else "`null`"
    if isinstance(value, (list, tuple)):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


def _plain(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip()


if __name__ == "__main__":
    sys.exit(main())
