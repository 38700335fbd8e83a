"""Settings: what is accepted, and what an error says."""

import dataclasses
import json
import math

import pytest
import yaml

from spark_dl import Checkpoint, Config, Data, Launch, Parallel, Train, load_config
from spark_dl.config.checks import suggestion
from spark_dl.config.load import build_config, config_keys

NAN, INF = math.nan, math.inf


def encodings(*settings):
    return [{"encode": {"c": s}} for s in settings]


SERVERS = {"strategy": "parameter_server"}
SYNC = ("sync", "k_sync", "k_batch_sync")
INVALID = [
    (Data, "data.features", [(), [], "pixels", None, 3, ("a", "a"), ("a", "label")]),
    (Data, "data.features and data.label", [], [{"features": ("",)}, {"features": (3,)}, {"label": ""}, {"label": 3}]),
    (Data, "train.validation_fraction", [-0.1, 1, 1.5, NAN, INF, "0.1", True, None]),
    (Data, "shards.rows_per_row_group", [-1, 1.5, "8", True, None]),
    (Data, "shards.rows_per_shard", [-1, 1.5, "8", True, None]),
    (Data, "data.require_success", [0, "no", None]),
    (Data, "loader.num_streams", [0, -1, 2.0, "8", True, None]),
    (Data, "loader.shuffle_window_rows", [0, -1, 2.0, None]),
    (Data, "loader.memory_mib", [0, -1, 2.0, None]),
    (Data, "loader.reader_threads", [0, -1, 2.0, None]),
    (Data, "loader.prefetch_batches", [0, -1, 2.0, None]),
    (Data, "shards.cache_dir", ["relative", 1]),
    (Data, "shards.store", ["", 1]),
    (Data, "shards.store_ttl_days", [-1, "1", None]),
    (Data, "sequences.length", [-1, 2.0, "8", True, None]),
    (Data, "sequences.stride", [0, -1, 2.0, None, 3]),
    (Data, "sequences.order", ["", 3, "time"]),
    (Data, "sequences.group", ["", 3, "device"]),
    (Data, "sequences.max_gap", [1, 0]),
    (Data, "sequences.max_gap", [], [{"sequence_max_gap": g, "sequence_length": 2} for g in (-1, NAN, INF, "1")]),
    (Data, "sequences.order", [], [{"sequence_max_gap": 1, "sequence_length": 2}]),
    (Data, "train.validation_fraction", [], [{"validation_fraction": 0.1, "sequence_length": 2}]),
    (Data, "shards.storage", [], [{"storage": "local", "sequence_length": 2}]),
    (Data, "data.filters", [], [{"filters": [["x", ">", 1]], "sequence_length": 2}]),
    (Data, "loader.reader", [], [{"reader": "petastorm", "sequence_length": 2}]),
    (Data, "shards.cache_mib", [-1, 2.0, None]),
    (Data, "shards.cache_mib", [], [{"cache_dir": "/c"}, {"cache_mib": 0, "cache_dir": "/c"}]),
    (Data, "shards.cache_dir", [], [{"reader": "petastorm", "cache_mib": 8, "cache_dir": "/c"}]),
    (Data, "shards.store", [], [{"storage": "local", "store": "/store"}]),
    (Data, "loader.ragged", ["padded", None, True]),
    (Data, "loader.proportions", [["a"], None, 0.5]),
    (Data, "loader.proportions.a", [], [{"proportions": {"a": v}} for v in (0, -1, NAN, INF, "1", True, None)]),
    (Data, "train.validation_fraction", [], [{"proportions": {"a": 1}, "validation_fraction": 0.1}]),
    (Data, "shards.storage", [], [{"proportions": {"a": 1}, "storage": "local"}]),
    (Data, "loader.reader", [], [{"proportions": {"a": 1}, "reader": "petastorm"}]),
    (Data, "data.nulls", ["allow", "Drop", None, True]),
    (Data, "data.nonfinite", ["raise", None, True]),
    (Data, "data.encode", ["hash", None, ["c"], 3]),
    (Data, "data.encode.c", [], encodings("hash", None, ["hash"], 3)),
    (Data, "data.encode.c.as", [], encodings({"as": "md5"}, {"as": 3}, {"as": ["hash"]})),
    (Data, "data.encode.c.bucket", [], encodings({"as": "hash", "buckets": 3, "bucket": 3})),
    (
        Data,
        "data.encode.c.buckets",
        [],
        encodings({"as": "hash"}, *({"as": "hash", "buckets": b} for b in (0, "9", True, 1.5, None))),
    ),
    (Data, "data.encode.c.buckets", [], encodings({"as": "bytes", "buckets": 3}, {"buckets": 3})),
    (Data, "data.encode.c.ragged", [], encodings({"ragged": 1}, {"as": "hash", "buckets": 3, "ragged": None})),
    (Data, "data.encode.c.unit", [], encodings({"as": "timestamp", "unit": "h"}, {"as": "float", "unit": "s"})),
    (
        Data,
        "data.encode.c.resize",
        [],
        encodings(*({"as": "image", "resize": v} for v in (9, [9], [9, 0], [9, 9.0], [9, 9, 3], "99", [9, True]))),
    ),
    (Data, "data.encode.c.unknown", [], encodings({"as": "vocabulary", "unknown": "drop"})),
    (Data, "data.encode.c.min_count", [], encodings({"as": "vocabulary", "min_count": 0})),
    (Data, "data.encode.c.max_size", [], encodings({"as": "vocabulary", "max_size": "many"})),
    (
        Data,
        "data.encode.c.values",
        [],
        encodings(*({"as": "vocabulary", "values": v} for v in ([], "ab", [1], ["a", "a"], None))),
    ),
    (Data, "data.filters", ["x > 3", None, 3, ["x", ">", 3], [[]], {"x": 3}]),
    (Data, "data.fill", ["0", None, 0], [{"fill": {"c": 1}}, {"fill": {"c": 1}, "nulls": "drop"}]),
    (Data, "data.fill.c", [], [{"fill": {"c": v}} for v in (None, NAN, INF, [0], {})]),
    (Data, "loader.shuffle", [0, 1, "true", None]),
    (Data, "train.validation_fraction", [], [{"reader": "petastorm", "validation_fraction": 0.1}]),
    (Data, "loader.reader", ["arrow", "Petastorm", "", None]),
    (Train, "train.global_batch_size", [0, -64, 64.0, "64", True, None]),
    (Train, "train.accumulation_steps", [0, -1, 2.0, None]),
    (Train, "train.epochs", [0, -1, 2.0, None]),
    (Train, "train.max_steps", [0, -1, 2.0, True]),
    (Train, "train.optimizer", ["", "adamw", "_Sgd", None, 3, "lr_scheduler", "LBFGS"]),
    (Train, "train.lr", [0, -0.1, NAN, INF, "0.1", True, None]),
    (Train, "train.scheduler", ["", "Cosine", "_LRScheduler", 3]),
    (Train, "train.scheduler_interval", ["steps", None, 1]),
    (Train, "train.scheduler_interval", [], [{"scheduler": "ReduceLROnPlateau", "scheduler_interval": "step"}]),
    (Train, "train.lr_scaling", ["Linear", None, 1]),
    (Train, "train.warmup_steps", [-1, 2.0, True, None]),
    (Train, "train.clip_grad_norm", [0, -1, NAN, INF, "1"]),
    (Train, "train.precision", ["float16", "fp32", None]),
    (Train, "train.metrics.m", [], [{"metrics": {"m": bad}} for bad in ({}, "Accuracy", None, {"class": 3})]),
    (Train, "train.metrics", [], [{"metrics": {"loss": {"class": "MeanMetric"}}}]),
    (Train, "train.early_stop_metric", ["accuracy", 3, ""]),
    (Train, "train.early_stop_mode", ["minimum", None]),
    (Train, "train.early_stop_patience", [0, -1, 2.0, None]),
    (Train, "train.early_stop_min_delta", [-0.1, NAN, INF, None]),
    (Train, "train.seed", [-1, 1.0, True, None]),
    (Train, "train.log_every", [0, -1, 2.0, None]),
    (Parallel, "parallel.strategy", ["dpp", "DDP", "", None, 1]),
    (Parallel, "parallel.bucket_mib", [0, -1, NAN, INF, "25", None]),
    (Parallel, "parallel.bucket_mib", [], [{"bucket_mib": "auto", "strategy": "horovod"}]),
    (Parallel, "parallel.bucket_mib", [], [{"bucket_mib": "auto", "compression": c} for c in ("fp16", "topk")]),
    (Parallel, "parallel.find_unused_parameters", [0, 1, "true", None]),
    (
        Parallel,
        "parallel.find_unused_parameters",
        [],
        [{"find_unused_parameters": True, "compression": c} for c in ("powersgd", "threshold", "topk")],
    ),
    (Parallel, "parallel.static_graph", [0, 1, "true", None]),
    (Parallel, "parallel.sync_batchnorm", [0, 1, "true", None]),
    (Parallel, "parallel.sync_batchnorm", [], [{"sync_batchnorm": True, "strategy": "horovod"}]),
    (Parallel, "parallel.all_reduce", ["gloo", "Ring", None]),
    (Parallel, "parallel.all_reduce", [], [{"all_reduce": "ring", "compression": "fp16"}]),
    (Parallel, "parallel.compression", ["int8", "top-k", None]),
    (Parallel, "parallel.compression", [], [{"compression": "fp16", "strategy": "local_sgd"}]),
    (Parallel, "parallel.compression", [], [{"compression": "topk", "strategy": "horovod"}]),
    (
        Parallel,
        "parallel.compression_start_step",
        [-1, 2.0, True, None, 9],
        [{"compression_start_step": 9, "compression": "fp16"}],
    ),
    (Parallel, "parallel.powersgd_rank", [0, -1, 2.0, True, None, 2], [{"powersgd_rank": 2, "compression": "topk"}]),
    (
        Parallel,
        "parallel.threshold",
        [0, -1, NAN, INF, "1", None, 0.1],
        [{"threshold": 0.1, "compression": "powersgd"}],
    ),
    (Parallel, "parallel.topk_ratio", [0, 1.5, NAN, "1", None, 0.1], [{"topk_ratio": 0.1, "compression": "threshold"}]),
    (Parallel, "parallel.adasum", [0, 1, "true", None, True]),
    (Parallel, "parallel.sync_every_steps", [0, -1, 2.0, True, None, 2]),
    (Parallel, "parallel.sync_start_step", [-1, 2.0, True, None, 2]),
    (Parallel, "parallel.tree_depth", [0, -1, 2.0, True, None, 3]),
    (Parallel, "parallel.num_servers", [0, -1, 2.0, True, None, 2]),
    (Parallel, "parallel.server_mode", ["ksync", None, "async"]),
    (Parallel, "parallel.server_k", [-1, 2.0, True, None, 2]),
    (Parallel, "parallel.server_k", [], [{**SERVERS, "server_mode": m, "server_k": 2} for m in ("sync", "async")]),
    (Parallel, "parallel.max_staleness", [-1, 2.0, True, 2]),
    (Parallel, "parallel.max_staleness", [], [{**SERVERS, "server_mode": m, "max_staleness": 2} for m in SYNC]),
    (Parallel, "parallel.staleness_lr", [0, 1, "true", None, True]),
    (Parallel, "parallel.staleness_lr", [], [{**SERVERS, "server_mode": m, "staleness_lr": True} for m in SYNC]),
    (Parallel, "faults.straggler", ["normal", None]),
    (Parallel, "faults.straggler_s", [-1, NAN, INF, "1", None, 0.5]),
    (Parallel, "faults.straggler_s", [], [{"straggler": "constant"}]),
    (Parallel, "faults.straggler_ranks", [0, "0", [-1], [1.0], [True], None, [1]]),
    (Launch, "launch.num_ranks", [0, -1, 2.0, "2", True, None]),
    (Data, "shards.storage", ["disk", "", 1, None]),
    (Launch, "launch.device", ["gpu", "cuda:0", None]),
    (Launch, "launch.start_timeout_s", [0, -1, NAN, INF, None]),
    (Launch, "launch.collective_timeout_s", [0, -1, NAN, INF, None, 604_801, 1e12]),
    (Launch, "launch.threads", [-1, 2.0, True, None]),
    (Checkpoint, "checkpoint.every_steps", [-1, 2.0, True, None]),
    (Checkpoint, "checkpoint.every_epochs", [0, -1, 2.0, None]),
    (Checkpoint, "checkpoint.keep", [0, -1, 2.0, None]),
    (Checkpoint, "checkpoint.strict", ["yes", 1, None]),
]


