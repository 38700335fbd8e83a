"""Settings: what each section accepts, and what an error says. What excludes what is in `test_conflicts.py`."""

import dataclasses
import math
import pickle
import re

import pytest

from spark_dl import (
    DDP,
    Auto,
    Checkpoint,
    Config,
    Data,
    Faults,
    Horovod,
    Launch,
    Loader,
    LocalSGD,
    Mesh,
    ParameterServer,
    Sequences,
    Shards,
    Track,
    Train,
    TreeReduce,
)
from spark_dl.config import strategies
from spark_dl.config.checks import SettingError, section_name, suggestion
from spark_dl.config.load import config_keys, sections
from spark_dl.config.strategies import names

NAN, INF = math.nan, math.inf


def encodings(*settings):
    return [{"encode": {"c": s}} for s in settings]


def of_servers(modes, **more):
    return [{"server_mode": mode, **more} for mode in modes]


SYNC = ("sync", "k_sync", "k_batch_sync")
INVALID = [  # section, key, invalid values, and invalid combinations of values
    (Data, "data.features", [(), [], "pixels", None, 3, ("a", "a"), ("a", "label")]),
    (
        Data,
        "data.features, data.label and data.labels",
        [],
        [{"features": ("",)}, {"features": (3,)}, {"label": ""}, {"label": 3}],
    ),
    (Data, "data.require_success", [0, "no", None]),
    (Data, "data.assemble", ["float", "vector", True, 3]),
    (Data, "data.cast.features", [], [{"assemble": "float32", "cast": {"features": "float64"}}]),
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
    (Data, "data.weight", ["", 3, ("w",)]),
    (Data, "data.sampling_weight", ["", 1, True, ["w"]]),
    (Data, "data.weight_mean", ["mean", None, "weights"]),
    (Data, "data.labels", ["kind", 3, None]),
    (Data, "data.features", [], [{"labels": ("label",)}, {"labels": ("features",)}, {"weight": "label"}]),
    (Data, "data.features, data.label and data.labels", [], [{"labels": (3,)}, {"labels": ("",)}]),
    (Data, "data.cast", ["float32", None, ["features"]]),
    (Data, "data.cast.feature", [], [{"cast": {"feature": "float32"}}]),
    (Data, "data.cast.features", [], [{"cast": {"features": d}} for d in ("float", "uint16", None, 32)]),
    (Data, "data.filters", ["x > 3", None, 3, ["x", ">", 3], [[]], {"x": 3}]),
    (Data, "data.fill", ["0", None, 0], [{"fill": {"c": 1}}, {"fill": {"c": 1}, "nulls": "drop"}]),
    (Data, "data.fill.c", [], [{"fill": {"c": v}} for v in (None, NAN, INF, [0], {})]),
    (Shards, "shards.rows_per_row_group", [-1, 1.5, "8", True, None]),
    (Shards, "shards.rows_per_shard", [-1, 1.5, "8", True, None]),
    (Shards, "shards.storage", ["disk", "", 1, None]),
    (Shards, "shards.store", ["", 1]),
    (Shards, "shards.trusted_writers", ["root", [""], [1], 1, None]),
    (Shards, "shards.cache_dir", ["relative", 1], [{"cache_mib": 8}]),
    (Shards, "shards.cache_mib", [-1, 2.0, None], [{"cache_dir": "/c"}, {"cache_mib": 0, "cache_dir": "/c"}]),
    (Loader, "loader.num_streams", [0, -1, 2.0, "8", True, None]),
    (Loader, "loader.shuffle", [0, 1, "true", None]),
    (Loader, "loader.shuffle_window_rows", [0, -1, 2.0, None]),
    (Loader, "loader.memory_mib", [0, -1, 2.0, None]),
    (Loader, "loader.reader_threads", [0, -1, 2.0, None]),
    (Loader, "loader.prefetch_batches", [0, -1, 2.0, None]),
    (Loader, "loader.ragged", ["padded", None, True]),
    (Loader, "loader.predict_precision", ["bfloat16", "", None, 16]),
    (Loader, "loader.rows_at_once", [0, -1, 2.0, "8", True]),
    (Loader, "loader.group_by_length", [0, 1, "tokens", None]),
    (Loader, "loader.max_tokens", [0, -1, 2.0, "8", True], [{"max_tokens": 8, "ragged": "offsets"}]),
    (
        Loader,
        "loader.pad_to",
        [(0,), (64, 32), (8, 8), (8.5,), ("8",), (True,), 8, None],
        [{"pad_to": (8,), "ragged": "offsets"}],
    ),
    (Loader, "loader.proportions", [["a"], None, 0.5]),
    (Loader, "loader.proportions.a", [], [{"proportions": {"a": v}} for v in (0, -1, NAN, INF, "1", True, None)]),
    (Loader, "loader.epoch_size", [0, -1, 2.0, "8", True]),
    (Sequences, "sequences.length", [0, -1, 2.0, "8", True, None]),
    (Sequences, "sequences.stride", [], [{"length": 2, "stride": s} for s in (0, -1, 2.0, None)]),
    (Sequences, "sequences.order", [], [{"length": 2, "order": o} for o in ("", 3)]),
    (Sequences, "sequences.order", [], [{"length": 2, "max_gap": g} for g in (0, 1)]),
    (Sequences, "sequences.group", [], [{"length": 2, "group": g} for g in ("", 3)]),
    (Sequences, "sequences.max_gap", [], [{"length": 2, "order": "t", "max_gap": g} for g in (-1, NAN, INF, "1")]),
    (Train, "train.global_batch_size", [0, -64, 64.0, "64", True, None]),
    (Train, "train.accumulation_steps", [0, -1, 2.0, None]),
    (Train, "train.epochs", [0, -1, 2.0, None]),
    (Train, "train.max_steps", [0, -1, 2.0, True]),
    (Train, "train.optimizer", ["", "adamw", "_Sgd", None, 3, "lr_scheduler", "LBFGS"]),
    (Train, "train.optimizer_args", [None, "momentum", [0.9]]),
    (
        Train,
        "train.param_groups",
        [
            None,
            "bias",
            {"match": "bias"},
            ["bias"],
            [{}],
            [{"match": 1}],
            [{"match": "("}],
            [{"match": "a", "lr": 0}],
            [{"match": "a", "lr": "1"}],
            [{"match": "a", "optimizer": "adam"}],
            [{"match": "a", "optimizer": "LBFGS"}],
        ],
    ),
    (Train, "train.lr", [0, -0.1, NAN, INF, "0.1", True, None]),
    (Train, "train.scheduler", ["", "Cosine", "_LRScheduler", 3]),
    (Train, "train.scheduler_args", [None, "T_max", [30]]),
    (Train, "train.scheduler_interval", ["steps", None, 1]),
    (Train, "train.scheduler_interval", [], [{"scheduler": "ReduceLROnPlateau", "scheduler_interval": "step"}]),
    (Train, "train.lr_scaling", ["Linear", None, 1]),
    (Train, "train.warmup_steps", [-1, 2.0, True, None]),
    (Train, "train.on_nonfinite", ["ignore", None, 1]),
    (Train, "train.max_nonfinite", [0, -1, 1.5, "3"]),
    (Train, "train.check_replicas_every", [-1, 1.5, "10"]),
    (Train, "train.validate_every_steps", [-1, 1.5, None]),
    (Train, "train.swa_start", [1, -0.5, 1.5, "0.9", NAN]),
    (Train, "train.ema_decay", [0, 1, -0.5, 1.5, "0.9", NAN]),
    (Train, "train.clip_grad_norm", [0, -1, NAN, INF, "1"]),
    (Train, "train.precision", ["float16", "fp32", None]),
    (Train, "train.compile", [0, 1, "true", None]),
    (Train, "train.activation_checkpointing", [None, True, 1, "layers.*", ("",), (1,), {"a": 1}]),
    (Train, "train.random_by", ["rows", None]),
    (Train, "train.check_batch_loss", [0, 1, "true", None]),
    (Train, "train.channels_last", [0, 1, "true", None]),
    (Train, "train.deterministic", [0, 1, "true", None]),
    (Train, "train.offload_optimizer", [0, 1, "true", None]),
    (Train, "train.stochastic_rounding", [0, 1, "true", None, True]),
    (Train, "train.validation_fold", [-1, 1.0, "0", True], [{"validation_fraction": 0.2, "validation_fold": 5}]),
    (
        Train,
        "train.validation_fraction",
        [],
        [{"validation_fold": 0}, {"validation_fold": 0, "validation_fraction": 0.15}],
    ),
    (Train, "train.validation_fraction", [-0.1, 1, 1.5, NAN, INF, "0.1", True, None]),
    (Train, "train.metrics.m", [], [{"metrics": {"m": bad}} for bad in ({}, "Accuracy", None, {"class": 3})]),
    (Train, "train.metrics.m.label", [], [{"metrics": {"m": {"class": "MeanMetric", "label": v}}} for v in (3, None)]),
    (
        Train,
        "train.metrics.m.output",
        [],
        [{"metrics": {"m": {"class": "MeanMetric", "output": v}}} for v in (1.0, True)],
    ),
    (Train, "train.metrics", [None, "accuracy"], [{"metrics": {"loss": {"class": "MeanMetric"}}}]),
    (Train, "train.early_stop_metric", [3, ""]),
    (Train, "train.early_stop_mode", ["minimum", 1]),
    (Train, "train.init_from", ["", 3, ["/run"]]),
    (Train, "train.early_stop_patience", [0, -1, 2.0, None]),
    (Train, "train.early_stop_min_delta", [-0.1, NAN, INF, None]),
    (Train, "train.seed", [-1, 1.0, True, None]),
    (Train, "train.log_every", [0, -1, 2.0, None]),
    (DDP, "parallel.bucket_mib", [0, -1, NAN, INF, "25", None]),
    (DDP, "parallel.bucket_mib", [], [{"bucket_mib": "auto", "compression": c} for c in ("fp16", "topk")]),
    (DDP, "parallel.find_unused_parameters", [0, 1, "true", None]),
    (
        DDP,
        "parallel.find_unused_parameters",
        [],
        [{"find_unused_parameters": True, "compression": c} for c in ("powersgd", "threshold", "topk")],
    ),
    (DDP, "parallel.static_graph", [0, 1, "true", None]),
    (DDP, "parallel.sync_batchnorm", [0, 1, "true", None]),
    (DDP, "parallel.all_reduce", ["gloo", "Ring", None], [{"all_reduce": "ring", "compression": "fp16"}]),
    (DDP, "parallel.compression", ["int8", "top-k", None]),
    (
        DDP,
        "parallel.compression_start_step",
        [-1, 2.0, True, None, 9],
        [{"compression_start_step": 9, "compression": "fp16"}],
    ),
    (DDP, "parallel.powersgd_rank", [0, -1, 2.0, True, None, 2], [{"powersgd_rank": 2, "compression": "topk"}]),
    (DDP, "parallel.threshold", [0, -1, NAN, INF, "1", None, 0.1], [{"threshold": 0.1, "compression": "powersgd"}]),
    (DDP, "parallel.topk_ratio", [0, 1.5, NAN, "1", None, 0.1], [{"topk_ratio": 0.1, "compression": "threshold"}]),
    (Horovod, "parallel.bucket_mib", [0, -1, NAN, INF, "25", None, "auto"]),
    (Horovod, "parallel.compression", ["topk", "bf16", "powersgd", None]),
    *((Auto, f"parallel.{name}", [0, -1, True, "1"]) for name in ("memory_gib", "rate_mbit", "local_rate_mbit")),
    *((Auto, f"parallel.{name}", [-1, True, "1"]) for name in ("latency_ms", "local_latency_ms")),
    (Auto, "parallel.hosts", [0, -1, 2.0, True]),
    (Auto, "parallel.zero_stages", [(), (4,), ("1",), 1, None]),
    (Auto, "parallel.schedules", [(), ("naive",), "1f1b", None]),
    (Mesh, "parallel.pipeline", [0, -1, 2.0, True, None]),
    (Mesh, "parallel.tensor", [0, -1, 2.0, True, None]),
    (Mesh, "parallel.experts", [0, -1, 2.0, True, None]),
    (Mesh, "parallel.context", [0, -1, 2.0, True, None]),
    (Mesh, "parallel.zero_stage", [-1, 4, "1", None]),
    (Mesh, "parallel.find_unused_parameters", [0, 1, "true", None]),
    (Mesh, "parallel.check_first_step_mib", [-1, 2.5, True, "256", None]),
    (Mesh, "parallel.replicas", [0, -1, 2.0, True, None, 2]),
    (Mesh, "parallel.schedule", ["pipe", None, 1]),
    (Mesh, "parallel.stages", ["12", 3, (1, 0), (1.5,)]),
    (Mesh, "parallel.stages_per_rank", [0, -1, 2.0, True, None, 2]),
    (Mesh, "parallel.sequence", [0, 1, "true", None, True]),
    (Mesh, "parallel.vertical_sync", [0, 1, "true", None, True]),
    (Mesh, "parallel.bucket_mib", [0, -1, True, None, "auto"]),
    (LocalSGD, "parallel.sync_every_steps", [0, -1, 2.0, True, None]),
    (LocalSGD, "parallel.sync_start_step", [-1, 2.0, True, None]),
    (LocalSGD, "parallel.sync_batchnorm", [0, 1, "true", None]),
    (TreeReduce, "parallel.tree_depth", [0, -1, 2.0, True, None]),
    (ParameterServer, "parallel.num_servers", [0, -1, 2.0, True, None]),
    (ParameterServer, "parallel.server_mode", ["ksync", None]),
    (ParameterServer, "parallel.server_k", [-1, 2.0, True, None, 2], of_servers(("sync", "async"), server_k=2)),
    (ParameterServer, "parallel.max_staleness", [-1, 2.0, True, 2], of_servers(SYNC, max_staleness=2)),
    (ParameterServer, "parallel.staleness_lr", [0, 1, "true", None, True], of_servers(SYNC, staleness_lr=True)),
    (Launch, "launch.num_ranks", [0, -1, 2.0, "2", True, None]),
    (Launch, "launch.min_ranks", [0, -1, 2.0, "1", True, 2]),
    (Launch, "launch.exclude_host_after", [0, -1, 2.0, "1", True]),
    (Launch, "launch.device", ["gpu", "cuda:0", None]),
    (
        Launch,
        "launch.gpus_per_rank",
        [-1, NAN, INF, 1.5, "1", "all", True, None],
        [{"gpus_per_rank": 0, "device": "cuda"}],
    ),
    (Launch, "launch.start_timeout_s", [0, -1, NAN, INF, None]),
    (Launch, "launch.collective_timeout_s", [0, -1, NAN, INF, None, 604_801, 1e12]),
    (Launch, "launch.threads", [-1, 2.0, True, None]),
    (Launch, "launch.allow_plaintext", [None, "yes", 2]),
    (Launch, "launch.max_restarts", [-1, 2.0, True, None, "never"]),
    (Launch, "launch.restart_wait_s", [-1, NAN, INF, None, 1e12]),
    (Launch, "launch.preemption_grace_s", [-1, NAN, INF, None, 1e12]),
    (Launch, "launch.output", ["rank1", "", None, 0]),
    (Launch, "launch.log_dir", [None, 3, "s3://bucket/logs"]),
    (Launch, "launch.independent_ranks", [0, 1, "true", None]),
    (Checkpoint, "checkpoint.every_steps", [-1, 2.0, True, None]),
    (Checkpoint, "checkpoint.every_epochs", [0, -1, 2.0, None]),
    (Checkpoint, "checkpoint.weights", ["none", "", None, True]),
    (Checkpoint, "checkpoint.keep", [0, -1, 2.0, None]),
    (Checkpoint, "checkpoint.keep_best", [-1, 2.0]),
    (Checkpoint, "checkpoint.strict", ["yes", 1, None]),
    (Checkpoint, "checkpoint.asynchronous", ["yes", 1, None]),
    (Checkpoint, "checkpoint.on_error", ["ignore", "", None, True]),
    (Checkpoint, "checkpoint.signing_key_file", ["", 1, True]),
    (Track, "track.tensorboard", [0, "yes", None]),
    (Track, "track.mlflow", [1, "true", None]),
    (Track, "track.mlflow_registered_model_name", [3, "x"], [{"mlflow": True, "mlflow_registered_model_name": "x"}]),
    (Track, "track.mlflow_log_model", [1, None, True]),
    (Track, "track.mlflow_log_checkpoint", [1, None, True]),
    (Track, "track.profile_steps", [3, "1,2", [1], [0, 3], [3, 2], [1, 2, 3], [1, 2.0], [True, 2]]),
    (Track, "track.profile_ranks", [0, "0", None, [-1], [1.0], [True], [0]]),
    (Faults, "faults.straggler", ["normal", None]),
    (Faults, "faults.straggler_s", [-1, NAN, INF, "1", None, 0.5], [{"straggler": "constant"}]),
    (Faults, "faults.straggler_ranks", [0, "0", [-1], [1.0], [True], None, [1]]),
]


