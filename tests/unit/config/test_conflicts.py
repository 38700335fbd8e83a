"""Settings of several sections: what excludes what, and numbers that must fit each other."""

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest

from spark_dl import (
    DDP,
    Auto,
    Checkpoint,
    Config,
    DPSingleProcess,
    Horovod,
    LocalSGD,
    Mesh,
    Parallel,
    ParameterServer,
    ShuffleReduce,
    Single,
    Train,
    TreeReduce,
)
from spark_dl.config.checks import SettingError
from spark_dl.config.conflicts import CONFLICTS, Conflict
from tests.builders.settings import make_config, make_sections, parallel

LOCAL, MIXED, HELD_OUT = {"storage": "local"}, {"proportions": {"a": 1}}, {
    "validation_fraction": 0.1
}  # fmt: skip
FILTERS, SEQUENCES = {"filters": [["x", ">", 1]]}, {"sequence_length": 2}
SERVED, TWO_SERVERS = ({"parallel": ParameterServer(num_servers=n), "num_ranks": 4} for n in (1, 2))
METRICS = {"metrics": {"accuracy": {"class": "MulticlassAccuracy"}}}
EXCLUSIVE = [  # the key that the error names, and settings of which each is valid without the other
    ("train.validation_fraction", MIXED, HELD_OUT),
    ("shards.storage", MIXED, LOCAL),
    ("data.filters", LOCAL, FILTERS),
    ("shards.store", LOCAL, {"store": "/store"}),
    ("train.validation_fraction", SEQUENCES, HELD_OUT),
    ("shards.storage", SEQUENCES, LOCAL),
    ("data.filters", SEQUENCES, FILTERS),
    ("data.weight", SEQUENCES, {"weight": "w"}),
    ("train.metrics", {"label": None}, METRICS),
    ("train.accumulation_steps", {"max_tokens": 4096}, {"accumulation_steps": 2}),
    *(
        ("loader.max_tokens", {"max_tokens": 4096}, {"parallel": parallel})
        for parallel in (Horovod(), DDP(sync_batchnorm=True), DDP(static_graph=True), Mesh(zero_stage=2))
    ),
    ("launch.num_ranks", {"parallel": Single()}, {"num_ranks": 2}),
    ("launch.num_ranks", {"parallel": DPSingleProcess()}, {"num_ranks": 3}),
    ("launch.gpus_per_rank", {"parallel": TreeReduce()}, {"gpus_per_rank": 1}),
    ("parallel.all_reduce", {"parallel": DDP(all_reduce="ring")}, {"gpus_per_rank": 0.5}),
    *(("parallel.compression", {"parallel": DDP(compression=c)}, {"gpus_per_rank": 0.5}) for c in ("powersgd", "topk")),
    *(
        ("train.compile", strategy, {"compile": True})
        for strategy in (SERVED, {"parallel": TreeReduce()}, {"parallel": DPSingleProcess()})
    ),
    ("train.activation_checkpointing", {"parallel": TreeReduce()}, {"activation_checkpointing": "full"}),
    ("train.random_by", {"random_by": "row"}, {"compile": True}),
    ("train.random_by", {"random_by": "row"}, {"parallel": DPSingleProcess()}),
    ("train.channels_last", {"parallel": ShuffleReduce()}, {"channels_last": True}),
    ("train.precision", {"parallel": LocalSGD()}, {"precision": "bf16"}),
    ("train.stochastic_rounding", {"parallel": Mesh(zero_stage=3)}, {"precision": "bf16", "stochastic_rounding": True}),
    ("train.offload_optimizer", {"parallel": LocalSGD()}, {"offload_optimizer": True}),
    ("train.deterministic", {"parallel": ShuffleReduce()}, {"deterministic": True}),
    ("train.channels_last", SERVED, {"channels_last": True}),
    ("shards.storage", {"parallel": TreeReduce()}, LOCAL),
    ("shards.storage", {"parallel": ShuffleReduce()}, LOCAL),
    ("loader.ragged", {"parallel": DPSingleProcess()}, {"ragged": "offsets"}),
    *(
        ("train.precision", {"parallel": DDP(compression=c)}, {"precision": "fp16-mixed"})
        for c in ("powersgd", "threshold", "topk")
    ),
    ("train.optimizer", SERVED, {"optimizer": "Adafactor"}),
    ("train.clip_grad_norm", TWO_SERVERS, {"clip_grad_norm": 1.0}),
    ("train.ema_decay", {"ema_decay": 0.9}, SERVED),
    ("train.swa_start", {"swa_start": 0.9}, SERVED),
    ("data.sampling_weight", {"sampling_weight": "w"}, MIXED),
    ("data.sampling_weight", {"sampling_weight": "w"}, SEQUENCES),
    ("data.sampling_weight", {"sampling_weight": "w"}, LOCAL),
    ("checkpoint.weights", {"checkpoint": Checkpoint(weights="trainable")}, SERVED),
    ("checkpoint.weights", {"checkpoint": Checkpoint(weights="trainable")}, {"init_from": "runs/1"}),
    ("train.param_groups", {"param_groups": ({"match": "bias"},)}, SERVED),
    ("train.param_groups", {"param_groups": ({"match": "bias", "optimizer": "AdamW"},)}, {"parallel": Horovod()}),
    *(("train.on_nonfinite", SERVED, {"on_nonfinite": policy}) for policy in ("skip", "rollback")),
    ("train.on_nonfinite", {"parallel": DDP(compression="topk")}, {"on_nonfinite": "skip"}),
    ("train.check_replicas_every", SERVED, {"check_replicas_every": 5}),
    ("train.check_replicas_every", {"parallel": TreeReduce()}, {"check_replicas_every": 5}),
    ("train.lr_scaling", {"scheduler": "OneCycleLR", "scheduler_args": {"max_lr": 1.0}}, {"lr_scaling": "linear"}),
    ("train.precision", SERVED, {"precision": "fp16-mixed"}),
    ("shards.storage", SERVED, LOCAL),
    ("track.profile_steps", SERVED, {"profile_steps": (1, 2)}),
    ("track.profile_steps", {"parallel": TreeReduce()}, {"profile_steps": (1, 2)}),
    ("launch.min_ranks", {"min_ranks": 1}, LOCAL),
    ("launch.min_ranks", {"min_ranks": 1}, {"parallel": Auto()}),
]