def invalid_cases():
    found = []
    for section, key, values, *more in INVALID:
        cases = [{key.split(".")[-1]: value} for value in values] + [case for cases in more for case in cases]
        found += [pytest.param(section, key, case, id=f"{key}={list(case.values())[-1]!r}") for case in cases]
    return found


@pytest.mark.parametrize(("section", "key", "values"), invalid_cases())
def test_an_invalid_value_is_an_error_that_names_the_key(section, key, values):
    with pytest.raises(ValueError, match=rf"^{key}: "):
        section(**values)


def test_the_table_of_invalid_values_knows_every_number_choice_and_flag():
    free = {"data.label", "train.optimizer_args", "train.scheduler_args"}
    assert set(config_keys()) - free <= {key for _, key, *_ in INVALID}


ENCODE = {
    "city": {"as": "vocabulary", "min_count": 2, "unknown": "error"}, "name": {"as": "hash", "buckets": 1000},
    "user.text": {"as": "bytes"}, "when": {"as": "timestamp", "unit": "ms"}, "clicks": {"ragged": True},
}  # fmt: skip
FILL = {"age": 0, "city": "unknown", "score": -0.5, "flag": True}


def test_the_encoding_of_columns_travels_through_yaml_json_and_the_command_line(tmp_path):
    expected = Config(data=Data(encode=ENCODE, nulls="fill", fill=FILL))
    plain = {"data": {"encode": ENCODE, "nulls": "fill", "fill": FILL}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(plain))
    assert load_config(tmp_path / "c.yaml") == expected
    assert load_config(None, {"data.encode": ENCODE, "data.nulls": "fill", "data.fill": FILL}) == expected
    overrides = ["data.encode={city: {as: hash, buckets: 7}}", "data.nonfinite=allow"]
    encode = {"city": {"as": "hash", "buckets": 7}}
    assert load_config(None, overrides) == Config(data=Data(encode=encode, nonfinite="allow"))
    assert build_config(json.loads(json.dumps(expected.to_dict()))) == expected


