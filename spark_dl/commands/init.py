"""Writes a first YAML file, model and program for a table: which columns are features, and which is the label.

spark-dl init flowers.csv
spark-dl init s3a://bucket/events --format parquet --label clicked --output_dir first
spark-dl init warehouse.flowers --label species

It reads the table with Spark, says what it found of each column, and guesses the label if --label does not name it.
Nothing is overwritten. The files are short: a start to change, not a format to keep.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from spark_dl import cli
from spark_dl.cli.progress import text_table
from spark_dl.config.checks import suggestion
from spark_dl.spark_job import quoted

OPTIONS = {
    "table": cli.Option(is_positional=True, help="path or URL of files, or a table of Spark's catalog"),
    "label": cli.Option(kind=str | None, help="the column to predict; by default it is guessed"),
    "format": cli.Option(kind=str | None, help="csv, parquet, json, orc ...; by default it is told by the name"),
    "output_dir": cli.Option(default=".", help="folder for train.yaml, model.py and program.py"),
    "master": cli.Option(default="local[2]", help="Spark master URL"),
}
FILES = ("train.yaml", "model.py", "program.py")
_FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".orc": "orc", ".parquet": "parquet"}
_LABELS = ("label", "target", "y", "class", "outcome", "species", "churn", "clicked", "price")
"""Names of labels, the most telling first."""
_MOST_CLASSES = 100
_MOST_VALUES = 1000
"""Values of a column that are listed as a vocabulary. A column with more gets hashed."""
_MOST_COUNTED = 100_000
"""Rows whose values are counted."""
_NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal")


@dataclass
class Found:
    """What was found of a column."""

    name: str
    kind: str
    """Spark's type."""
    distinct: int = 0
    values: tuple[str, ...] = ()
    """Of a string, the most frequent first; of a number with few values, in order."""
    mean: float = 0.0
    scale: float = 1.0
    nulls: int = 0
    role: str = ""
    """`number`, `category`, `label`, or empty if it is left out."""
    why: str = ""

    @property
    def is_number(self) -> bool:
        return self.kind.partition("(")[0] in _NUMBERS


def main(given: Sequence[str]) -> NoReturn:
    """Runs the command with these arguments, and exits."""
    args = cli.parse("init", str(__doc__), OPTIONS, given, has_settings=False).args
    cli.run(lambda: init(args))