def invalid_cases():
    found = []
    for section, key, values, *more in INVALID:
        cases = [{key.split(".")[-1]: value} for value in values] + [case for cases in more for case in cases]
        name = f"{section.__name__} {key}" if section_name(section) == "parallel" else key
        found += [pytest.param(section, key, case, id=f"{name}={list(case.values())[-1]!r}") for case in cases]
    return found


@pytest.mark.parametrize(("section", "key", "values"), invalid_cases())
def test_B25_an_invalid_value_is_an_error_that_names_the_key(section, key, values):
    with pytest.raises(SettingError) as error:
        section(**values)
    assert error.value.key == key
    assert str(error.value).startswith(f"{key}: ")


def test_an_error_of_a_setting_is_a_valueerror_that_travels():
    with pytest.raises(ValueError, match="^train.epochs: expected an integer >= 1, found 0$") as error:
        Train(epochs=0)
    again = pickle.loads(pickle.dumps(error.value))
    assert (type(again), again.key, str(again)) == (SettingError, "train.epochs", str(error.value))


@pytest.mark.parametrize("strategy", names())
def test_the_table_of_invalid_values_knows_every_setting_of_every_strategy(strategy):
    known = {
        key
        for section, key, *_ in INVALID
        if getattr(section, "strategy", strategy) == strategy  # the other sections have none
    }
    assert {*config_keys(strategy)} - {"data.label", "parallel.strategy"} <= known


