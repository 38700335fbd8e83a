"""Which settings a resumed run may change."""

import dataclasses
import json
import re

import pytest

from spark_dl import Checkpoint, Config, Shards, Track
from spark_dl.config import strategies
from spark_dl.config.fields import fields_of_caller
from spark_dl.config.load import as_read, config_keys, sections
from spark_dl.rundir.checkpoint import Saved, check_same_settings
from tests.builders.settings import make_config

MAY_CHANGE = {
    "shards.store", "shards.trusted_writers", "shards.cache_dir", "shards.cache_mib",
    "loader.reader_threads", "loader.prefetch_batches", "loader.rows_at_once",
    "loader.predict_precision",
    "train.epochs", "train.max_steps", "train.metrics", "train.early_stop_metric", "train.early_stop_mode",
    "train.early_stop_patience", "train.early_stop_min_delta", "train.log_every",
    "train.validate_every_steps", "train.ema_decay", "train.swa_start",
    "train.on_nonfinite", "train.max_nonfinite", "train.check_replicas_every", "train.check_batch_loss",
    "train.compile", "train.channels_last", "train.deterministic",
    "train.offload_optimizer", "train.activation_checkpointing",
    *(key for key in config_keys() if key.startswith(("launch.", "checkpoint.", "track.", "faults."))),
}  # fmt: skip


def config_with(strategy):
    settings = strategies.find(strategy).settings()
    return make_config(sequence_length=2, parallel=settings, num_ranks=1 + settings.servers)


def resume_error(config, key):
    """The error of a run with `config` where the one before had another value of `key`; None where it may go on."""
    before = config.to_dict()
    section, _, name = key.partition(".")
    assert name in before[section]
    before[section][name] = "another value"
    try:
        check_same_settings(Saved("/run/checkpoints/1", 1, 1, {"config": before}), config)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("strategy", strategies.names())
def test_what_may_change_is_what_is_marked_and_nothing_else(strategy):
    config, marked = config_with(strategy), set()
    for name, section in sections(strategy).items():
        whole = getattr(section, "MAY_CHANGE", False)
        fields = dataclasses.fields(section)
        marked |= {f"{name}.{f.name}" for f in fields if whole or f.metadata.get("may_change")}
    errors = {key: resume_error(config, key) for key in config_keys(strategy)}
    expected = set(MAY_CHANGE)
    if strategy in ("mesh", "auto"):  # a checkpoint goes from any mesh to any other
        expected |= {key for key in config_keys(strategy) if key.startswith("parallel.")} - {"parallel.strategy"}
    assert {key for key, error in errors.items() if error is None} == marked == expected
    for key, error in errors.items():
        assert error is None or f"({key}: was 'another value', now " in error


OF_CALLER = {
    "shards.store", "shards.trusted_writers", "shards.cache_dir", "shards.cache_mib", "launch.log_dir",
    "launch.allow_plaintext",
    "checkpoint.signing_key_file", "train.init_from",
    *(key for key in config_keys() if key.startswith("track.")),
}  # fmt: skip
PLACE = re.compile(r"url|uri|dir|path|file|folder|store$|host|address|port$|server|endpoint|from$|key$|token|plaintext")
"""Names of settings that may say where to write or to connect."""
NO_PLACES = {"launch.exclude_host_after", "parallel.hosts", "parallel.server_k", "parallel.server_mode",
             "parallel.num_servers", "loader.max_tokens"}  # fmt: skip


@pytest.mark.parametrize("strategy", strategies.names())
def test_S22_settings_of_a_checkpoint_do_not_say_where_to_write_or_to_connect(strategy):
    marked = {f"{name}.{f}" for name, section in sections(strategy).items() for f in fields_of_caller(section)}
    assert marked == OF_CALLER
    assert {key for key in config_keys(strategy) if PLACE.search(key.partition(".")[2])} <= OF_CALLER | NO_PLACES
    usual, config = config_with(strategy), config_with(strategy)
    theirs = dataclasses.replace(
        config,
        shards=Shards(
            store="s3://other/x?endpoint_override=other",
            trusted_writers=("*",),
            cache_dir="/other",
            cache_mib=1,
            rows_per_shard=7,
        ),
        launch=dataclasses.replace(config.launch, log_dir="/other", allow_plaintext=True, device="cpu"),
        checkpoint=Checkpoint(signing_key_file="/other", keep=7),
        train=dataclasses.replace(config.train, init_from="s3://other", seed=7),
        track=Track(mlflow=True, mlflow_log_model=True, tensorboard=True),
    )
    found = as_read(json.loads(json.dumps(theirs.to_dict())))
    for key in OF_CALLER:
        section, _, name = key.partition(".")
        expected = getattr(getattr(usual, section), name)
        assert getattr(getattr(found, section), name) == expected, key
    assert (found.shards.rows_per_shard, found.checkpoint.keep, found.train.seed) == (7, 7, 7)
    assert (found.parallel, found.sequences, found.data) == (theirs.parallel, theirs.sequences, theirs.data)


def test_a_section_that_another_version_has_is_an_error_that_names_it():
    before = Config().to_dict()
    before["extra"] = before.pop("loader")
    with pytest.raises(ValueError, match=r"another version of spark_dl .*: extra, loader\)"):
        check_same_settings(Saved("/run/checkpoints/1", 1, 1, {"config": before}), Config())


@pytest.mark.parametrize("missing", ["track", "faults"])
def test_a_section_that_may_change_may_be_missing_in_an_older_checkpoint(missing):
    before = Config().to_dict()
    del before[missing]
    check_same_settings(Saved("/run/checkpoints/1", 1, 1, {"config": before}), Config())


def test_sequences_cannot_come_or_go():
    plain, in_sequences = Config(), make_config(sequence_length=3)
    for before, now in ((plain, in_sequences), (in_sequences, plain)):
        with pytest.raises(ValueError, match=r"sequences\.length: was (None, now 3|3, now None)"):
            check_same_settings(Saved("/run/checkpoints/1", 1, 1, {"config": before.to_dict()}), now)


def test_another_strategy_is_said_by_its_name_alone():
    before, now = (make_config(parallel=strategies.find(name).settings()) for name in ("tree_reduce", "ddp"))
    with pytest.raises(ValueError, match=r"\(parallel\.strategy: was 'tree_reduce', now 'ddp'\)"):
        check_same_settings(Saved("/run/checkpoints/1", 1, 1, {"config": before.to_dict()}), now)