def test_defaults_are_valid():
    assert Config() == Config(data=Data(), train=Train(), parallel=Parallel(), launch=Launch(), checkpoint=Checkpoint())


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().train.lr = 1.0


def test_without_a_label_only_the_features_are_read():
    assert Data(features=["a", "b"]).columns == ("a", "b", "label")
    assert Data(features=["a", "b"], label=None).columns == ("a", "b")


@pytest.mark.parametrize(("optimizer", "near"), [("Adamm", "Adam"), ("sgd", "SGD"), ("adamw", "AdamW")])
def test_an_unknown_optimizer_suggests_the_nearest(optimizer, near):
    with pytest.raises(ValueError, match=rf"no class '{optimizer}' in torch.optim; did you mean '{near}'\?"):
        Train(optimizer=optimizer)


# Settings that must fit each other


@pytest.mark.parametrize(("batch", "streams", "nearest"), [(60, 16, 64), (1, 16, 16), (17, 16, 16), (100, 8, 96)])
def test_the_global_batch_must_be_a_multiple_of_the_streams(batch, streams, nearest):
    message = rf"^train\.global_batch_size: .*num_streams={streams}, found {batch}; the nearest is {nearest}$"
    with pytest.raises(ValueError, match=message):
        Config(train=Train(global_batch_size=batch), data=Data(num_streams=streams))
    Config(train=Train(global_batch_size=nearest), data=Data(num_streams=streams))


