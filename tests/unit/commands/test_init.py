"""What init makes of a table: which columns it uses for what, and files that are what they say."""

import runpy

import pytest
import torch
import yaml

from spark_dl import load_config
from spark_dl.cli import UsageError
from spark_dl.commands import init
from spark_dl.commands.init import Found

COLUMNS = [
    Found("id", "int", distinct=200),
    Found("age", "double", distinct=80, mean=37.5, scale=12.0, nulls=3),
    Found("visits", "bigint", distinct=15, values=tuple("012"), mean=3.4, scale=2.0),
    Found("city", "string", distinct=2, values=("Oslo", "it's")),
    Found("street", "string", distinct=1500),
    Found("name", "string", distinct=200, values=tuple(f"n{i}" for i in range(200))),
    Found("member", "boolean", distinct=2, values=("true", "false")),
    Found("born", "date"),
    Found("same", "string", distinct=1, values=("x",)),
    Found("empty", "double", nulls=200),
    Found("kind of", "string", distinct=3, values=("b", "a", "c")),
]


def columns(*more):
    return [Found(**vars(each)) for each in (*COLUMNS, *more)]


def roles(found):
    return {c.name: c.role for c in found}


def test_columns_are_numbers_categories_or_left_out_with_a_reason():
    found = columns()
    label = init._choose_roles(found, "kind of", 200)
    assert roles(found) == {
        "id": "", "age": "number", "visits": "number", "city": "category", "street": "category", "name": "",
        "member": "number", "born": "", "same": "", "empty": "", "kind of": "label",
    }  # fmt: skip
    assert (label.name, label.why) == ("kind of", "--label")
    assert {c.name: c.why for c in found if not c.role} == {
        "id": "an identifier: it tells rows apart", "name": "an identifier: it tells rows apart",
        "born": "date: set data.features and data.encode to use it", "same": "it has one value only",
        "empty": "it has nulls only",
    }  # fmt: skip


@pytest.mark.parametrize(("more", "label", "why"), [
    ([], "kind of", "a guess: the last column; --label names another"),
    ([Found("Target", "int", distinct=2, values=("0", "1")), Found("z", "double", distinct=9)], "Target", "its name"),
    ([Found("z", "double", distinct=9)], "z", "a guess: the last column; --label names another"),
    ([Found("words", "string", distinct=5000)], "kind of", "a guess: the last column; --label names another"),
])  # fmt: skip
def test_the_label_is_the_column_with_a_telling_name_or_the_last_that_can_be_one(more, label, why):
    found = init._choose_roles(columns(*more), None, 200)
    assert (found.name, found.why) == (label, why)


