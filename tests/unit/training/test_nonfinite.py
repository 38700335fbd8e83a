"""What the driver says of `train.on_nonfinite` before a run starts."""

import logging

import pytest

from spark_dl import Checkpoint
from spark_dl.prepare import prepare_run
from spark_dl.training.finite import GRADIENT, NonFinite, NotFiniteError, explain
from tests.builders.datasets import write_dataset
from tests.builders.models import DROPOUT_MLP, blobs, small_config


@pytest.mark.parametrize(("policy", "saves", "warning"), [
    ("rollback", {}, "before the end of the first epoch, so NaN or Inf before it ends the run; set checkpoint.every_s"),
    ("rollback", {"every_epochs": 3}, "before the end of the first 3 epochs, so"),
    ("rollback", {"every_steps": 5}, ""), ("skip", {}, ""),
])  # fmt: skip
def test_F22_a_rollback_that_has_no_checkpoint_for_long_is_said_at_the_start(tmp_path, caplog, policy, saves, warning):
    shards = write_dataset(str(tmp_path / "data"), blobs(96), group_rows=40, shard_rows=120)
    config = small_config(2, {"on_nonfinite": policy}, checkpoint=Checkpoint(**saves))
    with (
        caplog.at_level(logging.WARNING, "spark_dl"),
        prepare_run(shards.url, DROPOUT_MLP, config, run_dir=str(tmp_path / "run")),
    ):
        found = [record.message for record in caplog.records if "train.on_nonfinite" in record.message]
    assert len(found) == bool(warning)
    assert not warning or warning in found[0]


def test_F22_an_error_that_says_that_there_is_no_checkpoint_does_not_speak_of_one():
    finding = NonFinite(3, GRADIENT, 1, "fc.weight")
    text = explain(NotFiniteError(finding, "There is none. ", names_checkpoint=True), 0, 0, None)
    assert "; the loss was finite. There is none. Try a lower train.lr" in text
    assert "saved" not in text
    text = explain(NotFiniteError(finding), 0, 0, None)
    assert "Nothing has been saved since: no checkpoint has been saved yet. " in text