@pytest.mark.parametrize(("ranks", "proposed"), [(17, 17), (20, 20), (32, 32), (100, 100)])
def test_there_must_be_a_stream_for_every_rank(ranks, proposed):
    message = rf"^loader\.num_streams: .*num_ranks={ranks}, found 16.* {proposed} would do"
    with pytest.raises(ValueError, match=message):
        Config(launch=Launch(num_ranks=ranks))
    settings = {"data": Data(num_streams=proposed), "train": Train(global_batch_size=2 * proposed)}
    Config(launch=Launch(num_ranks=ranks), **settings)


@pytest.mark.parametrize(("ranks", "proposed"), [(3, 18), (5, 20), (7, 21)])
def test_with_local_storage_the_ranks_have_equal_streams(ranks, proposed):
    message = (
        rf"^loader\.num_streams: expected a multiple of launch\.num_ranks={ranks} .*, found 16: .*; {proposed} would"
    )
    with pytest.raises(ValueError, match=message):
        Config(data=Data(storage="local"), launch=Launch(num_ranks=ranks))
    Config(launch=Launch(num_ranks=ranks))
    data = Data(storage="local", num_streams=proposed)
    Config(data=data, train=Train(global_batch_size=2 * proposed), launch=Launch(num_ranks=ranks))