def init(args: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the table, writes the files, and returns what the command prints."""
    folder = Path(args["output_dir"])
    if there := [name for name in FILES if (folder / name).exists()]:
        raise cli.UsageError(
            f"output_dir: {folder / there[0]} exists, and is not overwritten; move it, or pass another --output_dir"
        )
    from spark_dl.launch.session import build_session

    spark = build_session("spark_dl init", master=args["master"])
    source, df = _read(spark, args["table"], args["format"])
    columns, rows = _describe(df)
    label = _choose_roles(columns, args["label"], rows)
    table = [[c.name, c.kind, str(c.distinct), str(c.nulls), c.role or "-", c.why] for c in columns]
    cli.log.info(
        "%s: %s%d rows\n%s", args["table"], "the first " * (rows == _MOST_COUNTED), rows,
        "\n".join(text_table(["column", "type", "values", "nulls", "use", "because"], table)),
    )  # fmt: skip
    features = [c for c in columns if c.role in ("number", "category")]
    if not features:
        raise ValueError(f"{args['table']}: found no column that can be a feature beside the label {label.name!r}")
    folder.mkdir(parents=True, exist_ok=True)
    written = _Files(args["table"], source, features, label, rows)
    for name, text in zip(FILES, (written.yaml(), written.model(), written.program()), strict=True):
        with open(folder / name, "x") as file:
            file.write(text)
    at = "" if str(folder) == "." else f"cd {folder} && "
    cli.log.info("wrote %s; next: %sspark-dl train --config train.yaml --run_dir runs/1", ", ".join(FILES), at)
    return {
        "files": [str(folder / name) for name in FILES], "label": label.name, "features": [c.name for c in features],
        "left_out": [c.name for c in columns if not c.role], "rows": rows,
    }  # fmt: skip


def _read(spark: Any, table: str, file_format: str | None) -> tuple[dict[str, Any], Any]:
    """Returns the section `input` that reads a table, and its DataFrame."""
    end = re.search(r"(\.\w+)(\.gz|\.bz2|\.zst)?$", table)
    guessed = _FORMATS.get(end[1].lower()) if end else None
    if "/" not in table and guessed is None and file_format is None and not Path(table).exists():
        return {"table": table}, spark.table(table)
    file_format = file_format or guessed or "parquet"
    options: dict[str, Any] = {"header": True, "inferSchema": True} if file_format == "csv" else {}
    if end and end[1].lower() == ".tsv":
        options["sep"] = "\t"
    source = {"path": table, "format": file_format, **({"options": options} if options else {})}
    return source, spark.read.format(file_format).options(**options).load(table)


def _describe(df: Any) -> tuple[list[Found], int]:
    """Returns what is found of the columns, in one job over the first rows, and how many rows these are."""
    from pyspark.sql import functions as F

    columns = [Found(field.name, field.dataType.simpleString()) for field in df.schema.fields]
    if not columns:
        raise ValueError("the table has no columns")
    some = df.limit(_MOST_COUNTED)
    wanted = [F.count(F.lit(1)).alias("rows")]
    for i, column in enumerate(columns):
        cell = F.col(quoted(column.name))
        wanted.append(F.sum(cell.isNull().cast("bigint")).alias(f"nulls{i}"))
        if column.is_number:
            number = F.nanvl(cell.cast("double"), F.lit(None))
            wanted += [F.mean(number).alias(f"mean{i}"), F.stddev_pop(number).alias(f"scale{i}")]
        if column.is_number or column.kind in ("string", "boolean"):
            wanted.append(F.count_distinct(cell).alias(f"distinct{i}"))
    (row,) = some.agg(*wanted).collect()
    rows = int(row["rows"])
    if not rows:
        raise ValueError("the table has no rows; expected at least one")
    found = row.asDict()
    for i, column in enumerate(columns):
        column.nulls, column.distinct = int(found[f"nulls{i}"] or 0), int(found.get(f"distinct{i}") or 0)
        column.mean = _rounded(found.get(f"mean{i}"), 0.0)
        column.scale = _rounded(found.get(f"scale{i}"), 1.0) or 1.0
        few = column.distinct <= (_MOST_VALUES if column.kind == "string" else _MOST_CLASSES)
        if few and (column.is_number or column.kind in ("string", "boolean")):
            name = quoted(column.name)
            counts = some.where(f"{name} IS NOT NULL").groupBy(F.col(name).alias("value")).count().collect()
            column.values = tuple(str(each["value"]) for each in sorted(counts, key=lambda c: (-c["count"], str(c[0]))))
    return columns, rows


def _rounded(value: Any, otherwise: float) -> float:
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else otherwise


def _choose_roles(columns: Sequence[Found], name: str | None, rows: int) -> Found:
    """Sets what each column is used for. Returns the label."""
    by_name = {column.name: column for column in columns}
    if name is not None and name not in by_name:
        raise cli.UsageError(f"label: found no column {name!r} in the table{suggestion(name, [*by_name])}")
    usable = [c for c in columns if c.is_number or c.kind == "boolean" or (c.kind == "string" and c.values)]
    if not usable:
        raise ValueError(f"found no column that can be a label, in {[f'{c.name} {c.kind}' for c in columns]}")
    if name is not None:
        label, why = by_name[name], "--label"
        if label not in usable:
            raise cli.UsageError(
                f"label: the column {name!r} ({label.kind}, {label.distinct} values) can be no label; expected a "
                f"number, a boolean, or a string with at most {_MOST_VALUES} values"
            )
    else:
        lower = {c.name.lower(): c for c in reversed(usable)}
        named = next((lower[word] for word in _LABELS if word in lower), None)
        label = named or usable[-1]
        why = "its name" if named else "a guess: the last column; --label names another"
    for column in columns:
        column.role, column.why = _role(column, rows)
    label.role, label.why = "label", why
    return label


def _role(column: Found, rows: int) -> tuple[str, str]:
    if column.nulls == rows:
        return "", "it has nulls only"
    if column.kind == "boolean":
        return "number", "0 or 1"
    if column.kind != "string" and not column.is_number:
        return "", f"{column.kind}: set data.features and data.encode to use it"
    if column.distinct <= 1:
        return "", "it has one value only"
    is_whole = column.kind in ("int", "bigint", "smallint", "tinyint")
    if re.fullmatch(r"(.*_)?(id|uuid|key)", column.name.lower()) or (
        column.distinct == rows > 20 and (is_whole or column.kind == "string")
    ):
        return "", "an identifier: it tells rows apart"
    if column.is_number:
        return "number", f"mean {column.mean:.4g}, standard deviation {column.scale:.4g}"
    listed = f"{column.distinct} values" if column.values else f"{column.distinct} values, by their hashes"
    return "category", listed


class _Dumper(yaml.SafeDumper):
    """YAML as people write it: short lists in a line, and text of several lines as it is."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=True)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


@dataclass(frozen=True)
class _Files:
    """The texts of the files."""

    table: str
    source: Mapping[str, Any]
    features: Sequence[Found]
    label: Found
    rows: int

    @property
    def is_classification(self) -> bool:
        few = bool(self.label.values) and len(self.label.values) <= _MOST_CLASSES
        whole = self.label.kind in ("string", "boolean", "tinyint", "smallint", "int", "bigint")
        return whole and few and not (self.label.is_number and self.label.distinct > 20)

    @property
    def classes(self) -> list[str]:
        """The classes in order, numbers by their value."""
        as_number = self.label.is_number
        return sorted(self.label.values, key=lambda v: (int(v), "") if as_number else (0, v))

    def views(self) -> dict[str, str]:
        """Returns the SQL of the rows: the columns, and every fifth row as test rows."""
        names = [_quoted(column.name) for column in self.features]
        label = _quoted(self.label.name)
        target = f"CAST({label} AS {'STRING' if self.is_classification else 'FLOAT'}) AS {label}"
        wanted = ",\n  ".join([*names, target])
        fold = f"pmod(xxhash64({', '.join([*names, label])}), 10) AS fold"
        folds = {"train": "fold > 1", "validation": "fold = 1", "test": "fold = 0"}
        # Text for a file, from the names of the columns of the user's own table.
        rows = f"SELECT {wanted},\n  {fold}\nFROM input WHERE {label} IS NOT NULL\n"
        views = {name: f"SELECT * FROM rows WHERE {of}" for name, of in folds.items()}  # noqa: S608
        return {"rows": rows, **views}

    def data(self) -> dict[str, Any]:
        encode: dict[str, Any] = {}
        for column in self.features:
            if column.role == "category":
                listed = {"as": "vocabulary", "values": list(column.values)}
                encode[column.name] = listed if column.values else {"as": "hash", "buckets": _MOST_VALUES}
        if self.is_classification:
            encode[self.label.name] = {"as": "vocabulary", "values": self.classes, "unknown": "error"}
        fill = {c.name: "" if c.role == "category" else c.mean if c.kind in ("float", "double") or "decimal" in c.kind
                else round(c.mean) for c in self.features if c.kind != "boolean"}  # fmt: skip
        filled = {"nulls": "fill", "nonfinite": "fill", "fill": fill} if fill else {}
        return {"features": [c.name for c in self.features], "label": self.label.name, "encode": encode, **filled}

    def train(self) -> dict[str, Any]:
        batch = next(size for size in (512, 128, 32) if self.rows >= 20 * size or size == 32)
        metrics: dict[str, Any] = {"mean_absolute_error": {"class": "MeanAbsoluteError"}}
        if self.is_classification:
            micro = {"num_classes": len(self.classes), "average": "micro"}
            metrics = {"accuracy": {"class": "MulticlassAccuracy", **micro}}
        return {
            "epochs": 20, "global_batch_size": batch, "optimizer": "AdamW", "lr": 0.003, "metrics": metrics,
            "early_stop_metric": "loss", "early_stop_patience": 5,
        }  # fmt: skip

    @property
    def loss(self) -> str:
        return "CrossEntropyLoss" if self.is_classification else "MSELoss"

    def yaml(self) -> str:
        plain = {
            "input": {**self.source, "sql": self.views()},
            "model": {"build": "model.py:build_model", "predict": "model.py:predict", "loss": self.loss},
            "data": self.data(),
            "train": self.train(),
            "launch": {"num_ranks": 2},
        }
        return (
            f"# For {self.table}, by spark-dl init. Every setting is in docs/configuration.md.\n"
            "# spark-dl train --config train.yaml --run_dir runs/1\n"
            f"{yaml.dump(plain, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)}"
        )

    def model(self) -> str:
        numbers = [c for c in self.features if c.role == "number"]
        places = [i for i, c in enumerate(self.features) if c.role == "number"]
        sizes = {
            i: len(c.values) + 1 if c.values else _MOST_VALUES
            for i, c in enumerate(self.features) if c.role == "category"
        }  # fmt: skip
        target = self.label
        scaled = "" if self.is_classification else f" * {target.scale!r} + {target.mean!r}"
        outputs = "len(CLASSES)" if self.is_classification else "1"
        head = f"CLASSES = {self.classes!r}\n" if self.is_classification else ""
        answer = (
            '    probability = output.softmax(1)\n    return {"prediction": probability.argmax(1), "probability": '
            "probability.amax(1)}"
            if self.is_classification
            else '    return {"prediction": output}'
        )
        about = (
            "Returns the class of each row, an index of CLASSES, and its probability."
            if self.is_classification
            else f"Returns the {target.name} of each row."
        )
        return f'''"""A first model for {self.table}: scaled numbers and embedded categories into two hidden layers."""

import torch
from torch import nn

NUMBERS = {places!r}
"""Places of the numbers among data.features: {", ".join(c.name for c in numbers) or "none"}."""
MEANS = {[c.mean for c in numbers]!r}
SCALES = {[c.scale for c in numbers]!r}
CATEGORIES = {sizes!r}
"""Number of values of each category, by its place."""
{head}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("means", torch.tensor(MEANS))
        self.register_buffer("scales", torch.tensor(SCALES))
        self.embeddings = nn.ModuleList(nn.Embedding(size, 8) for size in CATEGORIES.values())
        inputs = len(NUMBERS) + 8 * len(CATEGORIES)
        self.layers = nn.Sequential(
            nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, {outputs})
        )

    def forward(self, *columns):  # in the order of data.features, each (rows,)
        parts = [embed(columns[place]) for place, embed in zip(CATEGORIES, self.embeddings)]
        if NUMBERS:
            numbers = torch.stack([columns[place].float() for place in NUMBERS], 1)
            parts.append((numbers - self.means) / self.scales)
        return self.layers(torch.cat(parts, 1)){"" if self.is_classification else ".squeeze(1)"}{scaled}


def build_model():
    return Model()


def predict(output):
    """{about}"""
{answer}
'''

    def program(self) -> str:
        if "table" in self.source:
            read = f"spark.table({self.source['table']!r})"
        else:
            options = "".join(f", {name}={value!r}" for name, value in self.source.get("options", {}).items())
            read = f"spark.read.load({self.source['path']!r}, format={self.source['format']!r}{options})"
        return f'''"""The same as `spark-dl train --config train.yaml`, as a program: python program.py"""

import yaml

import model
import spark_dl

spark = spark_dl.build_session("first", master="local[2]")
{read}.createOrReplaceTempView("input")
with open("train.yaml") as file:
    for name, query in yaml.safe_load(file)["input"]["sql"].items():
        spark.sql(query).createOrReplaceTempView(name)
train, validation, test = (spark.table(name) for name in ("train", "validation", "test"))

spec = spark_dl.ModelSpec(build=model.build_model, loss="{self.loss}", predict=model.predict)
config = spark_dl.load_config("train.yaml")  # or spark_dl.Config(data=spark_dl.Data(...), train=spark_dl.Train(...))
result = spark_dl.train(train, spec, config, validation=validation, run_dir="runs/program", overwrite=True)
print(spark_dl.evaluate(test, spec, result.checkpoint))
spark_dl.predict(test, spec, result.checkpoint).show(5)
'''


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else quoted(name)
