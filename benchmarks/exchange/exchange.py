"""Measures one exchange of gradients by method and size: seconds of the slowest rank, and bytes on the links.

Gradients are random, and their computation takes no time. All methods of `methods.py` run on the same ranks or
executors:

    backend, ring, tree ...      one all-reduce of one tensor, by the backend or `parallel.exchange.collectives`
    ddp, ddp powersgd, horovod   a backward pass of the strategy, as the training loop calls it
    tree_reduce, parameter_server sync ...   whole training steps, from the metrics of a run of `spark_dl.train`

`stream` does not exchange gradients: it sends the bytes of a ring to the next rank, as fast as TCP can.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.exchange.accelerator import accelerator_spec
from benchmarks.exchange.log import Log
from benchmarks.exchange.methods import METHODS, settings_of
from benchmarks.exchange.stream import stream_to_next
from benchmarks.model.profiles import Layer, Profile
from benchmarks.testbed.links import LinkBytes, read_links
from benchmarks.testbed.timing import all_reduce_limit_s, median_of_slowest, time_exchanges
from spark_dl import driver, storage
from spark_dl.baselines.servers.rules import rules_of
from spark_dl.baselines.servers.settings import ParameterServer
from spark_dl.config import Config, Data, Launch, Loader, Parallel, Train, strategies
from spark_dl.data.write.arrays import write_arrays
from spark_dl.launch.barrier import run_barrier
from spark_dl.launch.rank.rendezvous import join
from spark_dl.launch.rank.task import RankResult
from spark_dl.parallel.exchange import collectives
from spark_dl.rundir import metrics
from spark_dl.spec import Batch, ModelSpec
from spark_dl.world import World

_MATRIX = 512
_LONG_S, _MOST_REPEATS = 1.0, 25
_TIMEOUT_S = 900.0


def measure(
    spark: Any,
    folder: str,
    *,
    num_hosts: int,
    mib: Sequence[float],
    methods: Sequence[str],
    repeats: int = 3,
    rate_mbit: float | None = None,
    log: Log | None = None,
    save: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Rows of the section `exchange` of the report (see `report.py`). Called on the driver.

    One rank runs on each of `num_hosts` hosts. Methods that are runs need a `folder` that all hosts can access.
    `rate_mbit` is the rate of each link in each direction. Without it, and with compression, rows have no limit. `save`
    gets the rows so far after each row. A method that fails is left out.
    """
    log = log or Log()
    rows: list[dict[str, Any]] = []
    for size in mib:
        for method in methods:
            start, what = time.perf_counter(), f"{method}, {size:g} MiB"
            with log.attempt(what):
                if METHODS[method].how == "job":
                    run = f"{folder}/{method.replace(' ', '-')}-{size:g}"
                    settings = settings_of(method, num_hosts)
                    found = measure_job(spark, run, settings, _spec(size), num_hosts=num_hosts, repeats=repeats)
                else:
                    found = _measure_on_ranks(spark, method, num_hosts, size, repeats)
                limit = _limit(method, found, num_hosts, size, rate_mbit)
                known = {"method": method, "exact": METHODS[method].is_exact, "hosts": num_hosts, "mib": size}
                rows.append({**known, **found, **limit})
                save(rows)
                log.show(f"{what}: {found['seconds']:.3f} s (measured in {time.perf_counter() - start:.0f} s)")
    return rows


def _limit(method: str, found: Mapping[str, Any], hosts: int, mib: float, rate_mbit: float | None) -> dict[str, Any]:
    """Returns the least seconds of an all-reduce at this rate. None for methods that send less than the gradient."""
    if rate_mbit is None or METHODS[method].is_compressed:
        return {"limit_s": None, "ratio_to_limit": None}
    limit_s = all_reduce_limit_s(mib, hosts, rate_mbit)
    return {"limit_s": limit_s, "ratio_to_limit": limit_s / found["seconds"]}