@pytest.mark.parametrize(("label", "message"), [
    ("kind", "label: found no column 'kind' in the table; did you mean 'kind of'"),
    ("born", "label: the column 'born' .date, 0 values. can be no label"),
    ("street", "label: the column 'street' .string, 1500 values. can be no label"),
])  # fmt: skip
def test_a_label_that_is_none_is_wrong_usage(label, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        init._choose_roles(columns(), label, 200)


def files_for(label, found=None, rows=200):
    found = found or columns()
    label = init._choose_roles(found, label, rows)
    features = [c for c in found if c.role in ("number", "category")]
    source = {"path": "people.csv", "format": "csv", "options": {"header": True}}
    return init._Files("people.csv", source, features, label, rows)


@pytest.mark.parametrize(("label", "is_classification", "classes"), [
    ("kind of", True, ["a", "b", "c"]), ("member", True, ["false", "true"]), ("visits", True, ["0", "1", "2"]),
    ("age", False, None),
])  # fmt: skip
def test_classes_are_in_order_and_numbers_with_many_values_are_regressed(label, is_classification, classes):
    written = files_for(label)
    assert written.is_classification == is_classification
    if is_classification:
        assert written.classes == classes
        assert written.data()["encode"][label] == {"as": "vocabulary", "values": classes, "unknown": "error"}
    else:
        assert written.loss == "MSELoss"


def test_integers_are_in_the_order_of_their_values():
    found = columns(Found("grade", "int", distinct=3, values=("10", "9", "2")))
    assert files_for("grade", found).classes == ["2", "9", "10"]


@pytest.mark.parametrize("label", ["kind of", "age", "member", "city"])
def test_the_settings_are_valid_and_the_model_takes_their_features(tmp_path, label):
    written = files_for(label)
    (tmp_path / "train.yaml").write_text(written.yaml())
    (tmp_path / "model.py").write_text(written.model())
    compile(written.program(), "program.py", "exec")
    plain = yaml.safe_load(written.yaml())
    assert plain["input"]["sql"] == written.views()
    config = load_config(tmp_path / "train.yaml")
    assert config.data.label == label
    assert config.data.features == tuple(c.name for c in written.features)
    functions = runpy.run_path(str(tmp_path / "model.py"))
    model = functions["build_model"]()
    batch = [torch.zeros(5, dtype=torch.int64) for _ in config.data.features]
    output = model(*batch)
    found = functions["predict"](output)
    if written.is_classification:
        assert output.shape == (5, len(written.classes))
        assert functions["CLASSES"] == written.classes
        assert found["prediction"].dtype == torch.int64
        assert found["probability"].min() > 0
    else:
        assert output.shape == found["prediction"].shape == (5,)


def test_numbers_are_scaled_and_categories_fit_their_embeddings(tmp_path):
    written = files_for("age")
    (tmp_path / "model.py").write_text(written.model())
    functions = runpy.run_path(str(tmp_path / "model.py"))
    names = [c.name for c in written.features]
    assert {names[i]: size for i, size in functions["CATEGORIES"].items()} == {"city": 3, "street": 1000, "kind of": 4}
    assert [names[i] for i in functions["NUMBERS"]] == ["visits", "member"]
    assert functions["MEANS"] == [3.4, 0.0]
    assert functions["SCALES"] == [2.0, 1.0]
    model = functions["build_model"]()
    torch.nn.init.zeros_(model.layers[-1].weight)
    torch.nn.init.zeros_(model.layers[-1].bias)
    assert model(*[torch.zeros(2, dtype=torch.int64) for _ in names]).tolist() == [37.5, 37.5], "the mean of the label"


@pytest.mark.parametrize(("rows", "batch"), [(30, 32), (2560, 128), (2559, 32), (1_000_000, 512)])
def test_a_batch_is_a_small_part_of_the_rows(rows, batch):
    assert files_for("kind of", rows=rows).train()["global_batch_size"] == batch


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "model.py").write_text("mine")
    with pytest.raises(UsageError, match=r"model.py exists, and is not overwritten; move it, or pass another"):
        init.init({"output_dir": str(tmp_path), "table": "x.csv"})
    assert [path.name for path in tmp_path.iterdir()] == ["model.py"]


class Reader:
    """Remembers how it was told to read."""

    def __init__(self):
        self.told = {}

    @property
    def read(self):
        return self

    def format(self, name):
        self.told["format"] = name
        return self

    def options(self, **options):
        self.told["options"] = options
        return self

    def load(self, path):
        self.told["path"] = path
        return "df"

    def table(self, name):
        self.told["table"] = name
        return "df"


@pytest.mark.parametrize(("table", "file_format", "source"), [
    ("a.csv", None, {"path": "a.csv", "format": "csv", "options": {"header": True, "inferSchema": True}}),
    ("a.csv.gz", None, {"path": "a.csv.gz", "format": "csv", "options": {"header": True, "inferSchema": True}}),
    ("d/a.TSV", None, {"path": "d/a.TSV", "format": "csv", "options": {"header": True, "inferSchema": True}}),
    ("a.parquet", None, {"path": "a.parquet", "format": "parquet"}),
    ("s3a://bucket/events", None, {"path": "s3a://bucket/events", "format": "parquet"}),
    ("s3a://bucket/events", "orc", {"path": "s3a://bucket/events", "format": "orc"}),
    ("a.jsonl", None, {"path": "a.jsonl", "format": "json"}),
    ("warehouse.events", None, {"table": "warehouse.events"}),
    ("events", None, {"table": "events"}),
    ("events", "parquet", {"path": "events", "format": "parquet"}),
])  # fmt: skip
def test_the_name_of_the_table_says_how_it_is_read(table, file_format, source):
    spark = Reader()
    found, _ = init._read(spark, table, file_format)
    assert {**found, "options": {}} == {**source, "options": {}}
    assert spark.told.get("path", spark.told.get("table")) == table
    options = found.get("options", {})
    assert options == (
        {**source.get("options", {}), "sep": "\t"} if table.endswith("TSV") else source.get("options", {})
    )