def lines_hit(fields):
    """Lines of the table that hold for settings, which may be no valid `Config`."""
    sections = SimpleNamespace(**{"sequences": None, "parallel": DDP(), **make_sections(**fields)})
    return [(line, line.message.format(c=sections)) for line in CONFLICTS if line.excluded(sections)]


@pytest.mark.parametrize(("key", "one", "other"), EXCLUSIVE, ids=str)
def test_settings_that_exclude_each_other_are_an_error_that_names_the_key(key, one, other):
    make_config(**one)
    make_config(**other)
    [(line, message)] = lines_hit({**one, **other})
    assert line.key == key
    with pytest.raises(SettingError) as error:
        make_config(**one, **other)
    assert error.value.key == key
    assert str(error.value) == f"{key}: {message}"
    assert "{" not in message


def test_every_line_of_the_table_has_a_case():
    hit = [line for _, one, other in EXCLUSIVE for line, _ in lines_hit({**one, **other})]
    assert {id(line) for line in hit} == {id(line) for line in CONFLICTS}


def test_a_strategy_adds_lines_of_its_own():
    @dataclass(frozen=True, kw_only=True)
    class Careful(Parallel):
        strategy: ClassVar[str] = "careful"
        excludes: ClassVar[tuple[Conflict, ...]] = (
            Conflict("train.precision", lambda c: c.train.precision == "fp16-mixed", "not with {c.parallel.strategy}"),
        )

    make_config(parallel=Careful())
    with pytest.raises(ValueError, match=r"^train\.precision: not with careful$"):
        make_config(parallel=Careful(), precision="fp16-mixed")


@pytest.mark.parametrize(("every", "settings"), [(6, {}), (8, {"sync_start_step": 3})], ids=str)
def test_local_sgd_compares_weights_after_averages_only(every, settings):
    for name in ("check_replicas_every", "validate_every_steps"):
        make_config(parallel=LocalSGD(sync_every_steps=4, sync_start_step=8), **{name: 12})
        with pytest.raises(ValueError, match=rf"^train\.{name}: expected a multiple of .*sync_every_steps=4"):
            make_config(parallel=LocalSGD(sync_every_steps=4, **settings), **{name: every})


def test_M19_local_sgd_does_not_take_fp16():
    with pytest.raises(
        ValueError, match=r"^train\.precision: expected float32 or bf16-mixed with .*'local_sgd'.* found fp16-mixed"
    ):
        make_config(parallel=LocalSGD(), precision="fp16-mixed")


