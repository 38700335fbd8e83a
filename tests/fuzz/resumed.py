"""Random runs that stop and go on with other settings: every row of an epoch once, or refused."""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

import spark_dl
from tests.builders.datasets import write_dataset
from tests.builders.settings import make_config
from tests.fuzz.errors import clear_text, note, without_digits
from tests.fuzz.recorded import recorded, recording


@dataclass(frozen=True)
class Case:
    """Settings of a run, of which some change where it goes on."""

    rows: int
    group_rows: int
    stop: int
    first: dict
    then: dict


_SETTINGS = {
    "num_ranks": st.integers(1, 2),
    "global_batch_size": st.sampled_from([4, 8, 12]),
    "num_streams": st.sampled_from([2, 4]),
    "shuffle_window_rows": st.sampled_from([8, 64, 65536]),
    "memory_mib": st.sampled_from([1, 16, 512]),
    "seed": st.integers(0, 1),
    "shuffle": st.booleans(),
    "reader_threads": st.integers(1, 2),
    "lr": st.sampled_from([0.1, 0.2]),
    "accumulate_steps": st.sampled_from([1, 2]),
    "epochs": st.integers(1, 3),
    "validation_fraction": st.sampled_from([0.0, 0.25]),
    "every_steps": st.integers(0, 3),
    "rows_at_once": st.sampled_from([None, 2]),
}


@st.composite
def cases(draw):
    def some(most):
        names = draw(st.lists(st.sampled_from(sorted(_SETTINGS)), max_size=most, unique=True))
        return {name: draw(_SETTINGS[name]) for name in names}

    return Case(draw(st.integers(8, 60)), draw(st.integers(2, 20)), draw(st.integers(1, 12)), some(5), some(2))


def check(spark, folder, case):
    folder.mkdir()
    shards = write_dataset(
        str(folder / "data"),
        {"id": np.arange(case.rows)},
        case.group_rows,
        3 * case.group_rows,
        features=("id",),
        label=None,
    )
    usual = {
        "global_batch_size": 4,
        "num_streams": 4,
        "epochs": 2,
        "num_ranks": 1,
        "max_restarts": 0,
        "check_batch_loss": False,
    }
    try:
        config = make_config(features=("id",), label=None, **{**usual, **case.first})
        stopped = replace(config, train=replace(config.train, max_steps=case.stop))
        changed = make_config(features=("id",), label=None, **{**usual, **case.first, **case.then})
    except (ValueError, TypeError) as error:
        note(f"settings: {without_digits(str(error))}")
        return
    spec, run_dir = recording(folder / "seen"), str(folder / "run")
    ways = [(stopped, False), (changed, True)]
    for settings, resume in ways:
        try:
            spark_dl.train(shards, spec, settings, run_dir=run_dir, resume=resume)
        except Exception as error:
            text = clear_text(error)
            if text is None:
                raise
            note(f"train(resume={resume}): {without_digits(text)}")
            return
    seen = recorded(folder / "seen")
    assert sorted(seen) == list(range(max(seen) + 1))
    for epoch, found in seen.items():
        assert set(found.values()) == {1}, f"epoch {epoch}: rows were read twice: {found}"
        is_whole = epoch < changed.train.epochs  # a run that goes on with fewer epochs than it has done stays there
        assert seen[0].keys() == found.keys() or not is_whole, f"epoch {epoch}: other rows than in the first"
    if not changed.train.validation_fraction:
        assert len(seen[0]) == case.rows, f"{case.rows - len(seen[0])} rows were never read"
