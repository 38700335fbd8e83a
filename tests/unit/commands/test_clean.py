"""The command clean: how long is old, and what it prints. What it deletes: unit/test_retention.py."""

import pytest

from spark_dl.cli import UsageError
from spark_dl.commands import clean
from tests.builders.run_folders import make_run
from tests.unit.test_retention import aged


@pytest.mark.parametrize(("text", "days"), [
    ("30d", 30), ("12h", 0.5), ("2w", 14), (" 1.5d ", 1.5), ("0d", 0), (None, None),
])  # fmt: skip
def test_durations_have_a_unit(text, days):
    assert clean.days(text) == days


@pytest.mark.parametrize("text", ["30", "d", "-1d", "1m", "thirty days", ""])
def test_other_durations_are_wrong_usage(text):
    with pytest.raises(UsageError, match="^older_than: expected a duration such as 30d, 12h or 2w, found"):
        clean.days(text)


def test_it_says_what_it_would_delete_and_deletes_when_it_is_told_to(tmp_path, capsys, caplog):
    for days in (3, 1):
        aged(make_run(tmp_path / f"{days}"), days)
    rules = {"path": str(tmp_path), "keep_last": 1, "older_than": None, "only_rows": False, "delete": False}
    found = clean.run(rules)
    assert (found["would_delete"], found["urls"]) == (1, [str(tmp_path / "3")])
    assert found["bytes"] > 1000
    said = capsys.readouterr().err
    assert "what  where" in said
    assert str(tmp_path / "3") in said
    done = clean.run({**rules, "delete": True})
    assert done == {"deleted": 1, "bytes": found["bytes"], "urls": found["urls"]}
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    with pytest.raises(UsageError, match="^keep_last: expected --keep-last, --older-than or --only_rows"):
        clean.run({**rules, "keep_last": None})