@pytest.mark.parametrize("settings", [
    {"parallel": DDP(compression="fp16"), "precision": "fp16-mixed"}, {"parallel": DDP(compression="topk"),
                                                                "precision": "bf16-mixed"},
    {"parallel": ParameterServer(), "num_ranks": 2, "clip_grad_norm": 1.0, "precision": "bf16-mixed",
     "optimizer": "AdamW"},
    {"parallel": LocalSGD(), "precision": "bf16-mixed", "optimizer": "Adafactor", "clip_grad_norm": 1.0},
    {"metrics": {}, "label": None},
    {"parallel": DDP(compression="bf16"), "gpus_per_rank": 0.5},
    {"parallel": DDP(all_reduce="ring", compression="none"), "gpus_per_rank": 1},
    {"parallel": DPSingleProcess(), "gpus_per_rank": 4, "channels_last": True},
    {"parallel": LocalSGD(), "compile": True, "channels_last": True},
], ids=str)  # fmt: skip
def test_what_does_not_exclude_each_other(settings):
    make_config(**settings)


# Numbers that must fit each other


@pytest.mark.parametrize(("batch", "streams", "nearest"), [(60, 16, 64), (1, 16, 16), (17, 16, 16), (100, 8, 96)])
def test_B26_the_global_batch_must_be_a_multiple_of_the_streams(batch, streams, nearest):
    message = rf"^train\.global_batch_size: .*num_streams={streams}, found {batch}; the nearest is {nearest}$"
    with pytest.raises(ValueError, match=message):
        make_config(global_batch_size=batch, num_streams=streams)
    make_config(global_batch_size=nearest, num_streams=streams)


@pytest.mark.parametrize(("ranks", "proposed"), [(17, 17), (20, 20), (32, 32), (100, 100)])
def test_B26_there_must_be_a_stream_for_every_rank(ranks, proposed):
    message = rf"^loader\.num_streams: .*num_ranks={ranks}, found 16.* {proposed} works"
    with pytest.raises(ValueError, match=message):
        make_config(num_ranks=ranks)
    make_config(num_ranks=ranks, num_streams=proposed, global_batch_size=2 * proposed)


@pytest.mark.parametrize(("ranks", "proposed"), [(3, 18), (5, 20), (7, 21)])
def test_B26_with_local_storage_the_ranks_have_equal_streams(ranks, proposed):
    message = (
        rf"^loader\.num_streams: expected a multiple of launch\.num_ranks={ranks} .*, found 16: .*; {proposed} works"
    )
    with pytest.raises(ValueError, match=message):
        make_config(storage="local", num_ranks=ranks)
    make_config(num_ranks=ranks)
    make_config(storage="local", num_streams=proposed, global_batch_size=2 * proposed, num_ranks=ranks)


@pytest.mark.parametrize(("batch", "streams", "ranks", "most"), [
    (64, 16, 1, 64), (64, 16, 16, 4), (64, 16, 5, 12), (64, 16, 3, 20), (64, 16, 7, 8),
    (16, 16, 16, 1), (16, 16, 3, 5),
])  # fmt: skip
def test_B26_every_micro_batch_of_every_rank_has_a_row(batch, streams, ranks, most):
    def build(accumulation_steps):
        train = Train(global_batch_size=batch, accumulation_steps=accumulation_steps)
        return make_config(train=train, num_streams=streams, num_ranks=ranks)

    build(most)
    with pytest.raises(ValueError, match=rf"^train\.accumulation_steps: expected at most {most},.* found {most + 1}$"):
        build(most + 1)


