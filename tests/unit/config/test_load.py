"""Settings from YAML files, overrides and plain dicts."""

import json
import re

import pytest
import yaml

import spark_dl
from spark_dl import (
    Checkpoint,
    Config,
    Data,
    Horovod,
    Launch,
    Loader,
    Sequences,
    Shards,
    Train,
    load_config,
)
from spark_dl.config import strategies
from spark_dl.config.load import build_config, config_keys, with_settings

SECTIONS = "checkpoint, data, faults, launch, loader, parallel, sequences, shards, track, train"


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


ENCODE = {
    "city": {"as": "vocabulary", "min_count": 2, "unknown": "error"}, "name": {"as": "hash", "buckets": 1000},
    "user.text": {"as": "bytes"}, "when": {"as": "timestamp", "unit": "ms"}, "clicks": {"ragged": True},
}  # fmt: skip
FILL = {"age": 0, "city": "unknown", "score": -0.5, "flag": True}


def test_the_encoding_of_columns_travels_through_yaml_json_and_the_command_line(tmp_path):
    expected = Config(data=Data(encode=ENCODE, nulls="fill", fill=FILL))
    plain = {"data": {"encode": ENCODE, "nulls": "fill", "fill": FILL}}
    assert load_config(write(tmp_path, yaml.safe_dump(plain))) == expected
    assert load_config(None, {"data.encode": ENCODE, "data.nulls": "fill", "data.fill": FILL}) == expected
    overrides = ["data.encode={city: {as: hash, buckets: 7}}", "data.nonfinite=allow"]
    encode = {"city": {"as": "hash", "buckets": 7}}
    assert load_config(None, overrides) == Config(data=Data(encode=encode, nonfinite="allow"))
    assert build_config(json.loads(json.dumps(expected.to_dict()))) == expected


def test_nothing_gives_the_defaults():
    assert load_config() == build_config({}) == Config()


def test_a_file_and_then_overrides(tmp_path):
    path = write(tmp_path, "train: {lr: 0.5, epochs: 3}\ndata: {features: [a, b], label: null}\n")
    config = load_config(path, ["train.lr=1e-3", "launch.num_ranks=2", "train.optimizer_args={momentum: 0.9}"])
    assert config == Config(
        train=Train(lr=0.001, epochs=3, optimizer_args={"momentum": 0.9}),
        data=Data(features=("a", "b"), label=None),
        launch=Launch(num_ranks=2),
    )
    assert load_config(str(path)).train.lr == 0.5


def test_overrides_as_a_mapping():
    overrides = {"data.features": ["a b", "1"], "data.label": None, "train.max_steps": 5, "loader.shuffle": False}
    config = load_config(None, {**overrides, "train.optimizer_args": {"momentum": 0.9}})
    assert config.data == Data(features=("a b", "1"), label=None)
    assert config.loader == Loader(shuffle=False)
    assert config.train == Train(max_steps=5, optimizer_args={"momentum": 0.9})