def test_defaults_are_valid():
    sections = {"data": Data(), "shards": Shards(), "loader": Loader(), "sequences": None, "train": Train(),
                "parallel": DDP(), "launch": Launch(), "checkpoint": Checkpoint(), "track": Track(),
                "faults": Faults()}  # fmt: skip
    assert Config() == Config(**sections)
    assert [f.name for f in dataclasses.fields(Config)] == [*sections]


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().train.lr = 1.0


def test_without_a_label_only_the_features_are_read():
    assert Data(features=["a", "b"]).columns == ("a", "b", "label")
    assert Data(features=["a", "b"], label=None).columns == ("a", "b")


def test_a_dataset_has_the_columns_by_which_sequences_are_found_too():
    config = Config(data=Data(features=["a", "t"]), sequences=Sequences(length=2, order="t", group="g"))
    assert config.stored_columns == ("a", "t", "label", "g")
    assert Config(data=Data(features=["a"])).stored_columns == ("a", "label")


@pytest.mark.parametrize(("optimizer", "near"), [("Adamm", "Adam"), ("sgd", "SGD"), ("adamw", "AdamW")])
def test_B25_an_unknown_optimizer_suggests_the_nearest(optimizer, near):
    with pytest.raises(ValueError, match=rf"no class '{optimizer}' in torch.optim; did you mean '{near}'\?"):
        Train(optimizer=optimizer)


