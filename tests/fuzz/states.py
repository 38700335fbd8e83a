"""Random readings that stop and go on: every row of an epoch once, or the state is refused."""

import json
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

import spark_dl
from spark_dl import Data, Loader
from spark_dl.data.columns.ragged import from_lengths
from tests.builders.datasets import write_dataset
from tests.fuzz.errors import note, without_digits


@dataclass(frozen=True)
class Reading:
    """The arguments of `open_dataset` on all ranks."""

    ranks: int = 1
    batch_size: int = 4
    seed: int = 0
    shuffle: bool = True
    split: str = "all"
    fraction: float = 0.0
    window: int = 64
    streams: int = 4
    memory_mib: int = 512
    threads: int = 1
    ragged: str = "pad"
    columns: tuple[str, ...] = ("id", "x")


@dataclass(frozen=True)
class Case:
    """A dataset, and readings that each stop after some batches."""

    rows: int
    group_rows: int
    is_ragged: bool
    readings: tuple[Reading, ...]
    stops: tuple[int, ...]


_CHANGES = {
    "ranks": st.integers(1, 4), "batch_size": st.integers(1, 9), "seed": st.integers(0, 2), "shuffle": st.booleans(),
    "fraction": st.sampled_from([0.0, 0.1, 0.3]), "window": st.sampled_from([1, 16, 64, 65536]),
    "streams": st.sampled_from([1, 2, 4, 12]), "memory_mib": st.sampled_from([1, 2, 16, 512]),
    "threads": st.integers(1, 3), "ragged": st.sampled_from(["pad", "offsets"]),
    "columns": st.sampled_from([("id",), ("id", "x"), ("x", "id")]),
}  # fmt: skip


@st.composite
def readings(draw, base, most):
    changed = draw(st.lists(st.sampled_from(sorted(_CHANGES)), max_size=most, unique=True))
    found = replace(base, **{name: draw(_CHANGES[name]) for name in changed})
    if "ranks" in changed and draw(st.booleans()):  # the same global batch, which may go on
        whole = base.batch_size * base.ranks
        if whole % found.ranks == 0:
            found = replace(found, batch_size=whole // found.ranks)
    if found.fraction:
        return replace(found, split=draw(st.sampled_from(["train", "train", "validation"])))
    return replace(found, split="all")


@st.composite
def cases(draw):
    """A dataset of up to 200 rows, and up to four readings."""
    first = draw(readings(Reading(), 8))
    found = [first]
    for _ in range(draw(st.integers(1, 3))):
        found.append(draw(readings(found[-1], 2)))
    stops = tuple(draw(st.lists(st.integers(0, 40), min_size=len(found), max_size=len(found))))
    return Case(draw(st.integers(1, 200)), draw(st.integers(1, 50)), draw(st.booleans()), tuple(found), stops)


def opened(url, reading):
    loader = Loader(
        num_streams=reading.streams, shuffle_window_rows=reading.window, memory_mib=reading.memory_mib,
        reader_threads=reading.threads, ragged=reading.ragged,
    )  # fmt: skip
    return [
        spark_dl.open_dataset(
            url, Data(features=reading.columns, label=None), batch_size=reading.batch_size, shuffle=reading.shuffle,
            seed=reading.seed, split=reading.split, validation_fraction=reading.fraction, loader=loader, cur_shard=rank,
            shard_count=reading.ranks,
        )
        for rank in range(reading.ranks)
    ]  # fmt: skip


def read(datasets, most=None):
    """The rows that all ranks read until a batch or the end of the epoch, and whether the epoch has ended."""
    iterators = [iter(dataset) for dataset in datasets]
    found = Counter()
    try:
        for _ in range(10**6 if most is None else most):
            batches = [next(iterator, None) for iterator in iterators]
            assert len({batch is None for batch in batches}) == 1, "ranks have different numbers of batches"
            if batches[0] is None:
                return found, True
            for batch in batches:
                found.update(batch["id"][batch["weight"] > 0].tolist())
        return found, False
    finally:
        for iterator in iterators:
            iterator.close()


def check(spark, folder, case):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 5, case.rows) if case.is_ragged else np.full(case.rows, 3)
    x = rng.normal(size=lengths.sum()).astype(np.float32)
    columns = {"id": np.arange(case.rows), "x": from_lengths(x, lengths) if case.is_ragged else x.reshape(-1, 3)}
    encode = {"x": {"ragged": True}} if case.is_ragged else {}
    url = str(folder)
    write_dataset(url, columns, case.group_rows, 3 * case.group_rows, features=("id", "x"), label=None, encode=encode)
    state, seen = None, Counter()
    for reading, stop in zip(case.readings, case.stops, strict=True):
        try:
            datasets = opened(url, reading)
            fresh = opened(url, reading)
        except ValueError as error:
            note(f"open_dataset: {without_digits(str(error))}")
            continue
        if state is not None:
            refusals = [refusal(dataset, state) for dataset in datasets]
            assert len(set(refusals)) == 1, f"ranks differ: {refusals}"
            if refusals[0]:
                note(f"state: {refusals[0]}")
                continue
        whole, _ = read(fresh)
        assert set(whole.values()) <= {1}, f"an epoch of {reading} has rows twice: {whole}"
        found, has_ended = read(datasets, stop)
        seen += found
        if has_ended or datasets[0].state_dict()["step"] >= len(datasets[0]):
            assert seen == whole, (
                f"twice: {seen - whole}, never: {whole - seen}, in an epoch that went on with {reading}"
            )
            seen = Counter()
        states = [json.dumps(dataset.state_dict()) for dataset in datasets]
        assert len(set(states)) == 1, f"the states of ranks differ: {states}"
        state = json.loads(states[0])
        last = reading
    if state is None:
        return
    datasets = opened(url, last)
    for dataset in datasets:
        dataset.load_state_dict(state)
    rest, _ = read(datasets)
    whole, _ = read(opened(url, last))
    if seen or rest != whole:
        seen += rest
    else:
        seen = rest
    assert seen == whole, f"twice: {seen - whole}, never: {whole - seen}, at the end"


def refusal(dataset, state):
    try:
        dataset.load_state_dict(state)
    except ValueError as error:
        return without_digits(str(error))
    return ""
