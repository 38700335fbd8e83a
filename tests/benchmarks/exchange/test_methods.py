"""The table of methods: what each is, and which sections measure it."""

import pytest

from benchmarks.exchange.conclusions import BUCKET_MIB
from benchmarks.exchange.methods import METHODS, measured_in, settings_of
from spark_dl import DDP
from spark_dl.parallel.cost import cost


def test_the_exact_methods():
    found = {name for name, method in METHODS.items() if method.is_exact}
    assert found == {
        "backend", "naive", "reduce_broadcast", "tree", "ring", "halving_doubling", "ddp", "ddp ring", "horovod",
        "tree_reduce", "shuffle_reduce", "parameter_server sync",
    }  # fmt: skip


def test_every_method_but_those_that_exchange_no_gradients_is_counted_by_the_cost_model():
    assert {name for name, method in METHODS.items() if not method.counted_as} == {"local_sgd", "stream"}
    assert {method.counted_as for method in METHODS.values()} - {""} == cost.METHODS.keys()


def test_buckets_of_the_model_are_those_of_the_settings():
    assert {method.parallel.bucket_mib for method in METHODS.values() if method.is_bucketed} == {BUCKET_MIB}


@pytest.mark.parametrize(("section", "measured"), [
    ("exchange", ["stream", "tree_reduce", "ddp topk", "ddp"]), ("compression", ["ddp", "ddp topk"]),
    ("breakdown", ["tree_reduce", "ddp topk", "ddp"]), ("scaling", ["ddp"]),
    ("stragglers", ["tree_reduce", "ddp topk", "local_sgd", "ddp"]),
])  # fmt: skip
def test_a_section_measures_its_own_methods_of_those_that_are_asked_for(section, measured):
    assert measured_in(section, ["stream", "tree_reduce", "ddp topk", "local_sgd", "ddp"]) == measured


def test_nothing_is_compared_with_the_ring_where_nothing_is_compressed():
    assert measured_in("compression", ["ddp", "tree_reduce"]) == []


def test_modes_with_a_k_wait_for_all_trainers_but_one():
    found = {name: getattr(settings_of(name, 5), "server_k", 0) for name in METHODS}
    waiting = {f"parameter_server {mode}" for mode in ("k_sync", "k_batch_sync", "k_async", "k_batch_async")}
    assert {name: k for name, k in found.items() if k} == dict.fromkeys(waiting, 3)
    assert settings_of("ddp", 5) == DDP()