@pytest.mark.parametrize("strategy", ["tree_reduce", "shuffle_reduce"])
@pytest.mark.parametrize("data", [{"storage": "local"}, {"reader": "petastorm"}])
def test_where_spark_aggregates_any_executor_must_be_able_to_read_the_rows_of_any_rank(strategy, data):
    (name,) = data
    with pytest.raises(ValueError, match=rf"^data\.{name}: expected .* with parallel\.strategy='{strategy}', found"):
        Config(data=Data(**data), parallel=Parallel(strategy=strategy))
    Config(data=Data(**data))


@pytest.mark.parametrize(("batch", "streams", "ranks", "most"), [
    (64, 16, 1, 64), (64, 16, 16, 4), (64, 16, 5, 12), (64, 16, 3, 20), (64, 16, 7, 8),
    (16, 16, 16, 1), (16, 16, 3, 5),
])  # fmt: skip
def test_every_micro_batch_of_every_rank_has_a_row(batch, streams, ranks, most):
    def build(accumulation_steps):
        train = Train(global_batch_size=batch, accumulation_steps=accumulation_steps)
        return Config(train=train, data=Data(num_streams=streams), launch=Launch(num_ranks=ranks))

    build(most)
    with pytest.raises(ValueError, match=rf"^train\.accumulation_steps: expected at most {most},.* found {most + 1}$"):
        build(most + 1)


@pytest.mark.parametrize("compression", ["powersgd", "threshold", "topk"])
def test_error_feedback_is_not_for_gradients_whose_scale_changes(compression):
    train, parallel = Train(precision="fp16"), Parallel(compression=compression)
    with pytest.raises(ValueError, match=rf"^train\.precision: not fp16 with parallel\.compression='{compression}'"):
        Config(train=train, parallel=parallel)
    Config(train=Train(precision="bf16"), parallel=parallel)
    Config(train=train, parallel=Parallel(compression="fp16"))


def test_data_parallel_splits_columns_by_rows():
    with pytest.raises(ValueError, match=r"^loader\.ragged: not offsets with parallel\.strategy='data_parallel'"):
        Config(data=Data(ragged="offsets"), parallel=Parallel(strategy="data_parallel"))