def test_settings_survive_yaml():
    config = Config(
        data=Data(features=("a",), label="b"),
        shards=Shards(rows_per_shard=9),
        loader=Loader(num_streams=8),
        sequences=Sequences(length=3, order="t"),
        train=Train(optimizer_args={"betas": [0.9, 0.99]}, max_steps=7, metrics={"m": {"class": "MeanMetric"}}),
        parallel=Horovod(bucket_mib=3.0),
        launch=Launch(num_ranks=4, device="cpu"),
        checkpoint=Checkpoint(keep=9),
        faults=spark_dl.Faults(straggler="constant", straggler_s=0.5, straggler_ranks=(1,)),
    )
    assert build_config(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config


@pytest.mark.parametrize(("text", "key", "near"), [
    ("train: {learning_rte: 1}", "train.learning_rte", "did you mean|expected one of"),
    ("train: {epoch: 1}", "train.epoch", r"did you mean 'train\.epochs'"),
    ("data: {num_stream: 8}", "data.num_stream", r"did you mean 'loader\.num_streams'"),
    ("data: {validation_fraction: 0.1}", "data.validation_fraction", r"did you mean 'train\.validation_fraction'"),
    ("trian: {lr: 1}", "trian.*", "did you mean 'train"),
    ("zzz: 1", "zzz", f"expected one of {SECTIONS}$"),
    ("sequences: {lenth: 3}", "sequences.lenth", r"did you mean 'sequences\.length'"),
    ("sequences: {length: 3, strid: 2}", "sequences.strid", r"did you mean 'sequences\.stride'"),
])  # fmt: skip
def test_B25_an_unknown_key_in_a_file_suggests_the_nearest(tmp_path, text, key, near):
    with pytest.raises(ValueError, match=rf"^unknown config key '{key}'; {near}"):
        load_config(write(tmp_path, text))


@pytest.mark.parametrize(("overrides", "near"), [
    (["train.epohcs=1"], r"did you mean 'train\.epochs'"),
    (["trian.lr=1"], r"did you mean 'train\.lr'"),
    (["launch.ranks=1"], r"did you mean 'launch\.num_ranks'"),
    (["data.num_stream=8"], r"did you mean 'loader\.num_streams'"),
    (["zzz=1"], f"expected one of {SECTIONS}$"),
    (["sequences.lenth=3"], r"did you mean 'sequences\.length'"),
    (["sequences.strid=2", "sequences.length=3"], r"did you mean 'sequences\.stride'"),
])  # fmt: skip
def test_B25_an_unknown_key_in_an_override_suggests_the_nearest(overrides, near):
    with pytest.raises(ValueError, match=rf"^unknown config key '{overrides[0].split('=')[0]}'; {near}"):
        load_config(None, overrides)


@pytest.mark.parametrize("override", [
    "train.lr=fast", "train.epochs=1.5", "train.epochs=0", "loader.shuffle=3", "launch.device=tpu", "train.lr",
    "sequences.length=long", "sequences.length=0",
])  # fmt: skip
def test_B25_a_value_that_does_not_fit_names_its_key(override):
    with pytest.raises(ValueError, match=override.split("=")[0].replace(".", r"\.")):
        load_config(None, [override])


@pytest.mark.parametrize(("override", "message"), [
    ("launch.num_ranks=two", "launch.num_ranks: expected a whole number, found 'two'"),
    ("launch.num_ranks=1.5", "launch.num_ranks: expected a whole number, found 1.5"),
    ("launch.num_ranks=null", "launch.num_ranks: expected a whole number, found None"),
    ("launch.restart_wait_s=nan", "launch.restart_wait_s: expected a number, found 'nan'"),
    ("loader.shuffle=3", "loader.shuffle: expected true or false, found 3"),
    (f"train.lr={10**400}", f"train.lr: expected a number, found {10**400}"),
    ("launch.max_restarts=always", "launch.max_restarts: expected a whole number or 'auto', found 'always'"),
    ("train.max_steps=[1]", "train.max_steps: expected a whole number or null, found [1]"),
    ("checkpoint.on_error=ignore", "checkpoint.on_error: expected 'raise' or 'warn', found 'ignore'"),
    ("data.features=a", "data.features: expected a list of strings, found 'a'"),
    ("track.profile_steps=[1]", "track.profile_steps: expected a list of 2 whole numbers or null, found [1]"),
    ("loader.proportions=3", "loader.proportions: expected a mapping of names to numbers, found 3"),
    ("train.optimizer_args={lr: [1", "train.optimizer_args: expected a mapping, found '{lr: [1'"),
    ("launch=2", "launch: expected a section with settings, found 2"),
    ("launch=fast", "launch: expected a section with settings, found 'fast'"),
    ("launch={num_ranks: 2, min_ranks: x}", "launch.min_ranks: expected a whole number or null, found 'x'"),
    ("parallel.bucket_mib=x", "parallel.bucket_mib: expected a number or 'auto', found 'x'"),
    ("sequences=3", "sequences: expected a section with settings, found 3"),
    ("sequences={length: 3, order: [1]}", "sequences.order: expected a string or null, found [1]"),
    ("sequences.length=long", "sequences.length: expected a whole number, found 'long'"),
    ("sequences={stride: 2}", "sequences.length: expected a whole number, found nothing"),
])  # fmt: skip
def test_B25_a_value_of_another_type_is_an_error_that_says_what_the_setting_takes(override, message):
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
        load_config(None, [override])


@pytest.mark.parametrize(("text", "message"), [
    ("launch: {num_ranks: two}", "launch.num_ranks: expected a whole number, found 'two'"),
    ("launch: 2", "launch: expected a section with settings, found 2"),
    ("sequences: [1]", "sequences: expected a section with settings, found [1]"),
    ("sequences: {length: 3, stride: x}", "sequences.stride: expected a whole number, found 'x'"),
])  # fmt: skip
def test_B25_a_value_of_another_type_in_a_file_is_the_same_error(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}"):
        load_config(write(tmp_path, text))


def test_a_file_without_sections_is_an_error_that_names_it(tmp_path):
    path = write(tmp_path, "3")
    with pytest.raises(ValueError, match=f"^config: expected sections with settings in {path}, found 3$"):
        load_config(path)
    path = write(tmp_path, "train: [")
    with pytest.raises(ValueError, match=f"^config: {path} is not YAML: "):
        load_config(path)


@pytest.mark.parametrize(("text", "value"), [
    ("1e-3", 0.001), ("1E5", 1e5), ("2.5e+3", 2500.0), (".5e1", 5.0), ("3", 3.0), ("0.25", 0.25), ("1_000.5", 1000.5),
])  # fmt: skip
def test_numbers_are_written_as_in_json_or_python(tmp_path, text, value):
    for config in (load_config(None, [f"train.lr={text}"]), load_config(write(tmp_path, f"train: {{lr: {text}}}"))):
        assert config.train.lr == value
        assert type(config.train.lr) is float


def test_the_last_value_of_a_key_counts(tmp_path):
    path = write(tmp_path, "train: {lr: 0.5, optimizer_args: {momentum: 0.9}}\nlaunch: {num_ranks: 3}\n")
    config = load_config(
        path, ["train={lr: 0.1, epochs: 2}", "train.epochs=4", "train.optimizer_args={nesterov: true}"]
    )
    assert (config.train.lr, config.train.epochs, config.launch.num_ranks) == (0.1, 4, 3)
    assert config.train.optimizer_args == {"nesterov": True}, "a mapping is one value"


def test_sequences_need_a_length_and_may_be_null(tmp_path):
    for load in (
        lambda: build_config({"sequences": {"stride": 2}}),
        lambda: load_config(None, ["sequences.stride=2"]),
        lambda: load_config(write(tmp_path, "sequences: {stride: 2}")),
    ):
        with pytest.raises(ValueError, match=r"sequences\.length"):
            load()
    assert load_config(None, ["sequences.stride=2", "sequences.length=5"]).sequences == Sequences(length=5, stride=2)
    path = write(tmp_path, "sequences: {length: 5, order: t}")
    assert load_config(path, ["sequences.stride=2"]).sequences == Sequences(length=5, order="t", stride=2)
    assert load_config(path, ["sequences=null"]) == load_config(write(tmp_path, "sequences: null")) == Config()


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(("sections", "message"), [
    ({"trian": {}}, "unknown config key 'trian'; did you mean 'train'"),
    ({"train": {"lrs": 1}}, r"unknown config key 'train\.lrs'; did you mean 'train\.lr'"),
    ({"sequences": {"lenth": 1}}, r"unknown config key 'sequences\.lenth'; did you mean 'sequences\.length'"),
    ({"train": None}, "^train: expected a section with settings, found "),
    ({"train": [1]}, "^train: expected a section with settings, found "),
    ({"parallel": None}, "^parallel: expected a section with settings, found "),
    ({"parallel": "ddp"}, "^parallel: expected a section with settings, found "),
])  # fmt: skip
def test_plain_dicts_are_checked_like_files(sections, message):
    with pytest.raises(ValueError, match=message):
        build_config(sections)


# The strategy


def as_file(tmp_path, parallel):
    return load_config(write(tmp_path, yaml.safe_dump({"parallel": parallel})))


def as_overrides(tmp_path, parallel):
    return load_config(None, {f"parallel.{key}": value for key, value in parallel.items()})


def as_plain(tmp_path, parallel):
    return build_config({"parallel": parallel})


EVERY_WAY = pytest.mark.parametrize("load", [as_file, as_overrides, as_plain])


@EVERY_WAY
def test_a_strategy_in_python_is_the_same_as_by_its_name(tmp_path, load):
    assert load(tmp_path, {"strategy": "ddp", "bucket_mib": 10}) == Config(parallel=spark_dl.DDP(bucket_mib=10))
    assert load(tmp_path, {"bucket_mib": "auto"}) == Config(parallel=spark_dl.DDP(bucket_mib="auto"))
    depth = {"strategy": "tree_reduce", "tree_depth": 3}
    assert load(tmp_path, depth) == Config(parallel=spark_dl.TreeReduce(tree_depth=3))
    assert Config(parallel=spark_dl.TreeReduce(tree_depth=3)).to_dict()["parallel"] == depth


@pytest.mark.parametrize("name", strategies.names())
def test_every_strategy_is_loaded_by_its_name(tmp_path, name):
    text = f"parallel: {{strategy: {name}}}\nlaunch: {{num_ranks: {2 if name == 'parameter_server' else 1}}}"
    config = load_config(write(tmp_path, text))
    assert (config.parallel.strategy, type(config.parallel)) == (name, strategies.find(name).settings)
    assert build_config(config.to_dict()) == config


@EVERY_WAY
@pytest.mark.parametrize("strategy", ["dpp", "DDP", "", None, 1, ["ddp"]])
def test_what_is_no_strategy_is_an_error_that_names_the_key_and_all_strategies(tmp_path, load, strategy):
    with pytest.raises(ValueError, match=r"^parallel\.strategy: ") as error:
        load(tmp_path, {"strategy": strategy})
    assert "did you mean 'ddp'" in str(error.value) or "tree_reduce" in str(error.value)


OTHERS = [  # a strategy, settings of which the last is another's, and whose that is
    ({"strategy": "horovod", "sync_batchnorm": True}, "ddp and local_sgd"),
    ({"strategy": "local_sgd", "compression": "fp16"}, "ddp and horovod"),
    ({"strategy": "tree_reduce", "tree_depth": 3, "bucket_mib": 9}, "ddp and horovod and mesh"),
    ({"strategy": "single", "static_graph": True}, "ddp"),
    ({"sync_every_steps": 2}, "local_sgd"),
    ({"strategy": "ddp", "sync_start_step": 2}, "local_sgd"),
    ({"strategy": "ddp", "tree_depth": 3}, "tree_reduce"),
    ({"num_servers": 2}, "parameter_server"),
    ({"server_mode": "async"}, "parameter_server"),
    ({"server_k": 2}, "parameter_server"),
    ({"max_staleness": 2}, "parameter_server"),
    ({"staleness_lr": True}, "parameter_server"),
]


@pytest.mark.sampled(13)
@EVERY_WAY
@pytest.mark.parametrize(("parallel", "having"), OTHERS, ids=str)
def test_a_setting_of_another_strategy_is_an_error_that_says_whose_it_is(tmp_path, load, parallel, having):
    strategy, key = parallel.get("strategy", "ddp"), f"parallel.{list(parallel)[-1]}"
    message = rf"^{key}: not a setting of parallel\.strategy='{strategy}', but of {having};"
    with pytest.raises(ValueError, match=message):
        load(tmp_path, parallel)


@pytest.mark.long
@pytest.mark.slow
def test_every_setting_that_another_strategy_has_is_an_error():
    """All pairs of a strategy and a setting of another one."""
    keys = {name: {key for key in config_keys(name) if key.startswith("parallel.")} for name in strategies.names()}
    for strategy, own in keys.items():
        for key in set().union(*keys.values()) - own:
            having = " and ".join(name for name in strategies.names() if key in keys[name])
            message = rf"^{key}: not a setting of parallel\.strategy='{strategy}', but of {having};"
            with pytest.raises(ValueError, match=message):
                build_config({"parallel": {"strategy": strategy, key.partition(".")[2]: 1}})


def test_an_override_of_the_strategy_leaves_no_settings_of_the_one_before(tmp_path):
    path = write(tmp_path, "parallel: {strategy: tree_reduce, tree_depth: 3}")
    for strategy in ("ddp", "local_sgd"):
        message = rf"^parallel\.tree_depth: not a setting of parallel\.strategy='{strategy}', but of tree_reduce;"
        with pytest.raises(ValueError, match=message):
            load_config(path, [f"parallel.strategy={strategy}"])
    path = write(tmp_path, "parallel: {strategy: ddp, bucket_mib: 3}")
    assert load_config(path, ["parallel.strategy=horovod"]).parallel == Horovod(bucket_mib=3)


def test_an_override_of_the_strategy_counts_wherever_it_stands(tmp_path):
    path = write(tmp_path, "parallel: {strategy: local_sgd}")
    expected = spark_dl.TreeReduce(tree_depth=3)
    assert load_config(path, ["parallel.tree_depth=3", "parallel.strategy=tree_reduce"]).parallel == expected
    assert load_config(path, ["parallel={strategy: tree_reduce, tree_depth: 3}"]).parallel == expected
    assert load_config(path, ["train.lr=1"]).parallel == spark_dl.LocalSGD()


@pytest.mark.parametrize("value", ["0123", "no", "1e3", "null", "a: b", "[]", "?", "", "-", "true", "~"])
def test_a_string_stays_the_string_that_it_is(tmp_path, value):
    """YAML read it, so it is not read again: zip codes begin with 0, and "no" is a word."""
    expected = {"zip": value, "list": 3, "flag": False}
    path = tmp_path / "settings.yaml"
    path.write_text(json.dumps({"data": {"nulls": "fill", "fill": expected}}))
    for config in (
        load_config(path),
        load_config(overrides={"data.nulls": "fill", "data.fill": expected}),
        load_config(overrides=["data.nulls=fill", f"data.fill={json.dumps(expected)}"]),
    ):
        assert config.data.fill == expected
        assert [type(v) for v in config.data.fill.values()] == [str, int, bool]


@pytest.mark.parametrize("value", ["null", "~", "#x", "&x", "0123", "no", "1.0", "[]", "'", "a: b"])
def test_a_quoted_word_is_a_value_of_a_setting(tmp_path, value):
    """A column can be called "null", and was no column; a word of the command line is no comment of YAML."""
    path = tmp_path / "settings.yaml"
    path.write_text(json.dumps({"data": {"label": value}, "checkpoint": {"signing_key_file": value}}))
    for config in (
        load_config(path),
        load_config(overrides={"data.label": value, "checkpoint.signing_key_file": value}),
    ):
        assert (config.data.label, config.checkpoint.signing_key_file) == (value, value)
    assert load_config(overrides=["data.label=null"]).data.label is None
    assert load_config(overrides={"data.label": None}).data.label is None
    assert load_config(overrides=["data.label=#x"]).data.label == "#x"


@pytest.mark.parametrize(("text", "message"), [
    ("data:\n  filters: [[x, '>', 1]]\ntrain:\n  lr: 0.1\ndata:\n  nulls: drop\n", "'data' is in line 1 and in line 5"),
    ("train:\n  lr: 0.1\n  epochs: 2\n  lr: 0.2\n", "'train.lr' is in line 2 and in line 4"),
    ("data:\n  encode:\n    a: {as: hash, buckets: 3, as: bytes}\n", "'data.encode.a.as' is in line 3 and in line 3"),
])  # fmt: skip
def test_a_key_that_is_there_twice_is_an_error_with_both_lines(tmp_path, text, message):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}: the key {message}; expected each key once"):
        load_config(path)


