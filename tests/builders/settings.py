"""Settings for tests: fields of any section by their names, in one call."""

import dataclasses

from spark_dl import (
    DDP,
    Checkpoint,
    Config,
    Data,
    DPSingleProcess,
    Faults,
    Horovod,
    Launch,
    Loader,
    LocalSGD,
    Mesh,
    ParameterServer,
    Sequences,
    Shards,
    ShuffleReduce,
    Single,
    Track,
    Train,
    TreeReduce,
)

SECTIONS = {"data": Data, "shards": Shards, "loader": Loader, "train": Train, "launch": Launch,
            "checkpoint": Checkpoint, "track": Track, "faults": Faults}  # fmt: skip
_STRATEGIES = (DDP, Mesh, Horovod, LocalSGD, Single, DPSingleProcess, TreeReduce, ShuffleReduce, ParameterServer)
STRATEGIES = {cls.strategy: cls for cls in _STRATEGIES}


def make_config(**fields):
    """A `Config`: `make_config(label=None, num_streams=2, global_batch_size=4)`.

    A field of `sequences` has its name, `sequence_length`. A section that is given whole, `train=Train()`, is a base
    for its fields.
    """
    return Config(**make_sections(**fields))


def make_sections(**fields):
    """The sections of such a `Config`, each of which is valid by itself, but for those that are not asked for."""
    given = {name: fields.pop(name) for name in (*SECTIONS, "sequences", "parallel") if name in fields}
    by_section = {name: {} for name in SECTIONS}
    sequences = {}
    for name, value in fields.items():
        if name.startswith("sequence_"):
            sequences[name.removeprefix("sequence_")] = value
            continue
        (section,) = [s for s, cls in SECTIONS.items() if name in {f.name for f in dataclasses.fields(cls)}]
        by_section[section][name] = value
    for name, values in by_section.items():
        base = given.get(name)
        given[name] = dataclasses.replace(base, **values) if base is not None else SECTIONS[name](**values)
    if sequences.get("length"):
        given["sequences"] = Sequences(**sequences)
    return given


def parallel(strategy="ddp", **values):
    """The settings of a strategy by its name."""
    return STRATEGIES[strategy](**values)
