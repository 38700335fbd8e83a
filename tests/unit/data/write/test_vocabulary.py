"""Which words a column has: configured, or those of another dataset, before any are counted."""

from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.source import SourceColumn
from spark_dl.data.write import vocabulary


def column(name, words, kind="vocabulary"):
    return SourceColumn(
        name, "int64", "scalar", encoding=Encoding(kind, vocabulary=words, **({"buckets": 3} if kind == "hash" else {}))
    )


def test_words_that_are_configured_stay_and_those_of_another_dataset_are_taken_for_the_others():
    columns = [column("own", ("a",)), column("taken", None), SourceColumn("plain", "int64", "scalar")]
    known = dict.fromkeys(("own", "taken", "plain", "more"), ("b", "c"))
    found = vocabulary.with_vocabularies(None, columns, {}, known)
    assert [c.encoding.vocabulary for c in found] == [("a",), ("b", "c"), None]
    assert [c.name for c in found] == ["own", "taken", "plain"]


def test_words_that_nobody_has_told_are_counted(monkeypatch):
    counted = {}

    def count(df, columns, encode):
        counted.update(columns)
        return dict.fromkeys(columns, ("counted",))

    monkeypatch.setattr(vocabulary, "_count_vocabularies", count)
    columns = [column("own", ("a",)), column("new", None), column("hashed", None, "hash"), column("taken", None)]
    found = vocabulary.with_vocabularies(None, columns, {}, {"taken": ("b",)})
    assert [c.encoding.vocabulary for c in found] == [("a",), ("counted",), None, ("b",)]
    assert [c.name for c in counted.values()] == ["new"]