def test_S02_a_settings_file_makes_no_objects(tmp_path):
    path = write(tmp_path, f"train: {{lr: !!python/object/apply:os.system ['touch {tmp_path}/made']}}")
    with pytest.raises(ValueError, match=f"^config: {path} is not YAML: .*could not determine a constructor"):
        load_config(path)
    with pytest.raises(ValueError, match="train.lr: expected a number, found "):
        load_config(None, [f"train.lr=!!python/object/apply:os.system ['touch {tmp_path}/made']"])
    assert not (tmp_path / "made").exists()


def test_settings_by_key_replace_those_of_a_config_and_another_strategy_has_its_own():
    plain = Config().to_dict()
    changed = with_settings(plain, {"train.lr": 3.0, "sequences.length": 4})
    assert (changed["train"]["lr"], changed["sequences"]) == (3.0, {"length": 4})
    assert plain["train"]["lr"] != 3.0
    changed = with_settings(plain, {"parallel.strategy": "local_sgd", "parallel.sync_every_steps": 7})
    assert changed["parallel"] == {"strategy": "local_sgd", "sync_every_steps": 7}
    assert with_settings(plain, {"parallel.bucket_mib": 7})["parallel"] == {**plain["parallel"], "bucket_mib": 7}
    for key in ("lr", "train.", "trian.lr"):
        with pytest.raises(ValueError, match=f"settings: expected keys such as 'train.lr', found '{key}'"):
            with_settings(plain, {key: 1})
