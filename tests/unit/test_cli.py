"""What the jobs share, without Spark."""

from spark_dl import cli


def test_datasets_by_url_are_handed_on_whoever_wrote_them(tmp_path):
    urls = {"train": str(tmp_path / "plain parquet"), "test": "s3://bucket/petastorm"}
    assert cli.read_datasets(None, cli.Input(datasets=urls)) == urls