def with_servers(ranks=4, num_servers=1, train=None, data=None, **parallel):
    return Config(
        train=Train(**(train or {})), data=Data(**(data or {})), launch=Launch(num_ranks=ranks),
        parallel=Parallel(**SERVERS, num_servers=num_servers, **parallel),
    )  # fmt: skip


@pytest.mark.parametrize(("key", "settings"), [
    ("parallel.num_servers", {"num_servers": 4}),
    ("parallel.num_servers", {"num_servers": 5}),
    ("parallel.server_k", {"server_mode": "k_sync", "server_k": 4}),
    ("parallel.server_k", {"server_mode": "k_async", "server_k": 3, "num_servers": 2}),
    ("faults.straggler_ranks", {"straggler": "constant", "straggler_s": 1, "straggler_ranks": (0, 3)}),
    ("faults.straggler_ranks", {"straggler": "constant", "straggler_s": 1, "straggler_ranks": (4,)}),
    ("train.optimizer", {"train": {"optimizer": "LBFGS"}}),
    ("train.optimizer", {"train": {"optimizer": "Adafactor"}}),
    ("train.clip_grad_norm", {"num_servers": 2, "train": {"clip_grad_norm": 1.0}}),
    ("train.precision", {"train": {"precision": "fp16"}}),
    ("train.accumulation_steps", {"train": {"accumulation_steps": 21}}),
    ("shards.storage", {"data": {"storage": "local"}}),
    ("loader.reader", {"data": {"reader": "petastorm"}}),
])  # fmt: skip
def test_what_parameter_servers_cannot_do_is_an_error_that_names_the_key(key, settings):
    with pytest.raises(ValueError, match=rf"^{key}: "):
        with_servers(**settings)


@pytest.mark.parametrize("strategy", ["ddp", "local_sgd", "tree_reduce", "parameter_server"])
def test_ranks_that_compute_nothing_cannot_be_slow(strategy):
    def build(*ranks):
        parallel = Parallel(strategy=strategy, straggler="constant", straggler_s=1, straggler_ranks=ranks)
        return Config(parallel=parallel, launch=Launch(num_ranks=5 if strategy == "parameter_server" else 4))

    build(0, 3)
    with pytest.raises(ValueError, match=r"^faults\.straggler_ranks: expected ranks below 4, .*, found \[0, 4\]$"):
        build(0, 4)


@pytest.mark.parametrize("settings", [
    {"num_servers": 3}, {"server_mode": "k_sync", "server_k": 3}, {"server_mode": "k_batch_sync", "server_k": 40},
    {"server_mode": "k_batch_async", "server_k": 9, "max_staleness": 0}, {"server_mode": "async", "staleness_lr": True},
    {"straggler": "constant", "straggler_s": 1, "straggler_ranks": (0, 2)}, {"train": {"accumulation_steps": 20}},
    {"train": {"clip_grad_norm": 1.0, "precision": "bf16", "optimizer": "AdamW"}},
])  # fmt: skip
def test_what_parameter_servers_can_do(settings):
    with_servers(**settings)


def test_arguments_must_be_plain_data():
    with pytest.raises(ValueError, match="plain numbers, strings, lists and mappings"):
        Config(train=Train(optimizer_args={"foreach": object()}))


# From files and command lines


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_nothing_gives_the_defaults():
    assert load_config() == Config()


def test_a_file_and_then_overrides(tmp_path):
    path = write(tmp_path, "train: {lr: 0.5, epochs: 3}\ndata: {features: [a, b], label: null}\n")
    config = load_config(path, ["train.lr=1e-3", "launch.num_ranks=2", "train.optimizer_args={momentum: 0.9}"])
    assert config == Config(
        train=Train(lr=0.001, epochs=3, optimizer_args={"momentum": 0.9}),
        data=Data(features=("a", "b"), label=None),
        launch=Launch(num_ranks=2),
    )
    assert load_config(str(path)).train.lr == 0.5


