"""What the jobs share, without Spark."""

import re
import sys

import pytest

from spark_dl.cli import arguments
from spark_dl.config.load import config_keys


def test_datasets_by_url_are_handed_on_whoever_wrote_them(tmp_path):
    urls = {"train": str(tmp_path / "plain parquet"), "test": "s3://bucket/petastorm"}
    assert arguments.read_datasets(None, arguments.Input(datasets=urls)) == urls


def test_help_explains_every_setting(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["job.py", "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        arguments.parse("A job.", {"output": (str, None, "folder for the files")})
    said = " ".join(capsys.readouterr().out.split())
    assert "--output OUTPUT folder for the files" in said
    option = r"--{0} (\S+|{{.*?}})( --{0}\+ \S+)? [`A-Z][^(]{{15}}"  # its name, its value, and some words
    assert [key for key in config_keys() if not re.search(option.format(re.escape(key)), said)] == []