@pytest.mark.parametrize(("batch", "streams", "copies", "found", "rows", "works"), [
    (60, 12, 4, 7, "15", "1, 3, 5, 15"), (64, 16, 4, 5, "16", "1, 2, 4, 8, 16"), (48, 24, 5, 4, "8 or 10", "1, 2"),
])  # fmt: skip
def test_B26_the_micro_batches_of_a_pipeline_are_equal(batch, streams, copies, found, rows, works):
    def build(accumulation_steps, **mesh):
        train = {"global_batch_size": batch, "accumulation_steps": accumulation_steps, "num_streams": streams}
        return make_config(**train, num_ranks=2 * copies, parallel=Mesh(schedule="gpipe", **mesh))

    message = (
        "train.accumulation_steps: expected micro-batches with the same number of rows in a pipeline, found "
        f"{found} for {rows} rows of a pipeline in a step; expected one of {works}, or another train.global_batch_size"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build(found, pipeline=2)
    for number in map(int, works.split(", ")):
        build(number, pipeline=2)
    build(found, tensor=2)  # without a pipeline they may differ by a row


def with_servers(num_servers=1, fields=None, **settings):
    return make_config(num_ranks=4, parallel=ParameterServer(num_servers=num_servers, **settings), **(fields or {}))


SLOW = {"straggler": "constant", "straggler_s": 1}


@pytest.mark.parametrize(("key", "settings"), [
    ("parallel.num_servers", {"num_servers": 4}),
    ("parallel.num_servers", {"num_servers": 5}),
    ("parallel.server_k", {"server_mode": "k_sync", "server_k": 4}),
    ("parallel.server_k", {"server_mode": "k_async", "server_k": 3, "num_servers": 2}),
    ("faults.straggler_ranks", {"fields": {**SLOW, "straggler_ranks": (0, 3)}}),
    ("faults.straggler_ranks", {"fields": {**SLOW, "straggler_ranks": (4,)}}),
    ("train.accumulation_steps", {"fields": {"accumulation_steps": 21}}),
])  # fmt: skip
def test_numbers_that_servers_leave_no_room_for_are_an_error_that_names_the_key(key, settings):
    with pytest.raises(ValueError, match=rf"^{key}: "):
        with_servers(**settings)


@pytest.mark.parametrize("settings", [
    {"num_servers": 3}, {"server_mode": "k_sync", "server_k": 3}, {"server_mode": "k_batch_sync", "server_k": 40},
    {"server_mode": "k_batch_async", "server_k": 9, "max_staleness": 0}, {"server_mode": "async", "staleness_lr": True},
    {"fields": {**SLOW, "straggler_ranks": (0, 2)}}, {"fields": {"accumulation_steps": 20}},
])  # fmt: skip
def test_what_parameter_servers_can_do(settings):
    with_servers(**settings)


@pytest.mark.parametrize("strategy", ["ddp", "local_sgd", "tree_reduce", "parameter_server"])
def test_ranks_that_compute_nothing_cannot_be_slow(strategy):
    def build(*ranks):
        num_ranks = 5 if strategy == "parameter_server" else 4
        return make_config(parallel=parallel(strategy), **SLOW, straggler_ranks=ranks, num_ranks=num_ranks)

    build(0, 3)
    with pytest.raises(ValueError, match=r"^faults\.straggler_ranks: expected ranks below 4, .*, found \[0, 4\]$"):
        build(0, 4)


def test_only_ranks_that_exist_are_profiled():
    make_config(num_ranks=2, profile_steps=(1, 2), profile_ranks=[0, 1])
    with pytest.raises(
        ValueError, match=r"^track\.profile_ranks: expected ranks below launch.num_ranks=2, found \[2\]"
    ):
        make_config(num_ranks=2, profile_steps=(1, 2), profile_ranks=[2])


def test_servers_do_not_train():
    assert with_servers(num_servers=3).num_trainers == 1
    assert Config().num_trainers == 1


def test_a_metric_of_a_column_that_is_not_read_is_an_error_with_the_nearest_name():
    metrics = {"accuracy": {"class": "MulticlassAccuracy", "label": "kid"}}
    with pytest.raises(ValueError, match=r"train.metrics.accuracy.label: no column 'kid' is read.*'kind'.*data.labels"):
        make_config(metrics=metrics, labels=("kind",))
    assert make_config(metrics=metrics, labels=("kid",), label=None).train.metrics == metrics


@pytest.mark.parametrize("parallel", [Mesh(), Auto()], ids=lambda each: each.strategy)
def test_checkpoints_without_frozen_weights_need_whole_weights(parallel):
    small = Checkpoint(weights="trainable")
    make_config(checkpoint=small)
    with pytest.raises(ValueError, match=r"^checkpoint\.weights: expected 'all' with parallel\.strategy="):
        make_config(checkpoint=small, parallel=parallel)


def test_one_dataset_has_an_epoch_of_its_own_unless_its_rows_are_drawn():
    make_config(epoch_size=100, sampling_weight="w")
    make_config(epoch_size=100, **MIXED)
    with pytest.raises(ValueError, match=r"^loader\.epoch_size: expected null without loader.proportions and data.s"):
        make_config(epoch_size=100)


def test_groups_of_parameters_need_one_model_with_all_of_them():
    with pytest.raises(ValueError, match=r"^train\.param_groups: expected none with parallel\.strategy='auto'"):
        make_config(param_groups=({"match": "bias"},), parallel=Auto())
    make_config(param_groups=({"match": "bias"},), parallel=Mesh(zero_stage=1))


@pytest.mark.parametrize(
    "parallel", [Mesh(pipeline=2, schedule="pipedream"), Auto(), LocalSGD()], ids=lambda each: each.strategy
)
def test_an_average_needs_ranks_that_have_the_weights_of_one_step(parallel):
    for name in ("ema_decay", "swa_start"):
        make_config(**{name: 0.9}, parallel=Mesh(zero_stage=3))
        with pytest.raises(ValueError, match=rf"^train\.{name}: expected null with parallel\.s"):
            make_config(**{name: 0.9}, parallel=parallel)
    with pytest.raises(ValueError, match=r"^train\.swa_start: expected null with train.ema_decay, as a run has one av"):
        make_config(ema_decay=0.9, swa_start=0.5)