@pytest.mark.parametrize(("build", "key", "near"), [
    (lambda: Train(batch_sise=3), "train.batch_sise", "did you mean 'train.global_batch_size'?"),
    (lambda: dataclasses.replace(Train(), epohcs=3), "train.epohcs", "did you mean 'train.epochs'?"),
    (lambda: Launch(ranks=3), "launch.ranks", "did you mean 'launch.num_ranks'?"),
    (lambda: DDP(bucket=3), "parallel.bucket", "did you mean 'parallel.bucket_mib'?"),
    (lambda: Mesh(pipelin=3), "parallel.pipelin", "did you mean 'parallel.pipeline'?"),
    (lambda: Config(trian=Train()), "trian", "did you mean 'train'?"),
])  # fmt: skip
def test_B25_an_unknown_setting_in_python_suggests_the_nearest(build, key, near):
    with pytest.raises(ValueError, match=rf"^unknown config key '{re.escape(key)}'; {re.escape(near)}$"):
        build()


@pytest.mark.parametrize("value", [{"num_ranks": 2}, "mesh", 3, Config])
@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Config)])
def test_B25_another_object_for_a_section_is_an_error_that_names_the_class(name, value):
    expected = r"a spark_dl\.DDP, or the settings of another strategy" if name == "parallel" else r"a spark_dl\.\w+"
    found = type(value).__name__
    with pytest.raises(
        ValueError, match=rf"^{name}: expected {expected}, found a {found}; pass spark_dl\.\w+\(\.\.\.\)"
    ):
        Config(**{name: value})