def test_overrides_as_a_mapping(tmp_path):
    overrides = {"data.features": ["a b", "1"], "data.label": None, "train.max_steps": 5, "loader.shuffle": False}
    config = load_config(None, {**overrides, "train.optimizer_args": {"momentum": 0.9}})
    assert config.data == Data(features=("a b", "1"), label=None, shuffle=False)
    assert config.train == Train(max_steps=5, optimizer_args={"momentum": 0.9})


@pytest.mark.parametrize(("text", "key", "near"), [
    ("train: {learning_rte: 1}", "train.learning_rte", "did you mean|known are"),
    ("train: {epoch: 1}", "train.epoch", r"did you mean 'train\.epochs'"),
    ("data: {num_stream: 8}", "data.num_stream", r"did you mean 'loader\.num_streams'"),
    ("trian: {lr: 1}", "trian.*", "did you mean 'train"),
    ("zzz: 1", "zzz", "known are checkpoint, data, launch, parallel, train"),
])  # fmt: skip
def test_an_unknown_key_in_a_file_suggests_the_nearest(tmp_path, text, key, near):
    with pytest.raises(ValueError, match=rf"unknown config key '{key}'; {near}"):
        load_config(write(tmp_path, text))


@pytest.mark.parametrize(("override", "near"), [
    ("train.epohcs=1", r"did you mean 'train\.epochs'"),
    ("trian.lr=1", r"did you mean 'train\.lr'"),
    ("launch.ranks=1", r"did you mean 'launch\.num_ranks'"),
    ("zzz=1", "known are checkpoint, data, launch, parallel, train"),
])  # fmt: skip
def test_an_unknown_key_in_an_override_suggests_the_nearest(override, near):
    with pytest.raises(ValueError, match=rf"unknown config key '{override.split('=')[0]}'; {near}"):
        load_config(None, [override])


@pytest.mark.parametrize("override", [
    "train.lr=fast", "train.epochs=1.5", "train.epochs=0", "loader.shuffle=3", "launch.device=tpu", "train.lr",
])  # fmt: skip
def test_a_value_that_does_not_fit_names_its_key(override):
    with pytest.raises(ValueError, match=override.split("=")[0].replace(".", r"\.")):
        load_config(None, [override])


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_settings_survive_yaml():
    config = Config(
        data=Data(features=("a",), label="b", validation_fraction=0.25, num_streams=8),
        train=Train(optimizer_args={"betas": [0.9, 0.99]}, max_steps=7, metrics={"m": {"class": "MeanMetric"}}),
        parallel=Parallel(static_graph=True),
        launch=Launch(num_ranks=4, device="cpu"),
        checkpoint=Checkpoint(keep=9),
    )
    assert build_config(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config
    assert build_config({}) == Config()


@pytest.mark.parametrize(("sections", "message"), [
    ({"trian": {}}, "unknown config key 'trian'; did you mean 'train'"),
    ({"train": {"lrs": 1}}, r"unknown config key 'train\.lrs'; did you mean 'train\.lr'"),
    ({"train": None}, "^train: expected a mapping"),
    ({"train": [1]}, "^train: expected a mapping"),
])  # fmt: skip
def test_plain_dicts_are_checked_like_files(sections, message):
    with pytest.raises(ValueError, match=message):
        build_config(sections)


def test_a_suggestion_is_the_nearest_name_or_all_names():
    assert suggestion("LABLE", ["label", "image"]) == "; did you mean 'label'?"
    assert suggestion("zzz", ["label", "image"]) == "; known are image, label"


def test_metrics_without_a_label_are_refused():
    with pytest.raises(ValueError, match=r"^train\.metrics: accuracy compare with data\.label, which is null"):
        Config(data=Data(label=None), train=Train(metrics={"accuracy": {"class": "MulticlassAccuracy"}}))