def random_profile(mib: float) -> Profile:
    """Returns a model of `mib` MiB of float32: square matrices of 1 MiB, and a vector for the rest."""
    elements = round(mib * 2**18)
    whole, rest = divmod(elements, _MATRIX * _MATRIX)
    shapes = [(_MATRIX, _MATRIX)] * whole + ([(rest,)] if rest else [])
    layers = tuple(Layer(f"matrix{i}", shape, 1 / len(shapes)) for i, shape in enumerate(shapes))
    return Profile(f"{mib:g} MiB", layers, multiply_adds=0)


def _spec(mib: float) -> ModelSpec:
    return accelerator_spec(random_profile(mib), forward_s=0.0, backward_s=0.0)


def config_of(parallel: Parallel, num_ranks: int, **train: Any) -> Config:
    """Returns the settings of steps with one row per rank."""
    return Config(
        data=Data(features=("x",), label=None),
        loader=Loader(num_streams=num_ranks, shuffle=False),
        train=Train(global_batch_size=num_ranks, lr=1e-6, log_every=1, **train),
        parallel=parallel,
        launch=Launch(num_ranks=num_ranks, device="cpu", collective_timeout_s=_TIMEOUT_S),
    )


def parallelize(config: Config) -> strategies.Parallelize:
    """Returns the strategy's function that trains on ranks."""
    found = strategies.find(config.parallel.strategy).parallelize
    assert found is not None
    return found


def _measure_on_ranks(spark: Any, method: str, num_hosts: int, mib: float, repeats: int) -> dict[str, Any]:
    config = config_of(METHODS[method].parallel, num_hosts)
    by_rank = run_barrier(spark, functools.partial(_time_on_rank, method, mib, repeats, config), launch=config.launch)
    sent = [r["sent"] for r in by_rank]
    return {
        "seconds": median_of_slowest([r["seconds"] for r in by_rank]),
        "bytes_per_rank": statistics.mean(sent),
        "busiest_link_bytes": max(max(r["sent"], r["received"]) for r in by_rank),
    }


def _time_on_rank(method: str, mib: float, repeats: int, config: Config, report: Any = None) -> RankResult:
    """Runs one rank. Returns the seconds of each exchange, and the mean bytes through its host's link."""
    with join(config.launch, report=report) as world, contextlib.ExitStack() as until_done:
        exchange = _exchange_of(method, mib, config, world, until_done)
        for _ in range(METHODS[method].warm_ups):
            exchange()
        repeats = _steady(exchange, repeats)
        seconds, link = time_exchanges(exchange, dist.barrier, host=world.host, repeats=repeats)
        counted = {"sent": link.sent / repeats, "received": link.received / repeats}
        return RankResult(world.rank, {"seconds": seconds, **counted})


def _steady(exchange: Callable[[], object], repeats: int) -> int:
    """Returns the number of repetitions of an exchange: `repeats`, or more for a short exchange (about `_LONG_S`
    seconds).

    The same on all ranks. Collective.
    """
    dist.barrier()
    start = time.perf_counter()
    exchange()
    taken = torch.tensor(time.perf_counter() - start)
    dist.broadcast(taken, 0)
    return max(repeats, min(_MOST_REPEATS, math.ceil(_LONG_S / float(taken))))


def _exchange_of(
    method: str, mib: float, config: Config, world: World, until_done: contextlib.ExitStack
) -> Callable[[], object]:
    how = METHODS[method].how
    if how == "stream":
        num_bytes = 2 * round(mib * 2**20) * (world.world_size - 1) // world.world_size
        return stream_to_next(world, num_bytes, until_done, config.launch.start_timeout_s)
    return _all_reduce(method, mib) if how == "all_reduce" else _backward(config, mib, world, until_done)


def _all_reduce(method: str, mib: float) -> Callable[[], object]:
    gradient = torch.randn(round(mib * 2**18)) * 1e-3  # 27 sums over 16 ranks stay finite

    def exchange() -> None:
        if method == "backend":
            dist.all_reduce(gradient)
        else:
            collectives.all_reduce(gradient, method)

    return exchange