def test_B25_a_section_of_another_name_or_none_is_an_error():
    with pytest.raises(ValueError, match=r"^launch: expected a spark_dl\.Launch, found a Train;"):
        Config(launch=Train())
    with pytest.raises(ValueError, match=r"^train: expected a spark_dl\.Train, found a NoneType;"):
        Config(train=None)
    assert Config(sequences=None) == Config()


@pytest.mark.parametrize("section", [*sections().values(), *(strategies.find(n).settings for n in names()), Config])
def test_B25_every_section_knows_its_settings(section):
    known = "(expected one of|did you mean|there are none)"
    with pytest.raises(ValueError, match=rf"^unknown config key '(\w+\.)?no_such_setting'; {known}"):
        section(no_such_setting=1)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Launch) if f.name.endswith("_s")])
@pytest.mark.parametrize("value", [INF, -INF, NAN, -1, 1e12, 604_801, True, "60"])
def test_B37_a_wait_without_an_end_is_refused(name, value):
    expected = "(a finite number >=? 0|at most 604800 s, a week)"
    with pytest.raises(ValueError, match=rf"^launch\.{name}: expected {expected}, found "):
        Launch(**{name: value})
    assert getattr(Launch(**{name: 604_800}), name) == 604_800


@pytest.mark.parametrize("name", ["start_timeout_s", "collective_timeout_s"])
def test_B37_a_wait_of_no_time_is_refused(name):
    with pytest.raises(ValueError, match=rf"^launch\.{name}: expected a finite number > 0, found 0$"):
        Launch(**{name: 0})


def test_a_suggestion_is_the_nearest_name_or_all_names():
    assert suggestion("LABLE", ["label", "image"]) == "; did you mean 'label'?"
    assert suggestion("zzz", ["label", "image"]) == "; expected one of image, label"


def test_arguments_must_be_plain_data():
    with pytest.raises(ValueError, match="plain numbers, strings, lists and mappings"):
        Config(train=Train(optimizer_args={"foreach": object()}))