def _backward(config: Config, mib: float, world: World, until_done: contextlib.ExitStack) -> Callable[[], object]:
    trainable = parallelize(config)(_spec(mib), world, config)
    until_done.callback(trainable.close)
    batch = batch_of(world)

    def exchange() -> None:
        trainable.forward_backward([batch], world.world_size)
        trainable.optimizer.zero_grad()

    return exchange


def batch_of(world: World) -> Batch:
    """Returns the row of a rank, from which its gradients are drawn."""
    return {"x": torch.full((1, 1), float(world.rank)), "weight": torch.ones(1)}


def measure_job(
    spark: Any,
    folder: str,
    parallel: Parallel,
    spec: ModelSpec,
    *,
    num_hosts: int,
    repeats: int,
    num_ranks: int | None = None,
) -> dict[str, Any]:
    """Returns seconds and bytes of a step of a run, with one rank on each host, or `num_ranks`. Called on the driver.

    Bytes are the difference of a short and a long run, so they do not include the start and the end. If an update needs
    the gradients of only K trainers, a step is as many updates as use one gradient of each trainer. The first step,
    in which all trainers start together, is not counted. If no gradient is cancelled, at least twice as many steps are
    counted, as the order of trainers varies.
    """
    num_ranks = num_ranks or num_hosts
    trainers, k, cancels = _trainers_and_k(parallel, num_ranks)
    updates = trainers / k
    before, counted = 1, repeats
    if k < trainers:
        before, counted = 1 + math.ceil(updates), trainers * math.ceil((repeats if cancels else 2 * repeats) / k)
    rows = num_ranks * (
        k * (before + counted) + 2
    )  # enough for each trainer, even if all other gradients are cancelled
    write_arrays({"x": np.random.default_rng(0).random((rows, 1), dtype=np.float32)}, f"{folder}/data")
    marks = [read_links(spark, num_hosts)]
    seconds: list[float] = []
    for max_steps in (before, before + counted):
        run_dir = f"{folder}/run-{max_steps}"
        config = config_of(parallel, num_ranks, max_steps=max_steps)
        driver.train(f"{folder}/data", spec, config, run_dir=run_dir, progress=False)
        marks.append(read_links(spark, num_hosts))
        times = [line["time"] for line in metrics.read_metrics(run_dir) if line["kind"] == "step"]
        seconds = [after - first for first, after in itertools.pairwise(times)][-counted:]
        storage.delete(run_dir)
    if any(mark.keys() != marks[0].keys() for mark in marks):
        raise RuntimeError(f"ranks ran on different hosts in different runs: "
                           f"{[sorted(mark) for mark in marks]}; start one executor on each host, with one task slot"
                           )  # fmt: skip
    short, long = ({host: after[host] - before[host] for host in after} for before, after in itertools.pairwise(marks))
    links = {host: _per_step(long[host] - short[host], counted / updates) for host in long}
    sent = [link.sent for host, link in links.items() if not host.startswith("driver ")]
    return {
        # Updates of single gradients come in bursts, so a median is not meaningful.
        "seconds": statistics.median(seconds) if k == trainers else statistics.mean(seconds) * updates,
        "bytes_per_rank": statistics.mean(sent),
        "busiest_link_bytes": max(max(link.sent, link.received) for link in links.values()),
    }


def _trainers_and_k(parallel: Parallel, num_ranks: int) -> tuple[int, int, bool]:
    """Returns the number of trainers, the gradients of an update, and whether an update cancels other gradients."""
    if not isinstance(parallel, ParameterServer):
        return num_ranks, num_ranks, True
    trainers = num_ranks - parallel.num_servers
    rules = rules_of(parallel, trainers)
    return trainers, rules.k, rules.cancels


def _per_step(link: LinkBytes, steps: float) -> LinkBytes:
    return LinkBytes(round(link.received / steps), round(link.sent / steps))
